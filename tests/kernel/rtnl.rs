// SPDX-License-Identifier: Apache-2.0
//! What the CNI plugin and `weft doctor` read and change with rtnetlink, compared with what `ip` writes and shows.

use std::net::IpAddr;

use weft_netlink::rtnl::{Route, Rtnl};

use super::adapter_net::{in_namespace, ip};

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Returns the destinations of routes as `ip route` shows them, without the default routes.
fn destinations(routes: &[Route]) -> Vec<String> {
    routes.iter().filter_map(|route| Some(format!("{}/{}", route.dst?, route.len))).collect()
}

#[test]
fn the_routes_of_the_main_table_are_read_for_both_families_and_those_of_no_other_table() {
    in_namespace(|| async {
        for words in [
            "route add 10.66.0.0/16 via 10.0.0.9 dev up0",
            "route add 10.67.0.0/16 via 10.0.0.9 dev up0 table 100",
            "route add unreachable 10.68.0.0/16",
            "-6 route add fd66::/64 via fd00::9 dev up0",
        ] {
            ip(words);
        }
        let mut rtnl = Rtnl::open().unwrap();
        let (main, sent) = (rtnl.main_table().unwrap(), rtnl.routes().unwrap());
        let (main, sent) = (destinations(&main), destinations(&sent));
        // Whether the main table has the route, and whether packets are sent by it.
        for (net, in_main, is_sent) in [
            ("10.66.0.0/16", true, true),
            ("10.67.0.0/16", false, false),
            ("10.68.0.0/16", true, false),
            ("fd66::/64", true, true),
            ("127.0.0.0/8", false, false),
        ] {
            let net = net.to_owned();
            assert_eq!((main.contains(&net), sent.contains(&net)), (in_main, is_sent), "{net}: {main:?} {sent:?}");
        }
        for (to, is_local) in [("10.0.0.1", true), ("fd00::1", true), ("10.0.0.9", false), ("10.66.0.1", false)] {
            assert_eq!(rtnl.is_local(address(to)).unwrap(), is_local, "{to}");
        }
    });
}

#[test]
fn a_bridge_its_ports_and_its_addresses_are_read_changed_and_removed() {
    in_namespace(|| async {
        for words in [
            "link add br0 type bridge",
            "link add pod0 type veth peer name pod1",
            "link set pod0 master br0",
            "addr add 10.77.0.1/24 dev br0",
            "neigh add 10.0.0.9 lladdr 02:00:00:00:00:09 dev up0 nud permanent",
        ] {
            ip(words);
        }
        let mut rtnl = Rtnl::open().unwrap();
        let bridge = rtnl.link("br0").unwrap().expect("it was made");
        let ports: Vec<String> = rtnl.ports(bridge.index).unwrap().into_iter().map(|port| port.name).collect();
        assert_eq!((bridge.kind.as_str(), ports), ("bridge", vec!["pod0".to_owned()]));
        rtnl.set_mtu(bridge.index, 1400).unwrap();
        assert!(ip("link show br0").contains(" mtu 1400 "));
        let neighbours = rtnl.neighbours().unwrap();
        let neighbour = neighbours.iter().find(|entry| entry.addr == address("10.0.0.9")).expect("it was written");
        assert!(neighbour.is_permanent() && neighbour.mac == [2, 0, 0, 0, 0, 9], "{neighbour:?}");
        let addrs = rtnl.addrs().unwrap();
        let addr = addrs.iter().find(|addr| addr.addr == address("10.77.0.1")).expect("it was added");
        assert_eq!((addr.index, addr.len, addr.global), (bridge.index, 24, true));
        // What is gone already is removed.
        for _ in 0..2 {
            rtnl.remove_addr(addr).unwrap();
            assert!(!ip("addr show").contains("10.77.0.1"));
        }
        for _ in 0..2 {
            rtnl.remove_link(bridge.index).unwrap();
            rtnl.remove_link_named("pod0").unwrap();
            assert!(rtnl.link("br0").unwrap().is_none() && rtnl.link("pod1").unwrap().is_none());
        }
    });
}
