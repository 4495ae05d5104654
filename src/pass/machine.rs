// SPDX-License-Identifier: Apache-2.0
//! Converts a snapshot of the machine into facts that leases are judged by and backends plan with.

use ipnet::IpNet;
use weft_backends::host::{OnLink, Reach};
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_subnet::cidr::Subnets;
use weft_subnet::connected::Connected;

use crate::kernel::Machine;

/// Returns the addresses and the directly connected networks of the machine that lie inside Network.
pub fn connected(machine: &Machine, networks: &Subnets) -> Connected {
    let name = |index: u32| machine.links.iter().find(|link| link.index == index).map(|link| link.name);
    let addrs = machine.addrs.iter().filter(|addr| networks.iter().any(|all| all.contains(&addr.net.addr())));
    let addrs = addrs.filter_map(|addr| Some((addr.net, name(addr.index)?)));
    let of_addrs = addrs.flat_map(|(net, link)| [(net, link), (IpNet::from(net.addr()), link)]);
    let of_routes = machine.routes.iter().filter_map(|route| match route.reach {
        Reach::Link(link) if route.protocol == KERNEL_PROTOCOL => Some((route.net, link)),
        Reach::Link(_) | Reach::Gateway => None,
    });
    Connected::new(networks, of_addrs.chain(of_routes).map(|(net, link)| (net, link.text().into())))
}

/// Returns which addresses the machine reaches directly on a link, and which through a gateway.
pub fn on_link(machine: &Machine) -> OnLink {
    OnLink::new(machine.routes.iter().map(|route| (route.net, route.metric, route.reach)))
}
