// SPDX-License-Identifier: Apache-2.0
//! Routes that drop what no other route takes: `unreachable Network` and `blackhole` of our own subnet, both of the last metric.
//! Where nodes have addresses inside Network, the first would cut off whatever is reached there by the default route: it is left
//! out for that family, and status says so.

use std::collections::BTreeMap;
use std::net::IpAddr;

use weft_backends::index::Changed;
use weft_backends::state::{Key, LAST_METRIC, Route, State, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Subnets, family};
use weft_subnet::lease::Id;

use super::Plan;
use crate::options::Fences;

/// The fences, and who stands in their way.
#[derive(Debug, Default)]
pub(super) struct Fence {
    wanted: Fences,
    /// Addresses of nodes inside Network; usually none.
    inside: BTreeMap<Id, Vec<IpAddr>>,
}

impl Fence {
    pub(super) fn new(wanted: Fences) -> Fence {
        Fence { wanted, inside: BTreeMap::new() }
    }

    pub(super) fn forget_all(&mut self) {
        self.inside.clear();
    }

    /// Takes down where a node is; none = it is gone. True when the routes are others now.
    pub(super) fn see(&mut self, id: &Id, addresses: impl Iterator<Item = IpAddr>, networks: &Subnets) -> bool {
        let within = |ip: &IpAddr| networks.iter().any(|network| network.contains(ip));
        let inside: Vec<IpAddr> = addresses.filter(within).collect();
        if !self.wanted.fail_closed || (inside.is_empty() && self.inside.is_empty()) {
            return false;
        }
        let before = self.left_out();
        if inside.is_empty() {
            self.inside.remove(id);
        } else {
            self.inside.insert(id.clone(), inside);
        }
        before != self.left_out()
    }

    /// IPv4, IPv6.
    fn left_out(&self) -> (bool, bool) {
        let any = |v4: bool| self.inside.values().flatten().any(|ip| ip.is_ipv4() == v4);
        (any(true), any(false))
    }

    pub(super) fn routes(&self, networks: &Subnets, own: &Subnets) -> State {
        let left_out =
            |net: &ipnet::IpNet| self.inside.values().flatten().any(|ip| family(&(*ip).into()) == family(net));
        let unreachable = networks.iter().filter(|net| self.wanted.fail_closed && !left_out(net));
        let blackhole = own.iter().filter(|_| self.wanted.blackhole);
        let route = |net, route| (Key::Route(net, LAST_METRIC), Value::Route(route));
        let unreachable = unreachable.map(|net| route(net, Route::Unreachable));
        unreachable.chain(blackhole.map(|net| route(net, Route::Blackhole))).collect()
    }

    /// Why a route that was asked for is not there.
    pub(super) fn problem(&self, networks: &Subnets) -> Option<String> {
        let ip = self.inside.values().flatten().next()?;
        let network = networks.iter().find(|network| network.contains(ip))?;
        Some(format!(
            "--fail-closed is off: Network {network} holds {ip}, a node's own address; what else stands in it is reached by other routes"
        ))
    }
}

impl Plan {
    /// A peer came, moved or went (`None`): may the whole Network be unreachable?
    pub(super) fn mind_fence(&mut self, id: &Id, attrs: Option<&Attrs>) -> Vec<Changed> {
        let addresses = attrs.map(|attrs| [attrs.public_ip.map(IpAddr::V4), attrs.public_ipv6.map(IpAddr::V6)]);
        let moved = self.fence.see(id, addresses.into_iter().flatten().flatten(), &self.network.networks);
        if moved { self.plan_devices() } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_inside_network_are_not_cut_off() {
        let networks = Subnets { v4: "10.0.0.0/8".parse().ok(), v6: "fd00::/48".parse().ok() };
        let own = Subnets { v4: "10.1.2.0/24".parse().ok(), v6: "fd00::1:0:0:0:0/64".parse().ok() };
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let text = |fence: &Fence| {
            let routes = fence.routes(&networks, &own);
            routes.iter().map(|(key, value)| format!("{key} {value}")).collect::<Vec<_>>()
        };
        let mut fence = Fence::new(Fences { fail_closed: true, blackhole: false });
        let both = ["route 10.0.0.0/8 metric 4294967294 unreachable", "route fd00::/48 metric 4294967294 unreachable"];
        assert!(!fence.see(&"a".into(), [ip("192.168.0.1")].into_iter(), &networks));
        assert_eq!(text(&fence), both);
        assert!(fence.see(&"b".into(), [ip("10.64.3.1"), ip("fe80::1")].into_iter(), &networks));
        assert_eq!(text(&fence), both[1..], "the other family keeps its route");
        assert!(fence.problem(&networks).unwrap().contains("Network 10.0.0.0/8 holds 10.64.3.1"));
        assert!(!fence.see(&"c".into(), [ip("10.64.3.2")].into_iter(), &networks));
        assert!(!fence.see(&"b".into(), std::iter::empty(), &networks));
        assert!(fence.see(&"c".into(), std::iter::empty(), &networks), "the last one left");
        assert_eq!((text(&fence), fence.problem(&networks)), (both.map(str::to_owned).to_vec(), None));
    }
}
