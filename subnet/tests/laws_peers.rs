// SPDX-License-Identifier: Apache-2.0
//! Tests which leases are believed: each reason to set a lease aside, and properties of any set of records in any order.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests, which clippy does not take for tests")]

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::{Ipv4Net, Ipv6Net};
use proptest::prelude::*;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::connected::Connected;
use weft_subnet::lease::{Age, Id, Lease, Record, Unreadable};
use weft_subnet::peers::{PeerChange, Peers, Us};

fn age(stamp: u64) -> Age {
    Age { stamp, ..Age::default() }
}

/// Returns a lease whose id is its key.
fn lease(key: &str, ip: &str, stamp: u64) -> Lease {
    let public_ip = ip.parse().ok();
    let attrs = Attrs { public_ip, backend_type: "vxlan".into(), ..Attrs::default() };
    Lease { id: key.into(), subnets: Subnets::from_key(key).unwrap_or_default(), attrs, age: age(stamp) }
}

/// Returns such a lease that also publishes an IPv6 address.
fn lease_v6(key: &str, ip: &str, ipv6: &str, stamp: u64) -> Lease {
    let lease = lease(key, ip, stamp);
    Lease { attrs: Attrs { public_ipv6: ipv6.parse().ok(), ..lease.attrs }, ..lease }
}

fn record(lease: Lease) -> Record {
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn us() -> Us {
    Us {
        networks: Subnets { v4: "10.5.0.0/16".parse().ok(), v6: None },
        id: Some("10.5.1.0-24".into()),
        own: Subnets::from_key("10.5.1.0-24").unwrap(),
        public: vec!["192.168.0.1".parse().unwrap()],
        ..Us::default()
    }
}

/// Returns a node that is connected to a LAN inside Network, and has another address of its own inside Network.
fn in_lan() -> Us {
    let networks = Subnets { v4: "10.5.0.0/16".parse().ok(), v6: None };
    let places = [("10.5.64.0/22", "lan0"), ("10.5.64.7/32", "lan0"), ("10.5.80.9/32", "lo"), ("10.0.0.0/8", "lan1")];
    let places = places.map(|(net, link)| (net.parse().unwrap(), Arc::from(link)));
    Us { connected: Connected::new(&networks, places), public: vec!["10.5.64.7".parse().unwrap()], ..us() }
}

fn dual() -> Us {
    let mut us = us();
    us.networks.v6 = "fd00::/48".parse().ok();
    us.own.v6 = "fd00:0:0:1::/64".parse().ok();
    us
}

fn ids(peers: &Peers) -> Vec<&str> {
    peers.believed().map(|lease| &*lease.id).collect()
}

fn reason(peers: &Peers) -> String {
    let mut all = peers.not_believed();
    let (_, reason, _) = all.next().expect("nothing is set aside");
    assert!(all.next().is_none(), "only one was put");
    reason.to_owned()
}

/// Reads the port of a lease as a register of backends does: only leases of wireguard have one.
fn ports(attrs: &Attrs) -> [Option<u16>; 2] {
    let port = attrs.backend_data.as_deref().and_then(|data| data.parse().ok());
    [port.filter(|_| attrs.backend_type == "wireguard"), None]
}

fn with_port(key: &str, ip: &str, port: u16) -> Lease {
    let mut lease = lease(key, ip, 1);
    lease.attrs.backend_type = "wireguard".into();
    lease.attrs.backend_data = Some(port.to_string().into());
    lease
}

/// A store may pass on what a peer wrote about itself. Only the key of the record says whose lease it is, and a subnet is a network.
#[test]
fn the_id_of_the_record_and_the_network_of_the_subnet_count() {
    let mut peers = Peers::new(us());
    let mut foreign = lease("10.5.2.0-24", "192.168.0.2", 1);
    foreign.id = "10.5.9.0-24".into();
    foreign.subnets.v4 = "10.5.2.77/24".parse().ok();
    peers.put(Record { id: "10.5.2.0-24".into(), lease: Ok(foreign) });
    assert_eq!(ids(&peers), ["10.5.2.0-24"]);
    let subnets: Vec<_> = peers.believed().filter_map(|lease| lease.subnets.v4).collect();
    assert_eq!(subnets, ["10.5.2.0/24".parse::<Ipv4Net>().unwrap()]);
}

thread_local! {
    /// How often a port was read on this thread.
    static READ: Cell<usize> = const { Cell::new(0) };
}

fn counted(attrs: &Attrs) -> [Option<u16>; 2] {
    READ.set(READ.get() + 1);
    ports(attrs)
}

/// Each of them is compared with others, so the work would grow with the square of their number.
#[test]
fn one_of_many_nodes_behind_one_nat_is_compared_with_some_of_them() {
    let mut peers = Peers::new(us()).with_ports(counted);
    for number in 2..=200 {
        peers.put(record(with_port(&format!("10.5.{number}.0-24"), "192.168.0.9", 50_000 + number)));
    }
    assert_eq!(peers.len(), 199);
    READ.set(0);
    assert!(peers.sharing(peers.get(&"10.5.200.0-24".into()).unwrap()).is_none());
    assert!((2..=100).contains(&READ.get()), "{} ports were read", READ.get());
}

#[test]
fn nodes_behind_one_nat_have_one_address_and_several_ports() {
    let us = Us { ports: [Some(51820), None], ..us() };
    let mut peers = Peers::new(us.clone()).with_ports(ports);
    for lease in [
        with_port("10.5.2.0-24", "192.168.0.1", 51822),
        with_port("10.5.3.0-24", "192.168.0.1", 51823),
        with_port("10.5.4.0-24", "192.168.0.9", 51820),
        with_port("10.5.5.0-24", "192.168.0.9", 51821),
    ] {
        peers.put(record(lease));
    }
    assert_eq!(peers.len(), 4);
    assert!(peers.shared().is_empty() && peers.naming_us().next().is_none());
    assert!(peers.sharing(peers.get(&"10.5.4.0-24".into()).unwrap()).is_none());

    // A copy of our address with our port.
    peers.put(record(with_port("10.5.6.0-24", "192.168.0.1", 51820)));
    assert_eq!(reason(&peers), "PublicIP 192.168.0.1 is our own address, with our own port: two nodes publish both");
    assert_eq!(peers.naming_us().count(), 1);
    // It gets another port, and then none.
    peers.put(record(with_port("10.5.6.0-24", "192.168.0.1", 51826)));
    assert_eq!((peers.len(), peers.not_believed_len()), (5, 0));
    let mut without = with_port("10.5.6.0-24", "192.168.0.1", 51826);
    without.attrs.backend_data = None;
    peers.put(record(without));
    assert!(reason(&peers).ends_with("our own address: two nodes publish it"), "no port proves another node");
    peers.put(record(with_port("10.5.6.0-24", "192.168.0.9", 51821)));
    let shared = peers.shared();
    assert_eq!((shared.len(), shared[0].count), (1, 2), "two nodes with one address and one port");
    assert_eq!(shared[0].leases.iter().map(|lease| &*lease.id).collect::<Vec<_>>(), ["10.5.5.0-24", "10.5.6.0-24"]);
    assert!(peers.sharing(peers.get(&"10.5.6.0-24".into()).unwrap()).is_some());
    // Another type has no port, so it shares the address with all of them.
    peers.put(record(lease("10.5.7.0-24", "192.168.0.9", 1)));
    assert_eq!(peers.shared()[0].count, 4);
    // We have another port now.
    peers.judge_for(Us { ports: [Some(51822), None], ..us });
    assert!(reason(&peers).contains("with our own port"));
}

/// Only ports of wireguard count: with vxlan, an address that is published twice is a mistake or an attack.
#[test]
fn other_types_are_set_aside_with_our_address_whatever_they_say() {
    let mut peers = Peers::new(Us { ports: [Some(51820), None], ..us() }).with_ports(ports);
    let mut copied = with_port("10.5.2.0-24", "192.168.0.1", 51822);
    copied.attrs.backend_type = "vxlan".into();
    peers.put(record(copied));
    assert!(reason(&peers).ends_with("our own address: two nodes publish it"));
    let mut peers = Peers::new(us()).with_ports(ports);
    peers.put(record(with_port("10.5.2.0-24", "192.168.0.1", 51822)));
    assert!(reason(&peers).ends_with("our own address: two nodes publish it"), "we have no port");
}

#[test]
fn each_reason_why_a_lease_is_impossible() {
    let v6 = |text: &str| text.parse::<Ipv6Addr>().ok();
    let with_v6 = |mut lease: Lease, ip: &str| {
        lease.attrs.public_ipv6 = v6(ip);
        lease
    };
    let rows = [
        (us(), lease("10.6.1.0-24", "192.168.0.2", 1), "subnet 10.6.1.0/24 is outside our Network 10.5.0.0/16"),
        (us(), lease("10.0.0.0-8", "192.168.0.2", 1), "subnet 10.0.0.0/8 is outside our Network 10.5.0.0/16"),
        (us(), lease("no subnet", "192.168.0.2", 1), "grants no subnet"),
        (us(), lease("fd00:0:0:2::-64", "192.168.0.2", 1), "family that net-conf does not enable"),
        (us(), lease("10.5.1.128-25", "192.168.0.2", 1), "overlaps our own 10.5.1.0/24"),
        (us(), lease("10.5.0.0-23", "192.168.0.2", 1), "overlaps our own 10.5.1.0/24"),
        (dual(), lease("10.5.2.0-24&fd00:0:0:1::-64", "192.168.0.2", 1), "overlaps our own"),
        (dual(), lease("10.5.2.0-24&fd01::-64", "192.168.0.2", 1), "fd01::/64 is outside our Network fd00::/48"),
        (us(), lease("10.5.2.0-24", "", 1), "no published address"),
        (us(), with_v6(lease("10.5.2.0-24", "", 1), "fd99::2"), "no published address of a family in use"),
        (us(), lease("10.5.2.0-24", "192.168.0.1", 1), "PublicIP 192.168.0.1 is our own address: two nodes publish it"),
        (
            Us { uplink: vec!["10.9.0.1".parse().unwrap()], ..us() },
            lease("10.5.2.0-24", "10.9.0.1", 1),
            "PublicIP 10.9.0.1 is the address of this node's uplink, which this node does not publish",
        ),
        (us(), lease("10.5.2.0-24", "10.5.1.9", 1), "PublicIP 10.5.1.9 lies inside our own subnet 10.5.1.0/24"),
        (in_lan(), lease("10.5.64.0-24", "192.168.0.2", 1), "subnet 10.5.64.0/24 contains 10.5.64.7, our own address"),
        (in_lan(), lease("10.5.64.0-22", "192.168.0.2", 1), "subnet 10.5.64.0/22 contains 10.5.64.7, our own address"),
        (
            in_lan(),
            lease("10.5.65.0-24", "192.168.0.2", 1),
            "subnet 10.5.65.0/24 overlaps 10.5.64.0/22, to which this node is connected by lan0",
        ),
        (
            in_lan(),
            lease("10.5.80.0-24", "192.168.0.2", 1),
            "subnet 10.5.80.0/24 contains 10.5.80.9, an address of this node (lo)",
        ),
        (us(), lease("10.5.2.0-24", "127.0.0.1", 1), "PublicIP 127.0.0.1 is a loopback address"),
        (us(), lease("10.5.2.0-24", "224.0.0.5", 1), "a multicast address"),
        (us(), lease("10.5.2.0-24", "0.0.0.0", 1), "the unspecified address"),
        (us(), lease("10.5.2.0-24", "255.255.255.255", 1), "the broadcast address"),
        (dual(), with_v6(lease("10.5.2.0-24", "192.168.0.2", 1), "::1"), "PublicIPv6 ::1 is a loopback address"),
        (dual(), with_v6(lease("10.5.2.0-24", "192.168.0.2", 1), "fe80::2"), "a link-local address"),
        (dual(), with_v6(lease("10.5.2.0-24", "192.168.0.2", 1), "ff02::2"), "a multicast address"),
        (dual(), with_v6(lease("10.5.2.0-24", "192.168.0.2", 1), "::"), "the unspecified address"),
        (dual(), with_v6(lease("10.5.2.0-24", "192.168.0.2", 1), "::ffff:1.2.3.4"), "an IPv4-mapped address"),
    ];
    for (us, bad, expected) in rows {
        let mut peers = Peers::new(us);
        assert_eq!(peers.put(record(bad.clone())), [], "{bad:?}");
        assert!(reason(&peers).contains(expected), "{:?} instead of {expected}", reason(&peers));
        assert_eq!((peers.len(), peers.get(&bad.id)), (0, None));
        assert_eq!(peers.not_believed().next().and_then(|(_, _, lease)| lease), Some(&bad));
        assert_eq!(peers.ids().count(), 1);
    }
}

#[test]
fn ipv6_addresses_make_a_lease_impossible_as_ipv4_addresses_do() {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let public = vec![ip("192.168.0.1"), ip("2001:db8::1"), ip("fd00:0:0:50::7")];
    let places = [("fd00:0:0:64::/62", "lan0"), ("fd00:0:0:80::9/128", "lo")];
    let places = places.map(|(net, link)| (net.parse().unwrap(), Arc::from(link)));
    let connected = Connected::new(&dual().networks, places);
    let us = Us { public, uplink: vec![ip("2001:db8::aa"), ip("fd00:0:0:60::7")], connected, ..dual() };
    let published = |ipv6| lease_v6("10.5.2.0-24", "192.168.0.2", ipv6, 1);
    let rows = [
        (published("2001:db8::1"), "PublicIPv6 2001:db8::1 is our own address: two nodes publish it"),
        (
            published("2001:db8::aa"),
            "PublicIPv6 2001:db8::aa is the address of this node's uplink, which this node does not publish",
        ),
        (published("fd00:0:0:1::9"), "PublicIPv6 fd00:0:0:1::9 lies inside our own subnet fd00:0:0:1::/64"),
        (
            lease("10.5.2.0-24&fd00:0:0:50::-64", "192.168.0.2", 1),
            "subnet fd00:0:0:50::/64 contains fd00:0:0:50::7, our own address",
        ),
        (
            lease("10.5.2.0-24&fd00:0:0:60::-64", "192.168.0.2", 1),
            "subnet fd00:0:0:60::/64 contains fd00:0:0:60::7, our own address",
        ),
        (
            lease("10.5.2.0-24&fd00:0:0:65::-64", "192.168.0.2", 1),
            "subnet fd00:0:0:65::/64 overlaps fd00:0:0:64::/62, to which this node is connected by lan0",
        ),
        (
            lease("10.5.2.0-24&fd00:0:0:80::-64", "192.168.0.2", 1),
            "subnet fd00:0:0:80::/64 contains fd00:0:0:80::9, an address of this node (lo)",
        ),
    ];
    for (bad, expected) in rows {
        let mut peers = Peers::new(us.clone());
        peers.put(record(bad));
        assert_eq!(reason(&peers), expected);
    }
}

#[test]
fn leases_that_are_believed() {
    for (us, good) in [
        (us(), lease("10.5.2.0-24", "192.168.0.2", 1)),
        // The address is in our LAN, but the subnet is not.
        (in_lan(), lease("10.5.2.0-24", "10.5.64.8", 1)),
        (us(), lease("10.5.2.0-24&fd01::-64", "192.168.0.2", 1)),
        (
            us(),
            Lease {
                attrs: Attrs { public_ipv6: "::1".parse().ok(), ..lease("", "192.168.0.2", 1).attrs },
                ..lease("10.5.2.0-24", "", 1)
            },
        ),
        (dual(), lease("10.5.2.0-24", "192.168.0.2", 1)),
        (dual(), lease("10.5.2.0-24&fd00:0:0:2::-64", "192.168.0.2", 1)),
    ] {
        let mut peers = Peers::new(us);
        let change = PeerChange { id: good.id.clone(), before: None, after: Some(good.clone().into()) };
        assert_eq!(peers.put(record(good.clone())), [change]);
        assert_eq!(peers.get(&good.id), Some(&good.clone().into()));
        assert_eq!(peers.put(record(good)), [], "the same again changes nothing");
    }
}

#[test]
fn unreadable_records_are_set_aside_and_removed() {
    let mut peers = Peers::new(us());
    let good = lease("10.5.2.0-24", "192.168.0.2", 1);
    let bad = Record { id: good.id.clone(), lease: Err(Unreadable::new("value is not a lease")) };
    assert_eq!(peers.put(bad.clone()), []);
    assert_eq!(reason(&peers), "value is not a lease");
    assert_eq!(peers.put(record(good.clone())).len(), 1);
    assert_eq!(peers.not_believed().count(), 0);
    assert_eq!(peers.put(bad), [PeerChange { id: good.id.clone(), before: Some(good.clone().into()), after: None }]);
    assert_eq!((peers.len(), reason(&peers).as_str()), (0, "value is not a lease"));
    assert_eq!(peers.remove(&good.id), []);
    assert_eq!((peers.ids().count(), peers.not_believed().count(), peers.is_empty()), (0, 0, true));
    assert_eq!(peers.remove(&good.id), []);
}

#[test]
fn a_new_address_of_a_lease_is_one_change() {
    let mut peers = Peers::new(us());
    let (old, new) = (lease("10.5.2.0-24", "192.168.0.2", 1), lease("10.5.2.0-24", "192.168.0.3", 1));
    peers.put(record(old.clone()));
    let change = PeerChange { id: old.id.clone(), before: Some(old.clone().into()), after: Some(new.clone().into()) };
    assert_eq!(peers.put(record(new.clone())), [change]);
    let impossible = lease("10.5.2.0-24", "127.0.0.1", 1);
    assert_eq!(
        peers.put(record(impossible)),
        [PeerChange { id: old.id.clone(), before: Some(new.into()), after: None }]
    );
    assert_eq!(peers.put(record(old.clone())).len(), 1);
    assert_eq!(peers.len(), 1);
}

#[test]
fn our_own_lease_is_not_a_peer() {
    let mut peers = Peers::new(us());
    let own = lease("10.5.1.0-24", "192.168.0.1", 1);
    assert_eq!(peers.put(record(own.clone())), []);
    assert_eq!((peers.len(), peers.ids().count(), peers.not_believed().count()), (0, 0, 0));
    assert_eq!((peers.not_believed_len(), peers.reason(&own.id)), (0, None));
    // We have another subnet now, so our former lease belongs to a peer.
    let moved =
        Us { id: Some("10.5.9.0-24".into()), own: Subnets::from_key("10.5.9.0-24").unwrap(), public: vec![], ..us() };
    assert_eq!(
        peers.judge_for(moved),
        [PeerChange { id: own.id.clone(), before: None, after: Some(own.clone().into()) }]
    );
    assert_eq!(
        peers.judge_for(us()),
        [PeerChange { id: own.id.clone(), before: Some(own.clone().into()), after: None }]
    );
    assert_eq!(peers.judge_for(us()), []);
    assert_eq!(peers.remove(&own.id), []);
}

#[test]
fn the_older_lease_keeps_the_subnet() {
    let mut peers = Peers::new(us());
    peers.put(record(lease("10.5.4.0-22", "192.168.0.9", 5)));
    assert_eq!(peers.put(record(lease("10.5.5.0-24", "192.168.0.2", 7))), []);
    assert_eq!(reason(&peers), "overlaps 10.5.4.0/22 of the older lease 10.5.4.0-22");
    assert_eq!(peers.beaten_by(&"10.5.5.0-24".into()).map(|id| &**id), Some("10.5.4.0-22"));
    // An older lease inside the large one sets it aside. A lease that is set aside blocks no other, so the third one is believed.
    let changes = peers.put(record(lease("10.5.6.0-24", "192.168.0.3", 3)));
    let seen: Vec<_> = changes.iter().map(|c| (&*c.id, c.before.is_some(), c.after.is_some())).collect();
    assert_eq!(seen, [("10.5.4.0-22", true, false), ("10.5.5.0-24", false, true), ("10.5.6.0-24", false, true)]);
    assert_eq!(ids(&peers), ["10.5.5.0-24", "10.5.6.0-24"]);
    let changes = peers.remove(&"10.5.6.0-24".into());
    let seen: Vec<_> = changes.iter().map(|c| (&*c.id, c.after.is_some())).collect();
    assert_eq!(seen, [("10.5.5.0-24", false), ("10.5.6.0-24", false), ("10.5.4.0-22", true)]);
    assert_eq!(ids(&peers), ["10.5.4.0-22"]);
    // If the age is the same, the id decides.
    peers.put(record(lease("10.5.4.0-23", "192.168.0.4", 5)));
    assert_eq!(ids(&peers), ["10.5.4.0-22"]);
    // A lease that was deleted and created again under the same id is younger.
    peers.put(record(lease("10.5.4.0-22", "192.168.0.9", 20)));
    assert_eq!(ids(&peers), ["10.5.4.0-23"]);
}

#[test]
fn of_a_subnet_and_a_public_address_inside_it_the_older_lease_is_believed() {
    let node = || record(lease("10.5.2.0-24", "10.5.64.2", 5));
    let over_it = |stamp| record(lease("10.5.64.0-22", "192.168.0.9", stamp));
    let mut peers = Peers::new(us());
    peers.put(node());
    assert_eq!(peers.put(over_it(9)), []);
    assert_eq!(reason(&peers), "subnet 10.5.64.0/22 contains PublicIP 10.5.64.2 of the older lease 10.5.2.0-24");
    assert_eq!(ids(&peers), ["10.5.2.0-24"]);
    // The older lease has the subnet. Nobody can take it away by publishing an address inside it.
    peers.put(over_it(1));
    assert_eq!(reason(&peers), "PublicIP 10.5.64.2 lies inside 10.5.64.0/22 of the older lease 10.5.64.0-22");
    assert_eq!(ids(&peers), ["10.5.64.0-22"]);
    let moved = lease("10.5.2.0-24", "192.168.0.2", 5);
    assert_eq!(peers.put(record(moved)).len(), 1, "with another published address it is believed again");
    assert_eq!(peers.put(node()).len(), 1);
    assert_eq!(peers.remove(&"10.5.64.0-22".into()).len(), 2, "and without the other lease, too");
    assert_eq!((ids(&peers), peers.not_believed().count()), (vec!["10.5.2.0-24"], 0));
}

/// An old lease that overlaps the LAN of many nodes is set aside. A single published address inside its subnet has no such effect.
#[test]
fn a_subnet_that_contains_public_addresses_of_two_others_is_set_aside_at_any_age() {
    let mut peers = Peers::new(us());
    let node = |n: u8, ip: &str| record(lease(&format!("10.5.{n}.0-24"), ip, 5 + u64::from(n)));
    peers.put(record(lease("10.5.64.0-22", "10.5.65.9", 1)));
    peers.put(node(2, "10.5.64.2"));
    // These do not count: the same address again, the address of the lease itself, and an address outside.
    for (n, ip) in [(3, "10.5.64.2"), (4, "10.5.65.9"), (5, "192.168.0.5")] {
        peers.put(node(n, ip));
    }
    assert_eq!(ids(&peers), ["10.5.5.0-24", "10.5.64.0-22"]);
    let changes = peers.put(node(6, "10.5.67.6"));
    assert_eq!(changes.len(), 5);
    assert_eq!(ids(&peers), ["10.5.2.0-24", "10.5.3.0-24", "10.5.4.0-24", "10.5.5.0-24", "10.5.6.0-24"]);
    assert_eq!(reason(&peers), "subnet 10.5.64.0/22 contains the published addresses of two other leases or more");
    assert_eq!(peers.beaten_by(&"10.5.64.0-22".into()), None);
    assert_eq!(peers.remove(&"10.5.2.0-24".into()).len(), 1, "another lease has that address still");
    assert_eq!(peers.remove(&"10.5.3.0-24".into()).len(), 4, "one address is left");
    assert_eq!(ids(&peers), ["10.5.5.0-24", "10.5.64.0-22"]);
}

#[test]
fn a_public_address_inside_a_subnet_counts_in_ipv6_as_in_ipv4() {
    let node = |n: u8, ipv6: &str| record(lease_v6(&format!("10.5.{n}.0-24"), &format!("192.168.0.{n}"), ipv6, 5));
    let over_it = |stamp| record(lease_v6("10.5.9.0-24&fd00:0:0:64::-62", "192.168.0.9", "2001:db8::9", stamp));
    let mut peers = Peers::new(dual());
    peers.put(node(2, "fd00:0:0:64::2"));
    assert_eq!(peers.put(over_it(9)), []);
    let subnets = "10.5.9.0/24,fd00:0:0:64::/62";
    assert_eq!(
        reason(&peers),
        format!("subnet {subnets} contains PublicIPv6 fd00:0:0:64::2 of the older lease 10.5.2.0-24")
    );
    peers.put(over_it(1));
    let older = "10.5.9.0-24&fd00:0:0:64::-62";
    assert_eq!(reason(&peers), format!("PublicIPv6 fd00:0:0:64::2 lies inside {subnets} of the older lease {older}"));
    // With the addresses of two other nodes inside, its age does not count.
    peers.put(node(4, "fd00:0:0:65::4"));
    assert_eq!(reason(&peers), "subnet fd00:0:0:64::/62 contains the published addresses of two other leases or more");
    assert_eq!(ids(&peers), ["10.5.2.0-24", "10.5.4.0-24"]);
    peers.remove(&"10.5.4.0-24".into());
    assert_eq!(ids(&peers), [older]);
}

/// Of many leases that overlap one LAN, only those are judged again whose judgement an address may change.
#[test]
fn many_subnets_that_contain_many_public_addresses_do_not_cost_quadratic_time() {
    let networks = Subnets { v4: "10.0.0.0/8".parse().ok(), v6: "fd00::/32".parse().ok() };
    let mut peers = Peers::new(Us { networks, ..Us::default() });
    let over_all = |n: u32| {
        let v6 = Ipv6Net::new(((0xfd00 << 112) + (u128::from(n) << 64)).into(), 64).ok();
        let subnets = Subnets { v4: "10.240.0.0/12".parse().ok(), v6 };
        Lease { id: subnets.to_key().into(), subnets, ..lease("", "192.168.0.9", 1) }
    };
    for n in 0..2000 {
        peers.put(record(over_all(n)));
    }
    let before = peers.judged();
    for (n, lease) in (0..2000).zip(many(2000)) {
        let attrs = Attrs { public_ip: Some(Ipv4Addr::from(0x0af0_0000 + n)), ..lease.attrs.clone() };
        peers.put(record(Lease { attrs, ..lease }));
    }
    assert_eq!(peers.len(), 2000);
    let judged = peers.judged() - before;
    assert!(judged < 20_000, "{judged} judgements for 2,000 leases");
}

/// In Kubernetes, a node chooses its published address but not its subnet. So an old node must not be able to set a younger one aside.
#[test]
fn if_subnets_are_assigned_a_public_address_does_not_set_a_subnet_aside() {
    let mut peers = Peers::new(Us { assigned: true, ..us() });
    peers.put(record(lease("10.5.2.0-24", "192.168.0.2", 5)));
    let hostile = |ip| record(Lease { subnets: Subnets::from_key("10.5.3.0-24").unwrap(), ..lease("old", ip, 1) });
    assert_eq!(peers.put(hostile("192.168.0.3")).len(), 1);
    let changes = peers.put(hostile("10.5.2.9"));
    assert_eq!((changes.len(), ids(&peers)), (1, vec!["10.5.2.0-24"]));
    assert_eq!(reason(&peers), "PublicIP 10.5.2.9 lies inside 10.5.2.0/24 of lease 10.5.2.0-24");
    assert_eq!(peers.remove(&"10.5.2.0-24".into()).len(), 2);
    assert_eq!(ids(&peers), ["old"]);
    let changes = peers.put(record(lease("10.5.2.0-24", "192.168.0.2", 9)));
    let seen: Vec<_> = changes.iter().map(|c| (&*c.id, c.after.is_some())).collect();
    assert_eq!(seen, [("old", false), ("10.5.2.0-24", true)]);
}

#[test]
fn a_public_address_that_several_leases_publish_is_found() {
    let mut peers = Peers::new(Us { uplink: vec!["10.9.0.1".parse().unwrap()], ..us() });
    for (key, ip) in [("10.5.2.0-24", "192.168.0.2"), ("10.5.3.0-24", "192.168.0.3"), ("10.5.4.0-24", "192.168.0.2")] {
        peers.put(record(lease(key, ip, 1)));
    }
    peers.put(record(lease("10.5.5.0-24", "192.168.0.1", 1)));
    // The address of an uplink that we do not publish does not count.
    peers.put(record(lease("10.5.6.0-24", "10.9.0.1", 1)));
    // A lease that is set aside does not count.
    peers.put(record(lease("10.5.3.0-25", "192.168.0.3", 2)));
    let shared: Vec<_> =
        peers.shared().iter().map(|s| (s.ip.to_string(), s.count, s.leases[1].id.to_string())).collect();
    assert_eq!(shared, [("192.168.0.2".to_owned(), 2, "10.5.4.0-24".to_owned())]);
    let sharing =
        |id: &str| peers.get(&id.into()).and_then(|lease| peers.sharing(lease)).map(|other| other.id.to_string());
    assert_eq!(sharing("10.5.2.0-24").as_deref(), Some("10.5.4.0-24"));
    assert_eq!(sharing("10.5.4.0-24").as_deref(), Some("10.5.2.0-24"));
    assert_eq!(sharing("10.5.3.0-24"), None);
    assert_eq!(peers.naming_us().map(|(_, lease)| &*lease.id).collect::<Vec<_>>(), ["10.5.5.0-24"]);
}

#[test]
fn an_ipv6_address_that_several_leases_publish_is_found_with_its_ports() {
    fn ports(attrs: &Attrs) -> [Option<u16>; 2] {
        [None, attrs.backend_v6_data.as_deref().and_then(|data| data.parse().ok())]
    }
    let us = Us { public: vec!["2001:db8::1".parse().unwrap()], ports: [None, Some(51821)], ..dual() };
    let mut peers = Peers::new(us).with_ports(ports);
    let nodes = [
        (2, "2001:db8::2", "51821"),
        (3, "2001:db8::2", "51821"),
        (4, "2001:db8::2", "51822"),
        (5, "2001:db8::1", "51821"),
        (6, "2001:db8::1", "51822"),
    ];
    for (n, ipv6, port) in nodes {
        let mut lease = lease_v6(&format!("10.5.{n}.0-24"), &format!("192.168.0.{n}"), ipv6, 1);
        lease.attrs.backend_v6_data = Some(port.into());
        peers.put(record(lease));
    }
    assert_eq!(reason(&peers), "PublicIPv6 2001:db8::1 is our own address, with our own port: two nodes publish both");
    let names = |leases: &[&Lease]| leases.iter().map(|lease| lease.id.to_string()).collect::<Vec<_>>();
    let shared: Vec<_> = peers.shared().iter().map(|s| (s.ip.to_string(), s.count, names(&s.leases))).collect();
    let both = vec!["10.5.2.0-24".to_owned(), "10.5.3.0-24".to_owned()];
    assert_eq!(shared, [("2001:db8::2".to_owned(), 2, both)]);
    let sharing = |id: &str| peers.sharing(peers.get(&id.into()).unwrap()).map(|other| other.id.to_string());
    assert_eq!(sharing("10.5.2.0-24").as_deref(), Some("10.5.3.0-24"));
    assert_eq!((sharing("10.5.4.0-24"), sharing("10.5.6.0-24")), (None, None), "with ports of their own");
    let naming_us: Vec<_> = peers.naming_us().map(|(ip, lease)| (ip.to_string(), &*lease.id)).collect();
    assert_eq!(naming_us, [("2001:db8::1".to_owned(), "10.5.5.0-24")]);
}

#[test]
fn a_dual_stack_lease_is_believed_or_set_aside_as_a_whole() {
    let mut peers = Peers::new(dual());
    peers.put(record(lease("10.5.2.0-24&fd00:0:0:2::-64", "192.168.0.2", 1)));
    assert_eq!(peers.put(record(lease("10.5.3.0-24&fd00:0:0:2::-64", "192.168.0.3", 2))), []);
    peers.put(record(lease("10.5.3.0-24", "192.168.0.4", 3)));
    assert_eq!(ids(&peers), ["10.5.2.0-24&fd00:0:0:2::-64", "10.5.3.0-24"]);
}

fn many(n: u32) -> impl Iterator<Item = Lease> {
    (0..n).map(|n| {
        let net = Ipv4Net::new(Ipv4Addr::from(0x0a00_0000 + n * 256), 24).unwrap();
        let subnets = Subnets { v4: Some(net), v6: None };
        Lease { id: subnets.to_key().into(), subnets, ..lease("", "192.168.0.2", u64::from(n) + 100) }
    })
}

/// This is the size of a large cluster. If each change read all leases, this test would take minutes.
#[test]
fn a_change_among_fifty_thousand_leases_judges_few() {
    let us = Us { networks: Subnets { v4: "10.0.0.0/8".parse().ok(), v6: None }, ..Us::default() };
    let mut peers = Peers::new(us);
    // A false lease that overlaps everything, and is younger than most, must not make each event slow.
    peers.put(record(lease("10.0.0.0-8", "192.168.0.9", 40_000)));
    for lease in many(50_000) {
        peers.put(record(lease));
    }
    assert_eq!(peers.len(), 50_000);
    for lease in many(50_000) {
        let renewed = Lease { attrs: Attrs { backend_data: Some("{}".into()), ..lease.attrs }, ..lease };
        assert_eq!(peers.put(record(renewed)).len(), 1);
    }
    for lease in many(50_000).skip(1) {
        assert_eq!(peers.remove(&lease.id).len(), 1);
    }
    assert_eq!(peers.len(), 1);
}

/// There are many nodes in a LAN inside Network, and some share an address. Each event must read only a few leases.
#[test]
fn a_change_among_twenty_thousand_public_addresses_inside_network_judges_few() {
    for assigned in [false, true] {
        let networks = Subnets { v4: "10.0.0.0/8".parse().ok(), v6: None };
        let mut peers = Peers::new(Us { networks, assigned, ..Us::default() });
        let lan = |n: u32| Some(Ipv4Addr::from(0x0af0_0000 + n % 16_000));
        let with =
            |n: u32, lease: Lease| record(Lease { attrs: Attrs { public_ip: lan(n), ..lease.attrs.clone() }, ..lease });
        for (n, lease) in (0..20_000).zip(many(20_000)) {
            peers.put(with(n, lease));
        }
        assert_eq!((peers.len(), peers.shared().len()), (20_000, 4_000));
        // This lease overlaps the whole LAN and is younger than all others.
        peers.put(record(lease("10.240.0.0-12", "192.168.0.9", 1_000_000)));
        for (n, lease) in (0..20_000).zip(many(20_000)) {
            peers.put(with(n + 1, lease));
        }
        // Nobody assigns such a subnet. If it exists, its owner has it.
        assert_eq!(peers.len(), if assigned { 1 } else { 20_000 });
    }
}

#[test]
fn a_new_address_of_this_host_judges_only_the_leases_that_it_overlaps() {
    let networks = Subnets { v4: "10.0.0.0/8".parse().ok(), v6: None };
    let mut peers = Peers::new(Us { networks, ..Us::default() });
    many(5000).for_each(|lease| drop(peers.put(record(lease))));
    let mut before = peers.judged();
    let mut judged = |peers: &Peers| peers.judged() - std::mem::replace(&mut before, peers.judged());
    let place = |net: &str| Connected::new(&networks, [(net.parse().unwrap(), Arc::from("kube-ipvs0"))]);
    assert_eq!((peers.connect(place("10.200.0.1/32")), judged(&peers)), (vec![], 0), "no lease has that");
    assert_eq!(peers.connect(place("10.0.7.1/32")).len(), 1);
    assert_eq!((peers.len(), judged(&peers)), (4999, 0));
    assert_eq!(peers.connect(place("10.0.8.0/23")).len(), 3, "one comes back, two go");
    assert_eq!((peers.len(), judged(&peers)), (4998, 1));
    assert_eq!(peers.connect(place("10.0.8.0/23")), []);
    assert_eq!(peers.connect(Connected::default()).len(), 2);
    assert_eq!((peers.len(), judged(&peers)), (5000, 2));
}

#[derive(Debug, Clone)]
enum Step {
    Put(Record),
    Remove(Id),
}

/// Generates records with few ids, few ages, and few prefixes of many lengths, so that many of them conflict.
fn any_record() -> impl Strategy<Value = Record> {
    let v4 =
        (0u32..64, 20u8..=28).prop_map(|(n, len)| Ipv4Net::new((0x0a05_0000 + n * 64).into(), len).unwrap().trunc());
    let v6 = (0u128..16, 58u8..=66)
        .prop_map(|(n, len)| Ipv6Net::new(((0xfd00 << 112) + (n << 63)).into(), len).unwrap().trunc());
    let subnets = (proptest::option::weighted(0.9, v4), proptest::option::weighted(0.3, v6));
    let ipv6 = proptest::option::of(0u128..24);
    (0u8..12, subnets, 0u64..4, 0u32..24, ipv6).prop_map(|(id, (v4, v6), stamp, ip, ipv6)| {
        let id: Id = format!("n{id}").into();
        if ip == 11 {
            return Record { id, lease: Err(Unreadable::new("unread")) };
        }
        // Half of the addresses lie inside Network, in the subnets of others.
        let public_ip =
            Some(if ip < 12 { Ipv4Addr::from(0xc0a8_0000 + ip) } else { Ipv4Addr::from(0x0a05_0000 + ip * 128) });
        let public_ipv6 = ipv6
            .map(|n| Ipv6Addr::from(if n < 12 { (0x2001_0db8 << 96) + n } else { (0xfd00 << 112) + ((n - 12) << 63) }));
        let attrs = Attrs { public_ip, public_ipv6, ..Attrs::default() };
        let age = Age { stamp, tie: Arc::from("") };
        Record { lease: Ok(Lease { id: id.clone(), subnets: Subnets { v4, v6 }, attrs, age }), id }
    })
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any_record().prop_map(Step::Put),
        1 => (0u8..12).prop_map(|id| Step::Remove(format!("n{id}").into())),
    ]
}

fn any_us() -> impl Strategy<Value = Us> {
    (0u8..3, 0u32..64, 0u8..12, any::<bool>(), 0u32..200, any::<bool>()).prop_map(
        |(id, own, ip, dual, lan, assigned)| {
            let networks = Subnets { v4: "10.5.0.0/16".parse().ok(), v6: "fd00::/60".parse().ok().filter(|_| dual) };
            // Most of these addresses lie inside the subnets of leases.
            let lan = Ipv4Net::new((0x0a05_0000 + lan * 64).into(), 27).unwrap();
            Us {
                networks,
                id: Some(format!("n{id}").into()),
                own: Subnets { v4: Some(Ipv4Net::new((0x0a05_0000 + own * 64).into(), 26).unwrap()), v6: None },
                public: vec![IpAddr::V4(Ipv4Addr::new(192, 168, 0, ip))],
                ports: [None, None],
                uplink: Vec::new(),
                connected: Connected::new(&networks, [(lan.into(), Arc::from("lan0"))]),
                assigned,
            }
        },
    )
}

/// Returns the subnets of a lease in the enabled families.
fn claimed(us: &Us, lease: &Lease) -> Subnets {
    let (v4, v6) = (us.networks.v4.is_some(), us.networks.v6.is_some());
    Subnets { v4: lease.subnets.v4.filter(|_| v4), v6: lease.subnets.v6.filter(|_| v6) }
}

/// Returns the published addresses of a lease in the enabled families.
fn published(us: &Us, lease: &Lease) -> Vec<IpAddr> {
    let is_on = |ip: &IpAddr| if ip.is_ipv4() { us.networks.v4.is_some() } else { us.networks.v6.is_some() };
    lease.attrs.published().filter(is_on).collect()
}

/// Returns true if a published address of the first lease lies in a subnet of the second.
fn stands_in(us: &Us, one: &Lease, other: &Lease) -> bool {
    let is_inside = |ip: &IpAddr| claimed(us, other).iter().any(|net| net.contains(ip));
    one.id != other.id && published(us, one).iter().any(is_inside)
}

/// Returns true if a subnet of this lease contains two or more published addresses of other leases.
fn covers_others(us: &Us, lease: &Lease, leases: &[&Lease]) -> bool {
    let own = published(us, lease);
    let others = leases.iter().filter(|other| other.id != lease.id).flat_map(|other| published(us, other));
    let others: BTreeSet<IpAddr> = others.filter(|ip| !own.contains(ip)).collect();
    claimed(us, lease).iter().any(|net| others.iter().filter(|ip| net.contains(*ip)).count() > 1)
}

/// The simplest definition of the leases that are believed. The possible leases whose subnet does not contain published addresses of several
/// others are taken in the order of their age. Each is believed if it conflicts with none that was believed before. If subnets are
/// assigned, a lease whose published address lies in the subnet of any possible lease is set aside instead. Whether a lease is possible is
/// found with a set that contains only this lease.
fn model(us: &Us, records: &BTreeMap<Id, Record>) -> BTreeSet<Id> {
    let possible = |record: &&Record| {
        let mut alone = Peers::new(us.clone());
        alone.put(Record::clone(record));
        alone.len() == 1
    };
    let mut leases: Vec<&Lease> = records.values().filter(possible).filter_map(|r| r.lease.as_ref().ok()).collect();
    leases.sort_by_key(|lease| (lease.age.clone(), lease.id.clone()));
    let mut taken: Vec<&Lease> = Vec::new();
    for lease in leases.iter().copied() {
        let apart = |other: &&Lease| {
            let overlap = claimed(us, other).overlaps(&claimed(us, lease));
            !overlap && (us.assigned || !(stands_in(us, lease, other) || stands_in(us, other, lease)))
        };
        let lost = if us.assigned {
            leases.iter().any(|other| stands_in(us, lease, other))
        } else {
            covers_others(us, lease, &leases)
        };
        if !lost && taken.iter().all(apart) {
            taken.push(lease);
        }
    }
    taken.into_iter().map(|lease| lease.id.clone()).collect()
}

fn believed(peers: &Peers) -> BTreeMap<Id, Lease> {
    peers.believed().map(|lease| (lease.id.clone(), Lease::clone(lease))).collect()
}

/// Applies changes to what was believed before.
fn follow(known: &mut BTreeMap<Id, Lease>, changes: Vec<PeerChange>) {
    for change in changes {
        assert_ne!(change.before, change.after, "a change that is none");
        assert_eq!(known.get(&change.id), change.before.as_deref(), "before is what was believed");
        match change.after {
            Some(lease) => known.insert(change.id, Lease::clone(&lease)),
            None => known.remove(&change.id),
        };
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// After every step the believed leases are those of the model and those that the changes add up to, and they never overlap.
    #[test]
    fn after_every_step_the_result_is_that_of_the_model(
        first in any_us(), second in any_us(), steps in proptest::collection::vec(any_step(), 1..40), switch in 0usize..40,
        moves in proptest::collection::btree_map(0usize..40, any_us(), 0..4),
    ) {
        let mut us = first;
        let mut peers = Peers::new(us.clone());
        let (mut records, mut known) = (BTreeMap::new(), BTreeMap::new());
        for (at, step) in steps.into_iter().enumerate() {
            if at == switch {
                us = second.clone();
                follow(&mut known, peers.judge_for(us.clone()));
            }
            if let Some(other) = moves.get(&at) {
                // Only the networks that this host is connected to have changed.
                us.connected = Connected::new(&us.networks, other.connected.iter().map(|net| (net, Arc::from("lan1"))));
                follow(&mut known, peers.connect(us.connected.clone()));
            }
            follow(&mut known, match step {
                Step::Put(record) => {
                    records.insert(record.id.clone(), record.clone());
                    let changes = peers.put(record.clone());
                    prop_assert_eq!(peers.put(record), vec![], "the same again");
                    changes
                }
                Step::Remove(id) => {
                    records.remove(&id);
                    peers.remove(&id)
                }
            });
            prop_assert_eq!(&known, &believed(&peers));
            prop_assert_eq!(known.keys().cloned().collect::<BTreeSet<_>>(), model(&us, &records));
            prop_assert_eq!(peers.len(), known.len());
            let own = usize::from(us.id.as_ref().is_some_and(|id| records.contains_key(id)));
            prop_assert_eq!(peers.ids().count(), records.len() - own);
            prop_assert_eq!(peers.not_believed().count() + peers.len(), records.len() - own, "believed or set aside");
            for (id, a) in &known {
                prop_assert_eq!(peers.get(id).map(|lease| &**lease), Some(a));
                prop_assert!(known.values().all(|b| a.id == b.id || !claimed(&us, a).overlaps(&claimed(&us, b))));
            }
        }
    }

    /// Any order of the same records leads to the same believed leases.
    #[test]
    fn the_result_does_not_depend_on_the_order(
        us in any_us(),
        (records, shuffled) in proptest::collection::btree_map(0u8..12, any_record(), 0..12).prop_flat_map(|records| {
            let records: Vec<Record> = records.into_iter().map(|(n, r)| {
                let id: Id = format!("n{n}").into();
                Record { lease: r.lease.map(|l| Lease { id: id.clone(), ..l }), id }
            }).collect();
            (Just(records.clone()), Just(records).prop_shuffle())
        }),
    ) {
        let all = |records: Vec<Record>| {
            let mut peers = Peers::new(us.clone());
            for record in records {
                peers.put(record);
            }
            believed(&peers)
        };
        prop_assert_eq!(all(records), all(shuffled));
    }

    /// After a record was added and removed, the believed leases and the sum of the changes are as before.
    #[test]
    fn to_put_and_remove_a_record_changes_nothing(us in any_us(), records in proptest::collection::vec(any_record(), 0..12), new in any_record()) {
        let mut peers = Peers::new(us);
        for record in records.into_iter().filter(|r| r.id != new.id) {
            peers.put(record);
        }
        let before = believed(&peers);
        let mut known = before.clone();
        let id = new.id.clone();
        follow(&mut known, peers.put(new));
        follow(&mut known, peers.remove(&id));
        prop_assert_eq!(&known, &before);
        prop_assert_eq!(&believed(&peers), &before);
    }
}
