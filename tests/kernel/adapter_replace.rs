// SPDX-License-Identifier: Apache-2.0
//! Another route is in the place of ours. It is replaced in one step, unless the kernel created it for an address of this host.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use weft::kernel::{Kernel, LinuxMonitor, Monitor, MonitorOptions, Notice, Outcome};
use weft_backends::diff::Op;
use weft_backends::state::{Key, Route, Value};

use super::adapter_net::{
    PROTOCOL, all_done, in_namespace, ip, kernel, name, neigh, nexthops, put, remove, via, vxlan,
};
use crate::patience::PATIENCE;

fn shown(net: &str) -> String {
    ip(&format!("-4 route show {net}")).trim_end().to_owned()
}

/// The connected route of up0. Without it, the host reaches nothing in its own network.
const LAN: &str = "10.0.0.0/24";

#[test]
fn the_kernels_own_route_is_never_replaced() {
    for with_nexthops in [true, false] {
        in_namespace(|| async move {
            let mut k = kernel(with_nexthops);
            put(&mut k, &[vxlan(false)]);
            let before = shown(LAN);
            assert!(before.contains("proto kernel"), "{before}");
            let free = via("10.1.3.0/24", "10.1.3.0", "flannel.1");
            let over = [
                via(LAN, "10.1.2.0", "flannel.1"),
                free.clone(),
                (via(LAN, "10.1.2.0", "up0").0, Value::Route(Route::Device { dev: name("up0") })),
                (via(LAN, "10.1.2.0", "up0").0, Value::Route(Route::Blackhole)),
            ];
            let ops = over.map(|(key, value)| Op::Ensure(key, value));
            for observe_first in [false, true] {
                if observe_first {
                    k.observe(&[]).unwrap();
                }
                for (op, outcome) in ops.iter().zip(k.apply(&ops)) {
                    match outcome {
                        Outcome::Done => assert_eq!(op.key(), free.0),
                        Outcome::Fatal(text) => {
                            assert!(text.contains(LAN) && text.contains("the kernel has its own route"), "{text}");
                        }
                        other @ (Outcome::Retry(_) | Outcome::Partly { .. }) => panic!("{other:?}"),
                    }
                }
                assert_eq!(shown(LAN), before);
                let ours = usize::from(with_nexthops);
                assert_eq!(nexthops(), ours, "no nexthop is left behind");
            }
            ip("addr del 10.0.0.1/24 dev up0");
            assert_eq!(shown(LAN), "");
            all_done(&ops[..1], k.apply(&ops[..1]));
            assert!(shown(LAN).contains("proto 90"), "the kernel's route is gone: {}", shown(LAN));
        });
    }
}

/// The adapter reads so many routes with one dump, and does not ask for each of them.
#[test]
fn the_kernels_own_route_stays_among_many_that_are_replaced() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        let before = shown(LAN);
        let many: Vec<(Key, Value)> =
            (0..40).map(|n| via(&format!("10.2.{n}.0/24"), "10.1.2.0", "flannel.1")).collect();
        for n in 0..40 {
            ip(&format!("route add 10.2.{n}.0/24 via 10.0.0.9 dev up0 proto static"));
        }
        let (lan, over) = via(LAN, "10.1.2.0", "flannel.1");
        let mut ops: Vec<Op> = many.iter().map(|(key, value)| Op::Ensure(*key, value.clone())).collect();
        ops.insert(20, Op::Ensure(lan, over));
        for (op, outcome) in ops.iter().zip(k.apply(&ops)) {
            let is_right = if op.key() == lan {
                matches!(&outcome, Outcome::Fatal(text) if text.contains("the kernel has its own route"))
            } else {
                outcome == Outcome::Done
            };
            assert!(is_right, "{op}: {outcome:?}");
        }
        assert_eq!(shown(LAN), before);
        let seen = k.observe(&[]).unwrap();
        assert!(many.iter().all(|(key, value)| seen.get(key).is_some_and(|seen| seen.value == *value)), "{seen:?}");
        assert_eq!((ip("-4 route show proto static"), nexthops()), (String::new(), 40));
    });
}

/// A policy rule leads packets of the host to a route in another table with the same prefix and metric. That route says nothing about the
/// one in the main table.
#[test]
fn the_kernels_own_route_stays_where_a_policy_rule_leads_to_another_table() {
    for with_nexthops in [true, false] {
        in_namespace(|| async move {
            let mut k = kernel(with_nexthops);
            put(&mut k, &[vxlan(false)]);
            ip(&format!("route add {LAN} dev up0 proto static table 100"));
            ip(&format!("rule add to {LAN} lookup 100 pref 100"));
            let before = shown(LAN);
            assert!(before.contains("proto kernel"), "{before}");
            let (key, value) = via(LAN, "10.1.2.0", "flannel.1");
            let outcome = k.apply(&[Op::Ensure(key, value)]).remove(0);
            let is_refused = matches!(&outcome, Outcome::Fatal(text) if text.contains("the kernel has its own route"));
            assert!(is_refused, "{outcome:?}");
            assert_eq!(shown(LAN), before);
        });
    }
}

/// The kernel's route for an IPv6 address has the metric 256, so another route to this prefix may be replaced by ours.
#[test]
fn a_route_of_the_kernel_with_another_metric_is_not_in_the_place_of_ours() {
    in_namespace(|| async {
        let mut k = kernel(true);
        ip("-6 route add fd00::/64 via fd00::9 dev up0 metric 1024 proto static");
        put(&mut k, &[via("fd00::/64", "fd00::2", "up0")]);
        let left = ip("-6 route show fd00::/64");
        assert!(left.contains("proto kernel") && left.contains("via fd00::2 "), "{left}");
        assert!(!left.contains("proto static"), "{left}");
    });
}

/// The address was added after our route, so the kernel added its own route behind ours.
#[test]
fn our_route_is_removed_and_the_kernels_own_one_stays() {
    for with_nexthops in [true, false] {
        in_namespace(|| async move {
            let mut k = kernel(with_nexthops);
            let ours = via("10.9.1.0/24", "10.1.2.0", "flannel.1");
            put(&mut k, &[vxlan(false), ours.clone()]);
            ip("addr add 10.9.1.1/24 dev up0");
            assert_eq!(shown("10.9.1.0/24").lines().count(), 2);
            let seen = k.observe(&[]).unwrap().get(&ours.0).unwrap().clone();
            assert_eq!((&seen.value, seen.protocol), (&Value::Route(Route::Other), PROTOCOL), "it can be removed");
            assert!(matches!(&k.apply(&[Op::Ensure(ours.0, ours.1)])[..], [Outcome::Fatal(_)]));
            assert_eq!(shown("10.9.1.0/24").lines().count(), 2, "nothing is deleted");
            remove(&mut k, &[(ours.0, seen.value.clone())]);
            let left = shown("10.9.1.0/24");
            assert!(left.contains("proto kernel") && left.lines().count() == 1, "{left}");
            // A route of another program beside that of the kernel: neither is ours.
            ip("route append 10.9.1.0/24 via 10.0.0.9 dev up0 proto static");
            assert_eq!(k.observe(&[]).unwrap().get(&ours.0).unwrap().protocol, 2);
        });
    }
}

#[test]
fn routes_of_other_programs_are_replaced_in_one_step() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false), vxlan(true)]);
        let many: Vec<(Key, Value)> =
            (0..300).map(|n| via(&format!("10.{}.{}.0/24", 2 + n / 200, n % 200), "10.1.2.0", "flannel.1")).collect();
        for (key, _) in &many {
            let Key::Route(net, _) = key else { panic!() };
            ip(&format!("route add {net} via 10.0.0.9 dev up0 proto static"));
        }
        ip("-6 route add fd00:2::/64 via fd00::9 dev up0 proto static");
        // The gateway of a tunnel route is inside its prefix, so IPv6 refuses the route as long as the other one is there.
        let six = via("fd00:2::/64", "fd00:2::", "flannel-v6.1");
        let all: Vec<_> = many.iter().cloned().chain([six]).collect();
        put(&mut k, &all);
        let seen = k.observe(&[]).unwrap();
        for (key, value) in all {
            let seen = seen.get(&key).unwrap();
            assert_eq!((&seen.value, seen.protocol), (&value, PROTOCOL));
        }
        assert_eq!((ip("-4 route show proto static"), nexthops()), (String::new(), 300));
        assert_eq!(ip("-6 route show proto static"), "");
    });
}

/// Linux refuses a route whose gateway is reached over another device. The route in its place, to the subnet of the gateway, has this effect.
#[test]
fn an_ipv6_route_that_leads_to_its_gateway_is_replaced_in_one_step() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(true)]);
        ip("link add other type vxlan id 7 dev up0 dstport 8473");
        ip("link set other up");
        let to = |dev: &str| via("fd00:2::/64", "fd00:2::", dev);
        put(&mut k, &[to("flannel-v6.1")]);
        let mut monitor = Command::new("ip").args(["-6", "monitor", "route"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(monitor.stdout.take().unwrap()).lines().map(Result::unwrap);
        // The monitor listens when it shows one of these.
        let begun = std::thread::spawn(move || {
            lines.find(|line| line.contains("fd00:99:")).unwrap();
            lines
        });
        let mut number = 0;
        while !begun.is_finished() {
            number += 1;
            ip(&format!("-6 route add fd00:99:{number}::/64 dev other"));
        }
        let mut lines = begun.join().unwrap();
        put(&mut k, &[to("other")]);
        ip("-6 route add fd00:98::/64 dev other");
        let seen: Vec<String> = lines.by_ref().take_while(|line| !line.contains("fd00:98::/64")).collect();
        monitor.kill().unwrap();
        monitor.wait().unwrap();
        assert!(seen.iter().any(|line| line.contains("fd00:2::/64 via fd00:2:: dev other")), "{seen:?}");
        assert!(!seen.iter().any(|line| line.starts_with("Deleted fd00:2::/64")), "{seen:?}");
        let left = ip("-6 route show");
        assert!(
            !left.lines().any(|line| line.starts_with("fd00:2:: ")),
            "the route to the gateway is gone again: {left}"
        );
    });
}

/// The route of another program may lead over the neighbour that goes. It is replaced in a second exchange with the kernel.
#[test]
fn a_neighbour_goes_only_when_the_route_that_may_need_it_is_replaced() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (neighbour, route) = (neigh("flannel.1", "10.1.2.0", 7), via("10.1.3.0/24", "10.1.3.0", "flannel.1"));
        put(&mut k, &[vxlan(false), neighbour.clone()]);
        ip("route add 10.1.3.0/24 via 10.1.2.0 dev flannel.1 onlink proto static");
        let mut monitor = LinuxMonitor::open(MonitorOptions::new(PROTOCOL, k.shared())).unwrap();
        let ops = [Op::Ensure(route.0, route.1.clone()), Op::Remove(neighbour.0, neighbour.1)];
        all_done(&ops, k.apply(&ops));
        // The notices come in the order of the changes.
        let mut seen = Vec::new();
        while !seen.contains(&Notice::Entry(neighbour.0, None)) {
            seen.extend(tokio::time::timeout(PATIENCE, monitor.next()).await.expect("the neighbour is gone").unwrap());
        }
        let place = |is: &dyn Fn(&Notice) -> bool| seen.iter().position(is);
        let replaced =
            place(&|n| matches!(n, Notice::Entry(key, Some(now)) if *key == route.0 && now.value == route.1));
        let gone = place(&|n| *n == Notice::Entry(neighbour.0, None));
        assert!(replaced.is_some() && replaced < gone, "{seen:?}");
    });
}
