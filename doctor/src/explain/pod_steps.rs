// SPDX-License-Identifier: Apache-2.0
//! The steps inside of a pod of this node, and at the link that leads to it.

use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;
use weft_subnet::env;

use super::explanation::{State, Step};
use super::facts::{Device, DeviceKind, Facts, Lookup, Place, Pod, PodGateway, Read, Way};
use super::rule_steps::TRANSLATED;
use super::shared_steps::down;
use crate::remedies::ip;
use crate::subnet_file::SubnetFile;

/// The pod that sends the packet: its link, its route, its gateway, and the port of the bridge.
pub(super) fn sends(facts: &Facts, way: &Way) -> Option<Step> {
    let pod = way.from_pod.as_ref()?;
    let (from, to, name) = (way.packet.from, way.packet.to, &pod.link.name);
    let step = Step::ok("pod", format!("{name} of the pod, over {}", pod.host_link.name));
    let inside = pod.enter();
    let ip = ip(from);
    if let Some(step) = link(&step, pod, from, way.arrives.as_ref()) {
        return Some(step);
    }
    if let Lookup::Refused(errno) = &pod.route {
        let gateway = gateway(facts, from);
        let remedy = format!(
            "{inside} {ip} route add default via {gateway} dev {name}, or delete the pod, so that it is made again"
        );
        return Some(step.broken(format!("the pod {from} has no route to {to}: {}", errno.desc()), remedy));
    }
    if let Some(other) = &pod.other_link {
        return Some(Step {
            state: State::Doubt,
            because: Some(format!(
                "the packet leaves the pod {from} by {other}, another network of it, and not by {name}"
            )),
            remedy: Some(format!("look at the routes of the pod: {inside} {ip} route get {to} from {from}")),
            ..step
        });
    }
    let bridge = way.arrives.as_ref()?;
    if let Some(step) = wrong_gateway(facts, &step, pod, from, bridge) {
        return Some(step);
    }
    if let Some(PodGateway { address: gateway, neighbour: Read::Found(known) }) = &pod.gateway
        && known.state & libc::NUD_PERMANENT != 0
        && let (Some(entry), Some(right)) = (known.mac, bridge.mac)
        && entry != right
    {
        let because = format!(
            "the pod {from} has a permanent entry for its gateway {gateway} with the MAC address {entry}, and {} has {right}",
            bridge.name
        );
        return Some(step.broken(because, format!("{inside} {ip} neigh del {gateway} dev {name}")));
    }
    Some(step)
}

/// The gateway of the pod is no address of the bridge, so nobody answers when the pod asks for it.
fn wrong_gateway(facts: &Facts, step: &Step, pod: &Pod, from: IpAddr, bridge: &Device) -> Option<Step> {
    let used = pod.gateway.as_ref().filter(|_| bridge.kind == DeviceKind::Bridge && !facts.addrs.is_empty())?.address;
    if facts.addrs.iter().any(|addr| addr.index == bridge.index && addr.addr == used) {
        return None;
    }
    let (right, host, name) = (gateway(facts, from), &bridge.name, &pod.link.name);
    let because = format!("the pod {from} sends by {used}, which is no address of {host}");
    if let Some(subnet) = subnet(facts, from).filter(|_| right == used.to_string()) {
        return Some(step.clone().broken(because, format!("ip addr add {used}/{} dev {host}", subnet.prefix_len())));
    }
    let destination = match &pod.route {
        Lookup::Route(route) => route.prefix.filter(|net| net.prefix_len() > 0),
        _ => None,
    };
    let destination = destination.map_or_else(|| "default".to_owned(), |net| net.to_string());
    let ip = ip(from);
    let remedy = format!(
        "{} {ip} route replace {destination} via {right} dev {name}, or delete the pod, so that it is made again",
        pod.enter()
    );
    Some(step.clone().broken(because, remedy))
}

/// An address of the own subnet that no pod has.
pub(super) fn absent(facts: &Facts, address: IpAddr) -> Option<Step> {
    let text = format!("no pod of this node has {address}");
    facts.absent.contains(&address).then(|| Step {
        state: State::Doubt,
        because: Some(text.clone()),
        remedy: Some("`kubectl get pods -A -o wide` shows which pod has the address, and on which node".to_owned()),
        ..Step::ok("pod", text)
    })
}

/// A packet that leaves the cluster with the address of a pod, so that no answer comes back, although the agent masquerades such packets. A rule
/// that was not evaluated may do so. While the table of the agent is in nftables, the destination is an exception that net-conf makes.
pub(super) fn not_masqueraded(facts: &Facts, way: &Way, places: (&Place, &Place), rules: &[Step]) -> Option<Step> {
    let SubnetFile::Good(file) = &facts.subnet_file else { return None };
    way.hop.device.as_ref().filter(|_| file.ipmasq && places == (&Place::Pod, &Place::Outside))?;
    let may_be = |step: &Step| {
        let is_source = step.is.contains(": the source address ");
        let is_of_agent = step.is.starts_with("nft chain ");
        is_source && (step.is.contains(TRANSLATED) || step.is.contains("not evaluated") || is_of_agent)
    };
    if rules.is_empty() || rules.iter().any(|step| step.state == State::Unknown || may_be(step)) {
        return None;
    }
    let from = way.packet.from;
    let because =
        format!("the packet leaves with the pod's address {from}, and FLANNEL_IPMASQ is true: no rule masquerades it");
    let remedy = "a running agent writes the rules again: `weft status rules`; nothing is wrong if net-conf excepts the destination";
    Some(Step {
        state: State::Doubt,
        because: Some(because.clone()),
        remedy: Some(remedy.to_owned()),
        ..Step::ok("rules", because)
    })
}

/// The pod that gets the packet, if something is wrong with it: its link, the port of the bridge, and the neighbour entry of this node for it.
pub(super) fn gets(way: &Way) -> Option<Step> {
    let (pod, to) = (way.to_pod.as_ref()?, way.packet.to);
    let step = Step::ok("pod", format!("{} of the pod, over {}", pod.link.name, pod.host_link.name));
    let device = way.hop.device.as_ref();
    if let Some(step) = link(&step, pod, to, device) {
        return Some(step);
    }
    let (Read::Found(known), Some(device)) = (way.hop.neighbour.as_ref()?, device) else { return None };
    let (entry, right) = (known.mac?, pod.link.mac?);
    if known.state & libc::NUD_PERMANENT == 0 || entry == right {
        return None;
    }
    let name = &device.name;
    let because = format!(
        "this node has a permanent entry for its pod {to} with the MAC address {entry}, and the pod has {right}"
    );
    Some(step.broken(because, format!("ip neigh del {to} dev {name}")))
}

/// The link of a pod that carries no packets.
fn link(step: &Step, pod: &Pod, address: IpAddr, through: Option<&Device>) -> Option<Step> {
    let (inside, host) = (&pod.link, &pod.host_link);
    if !inside.up {
        let remedy = format!("{} ip link set {} up", pod.enter(), inside.name);
        return Some(step.clone().broken(format!("{} of the pod {address} is down", inside.name), remedy));
    }
    if !host.up {
        return Some(down(step.clone(), host));
    }
    let bridge = through.filter(|device| device.kind == DeviceKind::Bridge && device.index != host.master)?;
    let (name, bridge) = (&host.name, &bridge.name);
    let because = format!("{name}, which leads to the pod {address}, is no port of {bridge}");
    Some(step.clone().broken(because, format!("ip link set {name} master {bridge}")))
}

/// Returns the address of this node in the subnet of the pod, or a word that stands for it.
fn gateway(facts: &Facts, pod: IpAddr) -> String {
    subnet(facts, pod).map_or_else(|| "GATEWAY".to_owned(), |net| env::gateway(net).to_string())
}

/// Returns the subnet of a pod.
fn subnet(facts: &Facts, pod: IpAddr) -> Option<IpNet> {
    let SubnetFile::Good(file) = &facts.subnet_file else { return None };
    file.subnets.iter().find(|net| net.contains(&pod))
}
