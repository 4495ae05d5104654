// SPDX-License-Identifier: Apache-2.0
//! Decides which entries that are not wanted may be removed. An entry that is wanted is ours, whoever wrote it. In case of doubt an entry
//! belongs to another program.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::Range;

use ipnet::IpNet;
use weft_subnet::allocate;
use weft_subnet::cidr::{Subnets, family};
use weft_subnet::net_conf::NetConf;
use weft_subnet::old_defects::{Defect, is_back};

use crate::host::OnLink;
use crate::state::{Key, Name, ObservedValue, Route, Value, metric};

/// `rtm_protocol` of every route and nexthop that weft writes.
pub const PROTOCOL: u8 = 90;
/// What the alias of every device that weft makes begins with. The path of the agent's subnet file follows.
pub const ALIAS: &str = "weft ";

/// The routing tables of fences. Each agent of a host has two of them (src/kernel/fence.rs).
pub const FENCE_TABLES: Range<u32> = 90_000..2_090_000;

/// RTPROT_UNSPEC and RTPROT_BOOT, which flannel's routes have.
const FLANNEL_PROTOCOLS: [u8; 2] = [0, 3];
/// RTPROT_KERNEL. The kernel adds and removes connected routes with an address.
pub const KERNEL_PROTOCOL: u8 = 2;

/// The facts that distinguish what we left from the entries of other programs.
#[derive(Debug, Clone, Default)]
pub struct Ownership {
    /// Our devices: those in the plan, those with flannel's names for our VNI, and those with the ifalias of this instance.
    pub devices: BTreeSet<Name>,
    /// Our Network.
    pub networks: Subnets,
    /// Our own subnet. A route to it, such as the connected route of cni0, is never removed.
    pub own: Subnets,
}

impl Ownership {
    /// Returns true if an entry that is not wanted may be removed.
    pub fn ours(&self, key: &Key, seen: &ObservedValue) -> bool {
        match key {
            // A device of flannel or of another agent does not have our mark, so it stays.
            Key::Link(name) => seen.mark && self.devices.contains(name),
            Key::Addr(name, net) => self.devices.contains(name) && !kernel_made(net),
            Key::Fdb(name, mac) => self.devices.contains(name) && !mac.is_multicast(),
            Key::WgPeer(name, _) | Key::AllowedIp(name, _) => self.devices.contains(name),
            Key::Neigh(name, ip) => self.devices.contains(name) && !kernel_made(&IpNet::from(*ip)),
            // These were read from our own tables.
            Key::Peer(_) | Key::Guard(_) | Key::Open(_) | Key::Fence(_) => true,
            Key::Route(net, _) => self.route(net, seen),
        }
    }

    fn route(&self, net: &IpNet, seen: &ObservedValue) -> bool {
        let Value::Route(route) = &seen.value else { return false };
        if seen.protocol == KERNEL_PROTOCOL || kernel_made(net) {
            return false;
        }
        let has_our_protocol = seen.protocol == PROTOCOL;
        if route.dev().is_some_and(|dev| self.devices.contains(&dev)) {
            // Other programs, such as Kilo, send traffic to destinations outside Network through the overlay. Their routes stay.
            return has_our_protocol || self.inside(net);
        }
        if !has_our_protocol || !self.inside(net) {
            return false;
        }
        let in_own = self.own.of(family(net)).is_some_and(|own| own.contains(net));
        // A route that delivers nothing is not a connected route, so it may be removed even in our own subnet.
        !in_own || matches!(route, Route::Blackhole | Route::Unreachable)
    }

    fn inside(&self, net: &IpNet) -> bool {
        self.networks.of(family(net)).is_some_and(|network| network.contains(net))
    }
}

/// Returns true for a route of exactly the form in which flannel writes those of its host-gw backend and of DirectRouting: a subnet of this
/// net-conf, through a gateway on the link, with flannel's protocol and metric, and not inside our own subnet. Other
/// programs write such routes, too, so ask only if flannel ran here before weft.
pub fn is_flannels(net_conf: &NetConf, own: &Subnets, on_link: &OnLink, (key, seen): (&Key, &ObservedValue)) -> bool {
    let (Key::Route(net, priority), &Value::Route(Route::Unicast { via, dev, onlink: false })) = (key, &seen.value)
    else {
        return false;
    };
    FLANNEL_PROTOCOLS.contains(&seen.protocol)
        && !seen.mark
        && *priority == metric(family(net))
        && (allocate::fits(net_conf, *net) || is_back(Defect::ForeignRoutesRemoved))
        && !own.of(family(net)).is_some_and(|own| own.contains(net))
        && on_link.on_link(via) == Some(dev)
}

/// Returns true for the names that flannel gives its devices: `flannel.<VNI>`, `flannel-v6.<VNI>`, `flannel.ipip`, `flannel0`, `flannel-wg`,
/// `flannel-wg-v6`.
pub fn is_flannels_device(name: Name) -> bool {
    let name = name.text();
    if matches!(&*name, "flannel0" | "flannel-wg" | "flannel-wg-v6") {
        return true;
    }
    let rest = name.strip_prefix("flannel.").or_else(|| name.strip_prefix("flannel-v6."));
    rest.is_some_and(|rest| rest == "ipip" || (!rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit())))
}

/// Returns true for the address that flannel gives its devices: the first one of our own subnet, as a single address.
pub fn is_address_of_flannels_device(own: &Subnets, addr: &IpNet) -> bool {
    let is_single = addr.prefix_len() == addr.max_prefix_len();
    is_single && own.of(family(addr)).is_some_and(|own| own.network() == addr.addr())
}

/// Returns true for a route to a subnet of this net-conf over a device with a name of flannel's, with flannel's protocol. An earlier backend of
/// flannel left it. It is longer than a route to the whole Network, so packets would still take it, perhaps in clear text. Ask only
/// if flannel ran here before weft.
pub fn is_over_flannels_device(net_conf: &NetConf, own: &Subnets, (key, seen): (&Key, &ObservedValue)) -> bool {
    let (Key::Route(net, _), Value::Route(route)) = (key, &seen.value) else { return false };
    FLANNEL_PROTOCOLS.contains(&seen.protocol)
        && route.dev().is_some_and(is_flannels_device)
        && net_conf.networks.of(family(net)).is_some_and(|all| all.contains(net) && all != *net)
        && !own.of(family(net)).is_some_and(|own| own.contains(net))
}

/// Returns true for link-local and multicast routes, which the kernel adds to every interface, and for the neighbours that it adds when a
/// packet is sent to a group or to all hosts.
fn kernel_made(net: &IpNet) -> bool {
    match net.addr() {
        IpAddr::V4(v4) => v4.is_multicast() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_multicast() || v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
