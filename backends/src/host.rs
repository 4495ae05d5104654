// SPDX-License-Identifier: Apache-2.0
//! What a backend knows about its machine. The agent makes this value, and so do tests.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use weft_subnet::cidr::Family;
use weft_subnet::connected::Connected;

use crate::identity::Identities;
use crate::name::Name;

/// The external interface, which carries the traffic between nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uplink {
    /// Its name.
    pub name: Name,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Its IPv4 address, if that family is in use.
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address, if that family is in use.
    pub v6: Option<Ipv6Addr>,
}

impl Uplink {
    /// Returns the address of one family.
    pub fn address(&self, family: Family) -> Option<IpAddr> {
        match family {
            Family::V4 => self.v4.map(IpAddr::V4),
            Family::V6 => self.v6.map(IpAddr::V6),
        }
    }

    /// Iterates over its addresses, IPv4 first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        both(self.v4, self.v6)
    }
}

fn both(v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>) -> impl Iterator<Item = IpAddr> {
    v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6))
}

/// Facts about the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The external interface.
    pub uplink: Uplink,
    /// The address that we publish as PublicIP: that of the uplink, or `--public-ip`.
    pub public_v4: Option<Ipv4Addr>,
    /// The address that we publish as PublicIPv6.
    pub public_v6: Option<Ipv6Addr>,
    /// The UDP port of our WireGuard device, if it is not that of net-conf.
    pub wireguard_port: Option<u16>,
    /// The UDP ports on which WireGuard devices of ours listen, where they should have others. Our lease names these, because peers would
    /// send to a port on which nobody listens otherwise.
    pub kept_ports: BTreeMap<Name, u16>,
    /// The identities of our devices, as the backend of net-conf chose them.
    pub identities: Identities,
    /// The addresses that are on a link of this host.
    pub routes: OnLink,
    /// The addresses and networks of this host inside Network. No subnet of a peer may overlap them.
    pub connected: Connected,
}

impl Host {
    /// Returns the facts of a machine of which only the uplink is known. It publishes no address.
    pub fn new(uplink: Uplink) -> Host {
        Host {
            uplink,
            public_v4: None,
            public_v6: None,
            wireguard_port: None,
            kept_ports: BTreeMap::new(),
            identities: Identities::default(),
            routes: OnLink::default(),
            connected: Connected::default(),
        }
    }

    /// Iterates over the addresses that we publish, IPv4 first.
    pub fn published(&self) -> impl Iterator<Item = IpAddr> + use<> {
        both(self.public_v4, self.public_v6)
    }
}

/// How the kernel reaches a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Directly on this interface.
    Link(Name),
    /// Through a gateway, or not at all (blackhole, unreachable, multipath).
    Gateway,
}

/// The shortest prefix of a network whose hosts are on one link. Default routes are shorter, also those in two or four parts, as VPNs write them.
const SHORTEST_LAN: u8 = 8;
const SHORTEST_LAN_V6: u8 = 16;

/// The routes of this host without those of weft. They show whether an address is on a link. The longest prefix wins, and among equal ones
/// the lowest metric. Prefixes have no host bits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnLink {
    /// The routes by prefix length and network address. Look-ups begin with the longest prefix.
    pub table: BTreeMap<(u8, IpAddr), Reach>,
}

impl OnLink {
    /// Builds the table. Among equal prefixes the lowest metric counts.
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

    /// Returns the prefixes that only one of the two has, or that they reach in different ways.
    pub fn difference(&self, other: &OnLink) -> Vec<IpNet> {
        let one_way = |one: &OnLink, two: &OnLink| -> Vec<IpNet> {
            let differs = one.table.iter().filter(|(key, reach)| two.table.get(key) != Some(reach));
            differs.filter_map(|((len, ip), _)| IpNet::new(*ip, *len).ok()).collect()
        };
        let mut all = one_way(self, other);
        all.extend(one_way(other, self));
        all
    }

    /// Returns the interface on whose link this address is, if it is on one. A route without a gateway that is as wide as a default route
    /// leads into a point-to-point link such as PPP or a VPN, and not to hosts of a LAN. This needs at most 33 or 129 look-ups.
    pub fn on_link(&self, ip: IpAddr) -> Option<Name> {
        let shortest = if ip.is_ipv4() { SHORTEST_LAN } else { SHORTEST_LAN_V6 };
        match self.longest(ip)? {
            (len, Reach::Link(name)) if len >= shortest => Some(name),
            (_, Reach::Link(_) | Reach::Gateway) => None,
        }
    }

    /// Returns the prefix length of the route for this address, if there is one. This needs at most 33 or 129 look-ups.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_counts_and_of_equal_ones_the_lowest_metric() {
        let (eth0, eth1) = (Name::new("eth0").unwrap(), Name::new("eth1").unwrap());
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let all = [
            (net("10.0.0.0/8"), 0, Reach::Gateway),
            (net("10.9.0.0/16"), 100, Reach::Link(eth0)),
            (net("10.9.0.0/16"), 50, Reach::Link(eth1)),
            (net("10.9.7.0/24"), 200, Reach::Gateway),
            (net("fd00::/16"), 0, Reach::Link(eth0)),
            (net("fc00::/7"), 0, Reach::Link(eth1)),
        ];
        let mut reversed = all;
        reversed.reverse();
        for routes in [all, reversed].map(OnLink::new) {
            for (ip, length, link) in [
                ("10.9.0.1", Some(16), Some(eth1)),
                ("10.9.7.1", Some(24), None),
                ("10.1.0.1", Some(8), None),
                ("11.0.0.1", None, None),
                ("fd00:1::1", Some(16), Some(eth0)),
                ("fd01:1::1", Some(7), None),
            ] {
                let address: IpAddr = ip.parse().unwrap();
                assert_eq!((routes.prefix_len(address), routes.on_link(address)), (length, link), "{ip}");
            }
        }
    }

    #[test]
    fn a_route_that_came_went_or_leads_elsewhere_is_a_difference() {
        let (eth0, eth1) = (Name::new("eth0").unwrap(), Name::new("eth1").unwrap());
        let table =
            |routes: &[(&str, Reach)]| OnLink::new(routes.iter().map(|(net, reach)| (net.parse().unwrap(), 0, *reach)));
        let before = table(&[
            ("10.7.0.0/16", Reach::Gateway),
            ("10.8.0.0/16", Reach::Link(eth0)),
            ("10.9.0.0/16", Reach::Link(eth0)),
        ]);
        let after = table(&[
            ("10.7.0.0/16", Reach::Gateway),
            ("10.9.0.0/16", Reach::Link(eth1)),
            ("fd00:9::/64", Reach::Link(eth0)),
        ]);
        let differ = |one: &OnLink, other: &OnLink| {
            let nets: std::collections::BTreeSet<IpNet> = one.difference(other).into_iter().collect();
            nets.iter().map(IpNet::to_string).collect::<Vec<_>>()
        };
        assert_eq!(differ(&before, &after), ["10.8.0.0/16", "10.9.0.0/16", "fd00:9::/64"]);
        assert_eq!(differ(&after, &before), differ(&before, &after));
        assert!(before.difference(&before).is_empty());
    }

    #[test]
    fn a_default_route_without_a_gateway_leads_to_no_lan() {
        let (eth0, ppp0) = (Name::new("eth0").unwrap(), Name::new("ppp0").unwrap());
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let routes = |wide: &[&str]| {
            let lan = [(net("10.0.0.0/8"), 0, Reach::Link(eth0)), (net("fd00:9::/64"), 0, Reach::Link(eth0))];
            OnLink::new(lan.into_iter().chain(wide.iter().map(|wide| (net(wide), 0, Reach::Link(ppp0)))))
        };
        for wide in [&["0.0.0.0/0", "::/0"][..], &["0.0.0.0/1", "128.0.0.0/1", "2000::/3"]] {
            let routes = routes(wide);
            for away in ["203.0.113.9", "2001:db8::9"] {
                assert_eq!(routes.on_link(away.parse().unwrap()), None, "{away} by {wide:?}");
            }
            for near in ["10.9.0.1", "fd00:9::7"] {
                assert_eq!(routes.on_link(near.parse().unwrap()), Some(eth0), "{near}");
            }
        }
        assert_eq!(routes(&["203.0.113.9/32"]).on_link("203.0.113.9".parse().unwrap()), Some(ppp0), "a peer of ppp0");
    }
}
