// SPDX-License-Identifier: Apache-2.0
//! The way of packets from the address of this node to its own pods. The answers that a pod gets from this node are such packets: those of an API
//! server, a kubelet, or anything else in the network of the host. A policy rule for that address may lead them away. Programs that let the kernel
//! choose the source do not meet that rule, so a ping from this node to the pod is answered.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_subnet::env;

use super::tables::Tables;
use crate::kernel::Kernel;
use crate::kernel::entries::{LOCAL, Lookup, MAIN, Packet, Route, RouteKind, unspecified};
use crate::known_links::bridge;
use crate::sources::NodeSources;

/// Packets of this node to its pods that do not get to their bridge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedAway {
    /// The address of this node.
    pub from: IpAddr,
    /// The subnet of the pods.
    pub subnet: IpNet,
    /// The table that a policy rule asks.
    pub table: u32,
    /// The link by which the packets leave.
    pub link: String,
}

/// Asks the kernel for the way from the addresses that the agent has named to a pod. Without an agent it is not known which addresses pods use. `own`
/// are the subnets of this node. A table is named once.
///
/// # Errors
/// The kernel does not answer.
pub(super) fn read(tables: &Tables<'_>, sources: &NodeSources, own: &[IpNet]) -> io::Result<Vec<LedAway>> {
    let mut found: Vec<LedAway> = Vec::new();
    let Some(bridge) = bridge(tables.links).map(|link| link.index) else { return Ok(found) };
    let mut kernel = Kernel::open()?;
    for subnet in own.iter().map(IpNet::trunc) {
        // The address of the bridge itself is a local one. The first pod has the next address.
        let bridge_addr = env::gateway(subnet);
        let Some(to) = subnet.hosts().find(|addr| *addr > bridge_addr) else { continue };
        let mut way = |from| match kernel.route(&Packet { from, to, proto: None, port: None }, None) {
            Lookup::Route(route) if route.kind == RouteKind::Unicast => Some(route),
            _ => None,
        };
        // If no packet gets to the bridge, that is another finding.
        if way(unspecified(to.is_ipv4())).is_none_or(|route| route.device != bridge) {
            continue;
        }
        let addrs = [&sources.published, &sources.uplink_addrs];
        for from in addrs.into_iter().filter_map(|addrs| tables.first_here(addrs, to)) {
            let Some(Route { device, table, .. }) = way(from) else { continue };
            let is_usual = [MAIN, LOCAL].contains(&table);
            let Some(link) = tables.link(device).filter(|link| link.index != bridge && !is_usual) else { continue };
            if !found.iter().any(|known| known.table == table && known.subnet == subnet) {
                found.push(LedAway { from, subnet, table, link: link.name.clone() });
            }
        }
    }
    Ok(found)
}
