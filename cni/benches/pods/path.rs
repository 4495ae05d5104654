// SPDX-License-Identifier: Apache-2.0
//! Measures round trips and one TCP stream from pod to pod, on one node and from node to node, all paths in turns.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use nix::sys::socket::{self, AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use serde_json::Value;
use weft_netlink::rtnl::in_netns;

use crate::site::{Site, env_text, wait_for};
use crate::{Way, high, low, ms};

const ROUNDS: usize = 30;
const PINGS: usize = 5_000;
/// The size of one TCP stream. It is large enough that slow start does not matter, and small enough for many turns.
const BYTES: &str = "512M";
/// The namespace of the second node.
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
    /// Returns a path between two namespaces, and starts iperf3 at its end.
    fn new(name: String, from: &str, to: &str, addr: Ipv4Addr) -> Path {
        let server = inside(to, &["iperf3", "-s"]).stdout(Stdio::null()).spawn();
        let server = server.expect("iperf3: apt-get install iperf3");
        wait_for("iperf3 to listen", || {
            inside(from, &["iperf3", "-c", &addr.to_string(), "-n", "1K"]).output().unwrap().status.success()
        });
        Path { name, from: from.to_owned(), addr, server, trips: Vec::new(), rates: Vec::new(), costs: Vec::new() }
    }

    /// Returns the time of a round trip in us.
    pub fn trip(&self) -> f64 {
        low(&self.trips)
    }

    /// Returns the rate of one TCP stream in Gbit/s.
    pub fn rate(&self) -> f64 {
        high(&self.rates)
    }

    /// Returns the CPU time of sender and receiver in ms/GB. Other work of the machine disturbs it less than the rate.
    pub fn cost(&self) -> f64 {
        low(&self.costs)
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        // The server may have ended by itself.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// Measures a veth pair between two pods with nothing in between, each way on one node, and each way from node to node. Returns the paths
/// in this order.
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

/// Makes a second node. As with host-gw, both nodes are on one link, and each has a route to the pods of the other.
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

/// Connects two pods by one veth pair. No other way can be faster.
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

/// Makes pods of one way: two on this node and one on the second node. Returns the path on this node, and the one to the second node.
fn wire(site: &Site, way: &Way, number: usize) -> (Path, Path) {
    site.install(&way.plugin);
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

/// Returns the median time from sending an ICMP echo request to reading the answer, in us. The kernel answers on the same processor, so the
/// scheduler does not matter.
fn round_trip(netns: &str, addr: Ipv4Addr) -> f64 {
    let netns = fs::File::open(netns).unwrap();
    let opened = in_netns(netns.as_fd(), || {
        socket::socket(AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Icmp).unwrap()
    });
    let fd = opened.unwrap();
    socket::setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::seconds(5)).unwrap();
    socket::connect(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(addr, 0))).unwrap();
    // Type 8, code 0, checksum, id 0, sequence 0 and no data. The checksum is the one's complement of the first two bytes.
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

/// Measures one TCP stream. Returns Gbit/s, and the CPU time in ms for each GB. If there are two processors, sender and receiver have one each,
/// because the choice of the scheduler would matter more than the path.
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
