// SPDX-License-Identifier: Apache-2.0
//! `ip` and `bridge` show what was written, and `observe` reads it.

use weft::kernel::{Kernel, LinuxKernel, Outcome};
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::state::{Key, LAST_METRIC, Route, Value};

use super::adapter_net::{
    ALIAS, PROTOCOL, all_done, bridge, fdb, in_namespace, ip, json, kernel, mac, name, neigh, nexthops, put, remove,
    via, vxlan, vxlan_with,
};

#[test]
fn vxlan_devices_have_every_attribute() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false), vxlan(true)]);
        let got = &json("ip", "-j -d link show dev flannel.1")[0];
        assert_eq!(
            (&got["mtu"], &got["address"], &got["ifalias"]),
            (&1450.into(), &"02:00:00:00:00:04".into(), &ALIAS.into())
        );
        let data = &got["linkinfo"]["info_data"];
        assert_eq!(
            (&data["id"], &data["link"], &data["local"], &data["port"], &data["learning"], &data["gbp"]),
            (&1.into(), &"up0".into(), &"10.0.0.1".into(), &8472.into(), &false.into(), &true.into())
        );
        assert_eq!(got["inet6_addr_gen_mode"], "none");
        let six = &json("ip", "-j -d link show dev flannel-v6.1")[0];
        assert_eq!(six["linkinfo"]["info_data"]["local6"], "fd00::1");
        assert_eq!(six["mtu"], 1430);
        let seen = k.observe(&[name("flannel.1"), name("flannel-v6.1")]).unwrap();
        for (key, value) in [vxlan(false), vxlan(true)] {
            assert_eq!(seen.get(&key).map(|s| (s.value.clone(), s.mark)), Some((value, true)));
        }
    });
}

#[test]
fn links_change_in_place_and_are_recreated() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = vxlan(false);
        put(&mut k, &[(key, value), (Key::Addr(name("flannel.1"), "10.1.0.0/32".parse().unwrap()), Value::Addr)]);
        let index = json("ip", "-j link show dev flannel.1")[0]["ifindex"].clone();
        let (_, altered) = vxlan_with(false, |link, vxlan| {
            (link.mtu, link.mac, vxlan.learning, vxlan.ttl) = (1400, Some(mac(9)), true, 7);
        });
        put(&mut k, &[(key, altered.clone())]);
        assert_eq!(k.observe(&[name("flannel.1")]).unwrap().get(&key).unwrap().value, altered);
        // One attribute alone is changed, too.
        for (learning, ttl) in [(true, 9), (false, 9)] {
            let (_, one) = vxlan_with(false, |link, vxlan| {
                (link.mtu, link.mac, vxlan.learning, vxlan.ttl) = (1400, Some(mac(9)), learning, ttl);
            });
            put(&mut k, &[(key, one.clone())]);
            assert_eq!(k.observe(&[name("flannel.1")]).unwrap().get(&key).unwrap().value, one);
        }
        assert_eq!(json("ip", "-j link show dev flannel.1")[0]["ifindex"], index);
        let (_, other) = vxlan_with(false, |_, vxlan| vxlan.port = 4789);
        let refused = k.apply(&[Op::Ensure(key, other.clone())]);
        assert!(matches!(&refused[0], Outcome::Retry(t) if t.contains("other fixed attributes")), "{refused:?}");
        let ops = [Op::Recreate(key, other.clone())];
        all_done(&ops, k.apply(&ops));
        let seen = k.observe(&[name("flannel.1")]).unwrap();
        assert_eq!(seen.get(&key).unwrap().value, other);
        assert!(!seen.keys().any(|k| matches!(k, Key::Addr(..))));
        remove(&mut k, &[(key, other.clone())]);
        remove(&mut k, &[(key, other.clone())]);
        assert!(!k.observe(&[name("flannel.1")]).unwrap().contains_key(&key));
    });
}

fn everything(v6: bool) -> Vec<(Key, Value)> {
    let (dev, a, b) = if v6 { ("flannel-v6.1", "fd00::2", "fd00:2::") } else { ("flannel.1", "10.0.0.2", "10.1.2.0") };
    let (net, host, hole, no) = if v6 {
        ("fd00:2::/64", "fd00:1::/128", "fd00:8::/64", "fd00:9::/64")
    } else {
        ("10.1.2.0/24", "10.1.0.0/32", "10.8.0.0/16", "10.9.0.0/16")
    };
    let metric = if v6 { 1024 } else { 0 };
    let direct = if v6 { "fd00:5::/64" } else { "10.5.0.0/16" };
    vec![
        vxlan(v6),
        (Key::Addr(name(dev), host.parse().unwrap()), Value::Addr),
        fdb(dev, 77, a),
        neigh(dev, b, 77),
        via(net, b, dev),
        (Key::Route(direct.parse().unwrap(), metric), Value::Route(Route::Device { dev: name("up0") })),
        (Key::Route(hole.parse().unwrap(), LAST_METRIC), Value::Route(Route::Blackhole)),
        (Key::Route(no.parse().unwrap(), LAST_METRIC), Value::Route(Route::Unreachable)),
    ]
}

#[test]
fn entries_are_observed_after_they_were_written_changed_and_removed() {
    for (v6, objects) in [(false, true), (false, false), (true, true)] {
        in_namespace(move || async move {
            let mut k = kernel(objects);
            let all = everything(v6);
            let dev = if v6 { "flannel-v6.1" } else { "flannel.1" };
            put(&mut k, &all);
            let seen = k.observe(&[name(dev)]).unwrap();
            for (key, value) in &all {
                assert_eq!(seen.get(key).map(|s| &s.value), Some(value), "{key:?}");
                if let Key::Route(..) = key {
                    assert_eq!(seen.get(key).unwrap().protocol, PROTOCOL);
                }
            }
            let own = |k: &&Key| !matches!(k, Key::Route(..));
            assert_eq!(seen.keys().filter(own).count(), 4, "{seen:?}");
            assert_eq!(nexthops(), usize::from(objects && !v6));
            let (x, y) = if v6 { ("fd00::3", "fd00:2::3") } else { ("10.0.0.3", "10.1.2.3") };
            let net = if v6 { "fd00:2::/64" } else { "10.1.2.0/24" };
            let moved = [fdb(dev, 77, x), neigh(dev, &all[3].0.address(), 78), via(net, y, dev)];
            put(&mut k, &moved);
            let seen = k.observe(&[name(dev)]).unwrap();
            for (key, value) in &moved {
                assert_eq!(seen.get(key).unwrap().value, *value);
            }
            assert_eq!(nexthops(), usize::from(objects && !v6));
            let mut down: Vec<_> = all[2..].to_vec();
            down[..3].clone_from_slice(&moved);
            remove(&mut k, &down);
            remove(&mut k, &down);
            let seen = k.observe(&[name(dev)]).unwrap();
            assert!(down.iter().all(|(key, _)| !seen.contains_key(key)));
            assert_eq!(nexthops(), 0);
        });
    }
}

trait Address {
    fn address(&self) -> String;
}

impl Address for Key {
    fn address(&self) -> String {
        let Key::Neigh(_, ip) = self else { panic!("not a neighbour") };
        ip.to_string()
    }
}

#[test]
fn several_routes_with_one_key_are_replaced_by_one() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &everything(false));
        bridge("fdb append 02:00:00:00:00:4d dev flannel.1 dst 10.0.0.66 self permanent");
        ip("route append 10.1.2.0/24 via 10.0.0.9");
        ip("route append 10.1.2.0/24 via 10.0.0.10");
        let seen = k.observe(&[name("flannel.1")]).unwrap();
        // The kernel ignores a second destination of a unicast MAC.
        assert_eq!(seen.get(&everything(false)[2].0).unwrap().value, everything(false)[2].1);
        let wanted = [everything(false)[4].clone()];
        assert!(wanted.iter().all(|(key, value)| seen.get(key).unwrap().value != *value), "{seen:?}");
        put(&mut k, &wanted);
        let seen = k.observe(&[name("flannel.1")]).unwrap();
        assert!(wanted.iter().all(|(key, value)| seen.get(key).unwrap().value == *value), "{seen:?}");
        assert!(!bridge("fdb show dev flannel.1").contains("10.0.0.66"));
        assert_eq!(json("ip", "-j route show 10.1.2.0/24").as_array().unwrap().len(), 1);
        assert_eq!(nexthops(), 1);
    });
}

#[test]
fn a_plain_route_of_flannel_is_taken_over_in_place() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        ip("route add 10.1.2.0/24 via 10.1.2.0 dev flannel.1 onlink");
        let route = via("10.1.2.0/24", "10.1.2.0", "flannel.1");
        assert!(!k.observe(&[]).unwrap().get(&route.0).unwrap().mark);
        put(&mut k, std::slice::from_ref(&route));
        let shown = json("ip", "-j route show 10.1.2.0/24");
        assert_eq!(shown.as_array().unwrap().len(), 1);
        assert!(shown[0]["nhid"].is_u64(), "{shown}");
        // An agent without nexthop objects writes it as a plain route. It takes over or deletes the nexthops of the earlier agent.
        ip(&format!(
            "nexthop add id {} via 10.0.0.9 dev up0 protocol {PROTOCOL}",
            shown[0]["nhid"].as_u64().unwrap() + 9
        ));
        let mut plain = kernel(false);
        assert_eq!(plain.observe(&[]).unwrap().get(&route.0).unwrap().value, route.1);
        assert_eq!(nexthops(), 1);
        put(&mut plain, std::slice::from_ref(&route));
        assert!(json("ip", "-j route show 10.1.2.0/24")[0]["nhid"].is_null());
        assert_eq!(nexthops(), 0);
    });
}

#[test]
fn a_nexthop_of_another_program_in_our_range_stays() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let first = 0x5700_0000_u32 + (7 << 18);
        ip(&format!("nexthop add id {first} via 10.0.0.9 dev up0 protocol static"));
        let route = via("10.1.2.0/24", "10.0.0.2", "up0");
        put(&mut k, std::slice::from_ref(&route));
        assert_eq!(k.observe(&[]).unwrap().get(&route.0).unwrap().value, route.1);
        assert_eq!(nexthops(), 2);
        remove(&mut k, std::slice::from_ref(&route));
        assert_eq!(json("ip", "-j nexthop")[0]["id"], first);
    });
}

/// Another agent of this host may have written a nexthop whose route comes next.
#[test]
fn an_unused_nexthop_of_an_earlier_run_is_deleted_and_that_of_another_agent_stays() {
    in_namespace(|| async {
        let [ours, theirs] = [7_u32, 8].map(|instance| 0x5700_0000 + (instance << 18) + 5);
        for id in [ours, theirs] {
            ip(&format!("nexthop add id {id} via 10.0.0.9 dev up0 protocol {PROTOCOL}"));
        }
        kernel(true).observe(&[]).unwrap();
        let left = json("ip", "-j nexthop");
        assert!(left.as_array().unwrap().len() == 1 && left[0]["id"] == theirs, "{left}");
    });
}

/// The route keeps its nexthop then, and the kernel finds it by that nexthop alone.
#[test]
fn a_route_whose_change_was_refused_can_still_be_removed() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let route = via("10.1.2.0/24", "10.0.0.2", "up0");
        put(&mut k, std::slice::from_ref(&route));
        let unreachable = Route::Unicast { via: "192.0.2.1".parse().unwrap(), dev: name("up0"), onlink: false };
        let outcome = k.apply(&[Op::Ensure(route.0, Value::Route(unreachable))]).remove(0);
        assert!(matches!(outcome, Outcome::Retry(_) | Outcome::Fatal(_)), "{outcome:?}");
        assert!(ip("route show 10.1.2.0/24").contains("via 10.0.0.2 "), "{}", ip("route show"));
        assert_eq!(nexthops(), 1, "that of the refused change is deleted");
        remove(&mut k, &[route]);
        assert_eq!((ip("route show 10.1.2.0/24").trim(), nexthops()), ("", 0));
    });
}

#[test]
fn a_nexthop_of_another_programs_route_is_forgotten_with_the_route() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let of = |k: &LinuxKernel, net: &str| k.shared().borrow().of(&Key::Route(net.parse().unwrap(), 0));
        // Both routes use one object, and the object stays.
        ip("nexthop add id 7 via 10.0.0.9 dev up0");
        for net in ["10.1.2.0/24", "10.1.3.0/24"] {
            ip(&format!("route add {net} nhid 7"));
        }
        k.observe(&[]).unwrap();
        assert_eq!((of(&k, "10.1.2.0/24"), of(&k, "10.1.3.0/24")), (Some(7), Some(7)));
        ip("route del 10.1.2.0/24");
        k.observe(&[]).unwrap();
        assert_eq!((of(&k, "10.1.2.0/24"), of(&k, "10.1.3.0/24")), (None, Some(7)));
    });
}

#[test]
fn no_nexthop_is_left_over() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let route =
            |n: usize, gw: usize| via(&format!("10.{}.{}.0/24", 64 + n / 256, n % 256), &format!("10.0.0.{gw}"), "up0");
        let all = |gw| (0..1000).map(|n| route(n, gw)).collect::<Vec<_>>();
        put(&mut k, &all(2));
        put(&mut k, &all(3));
        assert_eq!(nexthops(), 1000);
        let seen = k.observe(&[]).unwrap();
        assert!(all(3).iter().all(|(key, value)| seen.get(key).is_some_and(|s| s.value == *value && s.mark)));
        ip("route del 10.64.0.0/24");
        k.observe(&[]).unwrap();
        assert_eq!(nexthops(), 999);
        remove(&mut k, &all(3));
        assert_eq!(nexthops(), 0);
    });
}

#[test]
fn a_nexthop_without_carrier_is_tried_again() {
    in_namespace(|| async {
        let mut k = kernel(true);
        ip("link set far0 down");
        let (key, value) = via("10.1.2.0/24", "10.0.0.2", "up0");
        let outcome = k.apply(&[Op::Ensure(key, value.clone())]).remove(0);
        let Outcome::Retry(text) = outcome else { panic!("{outcome:?}") };
        assert!(text.contains("10.1.2.0/24 via 10.0.0.2 dev up0 onlink: ENETDOWN"), "{text}");
        assert!(text.contains("(Carrier for nexthop device is down)"), "{text}");
        let missing = k.apply(&[Op::Ensure(fdb("gone0", 1, "10.0.0.2").0, fdb("gone0", 1, "10.0.0.2").1)]).remove(0);
        assert!(matches!(&missing, Outcome::Retry(t) if t.contains("no link gone0")), "{missing:?}");
        ip("link set far0 up");
        put(&mut k, &[(key, value)]);
        assert_eq!(nexthops(), 1);
    });
}

#[test]
fn five_thousand_peers_are_observed() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let mut all = vec![vxlan(false)];
        for n in 0..5000_u32 {
            let gw = format!("10.{}.{}.0", 64 + n / 256, n % 256);
            all.push(fdb("flannel.1", 1000 + n, "10.0.0.2"));
            all.push(neigh("flannel.1", &gw, 1000 + n));
            all.push(via(&format!("{gw}/24"), &gw, "flannel.1"));
        }
        put(&mut k, &all);
        let seen = k.observe(&[name("flannel.1")]).unwrap();
        for (key, value) in &all {
            assert_eq!(seen.get(key).map(|s| &s.value), Some(value), "{key:?}");
        }
    });
}

#[test]
fn the_machine_has_links_addresses_and_routes_of_other_programs() {
    in_namespace(|| async {
        let mut k = kernel(true);
        ip("route add default via 10.0.0.254 metric 50");
        put(&mut k, &everything(false));
        ip("route add 10.66.0.0/16 dev flannel.1 proto static");
        let m = k.machine().unwrap();
        let up0 = m.links.iter().find(|l| l.name == name("up0")).unwrap();
        assert!(up0.up && up0.carrier && !up0.loopback && up0.mac.is_some());
        assert!(m.addrs.iter().any(|a| a.index == up0.index && a.net == "10.0.0.1/24".parse().unwrap()));
        let default = m.routes.iter().find(|r| r.net == "0.0.0.0/0".parse().unwrap()).unwrap();
        assert_eq!((default.via, default.dev), (Some("10.0.0.254".parse().unwrap()), Some(name("up0"))));
        // RTPROT_BOOT, which the kernel gives to routes without a protocol.
        assert_eq!((default.metric, default.protocol, default.reach), (50, 3, Reach::Gateway));
        assert!(m.links.iter().any(|l| l.loopback && l.name == name("lo")));
        assert!(m.routes.iter().all(|r| r.protocol != PROTOCOL && r.dev != Some(name("flannel.1"))));
    });
}

#[test]
fn routes_get_their_gateway_when_the_kernel_sends_only_ids() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let path = "net/ipv4/nexthop_compat_mode";
        assert_eq!(weft::kernel::sysctl::ensure(path, "0", true), Ok(weft::kernel::sysctl::Change::Changed));
        assert_eq!(weft::kernel::sysctl::ensure(path, "0", true), Ok(weft::kernel::sysctl::Change::Same));
        let route = via("10.1.2.0/24", "10.0.0.2", "up0");
        put(&mut k, std::slice::from_ref(&route));
        let seen = k.observe(&[]).unwrap().get(&route.0).cloned().unwrap();
        assert_eq!((seen.value, seen.mark), (route.1.clone(), true));
    });
}

#[test]
fn routes_of_other_programs_are_replaced_in_every_form() {
    for (family, net, gw, metric) in [("-4", "10.1.2.0/24", "10.0.0.2", 0), ("-6", "fd00:2::/64", "fd00::2", 1024)] {
        in_namespace(move || async move {
            let mut k = kernel(true);
            let other = gw.replace('2', "8");
            let route = via(net, gw, "up0");
            for form in [
                "dev up0".to_owned(),
                format!("via {other} dev up0 proto static"),
                format!("nexthop via {gw} dev up0 nexthop via {other} dev up0"),
            ] {
                ip(&format!("{family} route replace {net} {form}"));
                let key = Key::Route(net.parse().unwrap(), metric);
                assert_ne!(k.observe(&[]).unwrap().get(&key).unwrap().value, route.1, "{form}");
                put(&mut k, std::slice::from_ref(&route));
                let seen = k.observe(&[]).unwrap().get(&key).cloned().unwrap();
                assert_eq!((seen.value, seen.protocol), (route.1.clone(), PROTOCOL), "{form}");
                assert_eq!(json("ip", &format!("-j {family} route show {net}")).as_array().unwrap().len(), 1, "{form}");
            }
        });
    }
}

/// Policy rules, other tables and source addresses count, as for `ip route get`.
#[test]
fn the_way_to_an_address_is_the_kernels_answer() {
    in_namespace(|| async {
        let mut k = kernel(true);
        ip("link add up1 type veth peer name far1");
        ip("link set far1 up");
        ip("link set up1 up");
        ip("addr add 10.8.0.2/24 dev up1");
        ip("-6 addr add fd08::2/64 dev up1 nodad");
        let index = |dev: &str| json("ip", &format!("-j link show dev {dev}"))[0]["ifindex"].as_u64().unwrap();
        let (up0, up1) = (index("up0"), index("up1"));
        let mut way = |to: &str| {
            let found = k.look_up_route(to.parse().unwrap()).unwrap()?;
            Some((u64::from(found.index), found.source.unwrap().to_string()))
        };
        let answer = |index, source: &str| Some((index, source.to_owned()));
        for (option, far, gateway, second, third, sources) in [
            ("-4", "192.0.2.9", "10.0.0.254", "10.8.0.1", "10.0.0.7/24", ["10.0.0.1", "10.8.0.2", "10.0.0.7"]),
            ("-6", "2001:db8::9", "fd00::fe", "fd08::1", "fd00::7/64", ["fd00::1", "fd08::2", "fd00::7"]),
        ] {
            let run = |line: &str| ip(&format!("{option} {line}"));
            assert_eq!(way(far), None, "there is no route");
            run(&format!("route add default via {gateway} dev up0"));
            assert_eq!(way(far), answer(up0, sources[0]));
            run(&format!("route add default via {second} dev up1 table 100"));
            assert_eq!(way(far), answer(up0, sources[0]), "no rule leads to the second table");
            run(&format!("rule add to {far} lookup 100 pref 100"));
            assert_eq!(way(far), answer(up1, sources[1]));
            run(&format!("addr add {third} dev up0{}", if option == "-6" { " nodad" } else { "" }));
            let source = third.split('/').next().unwrap();
            run(&format!("route add default via {gateway} dev up0 src {source} table 99"));
            run(&format!("rule add to {far} lookup 99 pref 99"));
            assert_eq!(way(far), answer(up0, sources[2]), "the route names the source");
            run(&format!("rule add to {far} prohibit pref 98"));
            assert_eq!(way(far), None, "a rule forbids it");
            assert_eq!(way(sources[0]), None, "an address of this host");
        }
    });
}

/// The kernel has more entries on a device than the agent writes: what it learned from packets, and those of multicast addresses.
#[test]
fn neighbours_and_fdb_entries_that_expire_or_are_of_multicast_addresses_are_left_out() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let ours = [fdb("flannel.1", 7, "10.0.0.7"), neigh("flannel.1", "10.1.2.0", 7)];
        put(&mut k, &[vxlan(false)]);
        put(&mut k, &ours);
        bridge("fdb add 02:00:00:00:00:09 dev flannel.1 dst 10.0.0.9 self dynamic");
        ip("neigh add 10.1.2.9 lladdr 02:00:00:00:00:09 dev flannel.1 nud reachable");
        ip("neigh add 239.1.1.1 lladdr 01:00:5e:01:01:01 dev flannel.1 nud permanent");
        let seen = k.observe(&[]).unwrap();
        let mut entries: Vec<Key> =
            seen.keys().filter(|key| matches!(key, Key::Fdb(..) | Key::Neigh(..))).copied().collect();
        let mut wanted = ours.map(|(key, _)| key);
        entries.sort();
        wanted.sort();
        assert_eq!(entries, wanted);
    });
}

/// The kernel has one entry for a MAC, and the entry of another program may have the destination of ours.
#[test]
fn an_fdb_entry_that_got_another_port_or_vni_is_not_as_it_was_written() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = fdb("flannel.1", 7, "10.0.0.7");
        put(&mut k, &[vxlan(false), (key, value.clone())]);
        for other in ["port 4789", "vni 9", "via up0"] {
            bridge(&format!("fdb replace {} dev flannel.1 dst 10.0.0.7 {other} self permanent", mac(7)));
            let seen = k.observe(&[name("flannel.1")]).unwrap().get(&key).unwrap().value.clone();
            assert_ne!(seen, value, "{other}");
            put(&mut k, &[(key, value.clone())]);
            let seen = k.observe(&[name("flannel.1")]).unwrap().get(&key).unwrap().value.clone();
            assert_eq!(seen, value, "{other}: {}", bridge("fdb show dev flannel.1"));
        }
    });
}

/// The kernel gives the link lo to IPv6 routes that lead nowhere. And no peer is reached by the route of a pod.
#[test]
fn a_route_that_leads_nowhere_is_on_no_link_and_routes_of_pods_are_left_out() {
    in_namespace(|| async {
        let mut k = kernel(true);
        ip("-6 route add unreachable fd00:77::/64 proto static");
        // If lo counted as its link, lo would be the uplink of a node that has no other default route yet.
        ip("-6 route add unreachable default proto static");
        ip("route add 10.5.1.7/32 dev up0 proto 91");
        // Its gateway has the other family.
        ip("route add 10.9.9.0/24 via inet6 fd00::9 dev up0 proto static");
        let routes = k.machine().unwrap().routes;
        let of = |net: &str| routes.iter().find(|route| route.net == net.parse().unwrap());
        for net in ["fd00:77::/64", "::/0"] {
            assert_eq!(of(net).map(|route| (route.reach, route.dev)), Some((Reach::Gateway, None)), "{routes:?}");
        }
        assert_eq!(of("10.5.1.7/32"), None);
        assert_eq!(of("10.9.9.0/24").map(|route| route.reach), Some(Reach::Gateway), "{routes:?}");
        assert_eq!(of("10.0.0.0/24").map(|route| route.reach), Some(Reach::Link(name("up0"))));
    });
}
