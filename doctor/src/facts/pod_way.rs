// SPDX-License-Identifier: Apache-2.0
//! Asks the nodes that are reached without a tunnel (host-gw, DirectRouting) whether packets with addresses of pods get to them. The network of a cloud,
//! or a switch with port security, may pass only packets with the addresses of nodes.
//!
//! A node forwards packets for its pods. When it forwards one with TTL 1, it answers "time exceeded" (RFC 792), before any rule for forwarded
//! packets. So a packet with TTL 1 for the last address of its subnet shows that packets for its pods get to it, whether it has pods or
//! not, and whether they answer or not. The sender is the bridge of this node, so the answer goes to an address of a pod, too. The first address of the
//! subnet is asked as well: it belongs to the bridge of that node, if it has one. A node counts only if it answers at its own address meanwhile.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::libc;
use nix::sys::socket::{MsgFlags, SockFlag, SockType, SockaddrStorage, bind, recvfrom, sendto, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use weft_backends::owner::{FENCE_TABLES, PROTOCOL};
use weft_netlink::rtnl::{Addr, Route};
use weft_subnet::env;
use weft_udp::echo::{self, HEADER};

use super::policy_rules::PolicyRules;
use super::tables::Tables;
use crate::kernel::Kernel;
use crate::kernel::entries::RouteKind;
use crate::known_links::{bridge, is_ours};

/// What is sent before the silence of a node counts, and how long answers are waited for each time. The kernel of a node sends few messages about errors:
/// where it has no route, one costs two seconds (`ip_error` and `icmpv4_xrlim_allow`), and a request that comes earlier costs one of them again.
const ROUNDS: [(Kind, Duration); 5] = [
    (Kind::Expires, SHORT),
    (Kind::Bridge, LONG),
    (Kind::Expires, SHORT),
    (Kind::Bridge, LONG),
    (Kind::Expires, SHORT),
];
const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(2);
/// Maximum number of nodes that are asked, for each family.
const MAX_NODES: usize = 8;
/// Bytes of the header of IPv6.
const IPV6: usize = 40;

/// A node that is reached without a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Direct {
    /// Its address, which is the gateway of the route.
    pub gateway: IpAddr,
    /// Its subnet.
    pub subnet: IpNet,
    /// The address of the bridge of this node. Without one, this node sends from its own address.
    pub from: Option<IpAddr>,
}

impl Direct {
    /// Returns the node behind this gateway that has this subnet. `own` are the subnets of this node, `bridge` is the index of its bridge, and `addrs` are
    /// the addresses of its links. `None` if this node has no subnet of that family.
    pub fn new(gateway: IpAddr, subnet: IpNet, own: &[IpNet], bridge: Option<u32>, addrs: &[Addr]) -> Option<Direct> {
        let own = own.iter().find(|own| own.addr().is_ipv4() == subnet.addr().is_ipv4())?.trunc();
        let mut of_bridge = addrs.iter().filter(|addr| Some(addr.index) == bridge).map(|addr| addr.addr);
        Some(Direct { gateway, subnet, from: of_bridge.find(|addr| own.contains(addr)) })
    }
}

/// What was found.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PodWay {
    /// The nodes that answer at their own addresses, and not a single packet for their pods.
    pub silent: Vec<Direct>,
    /// Number of nodes that answer packets for their pods.
    pub answering: usize,
}

/// Number of kinds of packets.
const KINDS: usize = 3;

/// What a packet asks. Its number tells its answer from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// An echo request to the address of the node.
    Node,
    /// An echo request with TTL 1 to the last address of its subnet.
    Expires,
    /// An echo request to its bridge.
    Bridge,
}

/// Asks some of the nodes to which routes of weft lead without a tunnel, unless such nodes may drop the packets in silence. `own` are the subnets of this node.
///
/// # Errors
/// There are no raw sockets, for example because the caller is not root.
pub(super) fn read(tables: &Tables<'_>, own: &[IpNet]) -> io::Result<PodWay> {
    let mut found = PodWay::default();
    let bridge = bridge(tables.links).map(|link| link.index);
    let is_tunnel = |index: u32| tables.link(index).is_some_and(is_ours);
    let direct = |route: &Route| {
        let subnet = IpNet::new(route.dst?, route.len).ok()?;
        Direct::new(route.gateway?, subnet, own, bridge, tables.addrs)
    };
    let of_weft = tables.routes.iter().filter(|route| route.protocol == PROTOCOL && !is_tunnel(route.index));
    let (four, six): (Vec<Direct>, Vec<Direct>) =
        of_weft.filter_map(direct).partition(|direct| direct.gateway.is_ipv4());
    let (four, six) = (&four[..four.len().min(MAX_NODES)], &six[..six.len().min(MAX_NODES)]);
    let [of_four, of_six] = ask_both(tables.policy, four, six);
    for (nodes, answers) in [(four, of_four?), (six, of_six?)] {
        for (node, answer) in nodes.iter().zip(answers) {
            match answer {
                Some(true) => found.answering += 1,
                Some(false) => found.silent.push(*node),
                None => {}
            }
        }
    }
    Ok(found)
}

/// Returns true if the fence of this node, and so probably that of others, drops packets for unused addresses without an answer.
fn drops_in_silence(policy: &PolicyRules, is_ipv4: bool) -> bool {
    let blackhole = RouteKind::Refuses(libc::RTN_BLACKHOLE);
    let has_blackhole = |table: u32| {
        let routes = Kernel::open().and_then(|mut kernel| kernel.table(is_ipv4, table));
        routes.is_ok_and(|routes| routes.iter().any(|route| route.kind == blackhole))
    };
    policy.tables(is_ipv4, FENCE_TABLES).any(has_blackhole)
}

/// Asks one node. Returns whether it answers packets for its pods, or `None` if that cannot be known: it does not answer at its own address either, or such
/// nodes may drop the packets in silence. This blocks for up to six seconds.
///
/// # Errors
/// There are no raw sockets, for example because the caller is not root.
pub fn ask_one(node: Direct) -> io::Result<Option<bool>> {
    Ok(ask(&PolicyRules::read()?, &[node])?.into_iter().next().flatten())
}

/// Asks nodes of IPv4 and nodes of IPv6 at once, because silence takes six seconds.
fn ask_both(policy: &PolicyRules, four: &[Direct], six: &[Direct]) -> [Answers; 2] {
    let one_by_one = || [ask(policy, four), ask(policy, six)];
    if four.is_empty() || six.is_empty() {
        return one_by_one();
    }
    // A thread begins in the network namespace of the one that starts it.
    thread::scope(|scope| match thread::Builder::new().spawn_scoped(scope, || ask(policy, six)) {
        Ok(of_six) => {
            let of_four = ask(policy, four);
            let failed = |_| Err(io::Error::other("the thread for IPv6 has failed"));
            [of_four, of_six.join().unwrap_or_else(failed)]
        }
        // The machine may have no more threads, which is another finding.
        Err(_) => one_by_one(),
    })
}

/// What each of some nodes answers.
type Answers = io::Result<Vec<Option<bool>>>;

/// Asks nodes of one family. Returns the same as [`ask_one`] for each.
fn ask(policy: &PolicyRules, nodes: &[Direct]) -> Answers {
    let mut answered = vec![[false; KINDS]; nodes.len()];
    let Some(first) = nodes.first() else { return Ok(Vec::new()) };
    if drops_in_silence(policy, first.gateway.is_ipv4()) {
        return Ok(vec![None; nodes.len()]);
    }
    let receiver = open(first.gateway)?;
    for (round, (asks, wait)) in ROUNDS.into_iter().enumerate() {
        // That a node does not answer at its own address is another fault, which probes find.
        let is_open = |[node, expires, bridge]: &[bool; KINDS]| {
            if *node { !(*expires || *bridge) } else { round == 0 }
        };
        for (number, node) in nodes.iter().enumerate().filter(|(number, _)| is_open(&answered[*number])) {
            [Kind::Node, asks].into_iter().for_each(|kind| send(node, number, kind));
        }
        let end = Instant::now() + wait;
        while answered.iter().any(is_open)
            && let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| left.as_millis() > 0)
        {
            let left = TimeVal::milliseconds(left.as_millis().try_into().unwrap_or(i64::MAX));
            setsockopt(&receiver, sockopt::ReceiveTimeout, &left)?;
            let Some((number, kind)) = receive(&receiver, first.gateway.is_ipv4()) else { continue };
            if let Some(answered) = answered.get_mut(number).and_then(|one| one.get_mut(kind)) {
                *answered = true;
            }
        }
    }
    Ok(answered.into_iter().map(|[node, expires, bridge]| node.then_some(expires || bridge)).collect())
}

fn open(like: IpAddr) -> nix::Result<OwnedFd> {
    echo::open(like, SockType::Raw, SockFlag::SOCK_CLOEXEC)
}

/// Sends one packet. What this host itself does not send is a fault that other checks find.
fn send(node: &Direct, number: usize, kind: Kind) {
    let to = match kind {
        Kind::Node => Some(node.gateway),
        Kind::Expires => node.subnet.trunc().hosts().last(),
        Kind::Bridge => Some(env::gateway(node.subnet.trunc())),
    };
    let from = node.from.filter(|_| kind != Kind::Node);
    let _ = to.map(|to| send_to(from, to, &request(to.is_ipv4(), number, kind), kind == Kind::Expires));
}

fn send_to(from: Option<IpAddr>, to: IpAddr, message: &[u8], expires: bool) -> nix::Result<()> {
    let socket = open(to)?;
    if let Some(from) = from {
        bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
    }
    match to {
        _ if !expires => {}
        IpAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4Ttl, &1)?,
        IpAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6Ttl, &1)?,
    }
    sendto(socket.as_raw_fd(), message, &SockaddrStorage::from(SocketAddr::new(to, 0)), MsgFlags::empty()).map(drop)
}

/// Returns an echo request. The identifier is that of this process, and the sequence number says which node and what is asked.
fn request(is_ipv4: bool, number: usize, kind: Kind) -> Vec<u8> {
    let sequence = u16::try_from(number * KINDS + kind as usize).unwrap_or(u16::MAX);
    echo::request(is_ipv4, &[identifier(), sequence.to_be_bytes()].concat())
}

fn identifier() -> [u8; 2] {
    let [.., high, low] = std::process::id().to_be_bytes();
    [high, low]
}

/// Receives one packet. Returns the number of the node and of the kind of the request that it answers, if it answers one of ours.
fn receive(socket: &OwnedFd, is_ipv4: bool) -> Option<(usize, usize)> {
    let mut buffer = [0; 256];
    // An error means that the time is over, or that a signal came.
    let (size, _) = recvfrom::<SockaddrStorage>(socket.as_raw_fd(), &mut buffer).ok()?;
    answered(&buffer[..size], is_ipv4)
}

/// Returns what a packet answers. An error contains the beginning of the packet that it is about.
fn answered(packet: &[u8], is_ipv4: bool) -> Option<(usize, usize)> {
    let message = echo::message(packet, is_ipv4)?;
    let inner = || {
        let about = message.get(HEADER..)?;
        if is_ipv4 { echo::message(about, true) } else { about.get(IPV6..) }
    };
    let (of_ours, is_error) = match (*message.first()?, is_ipv4) {
        (kind, _) if kind == echo::answer_type(is_ipv4) => (message, false),
        // It cannot be delivered, or its time is exceeded.
        (3 | 11, true) | (1 | 3, false) => (inner()?, true),
        _ => return None,
    };
    if of_ours.get(4..6)? != identifier() || (is_error && *of_ours.first()? != echo::request_type(is_ipv4)) {
        return None;
    }
    let sequence = usize::from(u16::from_be_bytes(of_ours.get(6..HEADER)?.try_into().ok()?));
    // An error about the address of the node itself is no answer of it.
    let (number, kind) = (sequence / KINDS, sequence % KINDS);
    (!is_error || kind != Kind::Node as usize).then_some((number, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ipv4(message: &[u8]) -> Vec<u8> {
        [&[0x45][..], &[0; 19], message].concat()
    }

    #[test]
    fn answers_and_errors_about_our_requests_count_and_no_others() {
        for kind in [Kind::Node, Kind::Expires, Kind::Bridge] {
            let asked = request(true, 5, kind);
            let mut echo = asked.clone();
            echo[0] = 0;
            assert_eq!(answered(&ipv4(&echo), true), Some((5, kind as usize)));
            let error = |number| ipv4(&[&[number, 0, 0, 0, 0, 0, 0, 0][..], &ipv4(&asked)].concat());
            let wanted = (kind != Kind::Node).then_some((5, kind as usize));
            assert_eq!(answered(&error(11), true), wanted);
            assert_eq!(answered(&error(3), true), wanted);
            assert_eq!(answered(&error(5), true), None, "a redirect");
            assert_eq!(answered(&ipv4(&asked), true), None, "our own request");
            echo[4] ^= 1;
            assert_eq!(answered(&ipv4(&echo), true), None, "another process asks");
        }
        let asked = request(false, 2, Kind::Expires);
        let exceeded = [&[3, 0, 0, 0, 0, 0, 0, 0][..], &[0; IPV6], &asked].concat();
        assert_eq!(answered(&exceeded, false), Some((2, Kind::Expires as usize)));
        for cut in 0..exceeded.len() {
            assert_eq!(answered(&exceeded[..cut], false), None);
        }
    }
}
