// SPDX-License-Identifier: Apache-2.0
//! The data path of the udp backend. It carries IPv4 packets between a TUN device and a UDP socket, and is
//! wire-compatible with flannel's udp backend: the payload of a datagram is one inner packet and nothing else.
//!
//! ```text
//! pods -> kernel -> TUN device -> [thread "udp-send"]    -> UDP socket -> uplink
//! pods <- kernel <- TUN device <- [thread "udp-receive"] <- UDP socket <- uplink
//! ```
//!
//! The caller opens a [`Device`] and gives it to [`Tunnel::start`] together with plain values: the uplink's address, the
//! port, the own subnet, the MTU and the [`Routes`]. Addresses and routes of the device are the caller's business. The
//! table can be replaced while packets flow ([`Tunnel::set_routes`]).
//!
//! # What a tunnel forwards
//!
//! - **Sending**: the peer with the longest prefix gets the packet, and its TTL is decremented. A packet without a peer is
//!   answered with the ICMP message "network unreachable", and one whose TTL is used up with "time exceeded" ([`icmp`]).
//! - **Receiving**: a datagram counts only if a peer sends from its source address, the inner source is inside the subnet
//!   of that peer, and the inner destination is inside the own subnet. Everything else is counted by its
//!   [`Reason`](counters::Reason) and dropped. This stops strangers, but not whoever can send from a peer's address.
//!   Nothing is encrypted.
//!
//! # Load and memory
//!
//! The kernel hands over up to 64 KiB of one TCP or UDP flow at a time, and takes as much (GSO and GRO on both sides). There
//! is no queue between the device and the socket: a thread that cannot send does not read. The buffers have a fixed
//! size, so that packets wait in the kernel, whose queues are bounded.
//!
//! # Restarts
//!
//! The device is persistent: it stays with its addresses and routes while no process reads it, and the kernel drops what is
//! sent to it. The descriptors of device and sockets may be given to the service manager ([`Tunnel::descriptors`]) and handed to the
//! next process ([`Device::adopt`], [`Config::sockets`]). The device's queue then keeps up to 500 packets, and the socket 4 MiB. A tunnel that
//! ends still sends what it has read, and waits 0.2 s at most for room in the buffer of its socket.
//!
//! # A change of the port
//!
//! Each peer of the table has a port of its own, and a tunnel can receive on several ports ([`Config::more_ports`]), with one thread for each. A peer
//! gets its datagrams from the same port as that to which they are sent. The next tunnel of the process takes over the device and the sockets of
//! this one, so that packets wait in the kernel as in a restart.
//!
//! # Echo requests
//!
//! The tunnel sends none. [`echo`] is for the probes of the agent and for `weft doctor`.

pub mod counters;
mod device;
pub mod echo;
mod error;
pub mod icmp;
mod incoming;
mod outgoing;
pub mod packet;
mod routes;
mod shared;
mod tunnel;

pub use device::Device;
pub use error::Error;
pub use incoming::judge;
pub use routes::{Peer, Routes};
pub use tunnel::{Config, Descriptors, Tunnel};
