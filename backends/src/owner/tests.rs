// SPDX-License-Identifier: Apache-2.0
//! Which entries may be removed, row by row.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::net_conf::NetConf;

use super::{
    Ownership, PROTOCOL, is_address_of_flannels_device, is_flannels, is_flannels_device, is_over_flannels_device,
};
use crate::host::{OnLink, Reach};
use crate::link::{Foreign, Link};
use crate::state::{Fence, Guard, Key, LAST_METRIC, Mac, Name, ObservedValue, Route, Value};
use crate::wireguard_key::PublicKey;
use crate::wireguard_peer::WgPeer;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn us() -> Ownership {
    Ownership {
        devices: BTreeSet::from([name("flannel.1"), name("flannel-v6.1")]),
        networks: Subnets::from_key("10.5.0.0-16&fd00:5::-48").unwrap(),
        own: Subnets::from_key("10.5.1.0-24&fd00:5:0:1::-64").unwrap(),
    }
}

fn ask(us: &Ownership, key: Key, seen: ObservedValue) -> bool {
    us.ours(&key, &seen)
}

/// Returns the entry that `ip route add PREFIX via VIA dev DEV` writes, with this protocol.
fn entry(prefix: &str, via: &str, dev: &str, protocol: u8) -> (Key, ObservedValue) {
    let route = Route::Unicast { via: via.parse().unwrap(), dev: name(dev), onlink: false };
    let prefix = net(prefix);
    let metric = if prefix.addr().is_ipv4() { 0 } else { 1024 };
    (Key::Route(prefix, metric), ObservedValue { value: Value::Route(route), protocol, mark: false })
}

fn route(us: &Ownership, prefix: &str, via: &str, dev: &str, protocol: u8) -> bool {
    let (key, seen) = entry(prefix, via, dev, protocol);
    ask(us, key, seen)
}

fn plain(us: &Ownership, key: Key, value: Value) -> bool {
    ask(us, key, ObservedValue { value, protocol: 0, mark: false })
}

#[test]
fn a_link_needs_our_mark() {
    let link = Value::link(Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true });
    let asked = |dev, mark| ask(&us(), Key::Link(name(dev)), ObservedValue { value: link.clone(), protocol: 0, mark });
    assert!(asked("flannel.1", true));
    assert!(!asked("flannel.1", false), "a device of flannel or of another agent");
    assert!(!asked("flannel.9", true), "a device of another instance");
}

#[test]
fn what_is_on_our_device_is_ours() {
    let us = us();
    for (dev, ours) in [("flannel.1", true), ("flannel.2", false), ("eth0", false)] {
        let dev = name(dev);
        let (ip, mac): (IpAddr, Mac) = ("10.5.9.0".parse().unwrap(), Mac([2; 6]));
        assert_eq!(plain(&us, Key::Addr(dev, net("10.5.9.0/32")), Value::Addr), ours);
        assert_eq!(plain(&us, Key::Fdb(dev, mac), Value::Fdb(ip)), ours);
        assert_eq!(plain(&us, Key::Neigh(dev, ip), Value::Neigh(mac)), ours);
        let key = PublicKey([7; 32]);
        let holder = Value::AllowedIp(Arc::new(key));
        assert_eq!(plain(&us, Key::AllowedIp(dev, net("10.5.9.0/24")), holder), ours);
        let (endpoint, written) = (None, None);
        let peer =
            WgPeer { key, endpoint, keepalive: 0, preshared: false, assumes_port: false, is_live: false, written };
        assert_eq!(plain(&us, Key::WgPeer(dev, key.id()), Value::peer(peer)), ours);
        assert_eq!(route(&us, "10.77.0.0/16", "10.77.0.0", &dev.text(), PROTOCOL), ours);
        assert_eq!(route(&us, "10.5.9.0/24", "10.5.9.0", &dev.text(), 3), ours);
        assert!(
            !route(&us, "10.77.0.0/16", "10.77.0.0", &dev.text(), 3),
            "a route of another program through the overlay"
        );
        let device = ObservedValue { value: Value::Route(Route::Device { dev }), protocol: 4, mark: false };
        assert!(!ask(&us, Key::Route(net("10.77.0.0/16"), 0), device));
    }
}

#[test]
fn what_the_kernel_makes_is_not_ours() {
    let (us, dev) = (us(), name("flannel.1"));
    assert!(!plain(&us, Key::Addr(dev, net("fe80::1/64")), Value::Addr));
    assert!(!plain(&us, Key::Neigh(dev, "ff02::16".parse().unwrap()), Value::Neigh(Mac([0x33; 6]))));
    assert!(!plain(&us, Key::Neigh(dev, "224.0.0.22".parse().unwrap()), Value::Neigh(Mac([1; 6]))));
    assert!(!plain(&us, Key::Neigh(dev, "255.255.255.255".parse().unwrap()), Value::Neigh(Mac([0xff; 6]))));
    assert!(!plain(&us, Key::Fdb(dev, Mac([0x33, 0x33, 0, 0, 0, 1])), Value::Fdb("10.0.0.1".parse().unwrap())));
    for prefix in ["fe80::/64", "ff00::/8"] {
        let device = ObservedValue { value: Value::Route(Route::Device { dev }), protocol: 3, mark: false };
        assert!(!ask(&us, Key::Route(net(prefix), 256), device));
    }
    assert!(!route(&us, "10.5.9.0/24", "10.5.9.0", "flannel.1", 2), "kernel protocol");
}

#[test]
fn routes_with_our_protocol_inside_our_network_are_ours() {
    let us = us();
    assert!(route(&us, "10.5.9.0/24", "192.168.64.9", "eth0", PROTOCOL));
    assert!(route(&us, "fd00:5:0:9::/64", "2001:db8::9", "eth0", PROTOCOL));
    assert!(!route(&us, "10.6.9.0/24", "192.168.64.9", "eth0", PROTOCOL), "the other agent's network");
    assert!(!route(&us, "10.5.1.0/24", "192.168.64.9", "eth0", PROTOCOL), "our own subnet");
    assert!(!route(&us, "10.0.0.0/8", "192.168.64.9", "eth0", PROTOCOL), "wider than our network");
    assert!(!route(&us, "10.5.9.0/24", "192.168.64.9", "eth0", 4), "static");
    let dead = |route: Route, prefix: &str, protocol| {
        let seen = ObservedValue { value: Value::Route(route), protocol, mark: false };
        ask(&us, Key::Route(net(prefix), LAST_METRIC), seen)
    };
    for kind in [Route::Blackhole, Route::Unreachable] {
        assert!(dead(kind, "10.5.1.0/24", PROTOCOL) && dead(kind, "10.5.0.0/16", PROTOCOL), "{kind}");
        assert!(!dead(kind, "10.5.0.0/16", 3) && !dead(kind, "10.6.0.0/16", PROTOCOL), "{kind}");
    }
}

/// Nobody else writes there. A node that left must not be let in any more, and a guard that was turned off must go.
#[test]
fn what_was_read_from_our_own_tables_is_ours() {
    let (us, ip): (Ownership, IpAddr) = (us(), "192.168.64.9".parse().unwrap());
    assert!(plain(&us, Key::Peer(ip), Value::Peer) && plain(&us, Key::Open(ip), Value::Open));
    for family in Family::BOTH {
        assert!(plain(&us, Key::Guard(family), Value::Guard(Guard::default())));
        assert!(plain(&us, Key::Fence(family), Value::fence(Fence::default())));
    }
}

/// Returns whether an entry is one of flannel, in a network whose subnets have 24 bits and lie between 10.5.8.0 and 10.5.80.0.
fn flannels(entry: (Key, ObservedValue)) -> bool {
    let conf = r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.8.0","SubnetMax":"10.5.80.0","EnableIPv6":true,
        "IPv6Network":"fd00:5::/48","Backend":{"Type":"host-gw"}}"#;
    let net_conf = NetConf::parse(conf).unwrap();
    let on_link = OnLink::new([
        (net("192.168.64.0/24"), 0, Reach::Link(name("eth0"))),
        (net("2001:db8::/64"), 0, Reach::Link(name("eth0"))),
        (net("0.0.0.0/0"), 0, Reach::Gateway),
    ]);
    let own = Subnets::from_key("10.5.10.0-24&fd00:5:0:1::-64").unwrap();
    is_flannels(&net_conf, &own, &on_link, (&entry.0, &entry.1))
}

#[test]
fn flannels_routes_are_recognised_by_their_exact_form() {
    for (protocol, expected) in [(3, true), (0, true), (4, false), (2, false), (PROTOCOL, false)] {
        assert_eq!(flannels(entry("10.5.9.0/24", "192.168.64.9", "eth0", protocol)), expected);
        assert_eq!(flannels(entry("fd00:5:0:9::/64", "2001:db8::9", "eth0", protocol)), expected);
    }
    let others = [
        ("10.5.9.0/24", "192.168.70.9", "eth0", "a gateway that is not on the link"),
        ("10.5.9.0/24", "192.168.64.9", "eth1", "over another interface than the gateway's"),
        ("10.5.10.0/24", "192.168.64.9", "eth0", "our own subnet"),
        ("10.5.9.0/25", "192.168.64.9", "eth0", "another length"),
        ("10.5.8.0/23", "192.168.64.9", "eth0", "another length"),
        ("10.5.7.0/24", "192.168.64.9", "eth0", "before SubnetMin"),
        ("10.5.81.0/24", "192.168.64.9", "eth0", "after SubnetMax"),
        ("10.5.0.0/16", "192.168.64.9", "eth0", "the whole network"),
        ("10.6.9.0/24", "192.168.64.9", "eth0", "another network"),
    ];
    for (prefix, via, dev, why) in others {
        assert!(!flannels(entry(prefix, via, dev, 3)), "{prefix}: {why}");
    }
    let (key, mut seen) = entry("10.5.9.0/24", "192.168.64.9", "eth0", 3);
    assert!(!flannels((Key::Route(net("10.5.9.0/24"), 100), seen.clone())), "another metric");
    seen.mark = true;
    assert!(!flannels((key, seen.clone())), "through a nexthop object");
    seen = ObservedValue { value: Value::Route(Route::Device { dev: name("eth0") }), protocol: 3, mark: false };
    assert!(!flannels((key, seen.clone())), "without a gateway");
    let onlink = Route::Unicast { via: "192.168.64.9".parse().unwrap(), dev: name("eth0"), onlink: true };
    assert!(
        !flannels((key, ObservedValue { value: Value::Route(onlink), ..seen.clone() })),
        "flannel asks the kernel whether it is on the link"
    );
    assert!(!flannels((Key::Link(name("eth0")), seen.clone())));
}

/// The route to all of Network may be one that is wanted now. It is shorter than those to single subnets, and takes no packets from them.
#[test]
fn only_routes_to_single_subnets_over_a_device_of_flannels_are_left_over() {
    let network = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"}}"#).unwrap();
    let is_left = |prefix: &str, dev: &str, protocol: u8| {
        let (key, seen) = entry(prefix, "10.5.9.0", dev, protocol);
        is_over_flannels_device(&network, &us().own, (&key, &seen))
    };
    for (prefix, dev, protocol, expected) in [
        ("10.5.9.0/24", "flannel.1", 3, true),
        ("10.5.0.0/16", "flannel-wg", 3, false),
        ("10.6.9.0/24", "flannel.1", 3, false),
        ("10.5.1.0/24", "flannel.1", 3, false),
        ("10.5.9.0/24", "eth0", 3, false),
        ("10.5.9.0/24", "flannel.1", PROTOCOL, false),
    ] {
        assert_eq!(is_left(prefix, dev, protocol), expected, "{prefix} dev {dev} proto {protocol}");
    }
}

#[test]
fn devices_of_flannel_are_known_by_their_names() {
    for text in
        ["flannel.1", "flannel.9999999", "flannel-v6.1", "flannel.ipip", "flannel0", "flannel-wg", "flannel-wg-v6"]
    {
        assert!(is_flannels_device(name(text)), "{text}");
    }
    for text in ["flannel", "flannel.", "flannel-v6.", "flannel.1a", "flannel1", "flannel-wg0", "cni0", "my-flannel.1"]
    {
        assert!(!is_flannels_device(name(text)), "{text}");
    }
}

/// A device with such a name may be one of another network. Its address shows that it was this node's.
#[test]
fn a_device_of_flannel_has_the_first_address_of_our_subnet() {
    for (addr, expected) in [
        ("10.5.1.0/32", true),
        ("fd00:5:0:1::/128", true),
        ("10.5.1.0/24", false),
        ("fd00:5:0:1::/64", false),
        ("10.5.1.1/32", false),
        ("10.5.2.0/32", false),
    ] {
        assert_eq!(is_address_of_flannels_device(&us().own, &net(addr)), expected, "{addr}");
    }
}
