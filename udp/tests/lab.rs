// SPDX-License-Identifier: Apache-2.0
//! Tunnels between network namespaces, through a veth pair. Needs root, iproute2, ping and /dev/net/tun.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use nix::unistd::Pid;
use weft_lab::netns::{Netns, enter, in_thread, make_names_private};
use weft_udp::counters::{Counters, Reason};
use weft_udp::packet::checksum;
use weft_udp::{Config, Descriptors, Device, Peer, Routes, Tunnel};

const PORT: u16 = 8285;
const OTHER_PORT: u16 = 8286;
const MTU: u16 = 1472;
const ACCEPTS_ITSELF: &str = "ipv4/conf/flannel0/accept_local=1";

/// A node with the uplink 192.168.0.N and the subnet 10.5.N.0/24.
struct Node {
    ns: Netns,
    number: u8,
}

impl Node {
    fn inside<T: Send>(&self, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        in_thread(|| {
            enter(&self.ns.path())?;
            function()
        })
    }

    /// Opens the device and gives it its address and its route, as the agent will.
    async fn device(&self) -> Result<Device> {
        let device = self.inside(|| Ok(Device::open("flannel0")?))?;
        self.ns.ip(&format!("link set flannel0 mtu {MTU} up")).await?;
        self.ns.ip(&format!("addr replace 10.5.{}.0/32 dev flannel0", self.number)).await?;
        self.ns.ip("route replace 10.5.0.0/16 dev flannel0").await?;
        Ok(device)
    }

    fn tunnel(&self, device: Device) -> Result<Tunnel> {
        self.tunnel_with(device, None)
    }

    /// Starts a tunnel that takes over a socket.
    fn tunnel_with(&self, device: Device, socket: Option<OwnedFd>) -> Result<Tunnel> {
        let config = Config { sockets: socket.into_iter().collect(), ..self.config(device)? };
        self.inside(|| Ok(Tunnel::start(config, routes(), || {})?))
    }

    fn config(&self, device: Device) -> Result<Config> {
        let n = self.number;
        let uplink = Ipv4Addr::new(192, 168, 0, n);
        let subnet = format!("10.5.{n}.0/24").parse()?;
        Ok(Config {
            device,
            uplink,
            port: PORT,
            more_ports: Vec::new(),
            subnet,
            mtu: MTU,
            sockets: Vec::new(),
            counters: Default::default(),
        })
    }

    async fn start(&self) -> Result<Tunnel> {
        let device = self.device().await?;
        self.tunnel(device)
    }

    /// Opens the device again, and starts a tunnel after another one.
    fn again(&self) -> Result<Tunnel> {
        soon(|| self.tunnel(self.inside(|| Ok(Device::open("flannel0")?))?))
    }

    /// Starts a tunnel that takes over the device of another one, and its socket if there is one.
    fn adopt(&self, device: &OwnedFd, socket: Option<&OwnedFd>) -> Result<Tunnel> {
        soon(|| {
            let device = self.inside(|| Ok(Device::adopt(device.try_clone()?)?))?;
            self.tunnel_with(device, socket.map(OwnedFd::try_clone).transpose()?)
        })
    }

    /// Starts a tunnel that takes over the device and the sockets of another one, and receives on these ports. The first one is its own.
    fn on_ports(&self, before: Tunnel, ports: &[u16], routes: Routes) -> Result<Tunnel> {
        let Descriptors { device, sockets } = before.descriptors()?;
        before.stop()?;
        let device = self.inside(|| Ok(Device::adopt(device)?))?;
        let config = Config { port: ports[0], more_ports: ports[1..].to_vec(), sockets, ..self.config(device)? };
        self.inside(|| Ok(Tunnel::start(config, routes, || {})?))
    }

    fn ping(&self, words: &str) -> Result<String> {
        self.inside(|| {
            let out = Command::new("ping").args(words.split_whitespace()).output()?;
            Ok(String::from_utf8_lossy(&out.stdout).into_owned())
        })
    }

    fn spawn(&self, program: &str, words: &str) -> Result<Child> {
        self.inside(|| Ok(Command::new(program).args(words.split_whitespace()).stdout(Stdio::piped()).spawn()?))
    }
}

fn routes() -> Routes {
    routes_to(PORT)
}

/// Both nodes, at this port. A node's own subnet never reaches its device, so that one table serves both.
fn routes_to(port: u16) -> Routes {
    Routes::new([1, 2].map(|n| peer(n, port)))
}

fn peer(n: u8, port: u16) -> Peer {
    let address = SocketAddrV4::new(Ipv4Addr::new(192, 168, 0, n), port);
    Peer { subnet: format!("10.5.{n}.0/24").parse().unwrap(), address, sends_from: None }
}

fn two_nodes<T: Future<Output = Result<()>>>(test: impl FnOnce(Node, Node) -> T + Send + 'static) {
    let run = || {
        make_names_private().expect("these tests need root");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let program = Path::new("/nonexistent");
            let one = Node { ns: Netns::add("one", program).await?, number: 1 };
            let two = Node { ns: Netns::add("two", program).await?, number: 2 };
            one.ns.ip("link add up0 type veth peer name up0 netns two").await?;
            for node in [&one, &two] {
                node.ns.ip(&format!("addr add 192.168.0.{}/24 dev up0", node.number)).await?;
                node.ns.ip("link set up0 up").await?;
            }
            test(one, two).await
        })
    };
    if let Err(panic) = std::thread::spawn(move || run().unwrap()).join() {
        std::panic::resume_unwind(panic);
    }
}

/// How long a test waits. The machine may be busy with other tests.
const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until a condition holds.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        ensure!(Instant::now() < end, "after {PATIENCE:?} still not: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    Ok(())
}

/// Starts a tunnel after another one. A process that another test is just starting has copies of the last device and of its socket until it
/// executes its program.
fn soon(mut start: impl FnMut() -> Result<Tunnel>) -> Result<Tunnel> {
    let end = Instant::now() + PATIENCE;
    loop {
        match start() {
            Err(_) if Instant::now() < end => std::thread::park_timeout(Duration::from_millis(5)),
            done => return done,
        }
    }
}

/// A ping with 100 requests a second. Its output is a file, because nobody reads it meanwhile.
struct Pings {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Pings {
    fn start(from: &Node, to: u8) -> Result<Pings> {
        let output = tempfile::NamedTempFile::new()?;
        let mut ping = Command::new("ping");
        ping.args(["-n", "-i", "0.01", &format!("10.5.{to}.0")]).stdout(output.reopen()?);
        let child = from.inside(|| Ok(ping.spawn()?))?;
        Ok(Pings { child, output })
    }

    /// Returns the numbers of the answers, which begin with 1.
    fn answered(&self) -> BTreeSet<usize> {
        let text = std::fs::read_to_string(self.output.path()).unwrap_or_default();
        let number = |line: &str| line.strip_suffix(" ms")?.split_once("icmp_seq=")?.1.split(' ').next()?.parse().ok();
        text.lines().filter_map(number).collect()
    }

    fn last(&self) -> usize {
        self.answered().last().copied().unwrap_or_default()
    }

    /// Ends the ping when requests of from now on were answered. Returns the numbers of all answers.
    fn stop(mut self) -> Result<BTreeSet<usize>> {
        let now = self.last();
        eventually("later pings are answered", || self.last() >= now + 20)?;
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)?;
        self.child.wait()?;
        Ok(self.answered())
    }
}

impl Drop for Pings {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn two_tunnels_carry_pings_up_to_the_mtu_and_cost_one_hop() {
    two_nodes(|one, two| async move {
        let (first, second) = (one.start().await?, two.start().await?);
        // One request at a time: after the last one of several, ping would wait for a moment only.
        for (from, to) in [(&one, 2), (&two, 1)].repeat(3) {
            let out = from.ping(&format!("-c 1 -W 60 -M do -s {} 10.5.{to}.0", MTU - 28))?;
            assert!(out.contains(" 0% packet loss"), "{out}");
            assert!(out.contains("ttl=63"), "the tunnel costs one hop: {out}");
        }
        let counters = first.counters();
        // A packet counts when the kernel has taken it. Its answer may come before.
        let counted = || (counters.sent.packets(), counters.sent.bytes(), counters.received.packets());
        eventually("all packets are counted", || counted() == (6, 6 * u64::from(MTU), 6))?;
        // Larger packets are fragmented by the kernel before they reach the device.
        let out = one.ping("-c 1 -W 60 -s 4000 10.5.2.0")?;
        assert!(out.contains(" 0% packet loss"), "{out}");
        first.stop()?;
        second.stop()?;
        Ok(())
    });
}

#[test]
fn the_datagram_is_the_bare_inner_packet() {
    two_nodes(|one, two| async move {
        let tunnel = one.start().await?;
        let socket = two.inside(|| Ok(UdpSocket::bind((Ipv4Addr::new(192, 168, 0, 2), PORT))?))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut ping = one.spawn("ping", "-c 1 -W 1 10.5.2.0")?;
        let mut bytes = [0; 2000];
        let (length, from) = socket.recv_from(&mut bytes)?;
        ping.wait()?;
        assert_eq!(from.to_string(), format!("192.168.0.1:{PORT}"));
        assert_eq!((length, &bytes[..4]), (84, &[0x45, 0, 0, 84][..]));
        assert_eq!((bytes[8], bytes[9]), (63, 1), "TTL and protocol");
        assert_eq!(&bytes[12..20], &[10, 5, 1, 0, 10, 5, 2, 0]);
        assert_eq!(checksum(&bytes[..20]), 0);
        tunnel.stop()?;
        Ok(())
    });
}

/// Without that, a burst would be lost while the thread waits for a processor.
#[test]
fn the_socket_keeps_a_burst_of_four_mebibytes() {
    two_nodes(|one, _two| async move {
        let tunnel = one.start().await?;
        let kept = getsockopt(&tunnel.descriptors()?.sockets[0], sockopt::RcvBuf)?;
        assert!(kept >= 4 << 20, "{kept} bytes");
        tunnel.stop()?;
        Ok(())
    });
}

#[test]
fn an_address_without_a_peer_and_a_used_up_ttl_are_answered() {
    two_nodes(|one, two| async move {
        let (first, second) = (one.start().await?, two.start().await?);
        // The source of the answer is an address of this host, which the kernel accepts only with this setting.
        one.ns.sysctl(&[ACCEPTS_ITSELF])?;
        let out = one.ping("-c 1 -W 60 10.5.9.1")?;
        assert!(out.contains("From 10.5.1.0") && out.contains("Destination Net Unreachable"), "{out}");
        let out = one.ping("-c 1 -W 60 -t 1 10.5.2.0")?;
        assert!(out.contains("From 10.5.1.0") && out.contains("Time to live exceeded"), "{out}");
        let out = one.ping("-c 1 -W 60 -t 2 10.5.2.0")?;
        assert!(out.contains(" 0% packet loss"), "{out}");
        let counters = first.counters();
        assert_eq!(counters.sent.dropped(Reason::NoRoute), 1);
        assert_eq!(counters.sent.dropped(Reason::TtlExpired), 1);
        // A new table counts from the next packet on.
        first.set_routes(Routes::default());
        let out = one.ping("-c 1 -W 60 10.5.2.0")?;
        assert!(out.contains("Destination Net Unreachable"), "{out}");
        drop(second);
        Ok(())
    });
}

/// An ICMP echo request of a length, with a header of 4 * `ihl` bytes.
fn echo(length: usize, ihl: u8, ttl: u8, source: [u8; 4], destination: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0; length.max(60)];
    packet[0] = 0x40 | ihl;
    packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
    (packet[8], packet[9]) = (ttl, 1);
    packet[12..16].copy_from_slice(&source);
    packet[16..20].copy_from_slice(&destination);
    let header = usize::from(ihl) * 4;
    // Options: nothing but "no operation".
    packet[20..header.max(20)].fill(1);
    let sum = checksum(&packet[..header]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.truncate(length);
    if let Some(payload) = packet.get_mut(header..).filter(|payload| payload.len() >= 8) {
        payload[0] = 8;
        let sum = checksum(payload);
        payload[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    packet
}

#[test]
fn only_a_peers_packets_for_the_own_subnet_are_delivered() {
    two_nodes(|one, two| async move {
        let tunnel = one.start().await?;
        two.ns.ip("addr add 192.168.0.77/24 dev up0").await?;
        let open = |last: u8| two.inside(|| Ok(UdpSocket::bind((Ipv4Addr::new(192, 168, 0, last), PORT))?));
        let (peer, stranger) = (open(2)?, open(77)?);
        let (ours, theirs) = ([10, 5, 1, 0], [10, 5, 2, 9]);
        let good = echo(84, 5, 63, theirs, ours);
        let mut broken = good.clone();
        broken[11] ^= 1;
        let mut ipv6 = good.clone();
        ipv6[0] = 0x60;
        let cases = [
            (&stranger, good.clone(), Reason::Stranger),
            (&peer, good[..19].to_vec(), Reason::Malformed),
            (&peer, good[..83].to_vec(), Reason::Malformed),
            (&peer, Vec::new(), Reason::Malformed),
            (&peer, broken, Reason::Malformed),
            (&peer, ipv6, Reason::NotIpv4),
            (&peer, echo(1473, 5, 63, theirs, ours), Reason::TooLong),
            (&peer, echo(84, 5, 0, theirs, ours), Reason::TtlExpired),
            (&peer, echo(84, 5, 63, [10, 5, 3, 1], ours), Reason::ForeignSource),
            (&peer, echo(84, 5, 63, [127, 0, 0, 1], ours), Reason::ForeignSource),
            (&peer, echo(84, 5, 63, ours, ours), Reason::ForeignSource),
            (&peer, echo(84, 5, 63, theirs, [10, 5, 2, 1]), Reason::ForeignDestination),
            (&peer, echo(84, 5, 63, theirs, [192, 168, 0, 1]), Reason::ForeignDestination),
        ];
        let counters = tunnel.counters();
        let to = (Ipv4Addr::new(192, 168, 0, 1), PORT);
        for (socket, datagram, reason) in cases {
            let before = counters.received.dropped(reason);
            socket.send_to(&datagram, to)?;
            eventually(reason.label(), || counters.received.dropped(reason) == before + 1)?;
        }
        assert_eq!(counters.received.packets(), 0);
        let good = [(20, 5, 63), (60, 15, 63), (1472, 5, 63), (84, 15, 63), (84, 5, 1), (84, 5, 2), (84, 5, 255)];
        for ((length, ihl, ttl), number) in good.into_iter().zip(1..) {
            peer.send_to(&echo(length, ihl, ttl, theirs, ours), to)?;
            eventually("the packet is delivered", || counters.received.packets() == number)?;
        }
        assert_eq!(counters.received.dropped(Reason::DeviceRefused), 0);
        tunnel.stop()?;
        Ok(())
    });
}

#[test]
fn a_packet_that_the_device_refuses_is_counted_and_the_tunnel_goes_on() {
    two_nodes(|one, two| async move {
        let tunnel = one.start().await?;
        let peer = two.inside(|| Ok(UdpSocket::bind((Ipv4Addr::new(192, 168, 0, 2), PORT))?))?;
        let datagram = echo(84, 5, 63, [10, 5, 2, 9], [10, 5, 1, 0]);
        let send = || peer.send_to(&datagram, (Ipv4Addr::new(192, 168, 0, 1), PORT));
        let counters = tunnel.counters();
        let refused = || counters.received.dropped(Reason::DeviceRefused);
        one.ns.ip("link set flannel0 down").await?;
        send()?;
        eventually("the packet is refused", || refused() == 1)?;
        one.ns.ip("link set flannel0 up").await?;
        send()?;
        eventually("the next one is received", || counters.received.packets() == 2)?;
        assert_eq!(refused(), 1);
        tunnel.stop()?;
        Ok(())
    });
}

#[test]
fn a_tcp_stream_arrives_whole() {
    two_nodes(|one, two| async move {
        let (first, second) = (one.start().await?, two.start().await?);
        let listener = two.inside(|| Ok(std::net::TcpListener::bind("10.5.2.0:7000")?))?;
        let data: Vec<u8> = (0..8_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let sent = data.clone();
        let writer = std::thread::spawn(move || {
            one.inside(|| {
                let mut stream = std::net::TcpStream::connect("10.5.2.0:7000")?;
                Ok(std::io::Write::write_all(&mut stream, &sent)?)
            })
        });
        let mut received = Vec::new();
        std::io::Read::read_to_end(&mut listener.accept()?.0, &mut received)?;
        writer.join().unwrap()?;
        assert!(received == data, "{} bytes of {}", received.len(), data.len());
        let (sent, received) = (first.counters(), second.counters());
        assert!(sent.sent.bytes() > 8_000_000 && received.received.bytes() > 8_000_000);
        for reason in Reason::ALL {
            assert_eq!(received.received.dropped(*reason), 0, "{}", reason.label());
        }
        Ok(())
    });
}

/// Returns how many echo requests the node has sent.
fn echoes_sent(node: &Node) -> Result<u64> {
    let text = node.inside(|| Ok(std::fs::read_to_string("/proc/thread-self/net/snmp")?))?;
    let mut lines = text.lines().filter(|line| line.starts_with("IcmpMsg:"));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let mut fields = names.split_whitespace().zip(values.split_whitespace());
    Ok(fields.find(|(name, _)| *name == "OutType8").map_or(Ok(0), |(_, value)| value.parse())?)
}

#[test]
fn a_device_keeps_its_routes_without_a_process_and_its_packets_with_a_descriptor() {
    two_nodes(|one, two| async move {
        let _second = two.start().await?;
        let first = one.start().await?;
        let routes = one.ns.ip("route show dev flannel0").await?;
        assert!(routes.contains("10.5.0.0/16"), "{routes}");
        // The device stays, but nobody keeps its packets.
        first.stop()?;
        let out = one.ping("-q -c 10 -i 0.01 -W 1 10.5.2.0")?;
        assert!(out.contains(" 100% packet loss"), "{out}");
        let without_process = one.ns.ip("route show dev flannel0").await?;
        assert_eq!(without_process.replace(" linkdown", ""), routes);
        let first = one.again()?;
        for _ in 0..3 {
            let out = one.ping("-q -c 1 -W 60 10.5.2.0")?;
            assert!(out.contains(" 0% packet loss"), "{out}");
        }
        // A descriptor that the service manager keeps makes the queue keep the packets.
        let fd = first.device()?.try_clone_fd()?;
        first.stop()?;
        let before = echoes_sent(&one)?;
        let ping = one.spawn("ping", "-c 10 -i 0.01 -W 60 10.5.2.0")?;
        eventually("the requests wait in the queue", || echoes_sent(&one).is_ok_and(|now| now >= before + 10))?;
        let first = one.adopt(&fd, None)?;
        let out = String::from_utf8_lossy(&ping.wait_with_output()?.stdout).into_owned();
        assert!(out.contains(" 0% packet loss"), "{out}");
        drop(first);
        Ok(())
    });
}

#[test]
fn nothing_is_lost_while_somebody_keeps_the_descriptors() {
    two_nodes(|one, two| async move {
        let second = two.start().await?;
        let first = one.start().await?;
        // The requests come from the other node, so both directions wait: requests in the socket, and replies of later pings in the device.
        let pings = [Pings::start(&two, 1)?, Pings::start(&one, 2)?];
        eventually("the pings run", || first.counters().received.packets() >= 20)?;
        let Descriptors { device, sockets } = first.descriptors()?;
        first.stop()?;
        let (sent, before) = (second.counters(), second.counters().sent.packets());
        eventually("datagrams wait in the socket", || sent.sent.packets() >= before + 10)?;
        let first = one.adopt(&device, sockets.first())?;
        for ping in pings {
            let answered = ping.stop()?;
            let lost: Vec<_> = (1..*answered.last().unwrap()).filter(|number| !answered.contains(number)).collect();
            assert!(lost.is_empty(), "{lost:?} of {}", answered.len());
        }
        // A socket of another port is not used.
        let descriptors = first.descriptors()?;
        first.stop()?;
        let stranger = one.inside(|| Ok(UdpSocket::bind("192.168.0.1:8286")?))?;
        drop((descriptors.sockets, sockets));
        let first = one.adopt(&descriptors.device, Some(&stranger.into()))?;
        assert!(one.ping("-q -c 1 -W 60 10.5.2.0")?.contains(" 0% packet loss"));
        drop(first);
        Ok(())
    });
}

/// Returns the number of packets that a tunnel has read from its new device, and has neither sent nor dropped.
fn packets_in(node: &Node, counters: &Counters) -> Result<u64> {
    let dropped: u64 = Reason::ALL.iter().map(|reason| counters.sent.dropped(*reason)).sum();
    let done = counters.sent.packets() + dropped;
    let text = node.inside(|| Ok(std::fs::read_to_string("/proc/thread-self/net/dev")?))?;
    let device = text.lines().find_map(|line| line.trim_start().strip_prefix("flannel0:"));
    // The first eight numbers are of packets that the tunnel has written. Then come the bytes and the packets that it has read.
    let read: u64 = device.and_then(|line| line.split_whitespace().nth(9)).map_or(Ok(0), str::parse)?;
    Ok(read.saturating_sub(done))
}

/// The socket's buffer is full when the tunnel has to end. What the tunnel has read is in no queue of the kernel any more.
#[test]
fn packets_that_were_read_are_sent_before_the_tunnel_ends() {
    two_nodes(|one, two| async move {
        // Nobody answers the question for the link address of the other node. So datagrams stay in the socket's buffer until the kernel gives
        // up after 0.05 s, which is less than the tunnel waits. Then it asks again for the next datagram.
        two.ns.ip("link set up0 arp off").await?;
        one.ns.sysctl(&["ipv4/neigh/up0/mcast_solicit=1", "ipv4/neigh/up0/retrans_time_ms=50"])?;
        let first = one.start().await?;
        // The kernel makes that the smallest buffer, which has room for some datagrams.
        setsockopt(&first.descriptors()?.sockets[0], sockopt::SndBuf, &1)?;
        let counters = first.counters();
        let mut ping = one.spawn("ping", "-i 0.01 10.5.2.0")?;
        let mut before = 0;
        // The number is positive for a moment while a packet is sent, too. It stays only while the tunnel waits for room.
        eventually("the tunnel waits with packets that it has read", || {
            let now = packets_in(&one, &counters).unwrap_or_default();
            now > 0 && now == std::mem::replace(&mut before, now)
        })?;
        first.stop()?;
        let left = packets_in(&one, &counters)?;
        ping.kill()?;
        ping.wait()?;
        assert_eq!((left, counters.sent.dropped(Reason::SendFailed)), (0, 0));
        Ok(())
    });
}

/// The kernel may need seconds for the link address of a peer, and its datagrams keep their room in the buffer for so long.
#[test]
fn packets_that_find_no_room_are_dropped_after_a_moment() {
    two_nodes(|one, two| async move {
        two.ns.ip("link set up0 arp off").await?;
        one.ns.sysctl(&["ipv4/neigh/up0/retrans_time_ms=600000"])?;
        let first = one.start().await?;
        setsockopt(&first.descriptors()?.sockets[0], sockopt::SndBuf, &1)?;
        let counters = first.counters();
        let mut ping = one.spawn("ping", "-i 0.01 10.5.2.0")?;
        let dropped = eventually("packets are dropped", || counters.sent.dropped(Reason::SendFailed) >= 50);
        ping.kill()?;
        ping.wait()?;
        dropped
    });
}

/// The kernel keeps for each of them as much as the default size of the buffer.
#[test]
fn two_peers_that_are_down_do_not_hold_up_the_others() {
    two_nodes(|one, two| async move {
        let (first, _second) = (one.start().await?, two.start().await?);
        first.set_routes(Routes::new([1, 2, 3, 4].map(|n| peer(n, PORT))));
        // The kernel gives up and forgets the datagrams only after minutes.
        one.ns.sysctl(&["ipv4/neigh/up0/retrans_time_ms=600000"])?;
        let mut to_gone = [3, 4].map(|n| one.spawn("ping", &format!("-i 0.002 -s 1300 10.5.{n}.0")));
        let counters = first.counters();
        // That is more than the kernel keeps.
        let kept = eventually("datagrams to the peers that are down are sent", || counters.sent.packets() >= 600);
        let answered = kept.and_then(|()| Pings::start(&one, 2)?.stop());
        for ping in &mut to_gone {
            let ping = ping.as_mut().map_err(|error| anyhow::anyhow!("{error:#}"))?;
            ping.kill()?;
            ping.wait()?;
        }
        answered.map(drop)
    });
}

/// Waits until a tunnel has received some more packets.
fn receives(tunnel: &Tunnel) -> Result<()> {
    let counters = tunnel.counters();
    let before = counters.received.packets();
    eventually("packets arrive", || counters.received.packets() >= before + 20)
}

#[test]
fn nothing_is_lost_while_the_nodes_change_the_port_one_after_the_other() {
    two_nodes(|one, two| async move {
        let (first, second) = (one.start().await?, two.start().await?);
        let pings = [Pings::start(&one, 2)?, Pings::start(&two, 1)?];
        receives(&first)?;
        // The first node has followed, and the second one knows nothing of the change.
        let first = one.on_ports(first, &[OTHER_PORT, PORT], routes_to(PORT))?;
        assert!(first.listens_on(PORT) && first.listens_on(OTHER_PORT) && first.refused().is_empty());
        receives(&first)?;
        receives(&second)?;
        // The second one sees that the first one has followed, and the first one does not yet see that of the second one.
        let second = two.on_ports(second, &[OTHER_PORT, PORT], routes_to(OTHER_PORT))?;
        receives(&first)?;
        receives(&second)?;
        first.set_routes(routes_to(OTHER_PORT));
        receives(&second)?;
        let first = one.on_ports(first, &[OTHER_PORT], routes_to(OTHER_PORT))?;
        let second = two.on_ports(second, &[OTHER_PORT], routes_to(OTHER_PORT))?;
        assert!(!first.listens_on(PORT) && !second.listens_on(PORT));
        for ping in pings {
            let answered = ping.stop()?;
            let lost: Vec<_> = (1..*answered.last().unwrap()).filter(|number| !answered.contains(number)).collect();
            assert!(lost.is_empty(), "{lost:?} of {}", answered.len());
        }
        Ok(())
    });
}

/// A firewall between the nodes may know the packets by their two ports.
#[test]
fn a_peer_gets_its_datagrams_from_the_port_to_which_they_are_sent() {
    two_nodes(|one, two| async move {
        let tunnel = one.start().await?;
        let tunnel = one.on_ports(tunnel, &[OTHER_PORT, PORT], routes_to(PORT))?;
        let socket = two.inside(|| Ok(UdpSocket::bind((Ipv4Addr::new(192, 168, 0, 2), PORT))?))?;
        socket.set_read_timeout(Some(PATIENCE))?;
        let mut ping = one.spawn("ping", "-c 1 -W 1 10.5.2.0")?;
        let (_, from) = socket.recv_from(&mut [0; 2000])?;
        ping.wait()?;
        assert_eq!(from.to_string(), format!("192.168.0.1:{PORT}"));
        tunnel.stop()?;
        Ok(())
    });
}

/// The port of this node is another one, so it goes on to reach the peers that have followed.
#[test]
fn an_earlier_port_that_is_taken_is_named_and_does_not_stop_the_tunnel() {
    two_nodes(|one, two| async move {
        let (first, _second) = (one.start().await?, two.start().await?);
        let _taken = one.inside(|| Ok(UdpSocket::bind((Ipv4Addr::new(192, 168, 0, 1), OTHER_PORT))?))?;
        let first = one.on_ports(first, &[PORT, OTHER_PORT], routes())?;
        let refused: Vec<String> = first.refused().iter().map(ToString::to_string).collect();
        assert!(refused.len() == 1 && refused[0].contains("192.168.0.1:8286"), "{refused:?}");
        assert!(!first.listens_on(OTHER_PORT));
        assert!(one.ping("-q -c 1 -W 60 10.5.2.0")?.contains(" 0% packet loss"));
        Ok(())
    });
}

/// The kernel refuses packets together if one of them is too long for the uplink. Those that are short enough must leave anyway.
#[test]
fn packets_that_fit_are_sent_although_others_beside_them_are_too_long() {
    two_nodes(|one, two| async move {
        let _second = two.start().await?;
        let first = one.start().await?;
        // The requests wait until the next tunnel reads them all at once.
        let fd = first.device()?.try_clone_fd()?;
        first.stop()?;
        one.ns.ip("link set up0 mtu 1000").await?;
        let before = echoes_sent(&one)?;
        let mut pings = Vec::new();
        for (number, words) in [(1, "-s 1400 -W 1"), (2, "-s 1400 -W 1"), (3, "-s 56 -W 60")] {
            pings.push(one.spawn("ping", &format!("-c 1 -M do {words} 10.5.2.0"))?);
            eventually("the request waits", || echoes_sent(&one).is_ok_and(|now| now == before + number))?;
        }
        let first = one.adopt(&fd, None)?;
        let small = pings.pop().unwrap().wait_with_output()?;
        let out = String::from_utf8_lossy(&small.stdout).into_owned();
        assert!(out.contains(" 0% packet loss"), "{out}");
        for mut ping in pings {
            assert!(!ping.wait()?.success(), "the others are too long");
        }
        let counters = first.counters();
        let counted = || (counters.sent.dropped(Reason::TooBig), counters.sent.packets());
        eventually("all packets are counted", || counted() == (2, 1))?;
        drop(first);
        Ok(())
    });
}

/// Nobody waits for the end of the tunnel here. Without the end of the other thread, packets would still flow in one direction.
#[test]
fn both_threads_end_when_the_device_is_gone() {
    two_nodes(|one, _two| async move {
        let (config, ended) = (one.config(one.device().await?)?, Arc::new(AtomicUsize::new(0)));
        let count = ended.clone();
        let on_end = move || {
            count.fetch_add(1, Ordering::SeqCst);
        };
        let tunnel = one.inside(|| Ok(Tunnel::start(config, routes(), on_end)?))?;
        one.ns.ip("link del flannel0").await?;
        eventually("both threads end", || ended.load(Ordering::SeqCst) == 2)?;
        assert!(tunnel.has_ended());
        let lost = tunnel.stop().unwrap_err().to_string();
        assert!(lost.contains("flannel0 was lost"), "{lost}");
        Ok(())
    });
}

#[test]
fn a_restart_under_ping_counts_what_is_lost() {
    two_nodes(|one, two| async move {
        let _second = two.start().await?;
        let first = one.start().await?;
        let ping = Pings::start(&one, 2)?;
        let before = first.counters();
        eventually("the ping runs", || before.received.packets() >= 20)?;
        first.stop()?;
        let first = one.again()?;
        let after = first.counters();
        let answered = ping.stop()?;
        println!("{} of {} packets were lost", answered.last().unwrap() - answered.len(), answered.last().unwrap());
        // Every request that the second tunnel carried came back, and none that no tunnel carried.
        eventually("the last answers", || after.received.packets() >= after.sent.packets())?;
        let carried = before.sent.packets() + after.sent.packets();
        assert!(answered.len() as u64 <= carried, "{carried} carried, {} answered", answered.len());
        Ok(())
    });
}

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "needs FLANNELD"]
fn pings_reach_flanneld_and_come_from_it() {
    let flanneld = std::env::vars_os().find(|(name, _)| name == "FLANNELD").map(|(_, path)| path);
    let flanneld = flanneld.expect("set FLANNELD=/path/to/flanneld to run this test").into_string().unwrap();
    two_nodes(|one, two| async move {
        let dir = tempfile::tempdir()?;
        let path = dir.path().to_str().unwrap();
        let etcd = "--listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
                    --listen-peer-urls http://127.0.0.1:2380 --log-level error";
        let _etcd = Running(two.spawn("etcd", &format!("--data-dir {path}/etcd {etcd}"))?);
        let net_conf =
            r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.2.0","SubnetMax":"10.5.2.0","Backend":{"Type":"udp"}}"#;
        let lease = r#"{"PublicIP":"192.168.0.1","PublicIPv6":null}"#;
        let entries = [("config", net_conf), ("subnets/10.5.1.0-24", lease)];
        for (key, value) in entries {
            let put = || two.spawn("etcdctl", &format!("put /coreos.com/network/{key} {value}"));
            eventually("etcd takes an entry", || put().is_ok_and(|mut child| child.wait().unwrap().success()))?;
        }
        let flags = "-etcd-endpoints=http://127.0.0.1:2379 -iface=up0 -ip-masq=false -iptables-forward-rules=false";
        let _flanneld = Running(two.spawn(&flanneld, &format!("{flags} -subnet-file={path}/subnet.env"))?);
        eventually("flanneld is ready", || dir.path().join("subnet.env").exists())?;
        let first = one.start().await?;
        let reaches = |from: &Node, to: u8, (size, wait): (u16, u8)| {
            let ping = from.ping(&format!("-c 1 -W {wait} -M do -s {size} 10.5.{to}.0"));
            ping.is_ok_and(|out| out.contains(" 0% packet loss"))
        };
        // flanneld learns of its peers after it wrote subnet.env.
        eventually("a ping reaches flanneld", || reaches(&one, 2, (56, 1)))?;
        for (from, to) in [(&one, 2), (&two, 1)] {
            assert!(reaches(from, to, (MTU - 28, 60)) && reaches(from, to, (0, 60)));
        }
        first.stop()?;
        Ok(())
    });
}

/// Without the virtio header in front of each packet, all packets would be read wrongly.
#[test]
fn a_device_with_another_framing_is_not_taken_over() {
    two_nodes(|one, _two| async move {
        let refused = one.inside(|| {
            let bare = tun_rs::DeviceBuilder::new().name("flannel0").build_sync()?;
            Ok(Device::adopt(bare.as_fd().try_clone_to_owned()?).unwrap_err().to_string())
        })?;
        assert!(refused.contains("flannel0: its flags are 0x1001; delete it"), "{refused}");
        let ours = one.inside(|| Ok(Device::adopt(Device::open("flannel1")?.try_clone_fd()?)?.name().to_owned()))?;
        assert_eq!(ours, "flannel1");
        Ok(())
    });
}

#[test]
fn what_cannot_be_opened_is_named() {
    two_nodes(|one, _two| async move {
        let tunnel = one.start().await?;
        let busy = one.inside(|| Ok(Device::open("flannel0").unwrap_err().to_string()))?;
        assert!(busy.contains("flannel0") && busy.contains("busy"), "{busy}");
        one.ns.ip("link add other type bridge").await?;
        let other = one.inside(|| Ok(Device::open("other").unwrap_err().to_string()))?;
        assert!(other.contains("TUN device other"), "{other}");
        let port = one.tunnel(one.inside(|| Ok(Device::open("flannel1")?))?).unwrap_err().to_string();
        assert!(port.contains("192.168.0.1:8285"), "{port}");
        let file = std::fs::File::open("/dev/null")?.into();
        let file = one.inside(|| Ok(Device::adopt(file).unwrap_err().to_string()))?;
        assert!(file.contains("does not belong to a TUN device"), "{file}");
        one.ns.ip("tuntap add flannel2 mode tun").await?;
        one.ns.ip("link del flannel0").await?;
        eventually("the tunnel ends with its device", || tunnel.has_ended())?;
        let lost = tunnel.stop().unwrap_err().to_string();
        assert!(lost.contains("flannel0 was lost"), "{lost}");
        Ok(())
    });
}
