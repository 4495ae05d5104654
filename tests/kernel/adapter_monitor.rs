// SPDX-License-Identifier: Apache-2.0
//! The monitor reports every change of an entry.

use std::time::Instant;

use weft::kernel::{LinuxKernel, LinuxMonitor, Monitor, MonitorOptions, Notice, sysctl};
use weft_backends::state::{Key, ObservedValue, Value};

use crate::patience::PATIENCE;

use super::adapter_net::{
    ALIAS, PROTOCOL, bridge, fdb, in_namespace, ip, json, kernel, neigh, put, settled, via, vxlan,
};

fn monitor(k: &LinuxKernel) -> LinuxMonitor {
    LinuxMonitor::open(MonitorOptions::new(PROTOCOL, k.shared())).unwrap()
}

/// Waits for this notice, and skips others.
async fn expect(m: &mut LinuxMonitor, what: &str, is: impl Fn(&Notice) -> bool) {
    let mut all = Vec::new();
    let wait = async {
        loop {
            let notices = m.next().await.unwrap();
            if notices.iter().any(&is) {
                break;
            }
            all.extend(notices);
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, wait).await.is_ok();
    assert!(in_time, "{what}: only {all:?}");
}

fn gone(key: Key) -> impl Fn(&Notice) -> bool {
    move |n| *n == Notice::Entry(key, None)
}

fn is_now(key: Key, value: Value) -> impl Fn(&Notice) -> bool {
    move |n| matches!(n, Notice::Entry(k, Some(s)) if *k == key && s.value == value)
}

#[test]
fn every_deletion_and_change_is_reported() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let mut m = monitor(&k);
        let (link, f, n) = (vxlan(false), fdb("flannel.1", 77, "10.0.0.2"), neigh("flannel.1", "10.1.2.0", 77));
        let (r, plain) = (via("10.1.2.0/24", "10.1.2.0", "flannel.1"), via("10.1.3.0/24", "10.1.3.0", "flannel.1"));
        put(&mut k, &[link, f.clone(), n.clone(), r.clone()]);
        expect(&mut m, "own route", is_now(r.0, r.1.clone())).await;
        bridge("fdb replace 02:00:00:00:00:4d dev flannel.1 dst 10.0.0.9 self permanent");
        expect(&mut m, "fdb changed", is_now(f.0, fdb("flannel.1", 77, "10.0.0.9").1)).await;
        bridge("fdb del 02:00:00:00:00:4d dev flannel.1 self");
        expect(&mut m, "fdb deleted", gone(f.0)).await;
        put(&mut k, std::slice::from_ref(&f));
        expect(&mut m, "fdb back", is_now(f.0, f.1.clone())).await;
        // So does the device if it learns the address from a packet. Such an entry does not last.
        bridge("fdb replace 02:00:00:00:00:4d dev flannel.1 dst 10.0.0.9 self dynamic");
        expect(&mut m, "fdb learned", gone(f.0)).await;
        ip("neigh replace 10.1.2.0 lladdr 02:00:00:00:00:09 dev flannel.1 nud permanent");
        expect(&mut m, "neighbour changed", is_now(n.0, neigh("flannel.1", "10.1.2.0", 9).1)).await;
        ip("neigh del 10.1.2.0 dev flannel.1");
        expect(&mut m, "neighbour deleted", gone(n.0)).await;
        ip("route del 10.1.2.0/24");
        expect(&mut m, "route deleted", gone(r.0)).await;
        put(&mut k, std::slice::from_ref(&r));
        expect(&mut m, "route back", is_now(r.0, r.1.clone())).await;
        ip("nexthop flush");
        expect(&mut m, "nexthop flushed", gone(r.0)).await;
        ip("route add 10.1.3.0/24 via 10.1.3.0 dev flannel.1 onlink");
        expect(&mut m, "foreign route", is_now(plain.0, plain.1)).await;
        ip("route del 10.1.3.0/24");
        expect(&mut m, "foreign routes", |n| *n == Notice::Routes).await;
        ip("-6 route add blackhole fd00:77::/64");
        expect(&mut m, "IPv6", |n| matches!(n, Notice::Entry(Key::Route(net, 1024), Some(_)) if net.addr().is_ipv6()))
            .await;
        for change in [
            "link set flannel.1 mtu 1300",
            "link set flannel.1 address 02:00:00:00:00:55",
            "link set flannel.1 type vxlan ttl 5",
            "link set up0 down",
            "link set up0 up",
            "addr add 10.0.7.1/24 dev up0",
            "addr del 10.0.7.1/24 dev up0",
            "link set far0 down",
            "link del flannel.1",
        ] {
            ip(change);
            expect(&mut m, change, |n| *n == Notice::Links).await;
        }
    });
}

/// They may change by which interface an address is reached.
#[test]
fn rules_and_routes_of_all_tables_are_reported_where_they_matter() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let watched = || MonitorOptions::new(PROTOCOL, k.shared()).watch_fence(ALIAS);
        let mut m = LinuxMonitor::open(watched().watch_policy()).unwrap();
        let mut without = LinuxMonitor::open(watched()).unwrap();
        for change in [
            "route add default via 10.0.0.254 dev up0 table 100",
            "rule add to 192.0.2.9 lookup 100 pref 100",
            "rule del pref 100",
            "route del default table 100",
            "-6 route add default via fd00::fe dev up0 table 100",
            "-6 rule add to 2001:db8::9 lookup 100 pref 100",
            "-6 rule del pref 100",
        ] {
            ip(change);
            expect(&mut m, change, |n| *n == Notice::Routes).await;
        }
        // What came before is read when the change of the link is.
        ip("link set up0 mtu 1600");
        expect(&mut m, "a later change", |n| *n == Notice::Links).await;
        // The kernel itself writes the table of local addresses.
        ip("route add 192.0.2.77 dev up0 table local");
        let (key, value) = fdb("flannel.1", 1, "10.0.0.2");
        put(&mut k, &[vxlan(false), (key, value.clone())]);
        for monitor in [&mut without, &mut m] {
            expect(monitor, "nothing of this", |n| {
                assert_ne!(*n, Notice::Routes);
                is_now(key, value.clone())(n)
            })
            .await;
        }
    });
}

#[test]
fn an_overflow_is_reported_and_later_changes_too() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        let mut options = MonitorOptions::new(PROTOCOL, k.shared());
        options.buffer = 4096;
        let mut m = LinuxMonitor::open(options).unwrap();
        let many: Vec<_> = (0..500).map(|n| fdb("flannel.1", 1000 + n, "10.0.0.2")).collect();
        put(&mut k, &many);
        // The notification of this device is lost, too.
        ip("link add flannel.7 type vxlan id 7 dev up0 dstport 8472");
        expect(&mut m, "overflow", |n| *n == Notice::Lost).await;
        for dev in ["flannel.1", "flannel.7"] {
            let (key, value) = fdb(dev, 1, "10.0.0.2");
            put(&mut k, &[(key, value.clone())]);
            expect(&mut m, "after the overflow", is_now(key, value)).await;
        }
    });
}

/// Another program has put a nexthop of its own in the place of ours.
#[test]
fn a_nexthop_that_another_program_has_taken_over_is_not_deleted() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let route = via("10.1.2.0/24", "10.0.0.2", "up0");
        put(&mut k, std::slice::from_ref(&route));
        let mut m = monitor(&k);
        let id = json("ip", "-j nexthop")[0]["id"].clone();
        ip(&format!("nexthop replace id {id} via 10.0.0.9 dev up0 protocol static"));
        // The notices come in the order of the changes, so that of the nexthop is read before this one.
        ip("link set up0 mtu 1400");
        expect(&mut m, "a later change", |n| *n == Notice::Links).await;
        put(&mut k, &[via("10.1.2.0/24", "10.0.0.3", "up0")]);
        let left = json("ip", "-j nexthop");
        assert!(left.as_array().unwrap().iter().any(|nexthop| nexthop["id"] == id), "{left}");
    });
}

#[test]
fn changes_that_do_not_matter_are_not_reported() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        ip("link add cni0 type bridge");
        settled();
        let mut m = monitor(&k);
        // The kernel notifies of each of these: a link without a relevant change, a renewed address, a neighbour that is not permanent
        // and one of a multicast address, a route of another table, the links of pods.
        ip("link set up0 txqueuelen 500");
        ip("addr change fd00::1/64 dev up0 nodad");
        ip("neigh replace 10.0.0.9 lladdr 02:00:00:00:00:09 dev up0 nud reachable");
        ip("neigh add 239.1.1.1 lladdr 01:00:5e:01:01:01 dev flannel.1 nud permanent");
        // The device learns an address of which the agent has no entry.
        bridge("fdb add 02:00:00:00:00:0a dev flannel.1 dst 10.0.0.9 self dynamic");
        ip("route add 10.77.0.0/16 dev up0 table 77");
        // A pod is created and deleted.
        ip("link add pod0 type veth peer name pod1");
        ip("link set pod0 up");
        ip("link set pod1 up");
        ip("route add 10.5.1.7/32 dev pod0 proto 91");
        ip("route del 10.5.1.7/32 dev pod0");
        ip("link set pod0 master cni0");
        ip("link del pod0");
        let (key, value) = fdb("flannel.1", 1, "10.0.0.2");
        put(&mut k, &[(key, value.clone())]);
        let first = m.next().await.unwrap();
        // Removed routes are reported as entries, because only the plan knows if it wants them.
        let (entries, rest): (Vec<_>, Vec<_>) =
            first.iter().partition(|n| matches!(n, Notice::Entry(Key::Route(..), None)));
        assert!(entries.len() <= 2 && rest.len() == 1 && is_now(key, value)(rest[0]), "{first:?}");
    });
}

/// The uplink may have an IPv6 address only, and an address that is deprecated is not published.
#[test]
fn a_change_of_an_ipv6_address_or_of_its_flags_is_reported() {
    in_namespace(|| async {
        let k = kernel(true);
        settled();
        let mut m = monitor(&k);
        for change in
            ["add fd00::7/64 dev up0 nodad", "change fd00::7/64 dev up0 preferred_lft 0", "del fd00::7/64 dev up0"]
        {
            ip(&format!("-6 addr {change}"));
            expect(&mut m, change, |n| *n == Notice::Links).await;
        }
    });
}

/// The kernel announces a new IPv6 address a moment later, in a work queue. One that another program removes before is never announced.
#[test]
fn the_removal_of_an_ipv6_address_that_was_not_announced_is_reported() {
    in_namespace(|| async {
        let k = kernel(true);
        settled();
        let mut m = monitor(&k);
        let commands = "addr add fd00::8/64 dev up0 nodad\naddr del fd00::8/64 dev up0\n";
        let script = format!("printf '{commands}' | ip -6 -batch -");
        assert!(std::process::Command::new("sh").args(["-c", &script]).status().unwrap().success());
        expect(&mut m, "the removal", |n| *n == Notice::Links).await;
    });
}

/// Each end of the link of a pod has a link-local address, a second after it was set up and until the pod is deleted.
#[test]
fn the_link_local_addresses_of_pods_are_not_reported() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        settled();
        let mut m = monitor(&k);
        ip("link add pod0 type veth peer name pod1");
        ip("link set pod0 up");
        ip("link set pod1 up");
        ip("-6 addr add fe80::77/64 dev pod0 nodad");
        // This route comes after the notification of the address.
        let deadline = Instant::now() + PATIENCE;
        while !ip("-6 route show table local dev pod0").contains("local fe80::77 ") {
            assert!(Instant::now() < deadline, "{}", ip("-6 addr show dev pod0"));
        }
        ip("link del pod0");
        let (key, value) = fdb("flannel.1", 1, "10.0.0.2");
        put(&mut k, &[(key, value.clone())]);
        expect(&mut m, "a later change", |n| {
            assert_ne!(*n, Notice::Links);
            is_now(key, value.clone())(n)
        })
        .await;
    });
}

/// The old nexthop is deleted when the route has moved. If that looked like the loss of the route, the agent would write it again, with another
/// nexthop, and so on without end.
#[test]
fn a_route_that_the_agent_moves_is_reported_as_it_is_now() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        settled();
        let mut m = monitor(&k);
        let [before, after] = ["10.0.0.2", "10.0.0.3"].map(|gateway| via("10.1.2.0/24", gateway, "up0"));
        put(&mut k, &[before]);
        put(&mut k, std::slice::from_ref(&after));
        let (key, value) = fdb("flannel.1", 1, "10.0.0.2");
        put(&mut k, &[(key, value.clone())]);
        let mut seen: Vec<Notice> = Vec::new();
        while !seen.iter().any(is_now(key, value.clone())) {
            seen.extend(tokio::time::timeout(PATIENCE, m.next()).await.expect("a later change").unwrap());
        }
        let last = seen.iter().rfind(|n| matches!(n, Notice::Entry(key, _) if *key == after.0));
        let ours = ObservedValue { value: after.1, protocol: PROTOCOL, mark: true };
        assert_eq!(last, Some(&Notice::Entry(after.0, Some(ours))), "{seen:?}");
        assert!(!seen.contains(&Notice::Routes), "it is no route of another program: {seen:?}");
        assert!(!seen.contains(&Notice::Links), "{seen:?}");
    });
}

/// The monitor reads a limited number at once. No new notification wakes it up for the rest.
#[test]
fn more_notifications_than_are_read_at_once_are_all_reported() {
    in_namespace(|| async {
        let mut k = kernel(true);
        put(&mut k, &[vxlan(false)]);
        let options = MonitorOptions { buffer: 64 << 20, ..MonitorOptions::new(PROTOCOL, k.shared()) };
        let mut m = LinuxMonitor::open(options).unwrap();
        let many: Vec<_> = (0..5000).map(|n| fdb("flannel.1", 1000 + n, "10.0.0.2")).collect();
        put(&mut k, &many);
        let (key, value) = many.last().unwrap().clone();
        let first = m.next().await.unwrap();
        assert!(!first.contains(&Notice::Lost) && !first.iter().any(is_now(key, value.clone())), "{}", first.len());
        let rest = tokio::select! {
            biased;
            rest = m.next() => rest.unwrap(),
            () = std::future::ready(()) => panic!("the monitor waits for a new notification"),
        };
        assert!(rest.iter().any(is_now(key, value)), "{}", rest.len());
    });
}

/// With nexthop_compat_mode=0 the notification of a route has only the id of its nexthop. Our own write must not look like a change.
#[test]
fn a_route_with_the_nexthop_that_we_gave_it_is_not_reported_where_the_kernel_sends_only_ids() {
    in_namespace(|| async {
        let mut k = kernel(true);
        sysctl::ensure("net/ipv4/nexthop_compat_mode", "0", true).unwrap();
        put(&mut k, &[vxlan(false)]);
        let mut m = monitor(&k);
        let (ours, other) = (via("10.1.2.0/24", "10.0.0.2", "up0"), via("10.1.3.0/24", "10.0.0.2", "up0"));
        put(&mut k, std::slice::from_ref(&ours));
        ip("nexthop add id 7 via 10.0.0.9 dev up0");
        ip("route add 10.1.3.0/24 nhid 7");
        expect(&mut m, "the route of another program", |n| {
            assert!(!matches!(n, Notice::Entry(key, _) if *key == ours.0), "{n:?}");
            matches!(n, Notice::Entry(key, Some(_)) if *key == other.0)
        })
        .await;
    });
}
