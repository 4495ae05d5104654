// SPDX-License-Identifier: Apache-2.0
//! Sockets in namespaces: one datagram there and one back, and whom the far end saw.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};

/// How long one datagram may take on a busy machine; only a lost one takes it all.
const ARRIVAL: Duration = Duration::from_millis(500);

/// What became of a datagram and its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// It arrived with this source, and the answer came back.
    From(IpAddr),
    /// It arrived with this source; the answer did not reach the sender.
    Unanswered(IpAddr),
    /// It did not arrive.
    Lost,
}

/// Runs something in a namespace of the calling thread's lab. Sockets made there stay there.
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

/// A UDP socket in a namespace, on an address of it; port 0 = any.
pub fn socket(ns: &str, addr: IpAddr, port: u16) -> UdpSocket {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match inside(ns, || UdpSocket::bind((addr, port))) {
            Ok(socket) => {
                socket.set_read_timeout(Some(ARRIVAL)).unwrap();
                return socket;
            }
            // Of a socket that was closed just now, a process that another test is starting has a copy until it execs.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {}
            Err(error) => panic!("{ns}: bind {addr}: {error}"),
        }
    }
}

/// The unspecified address of the same family.
pub fn any(addr: IpAddr) -> IpAddr {
    if addr.is_ipv6() { IpAddr::from([0u16; 8]) } else { IpAddr::from([0u8; 4]) }
}

/// Sends a datagram from one socket to `to`, where `server` waits for it, and an answer back.
pub fn exchange(client: &UdpSocket, to: SocketAddr, server: &UdpSocket) -> Seen {
    let question = Instant::now().elapsed().as_nanos().to_string() + &client.local_addr().unwrap().port().to_string();
    if client.connect(to).and_then(|()| client.send(question.as_bytes())).is_err() {
        return Seen::Lost;
    }
    let Some(source) = receive(server, question.as_bytes()) else { return Seen::Lost };
    let seen = source.ip();
    // An answer that cannot be sent does not arrive.
    let _ = server.send_to(b"answer", source);
    if receive(client, b"answer").is_some() { Seen::From(seen) } else { Seen::Unanswered(seen) }
}

/// Waits for this datagram, past others; who sent it. `None` when it does not come.
pub fn receive(socket: &UdpSocket, wanted: &[u8]) -> Option<SocketAddr> {
    let mut room = [0; 2048];
    let deadline = Instant::now() + ARRIVAL;
    while Instant::now() < deadline {
        match socket.recv_from(&mut room) {
            Ok((length, source)) if room[..length] == *wanted => return Some(source),
            Ok(_) => {}
            // Errors of earlier datagrams (ICMP) are told here.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(_) => return None,
        }
    }
    None
}
