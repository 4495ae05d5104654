// SPDX-License-Identifier: Apache-2.0
//! What a backend knows of its machine: a value that the agent makes, and that tests make alike.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use weft_subnet::cidr::Family;
use weft_subnet::connected::Connected;

use crate::identity::Identities;
use crate::state::Name;

/// The external interface: what carries the traffic between nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Its name.
    pub name: Name,
    /// Bytes.
    pub mtu: u32,
    /// Its IPv4 address, if that family is in use.
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address, if that family is in use.
    pub v6: Option<Ipv6Addr>,
}

impl Uplink {
    /// The address of one family.
    pub fn address(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4.map(IpAddr::V4),
            Family::V6 => self.v6.map(IpAddr::V6),
        }
    }
}

/// Facts about the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The external interface.
    pub uplink: Uplink,
    /// What we publish as PublicIP (the uplink's address, or `--public-ip`).
    pub public_v4: Option<Ipv4Addr>,
    /// What we publish as PublicIPv6.
    pub public_v6: Option<Ipv6Addr>,
    /// The identities of our devices, as our network's backend chose them.
    pub identities: Identities,
    /// Which addresses are on a link of this host.
    pub routes: OnLink,
    /// Its addresses and networks inside Network: no peer may have a subnet over them.
    pub connected: Connected,
}

/// How the kernel would reach a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Directly on this interface.
    Link(Name),
    /// Through a gateway, or not at all (blackhole, unreachable, multipath).
    Gateway,
}

/// The host's own routes (ours left out), for the question whether an address is on the link: longest prefix wins,
/// lowest metric among equals. Prefixes are truncated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnLink {
    /// By prefix length (descending lookups), then network address.
    pub table: BTreeMap<(u8, IpAddr), Reach>,
}

impl OnLink {
    /// Builds the table from (prefix, metric, reach); among equal prefixes the lowest metric counts.
    pub fn new(routes: impl IntoIterator<Item = (IpNet, u32, Reach)>) -> OnLink {
        let mut best: BTreeMap<(u8, IpAddr), (u32, Reach)> = BTreeMap::new();
        for (net, metric, reach) in routes {
            let key = (net.prefix_len(), net.network());
            if best.get(&key).is_none_or(|(m, _)| metric < *m) {
                best.insert(key, (metric, reach));
            }
        }
        OnLink { table: best.into_iter().map(|(k, (_, r))| (k, r)).collect() }
    }

    /// The prefixes that are in one of the two alone, or reached in another way.
    pub fn difference(&self, other: &OnLink) -> Vec<IpNet> {
        let one_way = |one: &OnLink, two: &OnLink| -> Vec<IpNet> {
            let differs = one.table.iter().filter(|(key, reach)| two.table.get(key) != Some(reach));
            differs.filter_map(|((len, ip), _)| IpNet::new(*ip, *len).ok()).collect()
        };
        let mut all = one_way(self, other);
        all.extend(one_way(other, self));
        all
    }

    /// The interface on whose link this address is, if it is on one: at most 33 or 129 look-ups.
    pub fn on_link(&self, ip: IpAddr) -> Option<Name> {
        match self.longest(ip)? {
            (_, Reach::Link(name)) => Some(name),
            (_, Reach::Gateway) => None,
        }
    }

    /// The prefix length of the route for this address, if there is one: at most 33 or 129 look-ups.
    pub fn prefix_len(&self, ip: IpAddr) -> Option<u8> {
        self.longest(ip).map(|(len, _)| len)
    }

    fn longest(&self, ip: IpAddr) -> Option<(u8, Reach)> {
        let bits = if ip.is_ipv4() { 32 } else { 128 };
        (0..=bits).rev().find_map(|len| {
            let net = IpNet::new(ip, len).ok()?.network();
            self.table.get(&(len, net)).map(|reach| (len, *reach))
        })
    }
}
