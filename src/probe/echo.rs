// SPDX-License-Identifier: Apache-2.0
//! One ICMP echo request and its answer.
//!
//! An answer counts if it has the identifier, the sequence number, the random number and the size of the request. For IPv4 it must come
//! from the address that was asked. The socket is connected then, so the kernel hands out only packets of the peer. For IPv6 it may have
//! another source: the address that is asked is the first one of a subnet. Where a link of the peer has this subnet, too, as the bridge of
//! the pods does, this is also the subnet-router anycast address (RFC 4291, section 2.6.1). Linux answers requests to such an address from
//! another one of its addresses (net.ipv6.anycast_src_echo_reply of Documentation/networking/ip-sysctl.rst), if that link had the address
//! before the tunnel device.
//!
//! The kernel sets the DF bit of IPv4 packets, because they are not larger than the MTU of the device.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::pin;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, SockFlag, SockType, SockaddrStorage, connect, recvmsg, send, sendto};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, timeout_at};
use weft_udp::echo::{self, HEADER};

use crate::async_socket::wait_on;

/// Bytes of the random number.
const NONCE: usize = 8;
/// The largest IPv4 header.
const MAX_IP_HEADER: usize = 60;
/// Packets of the peer that are read for one request. A peer that sends more cannot keep this node busy.
const MAX_READ: usize = 64;
/// The same for packets of others, which a socket for IPv6 receives, too.
const MAX_READ_OF_OTHERS: usize = 1024;

/// An echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// The address.
    pub to: IpAddr,
    /// The size of the packet in bytes, with its IP header.
    pub size: u16,
    /// How long the answer is waited for.
    pub wait: Duration,
    /// Another address of the peer whose requests are noticed meanwhile.
    pub listen: Option<IpAddr>,
}

/// What came of an echo request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Answer {
    /// The time until the answer. `None` if there was none.
    pub round_trip: Option<Duration>,
    /// Requests of the peer itself arrived meanwhile.
    pub heard: bool,
}

/// Why no request can be sent.
#[derive(Debug, thiserror::Error)]
pub enum EchoError {
    /// The agent may not have an ICMP socket.
    #[error(
        "the agent may not send echo requests: it needs CAP_NET_RAW, or its group in the sysctl net.ipv4.ping_group_range; \
         --probe=off turns probes off"
    )]
    NotAllowed,
    /// Another error.
    #[error("open an ICMP socket: {0}")]
    Socket(#[from] io::Error),
}

/// The two kinds of ICMP sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It needs CAP_NET_RAW, and also shows requests of the peer.
    Raw,
    /// It needs net.ipv4.ping_group_range. The kernel chooses the identifier and hands out the answers only.
    Ping,
}

impl Echo {
    /// Sends the request and waits for the answer.
    ///
    /// # Errors
    /// There is no socket. An error of the network is no error here: then there is no answer.
    pub async fn send(self) -> Result<Answer, EchoError> {
        let (socket, kind) = open(self.to)?;
        let mut random = [0; 4 + NONCE];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let request = self.request(&random);
        let remote = SockaddrStorage::from(SocketAddr::new(self.to, 0));
        let began = Instant::now();
        // There may be no route, or the packet may be larger than the MTU, or a rule of this host may drop it.
        let (fd, flags) = (socket.as_raw_fd(), MsgFlags::empty());
        let sent = match self.to {
            IpAddr::V4(_) => connect(fd, &remote).and_then(|()| send(fd, &request, flags)),
            IpAddr::V6(_) => sendto(fd, &request, &remote, flags),
        };
        if let Err(error) = sent {
            tracing::debug!(to = %self.to, size = self.size, %error, "send an echo request");
            tokio::time::sleep(self.wait).await;
            return Ok(Answer::default());
        }
        let socket = wait_on(socket)?;
        let (mut answer, mut is_heard) = (Answer::default(), false);
        let mut listening = pin!(hear(self.listen));
        let waiting = async {
            let mut waiting = pin!(self.wait_for(&socket, (&request, kind), &mut answer));
            loop {
                tokio::select! {
                    is_answered = &mut waiting => break is_answered,
                    () = &mut listening, if !is_heard => is_heard = true,
                }
            }
        };
        let end = began + self.wait;
        if timeout_at(end, waiting).await == Ok(true) {
            answer.round_trip = Some(began.elapsed());
        }
        // The answer does not end the time in which requests of the peer are noticed.
        if self.listen.is_some() && !is_heard {
            is_heard = timeout_at(end, listening).await.is_ok();
        }
        answer.heard |= is_heard;
        Ok(answer)
    }

    /// Returns the ICMP message. `random` is the identifier, the sequence number and the random number.
    fn request(&self, random: &[u8; 4 + NONCE]) -> Vec<u8> {
        let ip_header = if self.to.is_ipv4() { 20 } else { 40 };
        let size = usize::from(self.size).saturating_sub(ip_header).max(HEADER + NONCE);
        // The type, the code and the checksum precede it.
        let mut content = vec![0; size - 4];
        content[..random.len()].copy_from_slice(random);
        echo::request(self.to.is_ipv4(), &content)
    }

    /// Returns true when the answer has come, and false after too many other packets. Without a request of ours (`sent` is empty), it returns
    /// with the first request of the peer.
    async fn wait_for(&self, socket: &AsyncFd<OwnedFd>, sent: (&[u8], Kind), answer: &mut Answer) -> bool {
        let mut buffer = [0; MAX_IP_HEADER + HEADER + NONCE];
        let (mut of_peer, mut of_others) = (0, 0);
        while of_peer < MAX_READ && of_others < MAX_READ_OF_OTHERS {
            let Ok(mut ready) = socket.readable().await else { return false };
            let (size, from) = match ready.try_io(|socket| receive(socket.get_ref(), &mut buffer)) {
                Ok(Ok(read)) => read,
                // It is an ICMP message of a router. The answer may come nevertheless.
                Ok(Err(_)) => {
                    of_peer += 1;
                    continue;
                }
                // All packets were read that there are. This counts as no packet.
                Err(_) => continue,
            };
            *(if from == Some(self.to) { &mut of_peer } else { &mut of_others }) += 1;
            match judge(&buffer[..size.min(buffer.len())], size, from, (self.to, sent.0, sent.1)) {
                Some(Received::Answer) => return true,
                Some(Received::Request) => {
                    answer.heard = true;
                    if sent.0.is_empty() {
                        return false;
                    }
                }
                None => {}
            }
        }
        false
    }
}

/// Receives the beginning of a packet. Returns the size of the whole packet, and its source.
fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<(usize, Option<IpAddr>)> {
    // With MSG_TRUNC the kernel returns the size of the packet, even if it is larger than the buffer.
    let mut parts = [IoSliceMut::new(buffer)];
    let received = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, None, MsgFlags::MSG_TRUNC)?;
    let v4 = |from: &SockaddrStorage| Some(IpAddr::V4(from.as_sockaddr_in()?.ip()));
    let v6 = |from: &SockaddrStorage| Some(IpAddr::V6(from.as_sockaddr_in6()?.ip()));
    Ok((received.bytes, received.address.and_then(|from| v4(&from).or_else(|| v6(&from)))))
}

/// Opens an ICMP socket for this address.
fn open(address: IpAddr) -> Result<(OwnedFd, Kind), EchoError> {
    for (kind, of_kind) in [(Kind::Raw, SockType::Raw), (Kind::Ping, SockType::Datagram)] {
        match echo::open(address, of_kind, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC) {
            Ok(socket) => return Ok((socket, kind)),
            Err(Errno::EPERM | Errno::EACCES) => {}
            Err(error) => return Err(EchoError::Socket(error.into())),
        }
    }
    Err(EchoError::NotAllowed)
}

/// Does this work. Also returns whether a request from this address arrived meanwhile.
pub async fn hearing<T>(from: IpAddr, work: impl Future<Output = T>) -> (T, bool) {
    let (mut listening, mut working) = (pin!(hear(Some(from))), pin!(work));
    tokio::select! {
        biased;
        () = &mut listening => (working.await, true),
        done = &mut working => (done, false),
    }
}

/// Returns when a request came from this address. If there is no address, or if its packets cannot be read, this never returns.
async fn hear(from: Option<IpAddr>) {
    let listener = from.and_then(|from| {
        let (socket, kind) = open(from).ok()?;
        if kind != Kind::Raw {
            return None;
        }
        connect(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0))).ok()?;
        Some((Echo { to: from, size: 0, wait: Duration::ZERO, listen: None }, wait_on(socket).ok()?))
    });
    if let Some((silent, socket)) = listener {
        let mut answer = Answer::default();
        silent.wait_for(&socket, (&[], Kind::Raw), &mut answer).await;
        if answer.heard {
            return;
        }
    }
    std::future::pending().await
}

#[derive(Debug, PartialEq, Eq)]
enum Received {
    /// The answer to our request.
    Answer,
    /// A request of the peer.
    Request,
}

/// Returns what a packet is. `size` is its whole size, of which `packet` may be the beginning only, and `from` its source. `sent` is where
/// our request went, the request, and the kind of the socket.
fn judge(packet: &[u8], size: usize, from: Option<IpAddr>, sent: (IpAddr, &[u8], Kind)) -> Option<Received> {
    let (to, request, kind) = sent;
    // Before a socket was connected, it may have received packets of others.
    let is_of_peer = from == Some(to);
    // Ping sockets hand out no IP header.
    let message = if kind == Kind::Raw { echo::message(packet, to.is_ipv4())? } else { packet };
    let ip_header = packet.len() - message.len();
    let (asks, answers) = (echo::request_type(to.is_ipv4()), echo::answer_type(to.is_ipv4()));
    // With a ping socket, the identifier is that of the kernel, which has compared it.
    let compared = if kind == Kind::Raw { 4 } else { 6 };
    let is_ours = || message.get(compared..HEADER + NONCE) == request.get(compared..HEADER + NONCE);
    match message.first()? {
        first if *first == answers && size == ip_header + request.len() && is_ours() => {
            (is_of_peer || to.is_ipv6()).then_some(Received::Answer)
        }
        first if *first == asks => is_of_peer.then_some(Received::Request),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use weft_udp::packet::checksum;

    use super::*;

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 5, 2, 0));
    const ECHO: Echo = Echo { to: PEER, size: 84, wait: Duration::ZERO, listen: None };

    fn answer(request: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 84, 0, 0, 0, 0, 64, 1, 0, 0, 10, 5, 2, 0, 10, 5, 1, 0];
        packet.extend(request);
        packet[20] = 0;
        packet
    }

    #[test]
    fn only_the_answer_to_our_request_counts() {
        let request = ECHO.request(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!((request.len(), checksum(&request)), (64, 0));
        let judged = |packet: &[u8]| judge(packet, packet.len(), Some(PEER), (PEER, &request, Kind::Raw));
        let good = answer(&request);
        assert_eq!(judged(&good), Some(Received::Answer));
        let other = Some([10, 5, 3, 0].into());
        assert_eq!(judge(&good, 84, other, (PEER, &request, Kind::Raw)), None, "it is from another peer");
        for at in [24, 26, 28, 35] {
            let mut other = good.clone();
            other[at] ^= 1;
            assert_eq!(judged(&other), None, "byte {at} is not that of the request");
        }
        assert_eq!(judged(&good[..80]), None, "it is shorter than the request");
        let mut asks = good.clone();
        asks[20] = 8;
        assert_eq!(judged(&asks), Some(Received::Request));
        assert_eq!(judge(&asks, 84, other, (PEER, &request, Kind::Raw)), None, "another peer asks");
        for cut in 0..36 {
            assert_eq!(judged(&good[..cut]), None);
        }
    }

    /// Whoever sends many packets to this node must not make its peers look unreachable. A UDP socket stands for an ICMP socket here, because
    /// both hand out the packet without its IP header.
    #[tokio::test]
    async fn packets_of_others_do_not_count_as_packets_of_the_peer() {
        let [peer, other] = [1, 2].map(|last| IpAddr::from([127, 0, 0, last]));
        let [of_peer, of_other] = [peer, other].map(|ip| UdpSocket::bind((ip, 0)).unwrap());
        let echo = Echo { to: peer, ..ECHO };
        let request = echo.request(&[1; 12]);
        let mut reply = request.clone();
        reply[0] = 0;
        // Returns true if the answer is noticed after so many other packets.
        let is_answered_after = async |others: usize, peers: usize| {
            let socket = UdpSocket::bind((peer, 0)).unwrap();
            socket.set_nonblocking(true).unwrap();
            let (at, socket) = (socket.local_addr().unwrap(), wait_on(OwnedFd::from(socket)).unwrap());
            let sending = async {
                for (from, count) in [(&of_other, others), (&of_peer, peers)] {
                    for _ in 0..count {
                        from.send_to(b"something else", at).unwrap();
                        // Each is read before the next one comes, so that none finds the queue full.
                        tokio::task::yield_now().await;
                    }
                }
                of_peer.send_to(&reply, at).unwrap();
                std::future::pending().await
            };
            let mut answer = Answer::default();
            tokio::select! {
                is_answered = echo.wait_for(&socket, (&request, Kind::Ping), &mut answer) => is_answered,
                never = sending => never,
            }
        };
        assert!(
            is_answered_after(0, MAX_READ - 1).await && is_answered_after(MAX_READ_OF_OTHERS - 1, MAX_READ - 1).await
        );
        assert!(!is_answered_after(0, MAX_READ).await, "the peer keeps this node busy");
        assert!(!is_answered_after(MAX_READ_OF_OTHERS, 0).await, "others keep this node busy");
    }

    #[test]
    fn with_a_ping_socket_the_kernel_compares_the_identifier() {
        let request = ECHO.request(&[1; 12]);
        let mut message = request.clone();
        (message[0], message[4]) = (0, 9);
        assert_eq!(judge(&message, 64, Some(PEER), (PEER, &request, Kind::Ping)), Some(Received::Answer));
        message[7] = 9;
        assert_eq!(judge(&message, 64, Some(PEER), (PEER, &request, Kind::Ping)), None);
    }

    #[test]
    fn an_answer_of_ipv6_may_come_from_another_address_and_a_request_of_the_peer_may_not() {
        let (peer, other): (IpAddr, IpAddr) = ("fd00:5:0:2::".parse().unwrap(), "fd00::2".parse().unwrap());
        let request = Echo { to: peer, ..ECHO }.request(&[1; 12]);
        let mut answer = request.clone();
        answer[0] = 129;
        for (packet, from, is) in [
            (&answer, peer, Some(Received::Answer)),
            (&answer, other, Some(Received::Answer)),
            (&request, peer, Some(Received::Request)),
            (&request, other, None),
        ] {
            assert_eq!(judge(packet, packet.len(), Some(from), (peer, &request, Kind::Raw)), is, "{from}");
        }
    }
}
