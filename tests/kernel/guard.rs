// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard in the real kernel: whose packets it lets in, and what happens when another program changes it.

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::path::Path;
use std::time::{Duration, Instant};

use weft::firewall::guard::table as guard;
use weft::firewall::nft::connection;
use weft::firewall::nft::generation::generation;
use weft::instance::Instance;
use weft::kernel::{Kernel, LinuxKernel, LinuxMonitor, LinuxOptions, Monitor, MonitorOptions, Notice};
use weft_backends::diff::Op;
use weft_backends::state::{Guard, Key, Observed, Value};
use weft_subnet::cidr::Family;

use crate::patience::PATIENCE;

use super::adapter_net::{PROTOCOL, all_done, in_namespace, ip, put, remove, run, settled};

const FILE: &str = "/run/flannel/subnet.env";

fn kernel() -> LinuxKernel {
    let options =
        LinuxOptions { nexthop_objects: true, instance: 7, protocol: PROTOCOL, alias: format!("weft {FILE}") };
    LinuxKernel::open(options).unwrap()
}

fn peer(ip: &str) -> (Key, Value) {
    (Key::Peer(ip.parse().unwrap()), Value::Peer)
}

fn chain(family: Family, ports: [u16; 2], ipip: bool) -> (Key, Value) {
    (Key::Guard(family), Value::Guard(Guard { ports, ipip }))
}

fn observed(kernel: &mut LinuxKernel) -> Vec<(Key, Value)> {
    let all: Observed = kernel.observe(&[]).unwrap();
    let ours = all.into_iter().filter(|(key, _)| matches!(key, Key::Peer(_) | Key::Guard(_)));
    let ours: Vec<(Key, Value)> = ours.map(|(key, seen)| (key, seen.value)).collect();
    let alone = kernel.guard().unwrap().into_iter().map(|(key, seen)| (key, seen.value));
    assert_eq!(alone.collect::<Vec<_>>(), ours, "the guard is read alone after a change of its table");
    ours
}

/// Binds a socket. A process that another test is just starting has copies of all sockets, also closed ones, until it executes its
/// program.
fn bound(to: &str) -> UdpSocket {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match UdpSocket::bind(to) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {}
            done => return done.unwrap(),
        }
    }
}

/// Asserts that a datagram from one address to a port of this host arrives, or that it does not. Over the loopback device, the kernel
/// delivers a datagram while it is sent.
fn assert_arrives(from: &str, to: &str, expected: bool) {
    let server = bound(to);
    server.set_read_timeout(Some(if expected { PATIENCE } else { Duration::from_millis(200) })).unwrap();
    let client = UdpSocket::bind((from.parse::<std::net::IpAddr>().unwrap(), 0)).unwrap();
    client.send_to(b"vxlan", to).unwrap();
    assert_eq!(server.recv(&mut [0; 16]).is_ok(), expected, "{from} to {to}");
}

#[test]
fn only_packets_from_peers_are_accepted() {
    in_namespace(|| async {
        for address in ["10.9.9.1/32", "10.9.9.2/32", "fd09::1/128", "fd09::2/128"] {
            let nodad = if address.contains(':') { " nodad" } else { "" };
            ip(&format!("addr add {address} dev lo{nodad}"));
        }
        let mut k = kernel();
        let all = [
            peer("10.9.9.1"),
            peer("fd09::1"),
            chain(Family::V4, [4789, 8472], true),
            chain(Family::V6, [0, 8472], false),
        ];
        put(&mut k, &all);
        assert_eq!(observed(&mut k), all);
        assert_eq!(observed(&mut kernel()), all, "another process");
        for (from, to, expected) in [
            ("10.9.9.1", "10.0.0.1:8472", true),
            ("10.9.9.2", "10.0.0.1:8472", false),
            ("10.9.9.2", "10.0.0.1:4789", false),
            ("10.9.9.2", "10.0.0.1:8473", true),
            ("fd09::1", "[fd00::1]:8472", true),
            ("fd09::2", "[fd00::1]:8472", false),
            ("fd09::2", "[fd00::1]:4789", true),
        ] {
            assert_arrives(from, to, expected);
        }
        let text = run("nft", "list chain ip weft-guard input");
        assert!(text.contains("udp dport 8472 ip saddr != @peers counter packets 1 "), "counted: {text}");
        assert!(text.contains("meta l4proto ipencap ip saddr != @peers counter"), "{text}");
        // Peers are added and removed one by one. Without its chain, the guard drops nothing.
        put(&mut k, &[peer("10.9.9.2")]);
        assert_arrives("10.9.9.2", "10.0.0.1:8472", true);
        remove(&mut k, &[peer("10.9.9.1")]);
        assert_arrives("10.9.9.1", "10.0.0.1:8472", false);
        assert_arrives("10.9.9.2", "10.0.0.1:8472", true);
        remove(&mut k, &[chain(Family::V4, [4789, 8472], true)]);
        assert_arrives("10.9.9.1", "10.0.0.1:8472", true);
    });
}

#[test]
fn entries_that_are_already_there_or_gone_are_done() {
    in_namespace(|| async {
        let mut k = kernel();
        let gone = [peer("10.9.9.1"), peer("fd09::1"), chain(Family::V4, [0, 8472], false)];
        remove(&mut k, &gone);
        assert_eq!(observed(&mut k), []);
        put(&mut k, &gone);
        put(&mut k, &gone);
        remove(&mut k, &gone[..1]);
        // One of them is already gone. The others are nevertheless removed.
        remove(&mut k, &gone);
        assert_eq!(observed(&mut k), []);
        assert!(guard::remove(&Instance::new(Path::new(FILE))).unwrap());
        assert!(!guard::remove(&Instance::new(Path::new(FILE))).unwrap());
        assert_eq!(run("nft", "list ruleset").trim(), "");
    });
}

#[test]
fn another_value_replaces_the_chain_and_changes_by_other_programs_are_observed() {
    in_namespace(|| async {
        let mut k = kernel();
        let good = [peer("10.9.9.1"), chain(Family::V4, [0, 8472], false)];
        put(&mut k, &[good[0].clone(), chain(Family::V4, [0, 4789], true)]);
        put(&mut k, &good);
        assert_eq!(observed(&mut k), good);
        for change in [
            "flush chain ip weft-guard input",
            "insert rule ip weft-guard input accept",
            "delete table ip weft-guard",
            "delete chain ip weft-guard input",
            "add table ip weft-guard { flags dormant; }",
        ] {
            run("nft", change);
            assert_ne!(observed(&mut k), good, "{change}");
            put(&mut k, &good);
            assert_eq!(observed(&mut k), good, "{change}");
        }
    });
}

/// Waits for this notice, and skips others.
async fn expect(monitor: &mut LinuxMonitor, what: &str, is: impl Fn(&Notice) -> bool) {
    let mut all = Vec::new();
    let wait = async {
        while !all.iter().any(&is) {
            all.extend(monitor.next().await.unwrap());
        }
    };
    let in_time = tokio::time::timeout(PATIENCE, wait).await.is_ok();
    assert!(in_time, "{what}: only {all:?}");
}

#[test]
fn changes_by_other_programs_are_reported() {
    in_namespace(|| async {
        settled();
        let mut k = kernel();
        let options = MonitorOptions::new(PROTOCOL, k.shared()).watch_guard(&format!("weft {FILE}"));
        let mut m = LinuxMonitor::open(options).unwrap();
        let all = [peer("10.9.9.1"), peer("fd09::1"), chain(Family::V4, [0, 8472], false)];
        put(&mut k, &all);
        expect(&mut m, "our own chain", |n| *n == Notice::Guard).await;
        let is = |text: &str, there: bool| {
            let (key, _) = peer(text);
            move |n: &Notice| matches!(n, Notice::Entry(k, seen) if *k == key && seen.is_some() == there)
        };
        for (change, ip, there) in [
            ("add element ip weft-guard peers { 10.9.9.7 }", "10.9.9.7", true),
            ("delete element ip weft-guard peers { 10.9.9.1 }", "10.9.9.1", false),
            ("flush set ip6 weft-guard peers", "fd09::1", false),
        ] {
            run("nft", change);
            expect(&mut m, change, is(ip, there)).await;
        }
        for change in [
            "insert rule ip weft-guard input accept",
            "flush chain ip weft-guard input",
            "delete chain ip weft-guard input",
            "add table ip weft-guard { flags dormant; }",
            "delete table ip6 weft-guard",
            "flush ruleset",
        ] {
            run("nft", change);
            expect(&mut m, change, |n| *n == Notice::Guard).await;
        }
        // Changes of other tables are not reported, and a new peer is reported only as an entry.
        run("nft", "add table ip other");
        put(&mut k, &[chain(Family::V4, [0, 8472], false)]);
        expect(&mut m, "the chain again", |n| *n == Notice::Guard).await;
        run("nft", "add chain ip other input");
        put(&mut k, &[peer("10.9.9.3")]);
        let next = m.next().await.unwrap();
        assert!(matches!(next[..], [Notice::Entry(Key::Peer(_), Some(_))]), "{next:?}");
    });
}

#[test]
fn many_peers_are_added_at_once() {
    in_namespace(|| async {
        let mut k = kernel();
        let peers: Vec<(Key, Value)> =
            (0..5000u32).map(|n| peer(&std::net::Ipv4Addr::from_bits(0x0a00_0000 + n).to_string())).collect();
        let ops: Vec<Op> = peers.iter().map(|(key, value)| Op::Ensure(*key, value.clone())).collect();
        all_done(&ops, k.apply(&ops));
        assert_eq!(observed(&mut k), peers);
        remove(&mut k, &peers[..4000]);
        assert_eq!(observed(&mut k), &peers[4000..]);
    });
}

/// The transaction is larger than the usual send buffer of a socket (208 KiB). When it is done, the kernel may still move the elements of the
/// sets, which the first read must notice.
#[test]
fn a_large_cluster_of_both_families_is_one_transaction() {
    in_namespace(|| async {
        let mut k = kernel();
        let mut netlink = connection::open().unwrap();
        let all = (0..20_000u32).map(|n| std::net::Ipv4Addr::from_bits(0x0a00_0000 + n));
        let peers: Vec<(Key, Value)> =
            all.clone().map(|ip| peer(&ip.to_string())).chain(all.map(|ip| peer(&format!("fd09::{ip}")))).collect();
        let ops: Vec<Op> = peers.iter().map(|(key, value)| Op::Ensure(*key, value.clone())).collect();
        let before = generation(&mut netlink).unwrap();
        all_done(&ops, k.apply(&ops));
        assert_eq!(generation(&mut netlink).unwrap() - before, 1, "transactions");
        assert_eq!(observed(&mut k), peers);
    });
}
