// SPDX-License-Identifier: Apache-2.0
//! The only seam to the OS: observe, apply, and a monitor that says where to look again.

pub mod decode;
pub(crate) mod dump;
pub mod encode;
pub mod errno;
pub mod fake;
pub mod fence;
pub mod guard;
pub mod kinds;
mod links;
pub mod linux;
pub mod monitor;
pub mod nexthop;
mod run;
mod standing;
pub mod sysctl;

pub use linux::{LinuxKernel, LinuxOptions};
pub use monitor::{LinuxMonitor, MonitorOptions};
pub use weft_netlink::{rt, socket, wire};

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::state::{Key, Mac, Name, Observed, Seen};

/// Who made a link. Its alias says so, and anybody with rights over the link can write that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Maker {
    /// This agent, or an earlier run with the same subnet file.
    ThisAgent,
    /// Another weft agent of this host, with another subnet file.
    AnotherAgent,
    /// Anybody else: the kernel, a person, flannel.
    Unknown,
}

/// A link of the host, any link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkInfo {
    /// Interface index: shell only.
    pub index: u32,
    /// Name.
    pub name: Name,
    /// Bytes.
    pub mtu: u32,
    /// Link-layer address, if it has an Ethernet one.
    pub mac: Option<Mac>,
    /// IFF_UP.
    pub up: bool,
    /// IFF_LOWER_UP (carrier).
    pub carrier: bool,
    /// IFF_LOOPBACK.
    pub loopback: bool,
    /// Who made it, as its alias says.
    pub maker: Maker,
}

/// An address of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddrInfo {
    /// Index of its link.
    pub index: u32,
    /// Address with prefix length.
    pub net: IpNet,
    /// ifa_scope (0 = global, 253 = link).
    pub scope: u8,
    /// IFA_F_*.
    pub flags: u32,
}

/// A route of the host that is not ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteInfo {
    /// Truncated prefix (0.0.0.0/0 for the default route).
    pub net: IpNet,
    /// Priority.
    pub metric: u32,
    /// Outgoing interface, if there is one.
    pub dev: Option<Name>,
    /// Gateway, if any.
    pub via: Option<IpAddr>,
    /// How it reaches.
    pub reach: Reach,
    /// rtm_protocol.
    pub protocol: u8,
}

/// Links, addresses and foreign routes of the main table, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// All links.
    pub links: Vec<LinkInfo>,
    /// All addresses.
    pub addrs: Vec<AddrInfo>,
    /// Routes of the main table whose protocol is not ours.
    pub routes: Vec<RouteInfo>,
}

/// How the kernel answered one operation. The meaning of an errno is decided in one place, `kernel/errno.rs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// In place (or gone, for a removal).
    Done,
    /// Not now: try again with back-off, or when the link event comes. Text for people: operation, object, cause, ext-ack.
    Retry(String),
    /// Will not work by trying again (permission, not supported): retried only by the audit.
    Fatal(String),
    /// A link is there and carries entries, but the kernel refused an attribute of it (MTU, MAC, learning, alias, up).
    Partly {
        /// What is missing and why, for people.
        missing: String,
        /// As [`Outcome::Retry`]; else as [`Outcome::Fatal`].
        retry: bool,
        /// Packets need none of what is missing (alias, learning): the link does its work without it.
        works: bool,
    },
}

/// What the monitor saw. Events carry no work: they only say where to look again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// One entry is like this now (`None`: gone). Compare with the desired value of its key; equal is nothing.
    Entry(Key, Option<Seen>),
    /// A link or address changed (created, deleted, up, down, renamed, carrier, MTU, MAC): re-check everything against a dump.
    Links,
    /// A foreign route changed: the on-link table may have.
    Routes,
    /// The rules or the tables of the fence changed: re-check the fence.
    Fence,
    /// The tunnel guard's table changed otherwise than by an element: re-check the guard.
    Guard,
    /// Notifications were lost (ENOBUFS): re-check everything.
    Lost,
}

/// The kernel as the agent sees it. Blocking, but bounded: the caller slices big batches and yields between them.
pub trait Kernel {
    /// Links, addresses, foreign routes.
    fn machine(&mut self) -> io::Result<Machine>;
    /// Entries on the named devices and on every device that bears our mark (links, addresses, permanent neighbours, FDB), and every
    /// unicast, blackhole and unreachable route of the main table of both families, whoever wrote it. An incomplete dump (NLM_F_DUMP_INTR, error in DONE) is repeated,
    /// at the end an error: never a partial answer.
    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed>;
    /// The tunnel guard alone, as [`Kernel::observe`] shows it.
    fn guard(&mut self) -> io::Result<Observed> {
        let all = self.observe(&[])?;
        Ok(all.into_iter().filter(|(key, _)| matches!(key, Key::Peer(_) | Key::Guard(_))).collect())
    }
    /// The fence and its exceptions alone, as [`Kernel::observe`] shows them.
    fn fence(&mut self) -> io::Result<Observed> {
        let all = self.observe(&[])?;
        Ok(all.into_iter().filter(|(key, _)| matches!(key, Key::Open(_) | Key::Fence(_))).collect())
    }
    /// Writes in this order; one outcome per operation, in order. A device without our mark is altered, re-created or removed only
    /// when it is the one that the last [`Kernel::observe`] showed, and a device that somebody made anew since then gets no entries.
    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome>;
}

/// Notifications of the kernel, on a socket of its own.
pub trait Monitor {
    /// Waits for the next notices; at least one. Cancel-safe.
    fn next(&mut self) -> impl Future<Output = io::Result<Vec<Notice>>>;
}
