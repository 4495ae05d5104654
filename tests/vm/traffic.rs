// SPDX-License-Identifier: Apache-2.0
//! Traffic between pods of the test machine, and what passes an uplink of it.
//!
//! `traffic flows REPORT SECONDS FROM,TO,ADDRESS...` sends 100 UDP packets per second from the namespace FROM to ADDRESS in the namespace TO,
//! for each flow. It ends when the file REPORT.stop appears, or after SECONDS.
//!
//! `traffic capture REPORT SECONDS NAMESPACE DEVICE NETWORK...` counts the frames of a device: those of WireGuard, those of vxlan, and those that
//! contain, at any place, an IP header with both addresses inside the networks. Such a frame shows what one pod sends to another in clear text.
//! Each message of a WireGuard handshake has a line of its own: `initiation` or `response`, its time, and who sent it.
//!
//! Both create the file REPORT.started when they work, and write their report to REPORT. Times are seconds since boot, as in
//! /proc/uptime.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expected")]
#![allow(clippy::disallowed_methods, reason = "packets are sent at fixed times")]

use std::collections::HashSet;
use std::fmt::Write as _;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket, sockopt,
};

/// The pause between two packets of a flow.
const INTERVAL: Duration = Duration::from_millis(10);
/// How long a flow may take until its first packet arrives.
const FIRST: Duration = Duration::from_secs(60);
/// How long the last packets may take to arrive.
const LAST: Duration = Duration::from_secs(5);
/// Maximum number of messages of handshakes that are listed.
const MAX_HANDSHAKES: usize = 1000;
/// The sequence number of the packets before the first that counts.
const TRIAL: u64 = u64::MAX;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["flows", report, seconds, ref flows @ ..] if !flows.is_empty() => {
            Run::new(report, seconds).flows(flows.iter().map(|text| Flow::open(text)).collect());
        }
        ["capture", report, seconds, namespace, device, ref networks @ ..] => {
            let networks: Vec<IpNet> = networks.iter().map(|text| text.parse().unwrap()).collect();
            Run::new(report, seconds).capture(&Uplink::open(namespace, device), &networks);
        }
        _ => panic!(
            "traffic flows REPORT SECONDS FROM,TO,ADDRESS... | capture REPORT SECONDS NAMESPACE DEVICE NETWORK..."
        ),
    }
}

/// Moves this thread to a namespace. Sockets stay in the namespace in which they were opened.
fn enter(namespace: &str) {
    let file = File::open(format!("/run/netns/{namespace}")).unwrap();
    setns(file, CloneFlags::CLONE_NEWNET).unwrap();
}

/// Seconds since boot.
fn uptime() -> f64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

/// What both commands have in common: when they end, and where their report goes.
struct Run {
    report: PathBuf,
    end: Instant,
}

impl Run {
    fn new(report: &str, seconds: &str) -> Run {
        Run { report: PathBuf::from(report), end: Instant::now() + Duration::from_secs(seconds.parse().unwrap()) }
    }

    fn file(&self, extension: &str) -> PathBuf {
        self.report.with_extension(extension)
    }

    /// Says why the run ends, if it does.
    fn ended(&self) -> Option<&'static str> {
        if self.file("stop").exists() { Some("stopped") } else { (Instant::now() >= self.end).then_some("timeout") }
    }

    fn write(&self, report: &str) {
        let aside = self.file("new");
        std::fs::write(&aside, report).unwrap();
        std::fs::rename(aside, &self.report).unwrap();
    }

    fn flows(&self, mut flows: Vec<Flow>) {
        for flow in &flows {
            flow.first_packet();
        }
        File::create(self.file("started")).unwrap();
        let (begin, boot) = (Instant::now(), uptime());
        let done = AtomicBool::new(false);
        let senders: Vec<UdpSocket> = flows.iter().map(|flow| flow.sender.try_clone().unwrap()).collect();
        let sent = std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receive(&mut flows, &done));
            let sent = send(&senders, self);
            done.store(true, Ordering::Release);
            receiver.join().unwrap();
            sent
        });
        let since_boot = |at: Instant| boot + at.duration_since(begin).as_secs_f64();
        self.write(&sent.report(&flows, since_boot));
    }

    fn capture(&self, uplink: &Uplink, networks: &[IpNet]) {
        File::create(self.file("started")).unwrap();
        let (mut frames, mut wireguard, mut vxlan, mut clear) = (0, 0, 0, 0);
        let (mut examples, mut handshakes) = (String::new(), 0);
        let ended = loop {
            if let Some(why) = self.ended() {
                break why;
            }
            while let Some(frame) = uplink.frame() {
                frames += 1;
                let port = datagram(&frame).map(|(_, port, _)| port);
                wireguard += u64::from(port.is_some_and(|port| (51820..=51839).contains(&port)));
                vxlan += u64::from(port == Some(8472));
                if let Some((message, from)) = handshake(&frame).filter(|_| handshakes < MAX_HANDSHAKES) {
                    handshakes += 1;
                    let _ = writeln!(examples, "{message} {:.2} {from}", uptime());
                }
                if shows_pods(&frame, networks) {
                    clear += 1;
                    if clear <= 3 {
                        let _ = writeln!(examples, "clear {:02x?}", &frame[..frame.len().min(96)]);
                    }
                }
            }
        };
        self.write(&format!(
            "frames {frames} wireguard {wireguard} vxlan {vxlan} clear {clear} ended {ended}\n{examples}"
        ));
    }
}

/// Packets from one pod to another.
struct Flow {
    name: String,
    sender: UdpSocket,
    receiver: UdpSocket,
    arrived: HashSet<u64>,
    twice: u64,
    last: Option<Instant>,
    longest_gap: Duration,
    gap_ended: Option<Instant>,
}

impl Flow {
    fn open(text: &str) -> Flow {
        let [from, to, address] = text.split(',').collect::<Vec<_>>()[..] else { panic!("no flow: {text}") };
        let address: IpAddr = address.parse().unwrap();
        enter(to);
        let receiver = UdpSocket::bind(SocketAddr::new(address, 0)).unwrap();
        enter(from);
        let any = if address.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
        let sender = UdpSocket::bind(SocketAddr::new(any, 0)).unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        let name = format!("{from}>{address}");
        let (arrived, longest_gap) = (HashSet::new(), Duration::ZERO);
        Flow { name, sender, receiver, arrived, twice: 0, last: None, longest_gap, gap_ended: None }
    }

    /// Sends until a packet arrives: the way may need an ARP request or a handshake first.
    fn first_packet(&self) {
        let end = Instant::now() + FIRST;
        self.receiver.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        loop {
            let _ = self.sender.send(&TRIAL.to_be_bytes());
            if self.receiver.recv(&mut [0; 64]).is_ok() {
                break;
            }
            assert!(Instant::now() < end, "no packet of {} arrives", self.name);
        }
        self.receiver.set_nonblocking(true).unwrap();
    }

    fn read_all(&mut self) {
        let mut packet = [0; 64];
        while let Ok(8) = self.receiver.recv(&mut packet) {
            let number = u64::from_be_bytes(packet[..8].try_into().unwrap());
            if number == TRIAL {
                continue;
            }
            let now = Instant::now();
            let gap = now - self.last.unwrap_or(now);
            if gap > self.longest_gap {
                (self.longest_gap, self.gap_ended) = (gap, Some(now));
            }
            self.last = Some(now);
            self.twice += u64::from(!self.arrived.insert(number));
        }
    }

    /// The runs of numbers that did not arrive, such as `17-40`.
    fn missing(&self, sent: u64) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for number in (0..sent).filter(|number| !self.arrived.contains(number)) {
            match runs.last_mut() {
                Some((_, last)) if *last + 1 == number => *last = number,
                _ => runs.push((number, number)),
            }
        }
        runs
    }
}

/// What the sender did.
struct Sent {
    /// When each packet was sent. All flows have the same times.
    times: Vec<Instant>,
    errors: HashSet<String>,
    ended: &'static str,
}

/// Sends one packet of every flow at each tick. A tick that is late is not followed by a burst, so the rate falls instead.
fn send(senders: &[UdpSocket], run: &Run) -> Sent {
    let mut sent = Sent { times: Vec::new(), errors: HashSet::new(), ended: "" };
    let mut next = Instant::now();
    loop {
        if let Some(why) = run.ended() {
            sent.ended = why;
            return sent;
        }
        let number = sent.times.len() as u64;
        sent.times.push(Instant::now());
        for sender in senders {
            if let Err(e) = sender.send(&number.to_be_bytes()) {
                sent.errors.insert(e.to_string());
            }
        }
        next = (next + INTERVAL).max(Instant::now() - INTERVAL);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

/// Reads until the sender is done and nothing has arrived for [`LAST`].
fn receive(flows: &mut [Flow], done: &AtomicBool) {
    let mut quiet = Instant::now();
    while !done.load(Ordering::Acquire) || quiet.elapsed() < LAST {
        let mut fds: Vec<PollFd> = flows.iter().map(|f| PollFd::new(f.receiver.as_fd(), PollFlags::POLLIN)).collect();
        if poll(&mut fds, PollTimeout::from(100_u8)).unwrap() == 0 {
            continue;
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any() == Some(true)).collect();
        for (flow, _) in flows.iter_mut().zip(ready).filter(|(_, ready)| *ready) {
            flow.read_all();
        }
        quiet = Instant::now();
    }
}

impl Sent {
    /// One line for all flows, and one for each.
    fn report(&self, flows: &[Flow], since_boot: impl Fn(Instant) -> f64) -> String {
        let count = self.times.len() as u64;
        let took = self.times.last().unwrap().duration_since(self.times[0]).as_secs_f64();
        let pauses = self.times.windows(2).map(|pair| pair[1] - pair[0]);
        let arrived: u64 = flows.iter().map(|flow| flow.arrived.len() as u64).sum();
        let sent = count * flows.len() as u64;
        let lost = sent - arrived;
        #[expect(clippy::cast_precision_loss, reason = "no run has 2^52 packets")]
        let rate = (count - 1) as f64 / took.max(0.001);
        let gap = flows.iter().max_by_key(|flow| flow.longest_gap).unwrap();
        let mut text = format!(
            "sent {sent} received {arrived} lost {lost} twice {} rate {rate:.0} pause {} gap {} gap_ended {:.2} ended {} errors {:?}\n",
            flows.iter().map(|flow| flow.twice).sum::<u64>(),
            pauses.max().unwrap_or_default().as_millis(),
            gap.longest_gap.as_millis(),
            gap.gap_ended.map_or(0.0, &since_boot),
            self.ended,
            self.errors,
        );
        for flow in flows {
            let missing = flow.missing(count);
            let lost: u64 = missing.iter().map(|(first, last)| last - first + 1).sum();
            let _ = write!(text, "flow {} lost {lost} gap {}", flow.name, flow.longest_gap.as_millis());
            for (first, last) in missing.iter().take(5) {
                let at = |number: u64| since_boot(self.times[usize::try_from(number).unwrap()]);
                let _ = write!(text, ", {first}-{last} at {:.2} to {:.2}", at(*first), at(*last));
            }
            text.push('\n');
        }
        text
    }
}

/// A socket that sees every frame of a device.
struct Uplink {
    socket: OwnedFd,
    index: usize,
}

impl Uplink {
    fn open(namespace: &str, device: &str) -> Uplink {
        enter(namespace);
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).unwrap();
        setsockopt(&socket, sockopt::RcvBufForce, &(32 << 20)).unwrap();
        let index = nix::net::if_::if_nametoindex(device).unwrap();
        Uplink { socket, index: index as usize }
    }

    /// Returns the next frame of the device, or `None` if there is none for some time.
    fn frame(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 65536];
        loop {
            let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, PollTimeout::from(100_u8)).unwrap() == 0 {
                return None;
            }
            let fd = self.socket.as_raw_fd();
            let Ok((length, Some(from))) = recvfrom::<LinkAddr>(fd, &mut buffer) else { return None };
            if from.ifindex() == self.index {
                buffer.truncate(length);
                return Some(buffer);
            }
        }
    }
}

/// Returns the source address, the destination port and the content of a frame whose outermost IP header is that of UDP.
fn datagram(frame: &[u8]) -> Option<(IpAddr, u16, &[u8])> {
    let packet = frame.get(14..)?;
    let (protocol, length, from) = match packet.first()? >> 4 {
        4 => (packet.get(9)?, usize::from(packet[0] & 15) * 4, <[u8; 4]>::try_from(packet.get(12..16)?).ok()?.into()),
        6 => (packet.get(6)?, 40, <[u8; 16]>::try_from(packet.get(8..24)?).ok()?.into()),
        _ => return None,
    };
    let udp = packet.get(length..).filter(|udp| *protocol == 17 && udp.len() >= 8)?;
    Some((from, u16::from_be_bytes([udp[2], udp[3]]), &udp[8..]))
}

/// Names the message of a WireGuard handshake, with its sender. Its length and its first four bytes tell it from all other messages.
fn handshake(frame: &[u8]) -> Option<(&'static str, IpAddr)> {
    let (from, _, content) = datagram(frame)?;
    match (content.get(..4)?, content.len()) {
        ([1, 0, 0, 0], 148) => Some(("initiation", from)),
        ([2, 0, 0, 0], 92) => Some(("response", from)),
        _ => None,
    }
}

/// Whether an IP header with both addresses inside the networks begins anywhere in the frame. So it does not matter what encapsulates it.
fn shows_pods(frame: &[u8], networks: &[IpNet]) -> bool {
    let inside = |address: IpAddr| networks.iter().any(|net| net.contains(&address));
    let v4 = |bytes: &[u8]| IpAddr::from(<[u8; 4]>::try_from(bytes).unwrap());
    let v6 = |bytes: &[u8]| IpAddr::from(<[u8; 16]>::try_from(bytes).unwrap());
    let header4 = |h: &[u8]| h[0] >> 4 == 4 && inside(v4(&h[12..16])) && inside(v4(&h[16..20]));
    let header6 = |h: &[u8]| h[0] >> 4 == 6 && inside(v6(&h[8..24])) && inside(v6(&h[24..40]));
    frame.windows(20).any(header4) || frame.windows(40).any(header6)
}
