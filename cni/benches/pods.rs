// SPDX-License-Identifier: Apache-2.0
//! Compares routed pods with the bridge, in turns: ADD and DEL with the real host-local, the removal of a veth pair by the kernel alone, and the
//! paths from pod to pod. `WEFT_CNI` names weft's binary; by default it is the one of this build. `FLANNEL_CNI` names flannel's plugin.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a measurement prints, and ends where it cannot go on"
)]

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use weft_netlink::rtnl::Rtnl;

use crate::site::{Site, on_a_node};

#[path = "pods/path.rs"]
mod path;
#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/plugin/site.rs"]
mod site;

const ROUNDS: usize = 30;
/// How long a pod lives. After that, the kernel has finished its work for a new link (duplicate address detection, grace periods).
const LIFE: Duration = Duration::from_millis(200);

/// One way to wire pods.
struct Way {
    name: &'static str,
    plugin: PathBuf,
    conf: Value,
    adds: Vec<f64>,
    dels: Vec<f64>,
}

fn main() {
    // `cargo test` runs benches without this argument, and expects that they measure nothing.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    on_a_node(|site| {
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        let ours = std::env::var_os("WEFT_CNI").map_or_else(|| env!("CARGO_BIN_EXE_weft-cni").into(), PathBuf::from);
        let mut ways = vec![way(&site, "routed", &ours, "weft-veth"), way(&site, "bridge", &ours, "bridge")];
        match std::env::var_os("FLANNEL_CNI") {
            Some(theirs) => ways.push(way(&site, "flannel's bridge", &PathBuf::from(theirs), "bridge")),
            None => println!("skipped: no FLANNEL_CNI to compare with"),
        }
        let (start, bare, by_ip) = latency(&site, &mut ways);
        for way in &ways {
            println!("{}: ADD {:.2} ms, DEL {:.2} ms", way.name, low(&way.adds), low(&way.dels));
        }
        println!("bare start of our plugin (VERSION): {start:.2} ms, bare removal of a veth pair: {bare:.2} ms");
        println!("the same removal by a process, `ip link del`: {by_ip:.2} ms");
        let routed = (low(&ways[0].adds), low(&ways[0].dels));
        for way in &ways[1..] {
            judge(&format!("ADD, routed to {}", way.name), routed.0 / low(&way.adds), 0.5, true);
        }
        judge("DEL, routed less bare removal, ms", routed.1 - bare, 4.0, true);
        ways.truncate(2);
        packets(&path::measure(&site, &ways));
    });
}

/// Prints and judges the paths, which have the order of [`path::measure`].
fn packets(paths: &[path::Path]) {
    for path in paths {
        let (trip, rate, cost) = (path.trip(), path.rate(), path.cost());
        println!("{}: round trip {trip:.2} us, TCP {rate:.1} Gbit/s, {cost:.0} ms CPU time for each GB", path.name);
    }
    let [alone, routed, bridge, far_routed, far_bridge] = paths else { panic!("five paths") };
    judge("round trip on one node, routed to bridge", routed.trip() / bridge.trip(), 0.8, true);
    let between = |path: &path::Path| path.trip() - alone.trip();
    println!(
        "between the pods, less a pair alone: routed {:.2} us, bridge {:.2} us, ratio {:.2}",
        between(routed),
        between(bridge),
        between(routed) / between(bridge)
    );
    judge("round trip across nodes, routed to bridge", far_routed.trip() / far_bridge.trip(), 1.0, true);
    for (place, routed, bridge) in [("on one node", routed, bridge), ("across nodes", far_routed, far_bridge)] {
        judge(&format!("TCP {place}, routed to bridge"), routed.rate() / bridge.rate(), 1.0, false);
        judge(&format!("CPU time of TCP {place}, routed to bridge"), routed.cost() / bridge.cost(), 1.0, true);
    }
}

fn judge(what: &str, got: f64, target: f64, at_most: bool) {
    let (word, met) = if at_most { ("at most", got <= target) } else { ("at least", got >= target) };
    println!("{what}: {got:.2} ({word} {target:.2}: {})", if met { "met" } else { "MISSED" });
}

/// Returns a way to connect pods. Each has its own network and its own directory of records.
fn way(site: &Site, name: &'static str, plugin: &std::path::Path, delegate: &str) -> Way {
    let conf = site.conf(json!({
        "name": name.replace([' ', '\''], "-"), "cniVersion": "0.3.1",
        "delegate": {"type": delegate, "isDefaultGateway": true, "ipMasq": false},
    }));
    let plugin = plugin.to_owned();
    Way { name, plugin, conf, adds: Vec::new(), dels: Vec::new() }
}

/// Measures ADD and DEL of every way in turns, and between them three bare times: the start of the plugin, the removal of a veth pair by netlink, and
/// the same by `ip`. Returns these three in ms.
fn latency(site: &Site, ways: &mut [Way]) -> (f64, f64, f64) {
    site.pod("p1");
    let mut host = Rtnl::open().unwrap();
    let (mut starts, mut bare, mut by_ip) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        site.install(&ways[0].plugin);
        starts.push(timed(site.command("VERSION", "", ""), &json!({"cniVersion": "1.0.0"})));
        for way in ways.iter_mut() {
            site.install(&way.plugin);
            way.adds.push(timed(site.command("ADD", "p1", "eth0"), &way.conf));
            std::thread::sleep(LIFE);
            way.dels.push(timed(site.command("DEL", "p1", "eth0"), &way.conf));
        }
        pair(site);
        let begin = Instant::now();
        host.remove_link_named("bare0").unwrap();
        bare.push(ms(begin.elapsed()));
        pair(site);
        let begin = Instant::now();
        site.ip("link del bare0");
        by_ip.push(ms(begin.elapsed()));
    }
    (low(&starts), low(&bare), low(&by_ip))
}

/// Creates a veth pair, and waits until the kernel has finished its work for it.
fn pair(site: &Site) {
    site.ip("link add bare0 type veth peer name eth0 netns p1");
    site.ip("link set bare0 up");
    site.ip("-n p1 link set eth0 up");
    std::thread::sleep(LIFE);
}

fn timed(mut command: Command, conf: &Value) -> f64 {
    use std::io::Write;
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let text = conf.to_string();
    let begin = Instant::now();
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    ms(begin.elapsed())
}

/// Returns the lower quartile of times, which other work of the machine disturbs less than the median.
fn low(all: &[f64]) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    all[all.len() / 4]
}

/// Returns the upper quartile of rates, for the same reason.
fn high(all: &[f64]) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    all[all.len() - 1 - all.len() / 4]
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
