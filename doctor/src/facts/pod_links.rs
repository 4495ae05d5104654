// SPDX-License-Identifier: Apache-2.0
//! The bridge of the pods, and the links that lead to pods.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_netlink::rtnl::{Addr, BridgePort, Link, Route};

use super::tables::Tables;
use crate::known_links::{self, is_of_routed_pod, is_ours};

/// The bridge plugin names the host's end of a pod's veth pair so, followed by eight hexadecimal digits.
const VETH: &str = "veth";

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

/// The link of a pod in another bridge than cni0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stray {
    /// Name of the link.
    pub link: String,
    /// Name of the bridge.
    pub bridge: String,
}

/// An address of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkAddress {
    /// Name of the link.
    pub link: String,
    /// The address, with its prefix length.
    pub addr: IpNet,
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
    /// Links of pods that are in another bridge than cni0.
    pub strays: Vec<Stray>,
    /// The addresses of all links, except for those of weft's devices and of routed pods, and for the address of the gateway at links of pods.
    pub addrs: Vec<LinkAddress>,
    /// The destinations of the routes over the bridge that need no gateway.
    pub connected: Vec<IpNet>,
}

/// The bridge of the CNI plugin.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Bridge {
    /// MTU in bytes.
    pub mtu: u32,
    /// Its addresses whose scope is wider than the link.
    pub addrs: Vec<IpAddr>,
}

/// Reads the bridge of the CNI plugin, if there is one.
pub(super) fn bridge(tables: &Tables<'_>) -> Option<Bridge> {
    let link = known_links::bridge(tables.links)?;
    let of_link = tables.addrs.iter().filter(|addr| addr.index == link.index && addr.global);
    Some(Bridge { mtu: link.mtu, addrs: of_link.map(|addr| addr.addr).collect() })
}

/// Reads from the tables of the kernel what concerns pods.
pub(super) fn read(tables: &Tables<'_>) -> PodLinks {
    let Tables { links, addrs, routes, .. } = *tables;
    let bridge = known_links::bridge(links);
    let of_bridge = |link: &Link| bridge.is_some_and(|bridge| link.master == bridge.index);
    let of_pods = links.iter().filter(|link| of_bridge(link) || is_of_routed_pod(link));
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
        let is_free = link.master == 0 && link.peer_netns.is_some() && !is_of_routed_pod(link);
        is_free && link.kind == VETH && is_of_bridge_plugin(&link.name) && !is_used(link.index)
    };
    let named = |addr: &Addr| {
        let link = links.iter().find(|link| link.index == addr.index && !is_ours(link) && !is_of_routed_pod(link))?;
        // The CNI plugin ptp gives every link of a pod the gateway alone, without the subnet.
        let is_alone = addr.len == if addr.addr.is_ipv4() { 32 } else { 128 };
        let of_pod = link.kind == VETH && link.peer_netns.is_some();
        let addr = IpNet::new(addr.addr, addr.len).ok()?;
        (!(is_alone && of_pod)).then(|| LinkAddress { link: link.name.clone(), addr })
    };
    let is_connected = |route: &&Route| {
        let of_bridge = bridge.is_some_and(|bridge| bridge.index == route.index);
        of_bridge && route.gateway.is_none() && !route.refuses()
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
fn strays(bridge: &Link, links: &[Link], addrs: &[Addr]) -> Vec<Stray> {
    let has_cni0 =
        |netns: Option<i32>| links.iter().any(|link| link.master == bridge.index && link.peer_netns == netns);
    let stray = |link: &Link| {
        let other = links.iter().find(|other| link.master != 0 && other.index == link.master)?;
        let is_of_pod = link.kind == VETH && link.peer_netns.is_some() && is_of_bridge_plugin(&link.name);
        let is_elsewhere = other.index != bridge.index && other.kind == "bridge" && !has_address(addrs, other.index);
        (is_of_pod && is_elsewhere && !has_cni0(link.peer_netns))
            .then(|| Stray { link: link.name.clone(), bridge: other.name.clone() })
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
