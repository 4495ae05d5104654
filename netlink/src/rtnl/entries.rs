// SPDX-License-Identifier: Apache-2.0
//! Addresses, routes, neighbours and queueing disciplines, as the kernel describes them.

use std::net::IpAddr;

use nix::libc;

/// An address on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addr {
    /// Interface index.
    pub index: u32,
    /// The address.
    pub addr: IpAddr,
    /// Prefix length.
    pub len: u8,
    /// True if the scope of the address is wider than the link.
    pub global: bool,
    /// True if the kernel found that another host has this IPv6 address.
    pub duplicate: bool,
}

/// What the kernel does with packets that take a route.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RouteKind {
    /// It sends them on.
    #[default]
    Unicast,
    /// It delivers them to this host.
    Local,
    /// It drops them, or answers with an ICMP error. The number is `RTN_*` of linux/rtnetlink.h.
    Refuses(u8),
    /// Something else, such as multicast.
    Other(u8),
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// What it does.
    pub kind: RouteKind,
    /// The routing table.
    pub table: u32,
    /// Destination; `None` for the default route.
    pub dst: Option<IpAddr>,
    /// Prefix length.
    pub len: u8,
    /// True for IPv6.
    pub v6: bool,
    /// Interface index, or 0 if the route has none.
    pub index: u32,
    /// Next hop.
    pub gateway: Option<IpAddr>,
    /// Next hop of the other family.
    pub via: Option<IpAddr>,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The MTU in bytes that the route has, or that the kernel has learned for a destination.
    pub mtu: Option<u32>,
    /// After how many ticks (`sysconf(_SC_CLK_TCK)` of them are a second) the kernel forgets what it has learned for a destination, or the route
    /// itself. `None` if it forgets neither.
    pub expires: Option<u32>,
    /// What wrote the route, as /etc/iproute2/rt_protos names it.
    pub protocol: u8,
}

impl Route {
    /// Returns true if the route refuses packets (blackhole, unreachable, prohibit).
    pub fn refuses(&self) -> bool {
        matches!(self.kind, RouteKind::Refuses(_))
    }
}

/// An entry of the neighbour table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neigh {
    /// Interface index.
    pub index: u32,
    /// IP address.
    pub addr: IpAddr,
    /// MAC address; may be empty.
    pub mac: Vec<u8>,
    /// Its state (`NUD_*` of linux/neighbour.h).
    pub state: u16,
}

impl Neigh {
    /// Returns true if somebody wrote the entry, and the kernel does not change it (NUD_PERMANENT).
    pub fn is_permanent(&self) -> bool {
        self.state & libc::NUD_PERMANENT != 0
    }
}

/// An entry of the table of a bridge: behind which port a MAC address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BridgeEntry {
    /// Interface index of the port.
    pub port: u32,
    /// Its state (`NUD_*` of linux/neighbour.h).
    pub state: u16,
}

impl BridgeEntry {
    /// Returns true if somebody wrote the entry, and false if the bridge has learned it.
    pub fn is_written(&self) -> bool {
        self.state & (libc::NUD_NOARP | libc::NUD_PERMANENT) != 0
    }
}

/// A queueing discipline.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Qdisc {
    /// Interface index.
    pub index: u32,
    /// Its kind, such as `fq_codel`.
    pub kind: String,
    /// True if it is that of all packets that leave by the link.
    pub is_root: bool,
    /// The bytes a second that `tbf` lets pass; `None` for other kinds.
    pub rate: Option<u64>,
}
