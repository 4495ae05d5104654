// SPDX-License-Identifier: Apache-2.0
//! The fence in the real kernel: which route the kernel chooses for forwarded packets and for those of the host, and which changes are
//! reported.

use weft::kernel::{Kernel, LinuxKernel, LinuxMonitor, LinuxOptions, Monitor, MonitorOptions, Notice};
use weft_backends::state::{Fence, Key, Observed, Value};
use weft_subnet::cidr::Family;

use crate::patience::PATIENCE;

use super::adapter_net::{PROTOCOL, in_namespace, ip, put, remove};

const ALIAS: &str = "weft /run/flannel/subnet.env";

fn kernel() -> LinuxKernel {
    let options = LinuxOptions { nexthop_objects: true, instance: 7, protocol: PROTOCOL, alias: ALIAS.to_owned() };
    LinuxKernel::open(options).unwrap()
}

fn fence(family: Family, unreachable: Option<&str>, blackhole: Option<&str>) -> (Key, Value) {
    let net = |text: Option<&str>| text.map(|text| text.parse().unwrap());
    (Key::Fence(family), Value::fence(Fence { unreachable: net(unreachable), blackhole: net(blackhole), whole: true }))
}

fn open(ip: &str) -> (Key, Value) {
    (Key::Open(ip.parse().unwrap()), Value::Open)
}

fn observed(kernel: &mut LinuxKernel) -> Vec<(Key, Value)> {
    let all: Observed = kernel.observe(&[]).unwrap();
    let ours = all.into_iter().filter(|(key, _)| matches!(key, Key::Open(_) | Key::Fence(_)));
    let ours: Vec<(Key, Value)> = ours.map(|(key, seen)| (key, seen.value)).collect();
    let alone = kernel.fence().unwrap().into_iter().map(|(key, seen)| (key, seen.value));
    assert_eq!(alone.collect::<Vec<_>>(), ours, "the fence is read alone after a change of its rules");
    ours
}

/// Adds a default route, the link of a pod and the route of a peer, in both families.
fn prepare() {
    for line in [
        "link set lo up",
        "link add dev pod0 type veth peer name pod1",
        "link set pod0 up",
        "link set pod1 up",
        "addr add 100.100.1.1/24 dev pod0",
        "-6 addr add fd00:100:0:1::1/64 dev pod0 nodad",
        "route add default via 10.0.0.99 dev up0 onlink",
        "-6 route add default via fd00::99 dev up0",
        "route add 100.100.2.0/24 via 10.0.0.9 dev up0 onlink",
        "-6 route add fd00:100:0:2::/64 via fd00::9 dev up0",
    ] {
        ip(line);
    }
    for knob in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        std::fs::write(format!("/proc/sys/net/{knob}"), "1").unwrap();
    }
}

/// Returns where the kernel would send a packet of a pod (`true`) or of the host.
fn goes(to: &str, forwarded: bool) -> String {
    let from = if to.contains(':') { "fd00:100:0:1::5" } else { "100.100.1.5" };
    let words = if forwarded { format!("route get {to} from {from} iif pod0") } else { format!("route get {to}") };
    let out = std::process::Command::new("ip").args(words.split(' ')).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    let known = [
        "100.100.1.5 dev pod0",
        "10.0.0.99",
        "10.0.0.9 ",
        "fd00::99",
        "fd00::9 ",
        "No route to host",
        "Invalid argument",
    ];
    let found = known.iter().find(|part| text.contains(**part));
    found.map_or_else(|| text.clone(), |part| part.trim().to_owned())
}

#[test]
fn forwarded_packets_need_a_route_of_their_own_and_packets_of_the_host_do_not() {
    in_namespace(|| async {
        prepare();
        let mut k = kernel();
        let fences = [fence(Family::V4, Some("100.64.0.0/10"), None), fence(Family::V6, Some("fd00:100::/32"), None)];
        let exceptions = [open("100.70.0.5"), open("fd00:100:9::5")];
        put(&mut k, &[&exceptions[..], &fences[..]].concat());
        assert_eq!(
            observed(&mut k),
            [exceptions[0].clone(), exceptions[1].clone(), fences[0].clone(), fences[1].clone()]
        );
        for (to, forwarded, own) in [
            ("100.100.2.7", "10.0.0.9", "10.0.0.9"),
            ("100.100.3.7", "No route to host", "10.0.0.99"),
            ("100.70.0.5", "10.0.0.99", "10.0.0.99"),
            ("198.51.100.1", "10.0.0.99", "10.0.0.99"),
            ("fd00:100:0:2::7", "fd00::9", "fd00::9"),
            ("fd00:100:0:3::7", "No route to host", "fd00::99"),
            ("fd00:100:9::5", "fd00::99", "fd00::99"),
            ("2001:db8::1", "fd00::99", "fd00::99"),
        ] {
            assert_eq!((goes(to, true).as_str(), goes(to, false).as_str()), (forwarded, own), "{to}");
        }
        // Another fence replaces the first one, and then there is none.
        let both = fence(Family::V4, Some("100.96.0.0/11"), Some("100.100.1.0/24"));
        put(&mut k, std::slice::from_ref(&both));
        assert_eq!(observed(&mut k), [exceptions[0].clone(), exceptions[1].clone(), both.clone(), fences[1].clone()]);
        assert_eq!(goes("100.70.0.9", true), "10.0.0.99", "no longer inside");
        assert_eq!(goes("100.100.3.7", true), "No route to host");
        ip("addr del 100.100.1.1/24 dev pod0");
        assert_eq!(goes("100.100.1.77", true), "Invalid argument", "an unused address is dropped silently");
        assert_eq!(goes("100.100.1.77", false), "10.0.0.99");
        remove(&mut k, &[both, fences[1].clone(), exceptions[0].clone(), exceptions[1].clone()]);
        assert_eq!(observed(&mut k), []);
        let left = ip("rule") + &ip("-6 rule");
        assert!(!left.contains("proto"), "{left}");
    });
}

#[test]
fn missing_and_additional_rules_are_observed_and_reported() {
    in_namespace(|| async {
        let mut k = kernel();
        let wanted = fence(Family::V4, Some("10.5.0.0/16"), Some("10.5.1.0/24"));
        let mut m = LinuxMonitor::open(MonitorOptions::new(PROTOCOL, k.shared()).watch_fence(ALIAS)).unwrap();
        for damage in [
            "rule del pref 30200",
            "rule del pref 30201",
            "rule del pref 30202",
            "rule del pref 30203",
            "route del unreachable 10.5.0.0/16 table 90000",
            "route del blackhole 10.5.1.0/24 table 90001",
            "route add unreachable 10.5.0.0/17 table 90000",
            // An exception opens one address. This one opens half of Network.
            "route add throw 10.5.0.0/17 table 90000",
            // An unused address of the own subnet is no exception.
            "route add throw 10.5.1.7 table 90001",
            "rule add pref 30202 to 10.5.0.0/16 fwmark 7 lookup main suppress_prefixlength 15 proto 90",
        ] {
            put(&mut k, std::slice::from_ref(&wanted));
            assert_eq!(observed(&mut k), std::slice::from_ref(&wanted), "{damage}");
            expect_change(&mut m).await;
            ip(damage);
            expect_change(&mut m).await;
            let [(_, Value::Fence(ref seen))] = observed(&mut k)[..] else {
                panic!("{damage}: {:?}", observed(&mut k))
            };
            assert!(Value::Fence(seen.clone()) != wanted.1, "{damage}");
        }
    });
}

/// Another program may use a preference of the fence for a rule of its own. Before Linux 4.17, rules have no protocol.
#[test]
fn a_rule_of_another_program_with_a_preference_of_the_fence_stays() {
    in_namespace(|| async {
        let mut k = kernel();
        let wanted = fence(Family::V4, Some("10.5.0.0/16"), None);
        ip("rule add pref 30202 from 192.0.2.0/24 lookup 77 proto 91");
        assert_eq!(observed(&mut k), []);
        put(&mut k, std::slice::from_ref(&wanted));
        assert_eq!(observed(&mut k), std::slice::from_ref(&wanted));
        remove(&mut k, &[wanted]);
        let left = ip("rule show pref 30202");
        assert!(left.contains("192.0.2.0/24") && left.lines().count() == 1, "{left}");
    });
}

/// Asserts that a change of the fence is reported, and reads all notifications about it. They come in the order of the changes, so all of
/// them were read when the last one arrives: a link changes its MTU.
async fn expect_change(m: &mut LinuxMonitor) {
    let other = if ip("link show up0").contains(" mtu 1400 ") { 1401 } else { 1400 };
    ip(&format!("link set up0 mtu {other}"));
    let (mut reported, mut last) = (false, false);
    while !last {
        let notices = tokio::time::timeout(PATIENCE, m.next()).await.expect("the link changed").unwrap();
        reported |= notices.contains(&Notice::Fence);
        last = notices.contains(&Notice::Links);
    }
    assert!(reported, "no change of the fence was reported");
}

/// Network changes. The notifications of the kernel show the order in which the old fence was replaced.
#[test]
fn the_new_fence_is_complete_before_the_old_one_is_removed() {
    in_namespace(|| async {
        prepare();
        let mut k = kernel();
        let output = tempfile::NamedTempFile::new().unwrap();
        let mut monitor = std::process::Command::new("ip");
        monitor.args(["monitor", "rule", "route"]).stdout(output.reopen().unwrap());
        let mut monitor = monitor.spawn().unwrap();
        let printed = || std::fs::read_to_string(output.path()).unwrap();
        // A route in a table that nobody uses shows how far the output has come.
        let marked = |number: u32| {
            let deadline = std::time::Instant::now() + PATIENCE;
            let mut metric = 0;
            while !printed().contains(&format!("198.51.100.{number} ")) {
                assert!(std::time::Instant::now() < deadline, "{}", printed());
                // The kernel would not notify of the same route again.
                metric += 1;
                ip(&format!("route add unreachable 198.51.100.{number} table 77 metric {metric}"));
            }
        };
        for (at, (old, new)) in [("10.5.0.0/16", "10.0.0.0/8"), ("10.0.0.0/8", "100.64.0.0/10")].into_iter().enumerate()
        {
            put(&mut k, &[fence(Family::V4, Some(old), None)]);
            let at = u32::try_from(at).unwrap() * 2;
            marked(at);
            let begin = printed().len();
            put(&mut k, &[fence(Family::V4, Some(new), None)]);
            marked(at + 1);
            let output = printed();
            let ours = |line: &&str| line.contains("lookup") || line.contains("table 90000");
            let lines: Vec<String> = output[begin..]
                .lines()
                .filter(ours)
                .map(|line| {
                    let gone = if line.contains("Deleted") { "-" } else { "+" };
                    let net = if line.contains(&format!("{new} ")) { "new" } else { "old" };
                    format!("{gone}{} {net}", if line.contains("lookup") { "rule" } else { "route" })
                })
                .collect();
            assert_eq!(
                lines,
                ["+rule new", "+route new", "-route old", "-rule old"],
                "{old} {new}: {}",
                &output[begin..]
            );
        }
        monitor.kill().unwrap();
        monitor.wait().unwrap();
    });
}
