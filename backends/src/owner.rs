// SPDX-License-Identifier: Apache-2.0
//! Whose entry is it? A key that we desire is ours whoever wrote it; this module answers for all the others.
//! Invariant: when in doubt, it is not ours.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_subnet::cidr::{Subnets, family};

use crate::family::metric;
use crate::host::OnLink;
use crate::state::{Key, Name, Route, Seen, Value};

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
    /// subnet.env, as found at start, named this same Network: then routes without protocol (0, or boot 3) whose gateway is
    /// on-link are an earlier flannel host-gw's.
    pub flannel_was_here: bool,
}

impl Ownership {
    /// True when an entry that is not desired may be removed.
    pub fn ours(&self, key: &Key, seen: &Seen, on_link: &OnLink) -> bool {
        match key {
            // flannel's device, or another agent's, bears no mark of ours: it stays.
            Key::Link(name) => seen.mark && self.devices.contains(name),
            Key::Addr(name, net) => self.devices.contains(name) && !kernel_made(net),
            Key::Fdb(name, mac) => self.devices.contains(name) && mac.0[0] & 1 == 0,
            Key::Neigh(name, ip) => self.devices.contains(name) && !kernel_made(&IpNet::from(*ip)),
            // Read from tables of our own.
            Key::Peer(_) | Key::Guard(_) | Key::Open(_) | Key::Fence(_) => true,
            Key::Route(net, priority) => self.route(net, *priority, seen, on_link),
        }
    }

    fn route(&self, net: &IpNet, priority: u32, seen: &Seen, on_link: &OnLink) -> bool {
        let Seen { value: Value::Route(route), protocol, .. } = *seen else { return false };
        if protocol == KERNEL_PROTOCOL || kernel_made(net) {
            return false;
        }
        if route.dev().is_some_and(|dev| self.devices.contains(&dev)) {
            return true;
        }
        if !self.inside(net) {
            return false;
        }
        let in_own = self.own.of(family(net)).is_some_and(|own| own.contains(net));
        match route {
            // Our number on a route that delivers nothing: nobody's connected route, even in our own subnet.
            Route::Blackhole | Route::Unreachable => protocol == PROTOCOL,
            _ if in_own => false,
            _ if protocol == PROTOCOL => true,
            Route::Unicast { via, .. } => {
                self.flannel_was_here
                    && FLANNEL_PROTOCOLS.contains(&protocol)
                    && priority == metric(family(net))
                    && self.networks.of(family(net)) != Some(*net)
                    && on_link.on_link(via).is_some()
            }
            Route::Device { .. } | Route::Other => false,
        }
    }

    fn inside(&self, net: &IpNet) -> bool {
        self.networks.of(family(net)).is_some_and(|network| network.contains(net))
    }
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
