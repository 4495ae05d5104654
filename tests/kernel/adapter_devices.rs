// SPDX-License-Identifier: Apache-2.0
//! Devices in the real kernel: refused attributes, devices of other programs, devices that are made again, and interface names
//! that are not UTF-8.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use weft::kernel::{Creator, Kernel, Outcome};
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::state::{Key, Name, Route, Value};
use weft_backends::wireguard_key::{KEY, PublicKey};
use weft_backends::wireguard_peer::WgPeer;

use super::adapter_net::{
    ALIAS, PROTOCOL, add_uplink, all_done, bridge, fdb, in_namespace, ip, json, kernel, mac, name, neigh, put, remove,
    seen_vxlan, via, vxlan, vxlan_with,
};

fn alias(dev: &str, text: &str) {
    assert!(Command::new("ip").args(["link", "set", dev, "alias", text]).status().unwrap().success());
}

/// Creates flannel.1 as another program would.
fn create_by_another() {
    ip(
        "link add flannel.1 address 02:00:00:00:09:09 mtu 1400 type vxlan id 1 dev up0 local 10.0.0.1 dstport 8472 nolearning gbp",
    );
    ip("link set flannel.1 up");
}

fn index() -> u64 {
    json("ip", "-j link show dev flannel.1")[0]["ifindex"].as_u64().unwrap()
}

#[test]
fn the_other_attributes_are_set_if_one_is_refused() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        ip("link set flannel.1 down");
        let (key, value) = vxlan_with(false, |link, vxlan| {
            (link.mtu, link.mac, vxlan.learning) = (70_000, Some(mac(9)), true);
        });
        let outcome = k.apply(&[Op::Ensure(key, value)]).remove(0);
        let Outcome::Partly { missing, retry: false, works: false } = outcome else { panic!("{outcome:?}") };
        assert!(missing.starts_with("mtu 70000: ") && missing.contains("EINVAL"), "{missing}");
        let (now, vxlan) = seen_vxlan(&k.observe(&[]).unwrap().get(&key).unwrap().value);
        assert_eq!((now.mtu, now.mac, vxlan.learning, now.up), (1450, Some(mac(9)), true, true));
    });
}

#[test]
fn a_device_is_created_without_an_attribute_that_the_kernel_refuses() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = vxlan_with(false, |link, _| link.mtu = 20);
        let outcome = k.apply(&[Op::Ensure(key, value.clone())]).remove(0);
        assert!(matches!(&outcome, Outcome::Partly { missing, .. } if missing.contains("mtu 20")), "{outcome:?}");
        let seen = k.observe(&[]).unwrap().get(&key).unwrap().clone();
        let ((now, _), (link, _)) = (seen_vxlan(&seen.value), seen_vxlan(&value));
        assert_eq!((now.mac, now.up, seen.mark), (link.mac, true, true));
        put(&mut k, &[fdb("flannel.1", 7, "10.0.0.7")]);
    });
}

#[test]
fn every_device_with_our_alias_is_observed() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false), fdb("flannel.1", 7, "10.0.0.7"), neigh("flannel.1", "10.1.2.0", 7)]);
        ip("link set flannel.1 down");
        ip("link set flannel.1 name renamed0");
        ip("link add flannel.9 type vxlan id 9 dev up0 dstport 8472");
        alias("flannel.9", "weft of another kind");
        let seen = k.observe(&[]).unwrap();
        let dev = name("renamed0");
        assert!(seen.get(&Key::Link(dev)).is_some_and(|seen| seen.mark && seen.protocol == PROTOCOL), "{seen:?}");
        assert!(seen.contains_key(&Key::Fdb(dev, mac(7))));
        assert!(!seen.contains_key(&Key::Link(name("flannel.9"))), "it was not named, and is not ours");
        let other = k.observe(&[name("flannel.9")]).unwrap().get(&Key::Link(name("flannel.9"))).unwrap().clone();
        assert_eq!((other.mark, other.protocol), (false, PROTOCOL), "it belongs to another agent");
        let value = seen.get(&Key::Link(dev)).unwrap().value.clone();
        remove(&mut k, &[(Key::Link(dev), value)]);
        assert_eq!(k.observe(&[dev]).unwrap().get(&Key::Link(dev)), None);
    });
}

#[test]
fn a_device_of_another_agent_is_neither_altered_nor_removed() {
    in_namespace(|| async {
        let mut k = kernel(true);
        create_by_another();
        alias("flannel.1", "weft /run/other/subnet.env");
        let (key, value) = vxlan(false);
        k.observe(&[name("flannel.1")]).unwrap();
        for op in [Op::Ensure(key, value.clone()), Op::Recreate(key, value.clone()), Op::Remove(key, value)] {
            let outcome = k.apply(&[op]).remove(0);
            let named = |text: &str| text.contains("another weft agent") && text.contains("/run/other/subnet.env");
            assert!(matches!(&outcome, Outcome::Fatal(text) if named(text)), "{outcome:?}");
        }
        assert!(
            ip("link show flannel.1").contains("02:00:00:00:09:09") && ip("link show flannel.1").contains("mtu 1400")
        );
    });
}

#[test]
fn a_device_without_alias_is_taken_over_only_if_it_was_observed() {
    in_namespace(|| async {
        let mut k = kernel(true);
        create_by_another();
        let before = index();
        let (key, value) = vxlan(false);
        for op in [Op::Ensure(key, value.clone()), Op::Recreate(key, value.clone())] {
            let outcome = k.apply(&[op]).remove(0);
            assert!(
                matches!(&outcome, Outcome::Retry(text) if text.contains("another program has just created")),
                "{outcome:?}"
            );
        }
        assert!(ip("link show flannel.1").contains("02:00:00:00:09:09"));
        k.observe(&[name("flannel.1")]).unwrap();
        put(&mut k, &[(key, value)]);
        assert_eq!((index(), &json("ip", "-j link show dev flannel.1")[0]["ifalias"]), (before, &ALIAS.into()));
    });
}

#[test]
fn no_entry_is_written_to_a_device_that_another_program_created_again() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        k.observe(&[]).unwrap();
        ip("link del flannel.1");
        create_by_another();
        let host = (Key::Addr(name("flannel.1"), "10.1.0.0/32".parse().unwrap()), Value::Addr);
        let all = [
            host,
            fdb("flannel.1", 7, "10.0.0.7"),
            neigh("flannel.1", "10.1.2.0", 7),
            via("10.1.2.0/24", "10.1.2.0", "flannel.1"),
        ];
        let put: Vec<Op> = all.iter().map(|(key, value)| Op::Ensure(*key, value.clone())).collect();
        let outcomes = k.apply(&put);
        let waits = |outcome: &Outcome| matches!(outcome, Outcome::Retry(text) if text.contains("another program has just created"));
        assert!(outcomes.iter().all(waits), "{outcomes:?}");
        // The entries of our device are gone with it. Those of the new device are not ours, so they are not removed.
        bridge("fdb replace 02:00:00:00:00:07 dev flannel.1 dst 10.0.0.66 self permanent");
        let (key, value) = fdb("flannel.1", 7, "10.0.0.66");
        let ops = [Op::Remove(key, value), Op::Remove(vxlan(false).0, vxlan(false).1)];
        all_done(&ops, k.apply(&ops));
        assert!(bridge("fdb show dev flannel.1").contains("10.0.0.66"));
        assert_eq!(ip("-4 route show dev flannel.1"), "");
        assert_eq!(ip("neigh show dev flannel.1"), "");
    });
}

#[test]
fn an_interface_whose_name_is_not_utf8_is_known_and_used() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let odd = b"od\xff\x1b0";
        let ip_bytes = |words: &[&[u8]]| {
            let out = Command::new("ip").args(words.iter().map(|word| OsStr::from_bytes(word))).output().unwrap();
            assert!(out.status.success(), "{out:?}");
        };
        ip_bytes(&[b"link", b"add", odd, b"type", b"bridge"]);
        ip_bytes(&[b"link", b"set", odd, b"up"]);
        ip_bytes(&[b"addr", b"add", b"10.99.0.1/24", b"dev", odd]);
        let dev = Name::of_kernel(odd).unwrap();
        let machine = k.machine().unwrap();
        let link = machine.links.iter().find(|link| link.name == dev).unwrap();
        assert!(machine.addrs.iter().any(|addr| addr.index == link.index));
        let connected = machine.routes.iter().find(|route| route.net == "10.99.0.0/24".parse().unwrap()).unwrap();
        assert_eq!((connected.dev, connected.reach), (Some(dev), Reach::Link(dev)));
        let route = Route::Unicast { via: "10.99.0.7".parse().unwrap(), dev, onlink: true };
        let entry = (Key::Route("10.1.7.0/24".parse().unwrap(), 0), Value::Route(route));
        // A bridge without ports has no carrier, so the kernel refuses a nexthop object. The route is written without one.
        let mut plain = kernel(false);
        put(&mut plain, std::slice::from_ref(&entry));
        assert_eq!(k.observe(&[]).unwrap().get(&entry.0).unwrap().value, entry.1);
        remove(&mut plain, &[entry]);
        assert_eq!(dev.to_string(), r"od\xff\x1b0");
    });
}

#[test]
fn the_fdb_entries_of_a_device_that_was_made_again_are_forgotten() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = vxlan(false);
        let entry = fdb("flannel.1", 77, "10.0.0.2");
        put(&mut k, &[(key, value.clone()), entry.clone()]);
        for _ in 0..3 {
            let again = [Op::Recreate(key, value.clone()), Op::Ensure(entry.0, entry.1.clone())];
            all_done(&again, k.apply(&again));
            k.observe(&[name("flannel.1")]).unwrap();
            assert_eq!(k.shared().borrow().fdb.len(), 1);
        }
        ip("link del flannel.1");
        k.observe(&[name("flannel.1")]).unwrap();
        assert_eq!(k.shared().borrow().fdb.len(), 0);
    });
}

#[test]
fn an_alias_that_was_cleared_is_set_again_and_that_of_another_agent_stays() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = vxlan(false);
        put(&mut k, &[(key, value)]);
        let shown = || json("ip", "-j link show dev flannel.1")[0]["ifalias"].clone();
        // It was not observed since it was made.
        alias("flannel.1", "");
        assert!(k.observe(&[]).unwrap().get(&key).is_some_and(|seen| seen.mark));
        assert_eq!(shown(), ALIAS);
        let theirs = "weft /run/other/subnet.env";
        alias("flannel.1", theirs);
        let seen = k.observe(&[name("flannel.1")]).unwrap().get(&key).unwrap().clone();
        assert!(!seen.mark, "another agent took it over: {seen:?}");
        assert_eq!(shown(), theirs);
    });
}

/// The uplink has got another name, and the plan keeps the old one for some seconds. The kernel knows the uplink by its index, so the device
/// goes on.
#[test]
fn a_device_whose_outer_device_is_missing_is_not_deleted_to_be_made_again() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = vxlan(false);
        put(&mut k, &[(key, value.clone()), fdb("flannel.1", 7, "10.0.0.7")]);
        let before = index();
        ip("link set up0 down");
        ip("link set up0 name renamed0");
        k.observe(&[]).unwrap();
        let outcome = k.apply(&[Op::Recreate(key, value)]).remove(0);
        assert!(matches!(&outcome, Outcome::Retry(text) if text.contains("no link up0")), "{outcome:?}");
        assert_eq!(index(), before);
        assert!(bridge("fdb show dev flannel.1").contains("10.0.0.7"));
    });
}

/// No device of an agent is chosen as an uplink, and the identity of our own one is kept.
#[test]
fn the_machine_says_which_devices_agents_have_made() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        ip("link add flannel.9 type vxlan id 9 dev up0 dstport 8472");
        alias("flannel.9", "weft /run/other/subnet.env");
        let links = k.machine().unwrap().links;
        let creator = |of: &str| links.iter().find(|link| link.name == name(of)).map(|link| link.creator);
        assert_eq!(creator("flannel.1"), Some(Creator::ThisAgent));
        assert_eq!(creator("flannel.9"), Some(Creator::AnotherAgent));
        assert_eq!(creator("up0"), Some(Creator::Unknown));
    });
}

/// The uplink of host-gw is made again with the same name, and no device of ours changes with it.
#[test]
fn a_route_is_written_to_a_link_that_was_made_again() {
    in_namespace(|| async {
        for with_nexthops in [true, false] {
            let mut k = kernel(with_nexthops);
            let route = via("10.1.2.0/24", "10.0.0.2", "up0");
            put(&mut k, std::slice::from_ref(&route));
            ip("link del up0");
            // The new link gets another index.
            ip("link add between0 type veth peer name between1");
            add_uplink();
            ip("link del between0");
            k.observe(&[]).unwrap();
            put(&mut k, std::slice::from_ref(&route));
            assert!(ip("route show 10.1.2.0/24").contains("via 10.0.0.2 dev up0"), "{}", ip("route show"));
            remove(&mut k, &[route]);
        }
    });
}

/// Without the key, the peer would be written as one that needs none, and no handshake with it would succeed.
#[test]
fn a_wireguard_peer_waits_until_the_preshared_key_is_known() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        let key = PublicKey([7; KEY]);
        let peer = WgPeer {
            key,
            endpoint: None,
            keepalive: 0,
            preshared: true,
            assumes_port: false,
            is_live: false,
            written: None,
        };
        let outcome = k.apply(&[Op::Ensure(Key::WgPeer(name("flannel.1"), key.id()), Value::peer(peer))]).remove(0);
        let waits = matches!(&outcome, Outcome::Retry(text) if text.contains("the preshared key is not known"));
        assert!(waits, "{outcome:?}");
    });
}
