// SPDX-License-Identifier: Apache-2.0
//! Routed pods beside the bridge, in turns: ADD and DEL with the real host-local, the kernel's own removal of a veth pair, and
//! the path from pod to pod. `WEFT_CNI` is our binary; the one that was built with this program else. `FLANNEL_CNI` names
//! flannel's plugin, whose bridge is what the targets speak of.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a measurement prints, and ends where it cannot go on"
)]

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde_json::{Value, json};
use weft_cni::rtnl::{Rtnl, within};

use crate::site::{Site, on_a_node};

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../tests/plugin/site.rs"]
mod site;

const ROUNDS: usize = 30;
/// A pod lives for a while: what the kernel still does for a new link (duplicate address detection, grace periods) is over then.
const LIFE: Duration = Duration::from_millis(200);
const PATH_ROUNDS: usize = 5;
const PINGS: usize = 20_000;
const SECONDS: &str = "2";

/// One way to wire pods.
struct Way {
    name: &'static str,
    plugin: PathBuf,
    conf: Value,
    adds: Vec<f64>,
    dels: Vec<f64>,
    trips: Vec<f64>,
    rates: Vec<f64>,
    addr: String,
    server: Option<Child>,
}

fn main() {
    // What `cargo test` gives a bench: nothing is to be measured then.
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
        paths(&site, &mut ways);
        for way in &ways {
            println!("{}: round trip {:.2} us, TCP {:.1} Gbit/s", way.name, low(&way.trips), best(&way.rates));
        }
        judge("round trip, routed to bridge", low(&ways[0].trips) / low(&ways[1].trips), 0.8, true);
        judge("TCP, routed to bridge", best(&ways[0].rates) / best(&ways[1].rates), 1.0, false);
    });
}

fn judge(what: &str, got: f64, target: f64, at_most: bool) {
    let (word, met) = if at_most { ("at most", got <= target) } else { ("at least", got >= target) };
    println!("{what}: {got:.2} ({word} {target:.2}: {})", if met { "met" } else { "MISSED" });
}

/// Each way has a network, and a record directory, of its own.
fn way(site: &Site, name: &'static str, plugin: &std::path::Path, delegate: &str) -> Way {
    let conf = site.conf(json!({
        "name": name.replace([' ', '\''], "-"), "cniVersion": "0.3.1",
        "delegate": {"type": delegate, "isDefaultGateway": true, "ipMasq": false},
    }));
    let plugin = plugin.to_owned();
    let (adds, dels, trips, rates) = Default::default();
    Way { name, plugin, conf, adds, dels, trips, rates, addr: String::new(), server: None }
}

/// ADD and DEL of every way in turns; between them the start of a process and the kernel alone, ms.
fn latency(site: &Site, ways: &mut [Way]) -> (f64, f64, f64) {
    site.pod("p1");
    let mut host = Rtnl::open().unwrap();
    let (mut starts, mut bare, mut by_ip) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        install(site, &ways[0]);
        starts.push(timed(site.command("VERSION", "", ""), &json!({"cniVersion": "1.0.0"})));
        for way in ways.iter_mut() {
            install(site, way);
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

/// A pair that has lived for a while.
fn pair(site: &Site) {
    site.ip("link add bare0 type veth peer name eth0 netns p1");
    site.ip("link set bare0 up");
    site.ip("-n p1 link set eth0 up");
    std::thread::sleep(LIFE);
}

fn install(site: &Site, way: &Way) {
    let file = site.path("bin/flannel");
    fs::remove_file(&file).unwrap();
    symlink(&way.plugin, file).unwrap();
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

/// Two pods of each way; the ways take turns, so that a busy moment of the machine meets both. Each has a subnet of its own.
fn paths(site: &Site, ways: &mut [Way]) {
    for (number, way) in ways.iter_mut().enumerate() {
        site.subnet_env(&crate::site::env_text(
            &format!("10.5.{}", number + 7),
            &format!("fd05:0:0:{}", number + 7),
            1450,
        ));
        install(site, way);
        let near = format!("near{number}");
        let far = format!("far{number}");
        for pod in [&near, &far] {
            site.pod(pod);
            let result = site.call("ADD", pod, &way.conf).fine().json();
            let address = result["ips"][0]["address"].as_str().unwrap();
            way.addr = address.split('/').next().unwrap().to_owned();
        }
        let server = inside(&far, &["iperf3", "-s"]).stdout(Stdio::null()).spawn();
        way.server = Some(server.expect("iperf3: apt-get install iperf3"));
        let addr = way.addr.clone();
        crate::site::wait_for("iperf3 to listen", || {
            inside(&near, &["iperf3", "-c", &addr, "-n", "1K"]).output().unwrap().status.success()
        });
    }
    for _ in 0..PATH_ROUNDS {
        for (number, way) in ways.iter_mut().enumerate() {
            way.trips.push(round_trip(&format!("/run/netns/near{number}"), way.addr.parse().unwrap()));
        }
    }
    for _ in 0..PATH_ROUNDS {
        for (number, way) in ways.iter_mut().enumerate() {
            let near = format!("near{number}");
            let out = inside(&near, &["iperf3", "-J", "-t", SECONDS, "-c", &way.addr]).output().unwrap();
            let value: Value = serde_json::from_slice(&out.stdout).unwrap();
            way.rates.push(value["end"]["sum_received"]["bits_per_second"].as_f64().unwrap() / 1e9);
        }
    }
    for server in ways.iter_mut().filter_map(|way| way.server.as_mut()) {
        server.kill().unwrap();
        server.wait().unwrap();
    }
}

/// Median time from sending an ICMP echo request to reading the answer, us: the kernel answers on the same processor, so no
/// scheduler is in it.
fn round_trip(netns: &str, addr: Ipv4Addr) -> f64 {
    let netns = fs::File::open(netns).unwrap();
    let opened = within(netns.as_fd(), || {
        socket::socket(AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Icmp).unwrap()
    });
    let fd = opened.unwrap();
    socket::setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(5)).unwrap();
    socket::connect(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(addr, 0))).unwrap();
    // Type 8, code 0, checksum, id 0, sequence 0, no data: the one's complement of the type's word.
    let request = [8, 0, 0xf7, 0xff, 0, 0, 0, 0];
    let mut answer = [0; 128];
    let mut times: Vec<f64> = (0..PINGS)
        .map(|_| {
            let begin = Instant::now();
            socket::send(fd.as_raw_fd(), &request, MsgFlags::empty()).unwrap();
            let got = socket::recv(fd.as_raw_fd(), &mut answer, MsgFlags::empty()).unwrap();
            assert_eq!((got, answer[20]), (28, 0), "an echo reply behind an IP header");
            ms(begin.elapsed()) * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn inside(pod: &str, words: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", pod]).args(words);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}

/// The lower quartile of times: what the work costs, more than what else the machine does.
fn low(all: &[f64]) -> f64 {
    let mut all = all.to_vec();
    all.sort_by(f64::total_cmp);
    all[all.len() / 4]
}

fn best(all: &[f64]) -> f64 {
    all.iter().copied().fold(0.0, f64::max)
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
