// SPDX-License-Identifier: Apache-2.0
//! cni0 or links of pods are down or not connected.

mod port_flags;
mod vlans;

use std::net::IpAddr;

use ipnet::IpNet;
use weft_netlink::rtnl::BridgePort;
use weft_subnet::env::gateway;

use crate::facts::NodeFacts;
use crate::facts::pod_links::{PodLink, PodLinks, Stray};
use crate::finding::{MAX_NAMED, NodeFinding, counted, finding, some_of};
use crate::known_links::{BRIDGE, ports_that};
use crate::remedies::connect;
use port_flags::port_flags;

/// The bridge or links of pods are down or not connected, so that pods have no network at all.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let pods = &facts.pods;
    let ports = pods.links.iter().filter(|link| link.port.is_some()).count();
    let mut findings = Vec::new();
    if pods.bridge_up == Some(false) && ports > 0 {
        let pods = counted(ports, "pod that it connects has", "pods that it connects have");
        let evidence = format!("{BRIDGE} is down: the {pods} no network");
        findings.push(finding(evidence, format!("ip link set {BRIDGE} up; then find out which program set it down")));
    }
    let down = || pods.links.iter().filter(|link| !link.up).map(|link| link.name.as_str());
    if let Some(first) = down().next() {
        let links = counted(down().count(), "link of a pod is", "links of pods are");
        let evidence = format!("{links} down: {}", some_of(down()));
        findings.push(finding(evidence, format!("ip link set {first} up, and so on; or delete these pods")));
    }
    findings.extend(ports_that_drop(pods));
    findings.extend(port_flags(facts));
    findings.extend(vlans::cut_off(facts));
    findings.extend(strays_found(pods));
    let Some(env) = facts.subnet_file.env() else { return findings };
    if let Some(first) = pods.orphans.first() {
        let evidence = format!(
            "{} connected to no bridge ({}), as after `ip link del {BRIDGE}`: these pods have no network",
            counted(pods.orphans.len(), "veth pair of a pod is", "veth pairs of pods are"),
            some_of(pods.orphans.iter().map(String::as_str))
        );
        let remedy = format!(
            "delete the pods of this node, so that they are made again; or, if {BRIDGE} has the subnet of this node: \
             ip link set {first} master {BRIDGE} up"
        );
        findings.push(finding(evidence, remedy));
    }
    for subnet in env.subnets.iter() {
        let of_family = |addr: &IpAddr| addr.is_ipv4() == subnet.addr().is_ipv4();
        let has_address = pods.addrs.iter().any(|one| one.link == BRIDGE && of_family(&one.addr.addr()));
        if ports > 0 && !has_address {
            let evidence = format!(
                "{BRIDGE} connects {} and has no address in {}, which is their gateway",
                counted(ports, "pod", "pods"),
                subnet.trunc()
            );
            let remedy = format!("ip addr add {}/{} dev {BRIDGE}", gateway(subnet), subnet.prefix_len());
            findings.push(finding(evidence, remedy));
        }
        if ports > 0 && pods.bridge_up == Some(true) {
            findings.extend(not_connected(pods, subnet));
        }
        findings.extend(two_links(pods, subnet));
    }
    findings
}

/// A port of the bridge passes no packets of its pod, or none to it.
fn ports_that_drop(pods: &PodLinks) -> Vec<NodeFinding> {
    // The kernel sets a port whose pod has not set its end up to the state "disabled".
    let is_in_use = |link: &&PodLink| pods.bridge_up == Some(true) && link.running;
    let ports = || pods.links.iter().filter(is_in_use).filter_map(|link| Some((link.name.as_str(), link.port?)));
    let mut findings = Vec::new();
    let stopped = || ports().filter(|(_, port)| port.state != BridgePort::FORWARDING);
    if let Some((first, port)) = stopped().next() {
        let state = match port.state {
            0 => "disabled",
            1 => "listening",
            2 => "learning",
            _ => "blocking",
        };
        let (by, turn_off) = if pods.stp {
            (", by STP", format!("ip link set {BRIDGE} type bridge stp_state 0 && "))
        } else {
            ("", String::new())
        };
        let evidence = format!(
            "{} no packets (state {state}{by}): {}. These pods have no network",
            ports_that(stopped().count(), "forwards", "forward"),
            some_of(stopped().map(|(name, _)| name))
        );
        let remedy = format!("{turn_off}bridge link set dev {first} state 3; and so on for each of these ports");
        findings.push(finding(evidence, remedy));
    }
    let deaf = || ports().filter(|(_, port)| !port.learning && !port.flood).map(|(name, _)| name);
    if let Some(first) = deaf().next() {
        let evidence = format!(
            "{} packets for unknown ones ({}): packets to these pods are dropped",
            ports_that(deaf().count(), "neither learns addresses nor gets", "neither learn addresses nor get"),
            some_of(deaf())
        );
        let remedy = format!("bridge link set dev {first} learning on flood on; and so on for each of these ports");
        findings.push(finding(evidence, remedy));
    }
    let locked = || ports().filter(|(_, port)| port.locked).map(|(name, _)| name);
    if let Some(first) = locked().next() {
        let evidence = format!(
            "{} locked ({}): it drops what these pods send",
            ports_that(locked().count(), "is", "are"),
            some_of(locked())
        );
        findings.push(finding(
            evidence,
            format!("bridge link set dev {first} locked off; and so on for each of these ports"),
        ));
    }
    findings
}

/// A pod hangs in a bridge that is not that of the pods.
fn strays_found(pods: &PodLinks) -> Vec<NodeFinding> {
    let one = |Stray { link, bridge }: &Stray| {
        let evidence = format!("{link} leads to a pod and is in {bridge}, not in {BRIDGE}: this pod has no network");
        finding(evidence, format!("ip link set {link} master {BRIDGE}"))
    };
    pods.strays.iter().take(MAX_NAMED).map(one).collect()
}

/// Two links have addresses in the subnet of this node, so packets to its pods leave by the wrong one.
fn two_links(pods: &PodLinks, subnet: IpNet) -> Option<NodeFinding> {
    let inside = pods.addrs.iter().filter(|one| subnet.trunc().contains(&one.addr.addr()));
    let mut links: Vec<&str> = inside.map(|one| one.link.as_str()).collect();
    links.sort_unstable();
    links.dedup();
    let other = links.iter().find(|link| **link != BRIDGE).filter(|_| links.len() > 1)?;
    let evidence = format!(
        "{} have addresses in {}, the subnet of this node: packets to its pods leave by one of them only",
        links.join(" and "),
        subnet.trunc()
    );
    Some(finding(evidence, format!("give {other} another address range (Docker: `bip` in daemon.json), or remove it")))
}

/// The bridge has an address in the subnet of this node, and the kernel does not send packets for exactly this subnet over it.
fn not_connected(pods: &PodLinks, subnet: IpNet) -> Option<NodeFinding> {
    let subnet = subnet.trunc();
    let inside = pods.addrs.iter().filter(|one| one.link == BRIDGE && subnet.contains(&one.addr.addr()));
    let inside: Vec<IpNet> = inside.map(|one| one.addr).collect();
    let Some(right) = inside.iter().find(|addr| addr.prefix_len() == subnet.prefix_len()) else {
        return wrong_length(pods, subnet, *inside.first()?);
    };
    // Routes to parts of the subnet may lead to all pods. A route to one address is that of one pod.
    let leads = |dst: &IpNet| dst.contains(&subnet) || subnet.contains(dst) && dst.prefix_len() < dst.max_prefix_len();
    if pods.connected.iter().any(leads) {
        return None;
    }
    let address = right.addr();
    let evidence = format!(
        "no route leads to {subnet} over {BRIDGE} although it has {address}: this node does not reach its pods, and packets of other \
         nodes to them are lost"
    );
    Some(finding(evidence, connect(subnet, address)))
}

/// The address of the bridge has another prefix length than the subnet, and so has the route that the kernel makes for it.
fn wrong_length(pods: &PodLinks, subnet: IpNet, addr: IpNet) -> Option<NodeFinding> {
    let effect = if addr.prefix_len() < subnet.prefix_len() {
        "packets to addresses outside of the subnet leave by the bridge, unless a longer route leads to them"
    } else if pods.connected.iter().any(|dst| dst.contains(&subnet)) {
        return None;
    } else {
        "this node does not reach pods outside of that range"
    };
    let evidence = format!("{BRIDGE} has {addr}, but the subnet of this node is {subnet}: {effect}");
    let right = format!("{}/{}", addr.addr(), subnet.prefix_len());
    Some(finding(evidence, format!("ip addr del {addr} dev {BRIDGE} && ip addr add {right} dev {BRIDGE}")))
}
