// SPDX-License-Identifier: Apache-2.0
//! Limits of a pod's bandwidth, with Debian's bandwidth plugin chained behind ours.

use std::fs;
use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::portmap::in_pod;
use crate::site::{Site, on_a_node, wait_for};
use crate::verbs::{address, chain};

/// An address of the node that pods send to.
const NODE: &str = "198.51.100.1";
const PORT: u16 = 9;
/// Bytes per second in each direction. So the queue empties over minutes, and a test that is delayed measures the same.
const RATE: [u64; 2] = [1_000, 1_200];
/// Bytes that pass at once.
const BURST: [u64; 2] = [20_000, 30_000];
const COUNT: u64 = 200;
const PAYLOAD: usize = 1_000;
/// What the queue counts: the payload, and the headers of UDP, IPv4 and Ethernet.
const FRAME: u64 = PAYLOAD as u64 + 8 + 20 + 14;

/// The two ends of a direction: `None` is the node.
struct Way<'a> {
    from: Option<&'a str>,
    to: Option<&'a str>,
    address: String,
}

fn inside<T>(pod: Option<&str>, work: impl FnOnce() -> T) -> T {
    match pod {
        Some(pod) => in_pod(pod, work),
        None => work(),
    }
}

/// Returns how many IPv4 packets this namespace has received for itself. A datagram counts when it arrives at its socket, whether or not
/// the socket has room for it.
fn arrived(pod: Option<&str>) -> u64 {
    let text = inside(pod, || fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
    let lines: Vec<Vec<&str>> =
        text.lines().filter_map(|line| Some(line.strip_prefix("Ip: ")?.split(' ').collect())).collect();
    let column = lines[0].iter().position(|name| *name == "InDelivers").unwrap();
    lines[1][column].parse().unwrap()
}

/// What became of datagrams that were sent at once.
struct Sent {
    /// What [`arrived`] said before.
    before: u64,
    /// How many of them arrived while they were sent.
    count: u64,
    /// How long that took.
    took: Duration,
}

/// Sends [`COUNT`] datagrams at once.
fn send(way: &Way) -> Sent {
    let _server = inside(way.to, || UdpSocket::bind(("0.0.0.0", PORT)).unwrap());
    let client = inside(way.from, || UdpSocket::bind("0.0.0.0:0").unwrap());
    let to = (way.address.as_str(), PORT);
    // The first datagram waits until the neighbour is known, and many could not wait there.
    let before = arrived(way.to);
    client.send_to(&[0], to).unwrap();
    wait_for("the first datagram", || arrived(way.to) > before);
    let (before, begin) = (arrived(way.to), Instant::now());
    for _ in 0..COUNT {
        client.send_to(&[0; PAYLOAD], to).unwrap();
    }
    // The time is read last, so that a delay between the two makes the limit larger and not smaller.
    let count = arrived(way.to) - before;
    Sent { before, count, took: begin.elapsed() }
}

fn tc(words: &str) -> Value {
    let out = Command::new("tc").args(["-j", "-s"]).args(words.split(' ')).output().unwrap();
    assert!(out.status.success(), "tc {words}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Returns the queue with a limit at the root of this device.
#[track_caller]
fn limit(device: &str) -> Value {
    let all = tc(&format!("qdisc show dev {device}"));
    let found = all.as_array().unwrap().iter().find(|one| one["kind"] == "tbf" && one["root"] == true);
    found.unwrap_or_else(|| panic!("{device} has no limit: {all}")).clone()
}

/// Returns the devices through which packets of pods with a limit pass.
fn detours(site: &Site) -> Vec<String> {
    let text = site.ip("-o link show type ifb");
    text.lines().map(|line| line.split([':', '@']).nth(1).unwrap().trim().to_owned()).collect()
}

/// Returns the node's end of the pod's veth pair.
fn host_end(site: &Site, pod: &str) -> String {
    let text = site.ip(&format!("-n {pod} -o link show eth0"));
    let index = text.split(['@', ':']).nth(2).unwrap().strip_prefix("if").unwrap().to_owned();
    let all = site.ip("-o link show type veth");
    let line = all.lines().find(|line| line.starts_with(&format!("{index}:"))).unwrap();
    line.split([':', '@']).nth(1).unwrap().trim().to_owned()
}

/// The limits that a pod has in the kernel are those of its annotations, and hold: to the pod, and from the pod.
fn limits_hold(delegate: Value) {
    on_a_node(move |site| {
        site.ip(&format!("addr add {NODE}/32 dev lo"));
        let ours = site.conf(json!({"delegate": delegate}));
        let [to_pod, from_pod] = [0, 1].map(|i| (RATE[i] * 8, BURST[i] * 8));
        let limits = json!({"bandwidth": {
            "ingressRate": to_pod.0, "ingressBurst": to_pod.1, "egressRate": from_pod.0, "egressBurst": from_pod.1,
        }});
        let free = [ours.clone(), json!({"type": "bandwidth"})];
        let limited = [ours, json!({"type": "bandwidth", "runtimeConfig": limits})];
        for (pod, plugins) in [("p0", &free), ("p1", &limited)] {
            site.pod(pod);
            let result = chain(&site, "ADD", pod, plugins);
            let addr = address(&result);
            let ways = [
                Way { from: None, to: Some(pod), address: addr },
                Way { from: Some(pod), to: None, address: NODE.into() },
            ];
            if pod == "p0" {
                assert_eq!(detours(&site), Vec::<String>::new());
                for way in &ways {
                    let sent = send(way);
                    wait_for("all datagrams of a pod without a limit", || arrived(way.to) >= sent.before + COUNT);
                }
                continue;
            }
            let [detour] = <[String; 1]>::try_from(detours(&site)).unwrap();
            let end = host_end(&site, pod);
            let filters = tc(&format!("filter show dev {end} parent ffff:")).to_string();
            assert!(filters.contains(&format!("\"{detour}\"")), "packets of the pod must pass {detour}: {filters}");
            for (i, (way, device)) in ways.iter().zip([&end, &detour]).enumerate() {
                let options = limit(device)["options"].clone();
                assert_eq!((&options["rate"], &options["burst"]), (&json!(RATE[i]), &json!(BURST[i])), "{options}");
                let Sent { before, count, took } = send(way);
                let allowed = BURST[i] as f64 + RATE[i] as f64 * took.as_secs_f64() + FRAME as f64;
                assert!((count * FRAME) as f64 <= allowed, "{count} datagrams in {took:?} through {device}");
                let seen = limit(device);
                assert!(seen["drops"].as_u64() > Some(0), "the others must be dropped: {seen}");
                let burst = BURST[i] / FRAME - 2;
                wait_for("as many datagrams as pass at once", || arrived(way.to) >= before + burst);
            }
        }
        chain(&site, "DEL", "p1", &limited);
        assert_eq!(detours(&site), Vec::<String>::new(), "DEL must remove the device of the limit");
        chain(&site, "DEL", "p0", &free);
        site.nothing_left();
    });
}

#[test]
fn limits_hold_for_pods_on_the_bridge() {
    limits_hold(json!({"isDefaultGateway": true}));
}

#[test]
fn limits_hold_for_routed_pods() {
    limits_hold(json!({"type": "weft-veth"}));
}
