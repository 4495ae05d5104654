// SPDX-License-Identifier: Apache-2.0
//! Sockets in namespaces. A datagram is sent and answered, and the receiver reports its source.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};

use crate::patience::PATIENCE;

/// How long to wait for a datagram. The kernel delivers it while it is sent, so one that arrives is never late (docs/testing.md).
const ARRIVAL: Duration = Duration::from_millis(500);

/// What happened to a datagram and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It arrived with this source, and the answer came back.
    From(IpAddr),
    /// It arrived with this source, but the answer did not reach the sender.
    Unanswered(IpAddr),
    /// It did not arrive.
    Lost,
}

/// Runs a function in a namespace. Sockets that it opens stay in that namespace.
pub fn inside<T: Send>(ns: &str, run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let file = File::open(format!("/run/netns/{ns}")).expect("the namespace has a name");
            setns(file, CloneFlags::CLONE_NEWNET).expect("these tests need CAP_SYS_ADMIN");
            run()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Opens a UDP socket in a namespace. With port 0, the kernel chooses a port.
pub fn socket(ns: &str, addr: IpAddr, port: u16) -> UdpSocket {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match inside(ns, || UdpSocket::bind((addr, port))) {
            Ok(socket) => {
                socket.set_read_timeout(Some(ARRIVAL)).unwrap();
                return socket;
            }
            // A process that another test is just starting has copies of all sockets, also closed ones, until it executes its program.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {}
            Err(error) => panic!("{ns}: bind {addr}: {error}"),
        }
    }
}

/// Returns the unspecified address of the same family.
pub fn any(addr: IpAddr) -> IpAddr {
    if addr.is_ipv6() { IpAddr::from([0u16; 8]) } else { IpAddr::from([0u8; 4]) }
}

/// Sends a datagram to `to`, for which `server` waits, and sends an answer back.
pub fn exchange(client: &UdpSocket, to: SocketAddr, server: &UdpSocket) -> Seen {
    let question = Instant::now().elapsed().as_nanos().to_string() + &client.local_addr().unwrap().port().to_string();
    if client.connect(to).and_then(|()| client.send(question.as_bytes())).is_err() {
        return Seen::Lost;
    }
    let Some(source) = receive(server, question.as_bytes()) else { return Seen::Lost };
    let seen = source.ip();
    // If the answer cannot be sent, it does not arrive.
    let _ = server.send_to(b"answer", source);
    if receive(client, b"answer").is_some() { Seen::From(seen) } else { Seen::Unanswered(seen) }
}

/// Waits for this datagram and skips others. Returns its source, or `None` if it does not arrive. Only a socket without any datagram ends
/// the wait. So a thread to which the machine gave no time finds what has arrived meanwhile.
pub fn receive(socket: &UdpSocket, wanted: &[u8]) -> Option<SocketAddr> {
    let mut room = [0; 2048];
    loop {
        match socket.recv_from(&mut room) {
            Ok((length, source)) if room[..length] == *wanted => return Some(source),
            Ok(_) => {}
            // The kernel reports ICMP errors about earlier datagrams here.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(_) => return None,
        }
    }
}
