// SPDX-License-Identifier: Apache-2.0
//! Row by row: whose entry is it?

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_subnet::cidr::Subnets;

use super::{Ownership, PROTOCOL};
use crate::host::{OnLink, Reach};
use crate::state::{Key, LAST_METRIC, Link, LinkKind, Mac, Name, Route, Seen, Value};

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn us(flannel_was_here: bool) -> Ownership {
    Ownership {
        devices: BTreeSet::from([name("flannel.1"), name("flannel-v6.1")]),
        networks: Subnets::from_key("10.5.0.0-16&fd00:5::-48").unwrap(),
        own: Subnets::from_key("10.5.1.0-24&fd00:5:0:1::-64").unwrap(),
        flannel_was_here,
    }
}

fn ask(us: &Ownership, key: Key, seen: Seen) -> bool {
    let on_link = OnLink::new([
        (net("192.168.64.0/24"), 0, Reach::Link(name("eth0"))),
        (net("2001:db8::/64"), 0, Reach::Link(name("eth0"))),
        (net("0.0.0.0/0"), 0, Reach::Gateway),
    ]);
    us.ours(&key, &seen, &on_link)
}

fn route(us: &Ownership, prefix: &str, via: &str, dev: &str, protocol: u8) -> bool {
    let route = Route::Unicast { via: via.parse().unwrap(), dev: name(dev), onlink: false };
    let prefix = net(prefix);
    let metric = if prefix.addr().is_ipv4() { 0 } else { 1024 };
    ask(us, Key::Route(prefix, metric), Seen { value: Value::Route(route), protocol, mark: false })
}

fn plain(us: &Ownership, key: Key, value: Value) -> bool {
    ask(us, key, Seen { value, protocol: 0, mark: false })
}

#[test]
fn a_link_needs_our_mark() {
    let link = Link { kind: LinkKind::Other, mtu: 1450, mac: None, up: true, learning: false };
    let asked = |dev, mark| ask(&us(true), Key::Link(name(dev)), Seen { value: Value::Link(link), protocol: 0, mark });
    assert!(asked("flannel.1", true));
    assert!(!asked("flannel.1", false), "flannel's or another agent's");
    assert!(!asked("flannel.9", true), "another instance's");
}

#[test]
fn what_is_on_our_device_is_ours() {
    let us = us(false);
    for (dev, ours) in [("flannel.1", true), ("flannel.2", false), ("eth0", false)] {
        let dev = name(dev);
        let (ip, mac): (IpAddr, Mac) = ("10.5.9.0".parse().unwrap(), Mac([2; 6]));
        assert_eq!(plain(&us, Key::Addr(dev, net("10.5.9.0/32")), Value::Addr), ours);
        assert_eq!(plain(&us, Key::Fdb(dev, mac), Value::Fdb(ip)), ours);
        assert_eq!(plain(&us, Key::Neigh(dev, ip), Value::Neigh(mac)), ours);
        assert_eq!(route(&us, "10.77.0.0/16", "10.77.0.0", &dev.text(), 3), ours);
        assert_eq!(route(&us, "10.5.9.0/24", "10.5.9.0", &dev.text(), 3), ours);
    }
}

#[test]
fn what_the_kernel_makes_is_not() {
    let (us, dev) = (us(true), name("flannel.1"));
    assert!(!plain(&us, Key::Addr(dev, net("fe80::1/64")), Value::Addr));
    assert!(!plain(&us, Key::Neigh(dev, "ff02::16".parse().unwrap()), Value::Neigh(Mac([0x33; 6]))));
    assert!(!plain(&us, Key::Neigh(dev, "224.0.0.22".parse().unwrap()), Value::Neigh(Mac([1; 6]))));
    assert!(!plain(&us, Key::Fdb(dev, Mac([0x33, 0x33, 0, 0, 0, 1])), Value::Fdb("10.0.0.1".parse().unwrap())));
    for prefix in ["fe80::/64", "ff00::/8"] {
        let device = Seen { value: Value::Route(Route::Device { dev }), protocol: 3, mark: false };
        assert!(!ask(&us, Key::Route(net(prefix), 256), device));
    }
    assert!(!route(&us, "10.5.9.0/24", "10.5.9.0", "flannel.1", 2), "kernel protocol");
}

#[test]
fn routes_with_our_number_inside_our_network() {
    let us = us(false);
    assert!(route(&us, "10.5.9.0/24", "192.168.64.9", "eth0", PROTOCOL));
    assert!(route(&us, "fd00:5:0:9::/64", "2001:db8::9", "eth0", PROTOCOL));
    assert!(!route(&us, "10.6.9.0/24", "192.168.64.9", "eth0", PROTOCOL), "the other agent's network");
    assert!(!route(&us, "10.5.1.0/24", "192.168.64.9", "eth0", PROTOCOL), "our own subnet");
    assert!(!route(&us, "10.0.0.0/8", "192.168.64.9", "eth0", PROTOCOL), "wider than our network");
    assert!(!route(&us, "10.5.9.0/24", "192.168.64.9", "eth0", 4), "static");
    let dead = |prefix: &str, protocol| {
        let seen = Seen { value: Value::Route(Route::Blackhole), protocol, mark: false };
        ask(&us, Key::Route(net(prefix), LAST_METRIC), seen)
    };
    assert!(dead("10.5.1.0/24", PROTOCOL) && dead("10.5.0.0/16", PROTOCOL));
    assert!(!dead("10.5.0.0/16", 3) && !dead("10.6.0.0/16", PROTOCOL));
}

#[test]
fn what_flannels_host_gw_left() {
    for (here, protocol, expected) in [(true, 3, true), (true, 0, true), (true, 4, false), (false, 3, false)] {
        assert_eq!(route(&us(here), "10.5.9.0/24", "192.168.64.9", "eth0", protocol), expected);
        assert_eq!(route(&us(here), "fd00:5:0:9::/64", "2001:db8::9", "eth0", protocol), expected);
    }
    let us = us(true);
    assert!(!route(&us, "10.5.9.0/24", "192.168.70.9", "eth0", 3), "gateway not on-link");
    assert!(!route(&us, "10.5.1.0/24", "192.168.64.9", "eth0", 3), "our own subnet");
    assert!(!route(&us, "10.5.1.128/25", "192.168.64.9", "eth0", 3), "inside our own subnet");
    assert!(!route(&us, "10.5.0.0/16", "192.168.64.9", "eth0", 3), "the whole network is no peer");
    assert!(!route(&us, "10.6.0.0/24", "192.168.64.9", "eth0", 3));
}
