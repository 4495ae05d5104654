// SPDX-License-Identifier: Apache-2.0
//! Starts and ends the threads of a tunnel.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, JoinHandle};

use ipnet::Ipv4Net;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{SockType, getsockopt, setsockopt, sockopt};
use quinn_udp::{UdpSockRef, UdpSocketState};

use super::counters::Counters;
use super::device::Device;
use super::error::Error;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::routes::Routes;
use super::shared::{Shared, Socket};

/// Bytes that the kernel may keep for the socket, so that a burst is not lost while the thread waits for a processor.
const SOCKET_BUFFER: usize = 4 << 20;

/// What a tunnel needs to know.
#[derive(Debug)]
pub struct Config {
    /// The device, which the tunnel reads and writes.
    pub device: Device,
    /// The address of the uplink. The sockets are bound to it, and packets are sent from it.
    pub uplink: Ipv4Addr,
    /// The port of this node; flannel's default is 8285.
    pub port: u16,
    /// Other ports to which peers may send while the port changes. One that cannot be used is left out ([`Tunnel::refused`]).
    pub more_ports: Vec<u16>,
    /// The subnet of this node. Its first address is the source of ICMP answers.
    pub subnet: Ipv4Net,
    /// The MTU of the device: that of the uplink less 28.
    pub mtu: u16,
    /// The sockets of an earlier tunnel, perhaps of another process. Those that have this address and one of the ports are used, and the
    /// datagrams that wait in them are forwarded.
    pub sockets: Vec<OwnedFd>,
    /// Where packets are counted. The next tunnel goes on counting if it gets the same counters.
    pub counters: Arc<Counters>,
}

/// The descriptors of a tunnel. While somebody keeps them, packets wait in the kernel for the next tunnel.
#[derive(Debug)]
pub struct Descriptors {
    /// The device, for [`Device::adopt`].
    pub device: OwnedFd,
    /// The sockets, for [`Config::sockets`]. That on the port of this node comes first.
    pub sockets: Vec<OwnedFd>,
}

/// The function that each thread of a tunnel calls at its end.
type OnEnd = Arc<dyn Fn() + Send + Sync>;

/// What a thread of a tunnel does.
type Run = Box<dyn FnOnce() -> Result<(), Error> + Send>;

/// A running tunnel. When it is dropped, its threads end; the device stays.
#[derive(Debug)]
pub struct Tunnel {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<(), Error>>>,
    refused: Vec<Error>,
}

impl Tunnel {
    /// Opens the sockets in the network namespace of the calling thread, and starts to forward packets. `on_end` is called
    /// once by each thread at its end, from that thread, so that the owner need not ask [`Tunnel::has_ended`] again and again.
    ///
    /// # Errors
    /// The address and the port of this node cannot be used, or a thread cannot be started.
    pub fn start(config: Config, routes: Routes, on_end: impl Fn() + Send + Sync + 'static) -> Result<Tunnel, Error> {
        let mut earlier: Vec<UdpSocket> = config.sockets.into_iter().filter(is_datagram).map(UdpSocket::from).collect();
        let mut open = |port| open_socket(SocketAddrV4::new(config.uplink, port), &mut earlier);
        let socket = open(config.port)?;
        let (mut more_sockets, mut refused) = (Vec::new(), Vec::new());
        for port in config.more_ports {
            match open(port) {
                Ok(socket) => more_sockets.push(socket),
                Err(error) => refused.push(error),
            }
        }
        let stop = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let shared = Arc::new(Shared {
            device: config.device,
            socket,
            more_sockets,
            subnet: config.subnet,
            mtu: config.mtu,
            counters: config.counters,
            routes: RwLock::new(Arc::new(routes)),
            stop: stop.map_err(|errno| Error::Thread(errno.into()))?,
            has_ended: AtomicBool::new(false),
        });
        // If one of the threads cannot be started, the drop of the tunnel ends those before it.
        let mut tunnel = Tunnel { shared: shared.clone(), threads: Vec::new(), refused };
        let on_end: OnEnd = Arc::new(on_end);
        let mut outgoing = Outgoing::new(shared.clone());
        tunnel.spawn("udp-send", on_end.clone(), Box::new(move || outgoing.run()))?;
        for socket in shared.sockets() {
            let mut incoming = Incoming::new(shared.clone(), socket.clone());
            tunnel.spawn("udp-receive", on_end.clone(), Box::new(move || incoming.run()))?;
        }
        Ok(tunnel)
    }

    fn spawn(&mut self, name: &str, on_end: OnEnd, run: Run) -> Result<(), Error> {
        let shared = self.shared.clone();
        let body = move || {
            // The other threads end, too, even if this one panics.
            let _end = EndOnDrop { shared, on_end };
            run()
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body).map_err(Error::Thread)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Replaces the table of peers. Packets that are being handled still use the old one.
    pub fn set_routes(&self, routes: Routes) {
        let routes = Arc::new(routes);
        // The old table is freed after the lock is released.
        let _old = std::mem::replace(&mut *self.shared.routes.write().unwrap_or_else(PoisonError::into_inner), routes);
    }

    /// Returns the counters, which stay readable after the end of the tunnel.
    pub fn counters(&self) -> Arc<Counters> {
        self.shared.counters.clone()
    }

    /// Returns another handle of the device, for [`Device::try_clone_fd`] and for the next tunnel.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn device(&self) -> io::Result<Device> {
        self.shared.device.try_clone()
    }

    /// Returns true if datagrams to this port of the uplink's address are received.
    pub fn listens_on(&self, port: u16) -> bool {
        self.shared.sockets().any(|socket| socket.port == port)
    }

    /// Returns why some of the other ports cannot be used.
    pub fn refused(&self) -> &[Error] {
        &self.refused
    }

    /// Returns further descriptors of the device and of the sockets.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn descriptors(&self) -> io::Result<Descriptors> {
        let sockets = self.shared.sockets().map(|socket| socket.socket.as_fd().try_clone_to_owned());
        Ok(Descriptors { device: self.shared.device.try_clone_fd()?, sockets: sockets.collect::<io::Result<_>>()? })
    }

    /// Returns true if a thread has ended or is about to end, so that no packets flow any more. [`Tunnel::stop`] says why.
    pub fn has_ended(&self) -> bool {
        self.shared.has_ended.load(Ordering::Acquire)
    }

    /// Ends the tunnel, and waits for its threads. The device stays.
    ///
    /// # Errors
    /// The tunnel had ended before because of a fault.
    pub fn stop(mut self) -> Result<(), Error> {
        self.join()
    }

    fn join(&mut self) -> Result<(), Error> {
        self.shared.end();
        let panicked = |_| Err(Error::Thread(io::Error::other("a thread of the tunnel panicked")));
        let results: Vec<_> = self.threads.drain(..).map(|thread| thread.join().unwrap_or_else(panicked)).collect();
        results.into_iter().collect()
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.join();
    }
}

struct EndOnDrop {
    shared: Arc<Shared>,
    on_end: OnEnd,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::Release);
        self.shared.end();
        (self.on_end)();
    }
}

fn is_datagram(fd: &OwnedFd) -> bool {
    getsockopt(fd, sockopt::SockType) == Ok(SockType::Datagram)
}

/// Opens a socket, or takes over the one of the `earlier` ones that has the address. Its datagrams have DF set, and ICMP messages do not change
/// their largest size.
fn open_socket(address: SocketAddrV4, earlier: &mut Vec<UdpSocket>) -> Result<Arc<Socket>, Error> {
    let refused = |source| Error::Socket { address, source };
    let has_address = |socket: &UdpSocket| socket.local_addr().is_ok_and(|at| at == address.into());
    let socket = match earlier.iter().position(has_address) {
        Some(at) => earlier.swap_remove(at),
        None => UdpSocket::bind(address).map_err(refused)?,
    };
    // Without CAP_NET_ADMIN in the initial user namespace, the kernel's default size has to do.
    let _ = setsockopt(&socket, sockopt::RcvBufForce, &SOCKET_BUFFER);
    // While the kernel asks for the link address of a peer, it keeps up to 208 KiB for it, and these datagrams count for this buffer. Its default
    // size is the same, so one peer that is down would stop the datagrams to all others.
    let _ = setsockopt(&socket, sockopt::SndBufForce, &SOCKET_BUFFER);
    let state = UdpSocketState::new(UdpSockRef::from(&socket)).map_err(refused)?;
    Ok(Arc::new(Socket { socket, state, port: address.port() }))
}
