// SPDX-License-Identifier: Apache-2.0
//! The routes of the subnet of this node: the kernel does not send packets for it over the bridge, or another program leads them away.

use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;

use super::base::BRIDGE;
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::pod_links::PodLinks;
use super::way_findings::{may_be_of_flannel, protocol};
use super::ways::OtherRoute;

/// Returns the command that makes the route of the subnet over the bridge, as the kernel makes it for the address of the bridge.
pub(crate) fn connect(subnet: IpNet, address: IpAddr) -> String {
    match address {
        IpAddr::V4(_) => format!("ip route replace {subnet} dev {BRIDGE} proto kernel scope link src {address}"),
        IpAddr::V6(_) => format!("ip -6 route replace {subnet} dev {BRIDGE} proto kernel metric 256"),
    }
}

/// The bridge has an address in the subnet of this node, and the kernel does not send packets for exactly this subnet over it.
pub(super) fn not_connected(pods: &PodLinks, subnet: IpNet) -> Option<NodeFinding> {
    let subnet = subnet.trunc();
    let inside = pods.addrs.iter().filter(|(link, addr)| link == BRIDGE && subnet.contains(&addr.addr()));
    let inside: Vec<IpNet> = inside.map(|(_, addr)| *addr).collect();
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

/// Routes of other programs inside the subnet of this node that lead to other hosts. A route over the link of a pod does not.
pub(super) fn led_away(facts: &NodeFacts, own: &[IpNet]) -> Vec<NodeFinding> {
    let is_uplink = |name: &str| facts.path_links.links.iter().any(|link| link.is_uplink && link.name == name);
    // The networks of links are findings of the check `bridge`.
    let leads_away =
        |route: &&OtherRoute| route.has_gateway || route.protocol != libc::RTPROT_KERNEL && is_uplink(&route.link);
    let one = |route: &OtherRoute| {
        let subnet = own.iter().map(IpNet::trunc).find(|subnet| subnet.contains(&route.dst))?;
        let (dst, link, writer) = (route.dst, &route.link, protocol(route.protocol));
        let evidence = format!(
            "{writer} has a route to {dst} over {link}, inside the subnet {subnet} of this node: packets to its pods there leave this node"
        );
        let family = if dst.addr().is_ipv6() { "-6 " } else { "" };
        Some(finding(evidence, format!("ip {family}route del {dst} dev {link}; then find the program that writes it")))
    };
    let away = facts.ways.other_routes.iter().filter(leads_away).filter(|route| !may_be_of_flannel(facts, route));
    away.filter_map(one).collect()
}
