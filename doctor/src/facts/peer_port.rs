// SPDX-License-Identifier: Apache-2.0
//! Asks peers that packets do not reach whether anything listens on the UDP port of their tunnel. A host where nothing does answers with an ICMP
//! message. Everything else is silent: a tunnel drops what is too short for it (vxlan and WireGuard in the kernel, udp in the agent), and so does
//! a firewall.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

/// How long the answers of all peers are waited for. A host where nothing listens answers at once.
const WAIT: Duration = Duration::from_millis(300);
/// The shortest time for which a socket is looked at. Zero would mean to wait for ever.
const LOOK: Duration = Duration::from_millis(1);
/// Maximum number of addresses that are asked.
const MAX_PEERS: usize = 8;

/// A question to a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question {
    /// The own address from which it is asked.
    pub own: IpAddr,
    /// The address and port of the peer.
    pub peer: SocketAddr,
}

/// Asks peers with one byte each. Returns those that answer that nothing listens there.
pub(super) fn closed(questions: &[Question]) -> Vec<SocketAddr> {
    // A socket that cannot send tells nothing about the peer.
    let sent = |Question { own, peer }: &Question| Some((*peer, send(*own, *peer).ok()?));
    let sent: Vec<(SocketAddr, UdpSocket)> = questions.iter().take(MAX_PEERS).filter_map(sent).collect();
    let end = Instant::now() + WAIT;
    let refuses = |socket: &UdpSocket| {
        let left = end.saturating_duration_since(Instant::now()).max(LOOK);
        let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        socket.set_read_timeout(Some(left)).is_ok() && socket.recv(&mut [0]).is_err_and(refused)
    };
    sent.into_iter().filter(|(_, socket)| refuses(socket)).map(|(peer, _)| peer).collect()
}

fn send(own: IpAddr, peer: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind((own, 0))?;
    socket.connect(peer)?;
    socket.send(&[0])?;
    Ok(socket)
}
