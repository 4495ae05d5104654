// SPDX-License-Identifier: Apache-2.0
//! Whose entry is it? A key that we desire is ours whoever wrote it; this module answers for all the others.
//! Invariant: when in doubt, it is not ours.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_subnet::allocate;
use weft_subnet::cidr::{Subnets, family};
use weft_subnet::network::Network;

use crate::family::metric;
use crate::host::OnLink;
use crate::state::{Key, Name, ObservedValue, Route, Value};

/// `rtm_protocol` of every route and nexthop that weft writes.
pub const PROTOCOL: u8 = 90;

/// RTPROT_UNSPEC and RTPROT_BOOT: what flannel's routes carry.
const FLANNEL_PROTOCOLS: [u8; 2] = [0, 3];
/// RTPROT_KERNEL: connected routes come and go with an address.
pub const KERNEL_PROTOCOL: u8 = 2;

/// What tells our leftovers from other people's entries.
#[derive(Debug, Clone, Default)]
pub struct Ownership {
    /// Devices that are ours: those in the plan, those of flannel's names for our VNI, those with our ifalias of this instance.
    pub devices: BTreeSet<Name>,
    /// Our Network.
    pub networks: Subnets,
    /// Our own subnet: never a leftover (cni0's connected route).
    pub own: Subnets,
}

impl Ownership {
    /// True when an entry that is not desired may be removed.
    pub fn ours(&self, key: &Key, seen: &ObservedValue) -> bool {
        match key {
            // flannel's device, or another agent's, bears no mark of ours: it stays.
            Key::Link(name) => seen.mark && self.devices.contains(name),
            Key::Addr(name, net) => self.devices.contains(name) && !kernel_made(net),
            Key::Fdb(name, mac) => self.devices.contains(name) && mac.0[0] & 1 == 0,
            Key::WgPeer(name, _) | Key::AllowedIp(name, _) => self.devices.contains(name),
            Key::Neigh(name, ip) => self.devices.contains(name) && !kernel_made(&IpNet::from(*ip)),
            // Read from tables of our own.
            Key::Peer(_) | Key::Guard(_) | Key::Open(_) | Key::Fence(_) => true,
            Key::Route(net, _) => self.route(net, seen),
        }
    }

    fn route(&self, net: &IpNet, seen: &ObservedValue) -> bool {
        let ObservedValue { value: Value::Route(route), protocol, .. } = seen else { return false };
        let protocol = *protocol;
        if protocol == KERNEL_PROTOCOL || kernel_made(net) {
            return false;
        }
        if route.dev().is_some_and(|dev| self.devices.contains(&dev)) {
            // Others may send their own traffic through the overlay (Kilo does): what they reach outside Network is their business.
            return protocol == PROTOCOL || self.inside(net);
        }
        if !self.inside(net) {
            return false;
        }
        let in_own = self.own.of(family(net)).is_some_and(|own| own.contains(net));
        match route {
            // Our number on a route that delivers nothing: nobody's connected route, even in our own subnet.
            Route::Blackhole | Route::Unreachable => protocol == PROTOCOL,
            _ if in_own => false,
            _ => protocol == PROTOCOL,
        }
    }

    fn inside(&self, net: &IpNet) -> bool {
        self.networks.of(family(net)).is_some_and(|network| network.contains(net))
    }
}

/// True for a route of exactly the form in which flannel writes those of its host-gw backend and of DirectRouting: a subnet of this
/// network, through a gateway on the link, with flannel's protocol and metric, and not inside our own subnet. Others write such
/// routes, too: ask only where flannel ran, and weft did not.
pub fn is_flannels(network: &Network, own: &Subnets, on_link: &OnLink, (key, seen): (&Key, &ObservedValue)) -> bool {
    let (Key::Route(net, priority), &Value::Route(Route::Unicast { via, dev, onlink: false })) = (key, &seen.value)
    else {
        return false;
    };
    FLANNEL_PROTOCOLS.contains(&seen.protocol)
        && !seen.mark
        && *priority == metric(family(net))
        && allocate::fits(network, *net)
        && !own.of(family(net)).is_some_and(|own| own.contains(net))
        && on_link.on_link(via) == Some(dev)
}

/// True for the names that flannel gives its devices: `flannel.<VNI>`, `flannel-v6.<VNI>`, `flannel.ipip`, `flannel0`, `flannel-wg`,
/// `flannel-wg-v6`.
pub fn is_flannels_device(name: Name) -> bool {
    let name = name.text();
    if matches!(&*name, "flannel0" | "flannel-wg" | "flannel-wg-v6") {
        return true;
    }
    let rest = name.strip_prefix("flannel.").or_else(|| name.strip_prefix("flannel-v6."));
    rest.is_some_and(|rest| rest == "ipip" || (!rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit())))
}

/// True for the address that flannel gives its devices: the first one of our own subnet, alone.
pub fn is_address_of_flannels_device(own: &Subnets, addr: &IpNet) -> bool {
    let is_single = addr.prefix_len() == addr.max_prefix_len();
    is_single && own.of(family(addr)).is_some_and(|own| own.network() == addr.addr())
}

/// True for a route to a subnet of this network over a device with a name of flannel's, with flannel's protocol. An earlier backend of
/// flannel left it. It is longer than a route to the whole Network, so packets would still take it, perhaps in clear text. Ask only
/// where flannel ran, and weft did not.
pub fn is_over_flannels_device(network: &Network, own: &Subnets, (key, seen): (&Key, &ObservedValue)) -> bool {
    let (Key::Route(net, _), Value::Route(route)) = (key, &seen.value) else { return false };
    FLANNEL_PROTOCOLS.contains(&seen.protocol)
        && route.dev().is_some_and(is_flannels_device)
        && network.networks.of(family(net)).is_some_and(|all| all.contains(net) && all != *net)
        && !own.of(family(net)).is_some_and(|own| own.contains(net))
}

/// Link-local and multicast: the kernel and its helpers put them on every interface.
fn kernel_made(net: &IpNet) -> bool {
    match net.addr() {
        IpAddr::V4(v4) => v4.is_multicast(),
        IpAddr::V6(v6) => v6.is_multicast() || v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
