// SPDX-License-Identifier: Apache-2.0
//! The parts of the cluster's Network that the host itself uses: its addresses, and the networks that it is directly connected to. A
//! lease that overlaps one of them would divert the host's own traffic, and a subnet there could not be used.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipnet::IpNet;

use crate::cidr::{Subnets, family};

/// The addresses and connected networks of a host inside Network, each with the name of its interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connected {
    places: BTreeSet<(IpNet, Arc<str>)>,
}

impl Connected {
    /// Creates the set. `places` are connected networks, and addresses as networks of one address. A network that contains all of
    /// Network is left out, because whoever chooses Network inside a LAN wants subnets there. Addresses in such a LAN still count.
    pub fn new(networks: &Subnets, places: impl IntoIterator<Item = (IpNet, Arc<str>)>) -> Connected {
        let inside = |net: &IpNet| networks.of(family(net)).is_some_and(|all| all.contains(net) && all != *net);
        let places = places.into_iter().map(|(net, link)| (net.trunc(), link));
        Connected { places: places.filter(|(net, _)| inside(net)).collect() }
    }

    /// Returns the set without what belongs to the cluster on this node: everything inside its own subnet, such as cni0, except on the
    /// uplink, and everything on the interfaces for which `is_own_link` returns true.
    pub fn without(&self, own: &Subnets, uplink: &str, is_own_link: impl Fn(&str) -> bool) -> Connected {
        let in_own = |net: &IpNet| own.of(family(net)).is_some_and(|own| own.contains(net));
        let ours = |(net, link): &&(IpNet, Arc<str>)| is_own_link(link) || (&**link != uplink && in_own(net));
        let rest = self.places.iter().filter(|place| !ours(place));
        Connected { places: rest.cloned().collect() }
    }

    /// Returns an address or network that overlaps this network, and its interface. Makes one look-up for each shorter prefix length.
    pub fn overlapping(&self, net: IpNet) -> Option<(IpNet, &str)> {
        if self.places.is_empty() {
            return None;
        }
        let from = |net: IpNet| self.places.range((net, Arc::from(""))..).next();
        // Networks are ordered by address, then by length. So if any network lies inside `net`, the next one does.
        let inside = from(net).filter(|(place, _)| net.contains(place));
        let around = || {
            (0..net.prefix_len()).find_map(|len| {
                let wider = IpNet::new(net.network(), len).ok()?.trunc();
                from(wider).filter(|(place, _)| *place == wider)
            })
        };
        inside.or_else(around).map(|(place, link)| (*place, &**link))
    }

    /// Returns what is in exactly one of the two sets.
    pub fn difference(&self, other: &Connected) -> Connected {
        Connected { places: self.places.symmetric_difference(&other.places).cloned().collect() }
    }

    /// Returns true if the host uses nothing inside Network.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Returns all of them as networks.
    pub fn iter(&self) -> impl Iterator<Item = IpNet> {
        self.places.iter().map(|(net, _)| *net)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks() -> Subnets {
        Subnets { v4: "10.0.0.0/8".parse().ok(), v6: "fd00::/48".parse().ok() }
    }

    fn places(of: &[(&str, &str)]) -> Connected {
        Connected::new(&networks(), of.iter().map(|(net, link)| (net.parse().unwrap(), Arc::from(*link))))
    }

    #[test]
    fn an_overlapping_network_may_be_smaller_larger_or_equal() {
        let all = places(&[("10.1.0.0/16", "lan0"), ("10.9.9.9/32", "lo"), ("fd00:0:0:7::/64", "lan0")]);
        let rows = [
            ("10.1.0.0/16", Some(("10.1.0.0/16", "lan0"))),
            ("10.1.7.0/24", Some(("10.1.0.0/16", "lan0"))),
            ("10.0.0.0/12", Some(("10.1.0.0/16", "lan0"))),
            ("10.9.9.0/24", Some(("10.9.9.9/32", "lo"))),
            ("10.9.8.0/24", None),
            ("10.2.0.0/16", None),
            ("fd00:0:0:7::/64", Some(("fd00:0:0:7::/64", "lan0"))),
            ("fd00:0:0:8::/64", None),
        ];
        for (net, expected) in rows {
            let expected = expected.map(|(net, link)| (net.parse().unwrap(), link));
            assert_eq!(all.overlapping(net.parse().unwrap()), expected, "{net}");
        }
    }

    #[test]
    fn only_what_is_inside_network_and_not_our_own_counts() {
        let all = places(&[
            ("10.0.0.0/8", "lan0"),
            ("0.0.0.0/0", "lan0"),
            ("192.168.0.0/16", "lan1"),
            ("10.5.1.1/32", "cni0"),
            ("10.5.1.0/24", "cni0"),
            ("10.5.9.0/32", "flannel.1"),
            ("10.7.0.0/24", "lan2"),
            ("10.5.1.64/28", "up0"),
        ]);
        let own = Subnets { v4: "10.5.1.0/24".parse().ok(), v6: None };
        let rest = all.without(&own, "up0", |link| link == "flannel.1");
        let rest: Vec<String> = rest.iter().map(|net| net.to_string()).collect();
        assert_eq!(rest, ["10.5.1.64/28", "10.7.0.0/24"]);
    }
}
