// SPDX-License-Identifier: Apache-2.0
//! The kernel as the agent uses it: [`Kernel`] observes and writes entries, and [`Monitor`] says which entries may have changed. All
//! other code of the agent is tested with [`fake::FakeKernel`].
//!
//! Each file here imports only files that are below it; `tests/layers/orders.rs` has their order. All files may use the items of this file.

mod batch;
pub mod decode;
pub mod encode;
pub mod errno;
pub mod fake;
pub mod fence;
pub mod guard;
pub mod kinds;
mod link_messages;
mod links;
pub mod linux;
mod machine;
pub mod monitor;
pub mod nexthop;
pub(crate) mod observe;
mod replace;
pub mod sysctl;
mod typed;
pub mod wireguard;
mod wireguard_peers;
mod wireguard_port;
mod write;

pub use linux::{LinuxKernel, LinuxOptions};
pub use machine::{AddrInfo, Creator, LinkInfo, Machine, MachineError, RouteInfo, RouteLookup};
pub use monitor::{LinuxMonitor, MonitorOptions};
pub use weft_netlink::{generic, rt, socket, wire};
pub use wireguard_peers::{Endpoints, wireguard_entries};

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use weft_backends::diff::Op;
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_backends::wireguard_key::{DeviceSecrets, PeerId};

/// The traffic with one peer of a WireGuard device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The device.
    pub device: Name,
    /// The peer.
    pub peer: PeerId,
    /// Where the peer was heard last, or else what its lease says.
    pub endpoint: Option<SocketAddr>,
    /// The time of the last handshake since 1970. `None` if there was none.
    pub handshake: Option<Duration>,
    /// Received bytes.
    pub received: u64,
    /// Sent bytes.
    pub sent: u64,
}

/// How an operation ended. `kernel/errno.rs` decides what an errno means, and `kernel/wireguard_peers.rs` for WireGuard devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The entry is in place; or it is gone, if it was to be removed.
    Done,
    /// The operation failed, and may succeed later: after a pause, or when its link changes. The text for people names the
    /// operation, the entry, the cause and the kernel's explanation.
    Retry(String),
    /// The operation failed, and a repetition is not expected to help (no permission, not supported). Only the audit tries again.
    Fatal(String),
    /// The link exists and can have entries, but the kernel refused one of its attributes (MTU, MAC, learning, alias).
    Partly {
        /// What is missing and why, for people.
        missing: String,
        /// True if the attribute may be accepted later, as with [`Outcome::Retry`]. Otherwise as with [`Outcome::Fatal`].
        retry: bool,
        /// True if no packet is affected by what is missing (alias, learning).
        works: bool,
    },
}

/// What changed in the kernel. A notice contains no work; it only says what must be compared again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// One entry is like this now, or gone (`None`). If it equals the desired value, nothing is to be done.
    Entry(Key, Option<ObservedValue>),
    /// A link or an address changed. Everything must be compared.
    Links,
    /// A route or a policy rule of another program changed, and with it perhaps how peers are reached, or which uplink is chosen.
    Routes,
    /// The rules or the tables of the fence changed.
    Fence,
    /// The table of the tunnel guard changed in another way than by one of its elements.
    Guard,
    /// Notifications were lost (ENOBUFS). Everything must be compared.
    Lost,
}

/// Reads and writes entries of the kernel. The calls block, but not for long: the caller divides many operations into several calls,
/// and lets other tasks run in between.
pub trait Kernel {
    /// Returns the links, the addresses and the routes of other programs.
    ///
    /// # Errors
    /// A dump failed.
    fn machine(&mut self) -> io::Result<Machine>;
    /// Returns how the kernel sends packets of this host to an address now. `None` if it has no route to it, if a rule forbids it, or
    /// if the address is one of this host.
    ///
    /// # Errors
    /// The question could not be asked, or the answer was lost.
    fn look_up_route(&mut self, to: IpAddr) -> io::Result<Option<RouteLookup>>;
    /// Does the same as [`Kernel::machine`], and looks up the route to this address, if there is one.
    ///
    /// # Errors
    /// A dump or the question failed.
    fn machine_towards(&mut self, to: Option<IpAddr>) -> io::Result<Machine> {
        let machine = self.machine()?;
        let lookup = to.map(|ip| self.look_up_route(ip)).transpose()?.flatten();
        Ok(Machine { lookup, ..machine })
    }
    /// Returns the named devices and all devices with our alias, with their addresses, permanent neighbours and FDB entries; all
    /// unicast, blackhole and unreachable routes of the main table, no matter which program wrote them; the tunnel guard; and the fence.
    ///
    /// # Errors
    /// A dump failed, or was interrupted by changes each time. A part of the entries is never returned.
    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed>;
    /// Returns only the tunnel guard, as [`Kernel::observe`] does.
    ///
    /// # Errors
    /// As [`Kernel::observe`].
    fn guard(&mut self) -> io::Result<Observed> {
        let all = self.observe(&[])?;
        Ok(all.into_iter().filter(|(key, _)| key.is_of_guard()).collect())
    }
    /// Returns only the fence and its exceptions, as [`Kernel::observe`] does.
    ///
    /// # Errors
    /// As [`Kernel::observe`].
    fn fence(&mut self) -> io::Result<Observed> {
        let all = self.observe(&[])?;
        Ok(all.into_iter().filter(|(key, _)| key.is_of_fence()).collect())
    }
    /// Sets the secrets of the WireGuard devices, which [`Kernel::apply`] writes and [`Kernel::observe`] compares. This writes nothing.
    fn set_secrets(&mut self, _secrets: Option<DeviceSecrets>) {}
    /// Returns only the peers and allowed IPs of these WireGuard devices, as [`Kernel::observe`] does.
    ///
    /// # Errors
    /// As [`Kernel::observe`].
    fn wireguard(&mut self, devices: &[Name]) -> io::Result<Observed> {
        let all = self.observe(devices)?;
        Ok(all.into_iter().filter(|(key, _)| key.is_of_wireguard()).collect())
    }
    /// Returns the UDP port on which each of these WireGuard devices listens. One that is down or does not exist is left out.
    ///
    /// # Errors
    /// As [`Kernel::observe`].
    fn listen_ports(&mut self, devices: &[Name]) -> io::Result<BTreeMap<Name, u16>> {
        let all = self.observe(devices)?;
        let port = |(key, seen): (&Key, &ObservedValue)| match (key, &seen.value) {
            (Key::Link(name), Value::Link(link)) if devices.contains(name) => Some((*name, link.listening_port()?)),
            _ => None,
        };
        Ok(all.iter().filter_map(port).collect())
    }
    /// Returns the traffic with the peers of these WireGuard devices.
    ///
    /// # Errors
    /// A dump failed.
    fn sessions(&mut self, _devices: &[Name]) -> io::Result<Vec<Session>> {
        Ok(Vec::new())
    }
    /// Carries out these operations in order. Returns one outcome for each, in order. A device without our alias is altered,
    /// re-created or removed only if the last [`Kernel::observe`] returned it. A device that another program has created since then gets
    /// no entries.
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome>;
}

/// Receives the notifications of the kernel.
pub trait Monitor {
    /// Waits for notices, and returns at least one. Cancel-safe.
    ///
    /// # Errors
    /// The notifications cannot be read.
    fn next(&mut self) -> impl Future<Output = io::Result<Vec<Notice>>>;
}
