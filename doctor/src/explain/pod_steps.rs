// SPDX-License-Identifier: Apache-2.0
//! The steps inside of a pod of this node, and at the link that leads to it.

use std::net::IpAddr;

use nix::libc;
use weft_subnet::env;

use super::Step;
use super::facts::{Device, DeviceKind, Facts, Lookup, Pod, Read, Way};
use super::steps::down;
use crate::node::SubnetFile;

/// The pod that sends the packet: its link, its route, its gateway, and the port of the bridge.
pub(super) fn sends(facts: &Facts, way: &Way) -> Option<Step> {
    let pod = way.from_pod.as_ref()?;
    let (from, to, name) = (way.packet.from, way.packet.to, &pod.link.name);
    let step = Step::ok("pod", format!("{name} of the pod, over {}", pod.host_link.name));
    let inside = format!("nsenter --net={}", pod.netns.display());
    let ip = if from.is_ipv4() { "ip" } else { "ip -6" };
    if let Some(step) = link(&step, pod, (from, way.arrives.as_ref())) {
        return Some(step);
    }
    if let Lookup::Refused(errno) = &pod.route {
        let gateway = gateway(facts, from).map_or_else(|| "GATEWAY".to_owned(), |gateway| gateway.to_string());
        let remedy = format!(
            "{inside} {ip} route add default via {gateway} dev {name}, or delete the pod, so that it is made again"
        );
        return Some(step.broken(format!("the pod {from} has no route to {to}: {}", errno.desc()), remedy));
    }
    let bridge = way.arrives.as_ref()?;
    if let Some((gateway, Read::Found(known))) = &pod.gateway
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

/// The pod that gets the packet, if something is wrong with it: its link, the port of the bridge, and the neighbour entry of this node for it.
pub(super) fn gets(way: &Way) -> Option<Step> {
    let (pod, to) = (way.to_pod.as_ref()?, way.packet.to);
    let step = Step::ok("pod", format!("{} of the pod, over {}", pod.link.name, pod.host_link.name));
    let device = way.hop.device.as_ref();
    if let Some(step) = link(&step, pod, (to, device)) {
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
fn link(step: &Step, pod: &Pod, (address, through): (IpAddr, Option<&Device>)) -> Option<Step> {
    let (inside, host) = (&pod.link, &pod.host_link);
    if !inside.up {
        let remedy = format!("nsenter --net={} ip link set {} up", pod.netns.display(), inside.name);
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

/// Returns the address of this node in the subnet of the pod.
fn gateway(facts: &Facts, pod: IpAddr) -> Option<IpAddr> {
    let SubnetFile::Good(file) = &facts.subnet_file else { return None };
    file.subnets.iter().find(|net| net.contains(&pod)).map(env::gateway)
}
