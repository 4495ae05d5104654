// SPDX-License-Identifier: Apache-2.0
//! From pod to pod, on one node and from node to node: round trips and one TCP stream, all paths in turns.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde_json::Value;
use weft_cni::rtnl::in_netns;

use crate::site::{Site, env_text, wait_for};
use crate::{Way, high, install, low, ms};

const ROUNDS: usize = 30;
const PINGS: usize = 5_000;
/// Of one TCP stream: long enough to leave slow start behind, short enough for many turns.
const BYTES: &str = "512M";
/// The second node.
const OTHER: &str = "other";

/// The way from one pod to another.
pub struct Path {
    pub name: String,
    from: String,
    addr: Ipv4Addr,
    server: Child,
    trips: Vec<f64>,
    rates: Vec<f64>,
    costs: Vec<f64>,
}

impl Path {
    /// A path between two namespaces, at whose end iperf3 listens.
    fn new(name: String, from: &str, to: &str, addr: Ipv4Addr) -> Path {
        let server = inside(to, &["iperf3", "-s"]).stdout(Stdio::null()).spawn();
        let server = server.expect("iperf3: apt-get install iperf3");
        wait_for("iperf3 to listen", || {
            inside(from, &["iperf3", "-c", &addr.to_string(), "-n", "1K"]).output().unwrap().status.success()
        });
        Path { name, from: from.to_owned(), addr, server, trips: Vec::new(), rates: Vec::new(), costs: Vec::new() }
    }

    /// A round trip, us.
    pub fn trip(&self) -> f64 {
        low(&self.trips)
    }

    /// One TCP stream, Gbit/s.
    pub fn rate(&self) -> f64 {
        high(&self.rates)
    }

    /// CPU time of sender and receiver, ms/GB: less disturbed by what else the machine does than the rate.
    pub fn cost(&self) -> f64 {
        low(&self.costs)
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Measures a pair between two pods with nothing in between, then each way on one node, then each way from node to node.
pub fn measure(site: &Site, ways: &[Way]) -> Vec<Path> {
    second_node(site);
    let mut paths = vec![pair_alone(site)];
    let wired: Vec<_> = ways.iter().enumerate().map(|(number, way)| wire(site, way, number)).collect();
    let (near, far): (Vec<_>, Vec<_>) = wired.into_iter().unzip();
    paths.extend(near);
    paths.extend(far);
    for _ in 0..ROUNDS {
        for path in &mut paths {
            path.trips.push(round_trip(&format!("/run/netns/{}", path.from), path.addr));
        }
    }
    for _ in 0..ROUNDS {
        for path in &mut paths {
            let (rate, cost) = stream(path);
            path.rates.push(rate);
            path.costs.push(cost);
        }
    }
    paths
}

/// A node beside ours, as the backend host-gw sees it: a link, and a route to each other's pods.
fn second_node(site: &Site) {
    site.pod(OTHER);
    site.ip(&format!("link add up0 type veth peer name up0 netns {OTHER}"));
    site.ip("addr add 192.0.2.1/24 dev up0");
    site.ip(&format!("-n {OTHER} addr add 192.0.2.2/24 dev up0"));
    site.ip("link set up0 up");
    site.ip(&format!("-n {OTHER} link set up0 up"));
    on_the_other(|| fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap());
}

fn on_the_other<T>(work: impl FnOnce() -> T) -> T {
    let netns = fs::File::open(format!("/run/netns/{OTHER}")).unwrap();
    in_netns(netns.as_fd(), work).unwrap()
}

/// What the two pods' own ends cost anybody.
fn pair_alone(site: &Site) -> Path {
    let ends = [("one", 1, 2), ("two", 2, 1)];
    for (pod, ..) in ends {
        site.pod(pod);
    }
    site.ip("-n one link add eth0 mtu 1450 type veth peer name eth0 mtu 1450 netns two");
    for (pod, own, other) in ends {
        site.ip(&format!("-n {pod} link set eth0 address 02:00:00:00:00:0{own} up"));
        site.ip(&format!("-n {pod} addr add 192.0.2.{own}/24 dev eth0"));
        site.ip(&format!("-n {pod} neigh add 192.0.2.{other} lladdr 02:00:00:00:00:0{other} dev eth0"));
    }
    Path::new("a pair alone".to_owned(), "one", "two", Ipv4Addr::new(192, 0, 2, 2))
}

/// Pods of one way: two on our node, one on the other. The path on our node, and the one to the other.
fn wire(site: &Site, way: &Way, number: usize) -> (Path, Path) {
    install(site, way);
    let (ours, others) = (number + 7, number + 17);
    let pods = ["near", "far", "away"].map(|name| format!("{name}{number}"));
    for pod in &pods {
        site.pod(pod);
    }
    let [near, far, away] = &pods;
    let subnet = |n: usize| site.subnet_env(&env_text(&format!("10.5.{n}"), &format!("fd05:0:0:{n}"), 1450));
    let add = |pod: &str| -> Ipv4Addr {
        let result = site.call("ADD", pod, &way.conf).success().json();
        let address = result["ips"][0]["address"].as_str().unwrap();
        address.split('/').next().unwrap().parse().unwrap()
    };
    subnet(ours);
    add(near);
    let far_addr = add(far);
    subnet(others);
    let away_addr = on_the_other(|| add(away));
    site.ip(&format!("route add 10.5.{others}.0/24 via 192.0.2.2"));
    site.ip(&format!("-n {OTHER} route add 10.5.{ours}.0/24 via 192.0.2.1"));
    let name = way.name;
    (
        Path::new(format!("{name}, one node"), near, far, far_addr),
        Path::new(format!("{name}, across nodes"), near, away, away_addr),
    )
}

/// Median time from sending an ICMP echo request to reading the answer, us: the kernel answers on the same processor, so no
/// scheduler is in it.
fn round_trip(netns: &str, addr: Ipv4Addr) -> f64 {
    let netns = fs::File::open(netns).unwrap();
    let opened = in_netns(netns.as_fd(), || {
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

/// One TCP stream: Gbit/s, and ms of CPU time for each GB. Where there are processors for both, sender and receiver stay on one
/// each: which of the two the scheduler would choose matters more than the path.
fn stream(path: &Path) -> (f64, f64) {
    let addr = path.addr.to_string();
    let mut words = vec!["iperf3", "-J", "-n", BYTES, "-c", &addr];
    if std::thread::available_parallelism().is_ok_and(|count| count.get() > 1) {
        words.extend(["-A", "0,1"]);
    }
    let out = inside(&path.from, &words).output().unwrap();
    let end = &serde_json::from_slice::<Value>(&out.stdout).unwrap()["end"];
    let number = |place: &str| {
        let value = end.pointer(place).and_then(Value::as_f64);
        value.unwrap_or_else(|| panic!("{}: no {place} in {}", path.name, String::from_utf8_lossy(&out.stdout)))
    };
    let (bytes, seconds) = (number("/sum_received/bytes"), number("/sum_received/seconds"));
    let percent = number("/cpu_utilization_percent/host_total") + number("/cpu_utilization_percent/remote_total");
    (bytes * 8.0 / seconds / 1e9, percent * 10.0 * seconds / (bytes / 1e9))
}

fn inside(pod: &str, words: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", pod]).args(words);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command
}
