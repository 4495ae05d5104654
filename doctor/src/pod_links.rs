// SPDX-License-Identifier: Apache-2.0
//! The bridge of the pods, the links that lead to pods, and what keeps packets from passing them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_cni::veth::ALIAS;
use weft_netlink::rtnl::{Addr, BridgePort, Link, Route};
use weft_subnet::env::gateway;

use super::base::BRIDGE;
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::own_subnet;
use super::ways::is_ours;

/// The bridge plugin names the host's end of a pod's veth pair so, followed by eight hexadecimal digits.
const VETH: &str = "veth";
/// Maximum number of links that a finding names.
const MAX_NAMED: usize = 3;

/// The link of a pod, seen from the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLink {
    /// Its name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// True if it is administratively up.
    pub up: bool,
    /// True if both ends are up.
    pub running: bool,
    /// What cni0 does with this port; `None` if the link is no port of it.
    pub port: Option<BridgePort>,
}

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PodLinks {
    /// Whether the bridge is administratively up; `None` if there is no bridge.
    pub bridge_up: Option<bool>,
    /// True if the bridge takes all packets, which does the work of the hairpin mode of its ports.
    pub promiscuous: bool,
    /// True if the bridge uses the spanning tree protocol.
    pub stp: bool,
    /// The ports of the bridge, and the links of routed pods.
    pub links: Vec<PodLink>,
    /// Links that look like those of pods, and belong to no bridge and no route.
    pub orphans: Vec<String>,
    /// Links of pods that are in another bridge than cni0, each with the name of that bridge.
    pub strays: Vec<(String, String)>,
    /// The addresses of all links, with their prefix lengths, except for those of weft's devices and of routed pods, and for the address of the
    /// gateway at links of pods.
    pub addrs: Vec<(String, IpNet)>,
    /// The destinations of the routes over the bridge that need no gateway.
    pub connected: Vec<IpNet>,
}

/// Reads from the tables of the kernel what concerns pods.
pub fn read(links: &[Link], addrs: &[Addr], routes: &[Route]) -> PodLinks {
    let bridge = links.iter().find(|link| link.name == BRIDGE && link.kind == "bridge");
    let of_bridge = |link: &Link| bridge.is_some_and(|bridge| link.master == bridge.index);
    let is_routed = |link: &Link| link.alias.split(' ').next() == Some(ALIAS);
    let of_pods = links.iter().filter(|link| of_bridge(link) || is_routed(link));
    let pod_link = |link: &Link| PodLink {
        name: link.name.clone(),
        mtu: link.mtu,
        up: link.up,
        running: link.is_running(),
        port: link.port.filter(|_| of_bridge(link)),
    };
    // The kernel gives every link that is up an IPv6 address of its own, which is not global, and a route for it.
    let is_used = |index: u32| {
        has_address(addrs, index) || routes.iter().any(|route| route.index == index && !is_of_the_link(route))
    };
    let is_orphan = |link: &&Link| {
        let is_free = link.master == 0 && link.peer_netns.is_some() && !is_routed(link);
        is_free && link.kind == VETH && is_of_bridge_plugin(&link.name) && !is_used(link.index)
    };
    let named = |addr: &Addr| {
        let link = links.iter().find(|link| link.index == addr.index && !is_ours(link) && !is_routed(link))?;
        // The CNI plugin ptp gives every link of a pod the gateway alone, without the subnet.
        let is_alone = addr.len == if addr.addr.is_ipv4() { 32 } else { 128 };
        let of_pod = link.kind == VETH && link.peer_netns.is_some();
        let addr = IpNet::new(addr.addr, addr.len).ok()?;
        (!(is_alone && of_pod)).then(|| (link.name.clone(), addr))
    };
    let is_connected = |route: &&Route| {
        let of_bridge = bridge.is_some_and(|bridge| bridge.index == route.index);
        of_bridge && route.gateway.is_none() && !route.refuses
    };
    let connected = routes.iter().filter(is_connected);
    PodLinks {
        bridge_up: bridge.map(|bridge| bridge.up),
        promiscuous: bridge.is_some_and(|bridge| bridge.promiscuous),
        stp: bridge.is_some_and(|bridge| bridge.stp != 0),
        links: of_pods.map(pod_link).collect(),
        orphans: links.iter().filter(is_orphan).map(|link| link.name.clone()).collect(),
        strays: bridge.map(|bridge| strays(bridge, links, addrs)).unwrap_or_default(),
        addrs: addrs.iter().filter(|addr| addr.global).filter_map(named).collect(),
        connected: connected.filter_map(|route| IpNet::new(route.dst?, route.len).ok()).collect(),
    }
}

/// Returns the links that look like those of pods of cni0 and are in another bridge. Such a link may belong to a container of another program,
/// whose bridge is its gateway and has an address; or it is a second network of a pod, which is reached over cni0, too.
fn strays(bridge: &Link, links: &[Link], addrs: &[Addr]) -> Vec<(String, String)> {
    let has_cni0 =
        |netns: Option<i32>| links.iter().any(|link| link.master == bridge.index && link.peer_netns == netns);
    let stray = |link: &Link| {
        let other = links.iter().find(|other| link.master != 0 && other.index == link.master)?;
        let is_of_pod = link.kind == VETH && link.peer_netns.is_some() && is_of_bridge_plugin(&link.name);
        let is_elsewhere = other.index != bridge.index && other.kind == "bridge" && !has_address(addrs, other.index);
        (is_of_pod && is_elsewhere && !has_cni0(link.peer_netns)).then(|| (link.name.clone(), other.name.clone()))
    };
    links.iter().filter_map(stray).collect()
}

fn has_address(addrs: &[Addr], index: u32) -> bool {
    addrs.iter().any(|addr| addr.index == index && addr.global)
}

/// Returns true for a route that leads to the hosts of its link alone, or to multicast groups.
fn is_of_the_link(route: &Route) -> bool {
    match route.dst {
        Some(IpAddr::V6(dst)) => dst.is_unicast_link_local() || dst.is_multicast(),
        Some(IpAddr::V4(dst)) => dst.is_link_local() || dst.is_multicast(),
        None => false,
    }
}

fn is_of_bridge_plugin(name: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    name.strip_prefix(VETH).is_some_and(|rest| rest.len() == 8 && rest.bytes().all(is_digit))
}

/// Returns the first of these names, and how many more there are.
fn some_of<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = names.collect();
    let more = if all.len() > MAX_NAMED { ", ..." } else { "" };
    format!("{}{more}", all[..all.len().min(MAX_NAMED)].join(", "))
}

/// The bridge or links of pods are down or not connected, so that pods have no network at all.
pub(super) fn bridge(facts: &NodeFacts) -> Vec<NodeFinding> {
    let pods = &facts.pods;
    let ports = pods.links.iter().filter(|link| link.port.is_some()).count();
    let mut findings = Vec::new();
    if pods.bridge_up == Some(false) && ports > 0 {
        let evidence = format!("{BRIDGE} is down: the {ports} pods that it connects have no network");
        findings.push(finding(evidence, format!("ip link set {BRIDGE} up; then find out which program set it down")));
    }
    let down = || pods.links.iter().filter(|link| !link.up).map(|link| link.name.as_str());
    if let Some(first) = down().next() {
        let evidence = format!("{} links of pods are down: {}", down().count(), some_of(down()));
        findings.push(finding(evidence, format!("ip link set {first} up, and so on; or delete these pods")));
    }
    findings.extend(ports_that_drop(pods));
    findings.extend(strays_found(pods));
    let Some(env) = facts.subnet_file.env() else { return findings };
    if let Some(first) = pods.orphans.first() {
        let evidence = format!(
            "{} veth pairs of pods are connected to no bridge ({}), as after `ip link del {BRIDGE}`: these pods have no network",
            pods.orphans.len(),
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
        let has_address = pods.addrs.iter().any(|(link, addr)| link == BRIDGE && of_family(&addr.addr()));
        if ports > 0 && !has_address {
            let evidence = format!(
                "{BRIDGE} connects {ports} pods and has no address in {}, which is their gateway",
                subnet.trunc()
            );
            let remedy = format!("ip addr add {}/{} dev {BRIDGE}", gateway(subnet), subnet.prefix_len());
            findings.push(finding(evidence, remedy));
        }
        if ports > 0 && pods.bridge_up == Some(true) {
            findings.extend(own_subnet::not_connected(pods, subnet));
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
            "{} ports of {BRIDGE} forward no packets (state {state}{by}): {}. These pods have no network",
            stopped().count(),
            some_of(stopped().map(|(name, _)| name))
        );
        let remedy = format!("{turn_off}bridge link set dev {first} state 3; and so on for each of these ports");
        findings.push(finding(evidence, remedy));
    }
    let deaf = || ports().filter(|(_, port)| !port.learning && !port.flood).map(|(name, _)| name);
    if let Some(first) = deaf().next() {
        let evidence = format!(
            "{} ports of {BRIDGE} neither learn addresses nor get packets for unknown ones ({}): packets to these pods are dropped",
            deaf().count(),
            some_of(deaf())
        );
        let remedy = format!("bridge link set dev {first} learning on flood on; and so on for each of these ports");
        findings.push(finding(evidence, remedy));
    }
    let locked = || ports().filter(|(_, port)| port.locked).map(|(name, _)| name);
    if let Some(first) = locked().next() {
        let evidence = format!(
            "{} ports of {BRIDGE} are locked ({}): it drops what these pods send",
            locked().count(),
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
    let one = |(link, bridge): &(String, String)| {
        let evidence = format!("{link} leads to a pod and is in {bridge}, not in {BRIDGE}: this pod has no network");
        finding(evidence, format!("ip link set {link} master {BRIDGE}"))
    };
    pods.strays.iter().take(MAX_NAMED).map(one).collect()
}

/// Two links have addresses in the subnet of this node, so packets to its pods leave by the wrong one.
fn two_links(pods: &PodLinks, subnet: IpNet) -> Option<NodeFinding> {
    let inside = pods.addrs.iter().filter(|(_, addr)| subnet.trunc().contains(&addr.addr()));
    let links: BTreeSet<&str> = inside.map(|(link, _)| link.as_str()).collect();
    let other = links.iter().find(|link| **link != BRIDGE).filter(|_| links.len() > 1)?;
    let evidence = format!(
        "{} have addresses in {}, the subnet of this node: packets to its pods leave by one of them only",
        links.iter().copied().collect::<Vec<_>>().join(" and "),
        subnet.trunc()
    );
    Some(finding(evidence, format!("give {other} another address range (Docker: `bip` in daemon.json), or remove it")))
}

/// Pods send packets that are larger than what the way to other nodes carries.
pub(super) fn mtu(facts: &NodeFacts) -> Option<NodeFinding> {
    let mtu = facts.subnet_file.env()?.mtu;
    let large = || facts.pods.links.iter().filter(|link| mtu > 0 && link.mtu > mtu);
    let first = large().next()?;
    let evidence = format!(
        "{} pods have a larger MTU ({}, such as {}) than the way to other nodes, which has {mtu}, as after a change of the backend or \
         of an MTU: their large packets vanish where ICMP is filtered",
        large().count(),
        first.mtu,
        first.name
    );
    Some(finding(evidence, "delete these pods, so that they are made again with the new MTU".to_owned()))
}

/// The bridge carries smaller packets than its pods send and expect. The kernel gives a bridge the smallest MTU of its ports, unless
/// somebody set it.
pub(super) fn small_bridge(facts: &NodeFacts, bridge: u32) -> Option<NodeFinding> {
    let mtu = facts.subnet_file.env()?.mtu;
    let mut ports = facts.pods.links.iter().filter(|link| link.port.is_some());
    let pod = ports.find(|link| bridge < mtu && link.mtu > bridge)?;
    let evidence = format!(
        "{BRIDGE} has MTU {bridge}, but pods ({} for {}) and the way to other nodes ({mtu}) have larger ones: large packets to pods vanish \
         where ICMP is filtered",
        pod.mtu, pod.name
    );
    Some(finding(evidence, format!("ip link set {BRIDGE} mtu {mtu}")))
}

/// A pod that is an endpoint of a service cannot reach itself by the address of the service. Without kube-proxy this does not matter.
pub(super) fn hairpin(facts: &NodeFacts) -> Option<NodeFinding> {
    let pods = &facts.pods;
    facts.rules.kube_proxy.as_ref().filter(|_| !pods.promiscuous)?;
    let without =
        || pods.links.iter().filter(|link| link.port.is_some_and(|port| !port.hairpin)).map(|link| link.name.as_str());
    without().next()?;
    let evidence = format!(
        "{} ports of {BRIDGE} have no hairpin mode ({}): these pods do not reach themselves by the address of a service",
        without().count(),
        some_of(without())
    );
    let remedy = "set `\"hairpinMode\": true` in the delegate of the CNI configuration, and delete these pods; until then, for each port: \
                  bridge link set dev PORT hairpin on";
    Some(finding(evidence, remedy.to_owned()))
}
