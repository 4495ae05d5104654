// SPDX-License-Identifier: Apache-2.0
//! What the threads of a tunnel share: the device, the sockets and the table of peers.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use quinn_udp::UdpSocketState;

use super::counters::Counters;
use super::device::Device;
use super::error::Error;
use super::routes::Routes;

/// A UDP socket of the tunnel.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) socket: UdpSocket,
    pub(crate) state: UdpSocketState,
    /// The port to which it is bound.
    pub(crate) port: u16,
}

/// What all threads use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) device: Device,
    /// The socket on the port of this node.
    pub(crate) socket: Arc<Socket>,
    /// Those on other ports, to which peers may still send.
    pub(crate) more_sockets: Vec<Arc<Socket>>,
    pub(crate) subnet: Ipv4Net,
    pub(crate) mtu: u16,
    pub(crate) counters: Arc<Counters>,
    /// The table of peers, which can be replaced while packets flow.
    pub(crate) routes: RwLock<Arc<Routes>>,
    /// Readable when the tunnel has to end.
    pub(crate) stop: EventFd,
    /// True when a thread has ended or is about to end.
    pub(crate) has_ended: AtomicBool,
}

impl Shared {
    /// Returns the current table. It may be replaced while the caller uses it.
    pub(crate) fn routes(&self) -> Arc<Routes> {
        self.routes.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns all sockets. The first one is bound to the port of this node.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = &Arc<Socket>> {
        std::iter::once(&self.socket).chain(&self.more_sockets)
    }

    /// Returns the socket from which a peer at this port gets its datagrams: the one with the same port, as with flannel. So a firewall
    /// that has let packets between two nodes through sees the same ports as before.
    pub(crate) fn socket_for(&self, port: u16) -> &Socket {
        self.sockets().find(|socket| socket.port == port).unwrap_or(&self.socket)
    }

    /// Waits for an event of a descriptor. Returns false when the tunnel has to end.
    pub(crate) fn wait(&self, fd: BorrowedFd<'_>, events: PollFlags) -> Result<bool, Error> {
        Ok(self.poll(fd, events, PollTimeout::NONE)?.is_some())
    }

    /// Waits for an event of a descriptor, for this time at most. Returns whether there was one, or `None` when the tunnel has to end.
    pub(crate) fn wait_at_most(
        &self,
        fd: BorrowedFd<'_>,
        events: PollFlags,
        time: Duration,
    ) -> Result<Option<bool>, Error> {
        self.poll(fd, events, PollTimeout::from(u16::try_from(time.as_millis()).unwrap_or(u16::MAX)))
    }

    fn poll(&self, fd: BorrowedFd<'_>, events: PollFlags, time: PollTimeout) -> Result<Option<bool>, Error> {
        loop {
            let mut fds = [PollFd::new(fd, events), PollFd::new(self.stop.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, time) {
                Ok(_) if fds[1].any().unwrap_or(true) => return Ok(None),
                Ok(ready) => return Ok(Some(ready > 0)),
                Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(Error::Thread(errno.into())),
            }
        }
    }

    /// Waits for an event of a descriptor until the deadline, although the tunnel has to end. Returns false if there was none.
    pub(crate) fn wait_until(fd: BorrowedFd<'_>, events: PollFlags, deadline: Instant) -> Result<bool, Error> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).as_millis();
            let left = PollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX));
            match poll(&mut [PollFd::new(fd, events)], left) {
                Ok(ready) => return Ok(ready > 0),
                Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(Error::Thread(errno.into())),
            }
        }
    }

    pub(crate) fn device_lost(&self, source: io::Error) -> Error {
        Error::DeviceLost { name: self.device.name().to_owned(), source }
    }

    pub(crate) fn end(&self) {
        // Its counter cannot overflow: only the threads and one owner write 1 to it.
        let _ = self.stop.write(1);
    }
}
