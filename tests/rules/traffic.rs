// SPDX-License-Identifier: Apache-2.0
//! The rules change while packets flow. No packet is lost, and none leaves with the address of a pod.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use weft::firewall::iptables::Iptables;
use weft::firewall::nft::Nft;
use weft::firewall::packet_filter::{Ensured, PacketFilter};
use weft::instance::Instance;
use weft_backends::traffic_rules::{Masquerade, Policy, Rules, rules};
use weft_lab::BackendKind;
use weft_subnet::cidr::Subnets;

use crate::packets::{inside, socket};
use crate::site::{Family, PATIENCE, PORT, Site, on_this_thread};

/// How often the rules are replaced at least, and how many packets must flow meanwhile.
const ROUNDS: u8 = 25;
/// The size of the buffer of the receiver, in bytes. It has room for what is sent in some seconds, so a receiver that gets no time loses
/// nothing.
const BUFFER: usize = 16 << 20;
/// The result of a flow of datagrams from a pod to the outside.
#[derive(Debug, Default, PartialEq, Eq)]
struct Flow {
    sent: u64,
    arrived: u64,
    sources: BTreeSet<IpAddr>,
}

/// Sends datagrams until it is stopped. Each is a new connection, so that each passes the masquerade rules.
struct Sender {
    stop: Arc<AtomicBool>,
    /// The last datagram was sent.
    ended: Arc<AtomicBool>,
    sources: Arc<Mutex<BTreeSet<IpAddr>>>,
    count: Arc<AtomicU64>,
    sent: JoinHandle<()>,
    arrived: JoinHandle<u64>,
}

impl Sender {
    fn start(site: &Site, family: Family) -> Sender {
        let out = site.addr("out", family);
        let (client, server) = (site.addr("n1-p1", family), socket("out", out, PORT));
        // A datagram that finds the buffer of the receiver full would count as lost by the rules.
        setsockopt(&server, sockopt::RcvBufForce, &BUFFER).expect("these tests need CAP_NET_ADMIN");
        let (stop, ended, sources) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default(), Arc::default());
        let count = Arc::<AtomicU64>::default();
        let (stopped, has_ended, seen, counted) = (stop.clone(), ended.clone(), Arc::clone(&sources), count.clone());
        let sent = thread::spawn(move || inside("n1-p1", || send(client, (out, PORT).into(), &stopped, &counted)));
        let arrived = thread::spawn(move || receive(&server, &has_ended, &seen));
        Sender { stop, ended, sources, count, sent, arrived }
    }

    /// Returns how many datagrams were sent until now.
    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    fn has_seen(&self, source: IpAddr) -> bool {
        self.sources.lock().unwrap().contains(&source)
    }

    fn end(self) -> Flow {
        self.stop.store(true, Ordering::Relaxed);
        self.sent.join().unwrap();
        self.ended.store(true, Ordering::Relaxed);
        let (sent, arrived) = (self.count.load(Ordering::Relaxed), self.arrived.join().unwrap());
        let sources = self.sources.lock().unwrap().clone();
        Flow { sent, arrived, sources }
    }
}

fn send(client: IpAddr, to: SocketAddr, stopped: &AtomicBool, count: &AtomicU64) {
    while !stopped.load(Ordering::Relaxed) {
        // The rules see only the first packet of a connection, so every datagram gets a new source port.
        let socket = UdpSocket::bind((client, 0)).expect("the pod has its address");
        let number = count.load(Ordering::Relaxed);
        socket.send_to(&number.to_be_bytes(), to).expect("a datagram is sent");
        count.store(number + 1, Ordering::Relaxed);
        // The buffer of the receiver must not overflow, nor the table of connections.
        thread::park_timeout(Duration::from_micros(300));
    }
}

/// Counts datagrams until the sender has ended and no more arrive.
fn receive(server: &UdpSocket, ended: &AtomicBool, sources: &Mutex<BTreeSet<IpAddr>>) -> u64 {
    let mut numbers = BTreeSet::new();
    let mut room = [0; 64];
    loop {
        match server.recv_from(&mut room) {
            Ok((8, source)) => {
                numbers.insert(room[..8].to_vec());
                sources.lock().unwrap().insert(source.ip());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && ended.load(Ordering::Relaxed) => {
                return numbers.len() as u64;
            }
            Ok(_) | Err(_) => {}
        }
    }
}

/// Returns the rules of n1 with an additional exception that no packet of the flow matches.
fn rules_with_exception(site: &Site, round: u8) -> Rules {
    let networks = Subnets { v4: "10.244.0.0/16".parse().ok(), v6: "fd00:10:244::/48".parse().ok() };
    let subnet = |family| match site.addr("n1-p1", family) {
        IpAddr::V4(v4) => format!("{v4}/24"),
        IpAddr::V6(v6) => format!("{v6}/64"),
    };
    let own = |family| subnet(family).parse::<ipnet::IpNet>().expect("an address with a length").trunc();
    let (ipnet::IpNet::V4(v4), ipnet::IpNet::V6(v6)) = (own(Family::V4), own(Family::V6)) else {
        panic!("both families")
    };
    let own = Subnets { v4: Some(v4), v6: Some(v6) };
    let except = [format!("203.0.113.{round}/32"), format!("2001:db8::{round}/128")];
    let except = except.map(|net| net.parse().expect("a prefix")).to_vec();
    let masquerade = Masquerade { fully_random: true, except, nodes: Vec::new() };
    rules(&networks, &own, &Policy { masquerade: Some(masquerade), forward: true })
}

/// Replaces the rules of the agent many times, and as long as few packets were sent: on a busy machine the sender may get little time. Each time
/// the rules have another exception, as after a change of net-conf.
fn replace(site: &Site, sender: &Sender, filter: impl Fn(&Instance) -> Box<dyn PacketFilter> + Send + Sync) {
    let instance = Instance::new(&site.lab.nodes[0].subnet_file());
    let wanted: Vec<Rules> = (1..=ROUNDS).map(|round| rules_with_exception(site, round)).collect();
    inside("n1", || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut filter = filter(&instance);
            let end = Instant::now() + PATIENCE;
            for (round, rules) in wanted.iter().cycle().enumerate() {
                if round >= wanted.len() && sender.count() > u64::from(ROUNDS) {
                    return;
                }
                assert!(Instant::now() < end, "packets flow while the rules change: {}", sender.count());
                assert_eq!(filter.ensure(rules).await.unwrap(), Ensured::Written);
            }
        });
    });
}

fn no_packet_is_lost_or_unmasqueraded(
    flags: &'static [&'static str],
    flavour: Option<&'static str>,
    filter: impl Fn(&Instance) -> Box<dyn PacketFilter> + Send + Sync + Copy + 'static,
) {
    on_this_thread(async move {
        let mut site = Site::build(BackendKind::Vxlan, &[&["--ip-masq", "--resync=1h"], flags].concat()).await;
        if let Some(flavour) = flavour {
            site.hint(flavour).await;
        }
        site.start().await;
        // The agent would restore its own rules, so it is stopped. The rules stay.
        site.lab.nodes[0].stop(nix::sys::signal::Signal::SIGTERM).await.unwrap();
        for family in Family::BOTH {
            site.until_seen(&crate::site::straight("n1-p1", "out"), family, "n1");
        }
        for family in Family::BOTH {
            let sender = Sender::start(&site, family);
            replace(&site, &sender, filter);
            let flow = sender.end();
            assert_eq!(flow.arrived, flow.sent, "{family:?}: {flow:?}");
            assert_eq!(flow.sources, BTreeSet::from([site.addr("n1", family)]), "{family:?}");
        }
    });
}

#[test]
fn no_packet_is_lost_or_unmasqueraded_while_nftables_rules_change() {
    no_packet_is_lost_or_unmasqueraded(&["--firewall=nft"], None, |instance| Box::new(Nft::new(instance)));
}

#[test]
fn no_packet_is_lost_or_unmasqueraded_while_iptables_nft_rules_change() {
    let filter = |instance: &Instance| Box::new(Iptables::new(instance)) as Box<dyn PacketFilter>;
    no_packet_is_lost_or_unmasqueraded(&["--firewall=iptables"], Some("nft"), filter);
}

#[test]
fn no_packet_is_lost_or_unmasqueraded_while_iptables_legacy_rules_change() {
    let filter = |instance: &Instance| Box::new(Iptables::new(instance)) as Box<dyn PacketFilter>;
    no_packet_is_lost_or_unmasqueraded(&["--firewall=iptables"], Some("legacy"), filter);
}

/// The control of the tests above: if the rules are removed for a moment, the receiver sees the address of a pod.
#[test]
fn a_moment_without_rules_is_noticed() {
    on_this_thread(async {
        let mut site =
            Site::build(BackendKind::Vxlan, &["--ip-masq", "--firewall=nft", "--iptables-resync=3600"]).await;
        site.start().await;
        site.lab.nodes[0].stop(nix::sys::signal::Signal::SIGTERM).await.unwrap();
        site.until_seen(&crate::site::straight("n1-p1", "out"), Family::V4, "n1");
        let sender = Sender::start(&site, Family::V4);
        site.nft("n1", "flush ruleset").await;
        let (pod, deadline) = (site.addr("n1-p1", Family::V4), Instant::now() + PATIENCE);
        while !sender.has_seen(pod) {
            assert!(Instant::now() < deadline, "no packet left with the address of the pod");
            thread::park_timeout(Duration::from_millis(10));
        }
        sender.end();
    });
}
