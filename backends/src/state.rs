// SPDX-License-Identifier: Apache-2.0
//! The types between plan and kernel: [`Key`], [`Value`], [`State`]. Devices have names here. Only `src/kernel` knows interface indexes.

mod entries;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use weft_subnet::cidr::{Family, family};

use crate::link::Link;
use crate::wireguard_key::{PeerId, PublicKey};
use crate::wireguard_peer::WgPeer;

pub use crate::mac::Mac;
pub use crate::name::Name;
pub use entries::Entries;

/// The metric of the blackhole and unreachable routes that earlier versions put into the main table. Every other route won over them.
pub const LAST_METRIC: u32 = 4_294_967_294;

/// Returns the metric that the kernel gives to a route that is written without one. flannel's routes have it, so weft replaces them in place.
pub fn metric(family: Family) -> u32 {
    match family {
        Family::V4 => 0,
        Family::V6 => 1024,
    }
}

/// The identity of an entry in the kernel, for IPv4 and IPv6. Routes are those of the main table. The order of the variants is the order of
/// creation. `D` is the type that names a device: [`Name`], or a number where many entries are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key<D = Name> {
    /// A network interface.
    Link(D),
    /// An address on an interface, with its prefix length (host bits kept).
    Addr(D, IpNet),
    /// An address from which the tunnel guard accepts packets.
    Peer(IpAddr),
    /// A peer of a WireGuard device: the first half of its public key.
    WgPeer(D, PeerId),
    /// A prefix that a WireGuard device sends to one of its peers, and accepts only from it.
    AllowedIp(D, IpNet),
    /// A forwarding entry of a vxlan device: inner destination MAC.
    Fdb(D, Mac),
    /// A permanent neighbour on an interface.
    Neigh(D, IpAddr),
    /// A route in the main table: its prefix without host bits, and its metric, which is 0 by default for IPv4 and 1024 for IPv6, as in the
    /// kernel.
    Route(IpNet, u32),
    /// The address of a node inside Network. The fence lets forwarded packets pass to it, although only the default route leads there.
    Open(IpAddr),
    /// The fence: a packet that is forwarded into Network or our own subnet needs a route of its own. It comes after the exceptions, so that
    /// they are in force first.
    Fence(Family),
    /// The tunnel guard for one family. It drops tunnel packets that do not come from peers. It comes last, so that the peers are known before.
    Guard(Family),
}

impl<D> Key<D> {
    /// Returns the same key with its device in another type. `None` if `rename` returns none.
    pub fn with_device<E>(self, rename: impl FnOnce(D) -> Option<E>) -> Option<Key<E>> {
        Some(match self {
            Key::Link(dev) => Key::Link(rename(dev)?),
            Key::Addr(dev, net) => Key::Addr(rename(dev)?, net),
            Key::WgPeer(dev, peer) => Key::WgPeer(rename(dev)?, peer),
            Key::AllowedIp(dev, net) => Key::AllowedIp(rename(dev)?, net),
            Key::Fdb(dev, mac) => Key::Fdb(rename(dev)?, mac),
            Key::Neigh(dev, ip) => Key::Neigh(rename(dev)?, ip),
            Key::Peer(ip) => Key::Peer(ip),
            Key::Route(net, metric) => Key::Route(net, metric),
            Key::Open(ip) => Key::Open(ip),
            Key::Fence(family) => Key::Fence(family),
            Key::Guard(family) => Key::Guard(family),
        })
    }

    /// Returns the device that the key names.
    pub fn device(&self) -> Option<&D> {
        match self {
            Key::Link(dev) | Key::Addr(dev, _) | Key::Fdb(dev, _) | Key::Neigh(dev, _) => Some(dev),
            Key::WgPeer(dev, _) | Key::AllowedIp(dev, _) => Some(dev),
            Key::Peer(_) | Key::Route(..) | Key::Open(_) | Key::Fence(_) | Key::Guard(_) => None,
        }
    }

    /// Returns true for link-layer entries: FDB entries and neighbours.
    pub fn is_link_layer(&self) -> bool {
        matches!(self, Key::Fdb(..) | Key::Neigh(..))
    }

    /// Returns true for an entry that says where the node with an identity is: the FDB entry of a VTEP MAC, or the WireGuard peer of a public
    /// key. The kernel has one such entry for each identity, so only one node can have it.
    pub fn is_identity(&self) -> bool {
        matches!(self, Key::Fdb(..) | Key::WgPeer(..))
    }

    /// Returns true for an entry by which packets are sent to a subnet of a peer.
    pub fn reaches(&self) -> bool {
        matches!(self, Key::Neigh(..) | Key::Route(..) | Key::AllowedIp(..))
    }

    /// Returns true for an entry of a WireGuard device. The kernel does not announce their changes.
    pub fn is_of_wireguard(&self) -> bool {
        matches!(self, Key::WgPeer(..) | Key::AllowedIp(..))
    }

    /// Returns true for an entry of the tunnel guard.
    pub fn is_of_guard(&self) -> bool {
        matches!(self, Key::Peer(_) | Key::Guard(_))
    }

    /// Returns true for an entry of the fence, or an exception to it.
    pub fn is_of_fence(&self) -> bool {
        matches!(self, Key::Open(_) | Key::Fence(_))
    }
}

/// What an entry says. Large values are shared, so that copies are cheap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value<D = Name> {
    /// See [`Link`].
    Link(Arc<Link>),
    /// An address has no value.
    Addr,
    /// See [`WgPeer`].
    WgPeer(Arc<WgPeer>),
    /// The public key of the peer that has the prefix.
    AllowedIp(Arc<PublicKey>),
    /// The outer destination address for this MAC.
    Fdb(IpAddr),
    /// The link-layer address of the neighbour.
    Neigh(Mac),
    /// See [`Route`].
    Route(Route<D>),
    /// A peer of the tunnel guard has no value.
    Peer,
    /// See [`Guard`].
    Guard(Guard),
    /// An exception from the fence has no value.
    Open,
    /// See [`Fence`].
    Fence(Arc<Fence>),
}

impl Value {
    /// Returns the value of a device.
    pub fn link(link: Link) -> Value {
        Value::Link(Arc::new(link))
    }

    /// Returns the value of a WireGuard peer.
    pub fn peer(peer: WgPeer) -> Value {
        Value::WgPeer(Arc::new(peer))
    }

    /// Returns the value of a fence.
    pub fn fence(fence: Fence) -> Value {
        Value::Fence(Arc::new(fence))
    }
}

impl<D> Value<D> {
    /// Returns the same value with its device in another type. `None` if `rename` returns none.
    pub fn with_device<E>(self, rename: impl FnOnce(D) -> Option<E>) -> Option<Value<E>> {
        Some(match self {
            Value::Link(link) => Value::Link(link),
            Value::Addr => Value::Addr,
            Value::WgPeer(peer) => Value::WgPeer(peer),
            Value::AllowedIp(key) => Value::AllowedIp(key),
            Value::Fdb(to) => Value::Fdb(to),
            Value::Neigh(mac) => Value::Neigh(mac),
            Value::Route(Route::Unicast { via, dev, onlink }) => {
                Value::Route(Route::Unicast { via, dev: rename(dev)?, onlink })
            }
            Value::Route(Route::Device { dev }) => Value::Route(Route::Device { dev: rename(dev)? }),
            Value::Route(Route::Blackhole) => Value::Route(Route::Blackhole),
            Value::Route(Route::Unreachable) => Value::Route(Route::Unreachable),
            Value::Route(Route::Other) => Value::Route(Route::Other),
            Value::Peer => Value::Peer,
            Value::Guard(guard) => Value::Guard(guard),
            Value::Open => Value::Open,
            Value::Fence(fence) => Value::Fence(fence),
        })
    }

    /// Returns the device that the value names.
    pub fn device(&self) -> Option<&D> {
        match self {
            Value::Route(Route::Unicast { dev, .. } | Route::Device { dev }) => Some(dev),
            _ => None,
        }
    }
}

/// The packets that this host forwards only if the main table has a route for them that is at least as long as the prefix. Packets of the
/// host itself are not affected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Fence {
    /// Network. Packets without a route get an ICMP error.
    pub unreachable: Option<IpNet>,
    /// Our own subnet. Packets without a route are dropped silently.
    pub blackhole: Option<IpNet>,
    /// True for what is wanted. False if a rule is missing in what was observed, or another rule stands among them.
    pub whole: bool,
}

/// The packets that the tunnel guard checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Guard {
    /// The UDP ports of vxlan in ascending order. 0 means none.
    pub ports: [u16; 2],
    /// True if it checks IPv4 in IPv4.
    pub ipip: bool,
}

/// Where a route leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route<D = Name> {
    /// Through a gateway.
    Unicast {
        /// The gateway, which has the family of the prefix.
        via: IpAddr,
        /// The outgoing interface.
        dev: D,
        /// True if the kernel must not check that the gateway is on the link.
        onlink: bool,
    },
    /// Directly to the hosts on an interface.
    Device {
        /// The outgoing interface.
        dev: D,
    },
    /// Dropped silently.
    Blackhole,
    /// Dropped with an ICMP error.
    Unreachable,
    /// Another form, such as multipath. It is observed and never written.
    Other,
}

impl Route {
    /// Returns the outgoing interface, if there is exactly one.
    pub fn dev(&self) -> Option<Name> {
        match self {
            Route::Unicast { dev, .. } | Route::Device { dev } => Some(*dev),
            Route::Blackhole | Route::Unreachable | Route::Other => None,
        }
    }
}

/// What is wanted in the kernel.
pub type State = Entries<Value>;

/// An observed entry: its value and who wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedValue {
    /// Its value.
    pub value: Value,
    /// `rtm_protocol` of a route. For a link it is [`crate::owner::PROTOCOL`] if the ifalias says that a weft agent of this host made it,
    /// either this one or another. 0 for other entries.
    pub protocol: u8,
    /// For a link: true if the ifalias says that this agent made it. For a route: true if it uses a nexthop object, and false if it is plain.
    pub mark: bool,
}

impl From<Value> for ObservedValue {
    /// Returns an observed entry that has neither a protocol nor a mark, so it is neither a link nor a route.
    fn from(value: Value) -> ObservedValue {
        ObservedValue { value, protocol: 0, mark: false }
    }
}

/// What is in the kernel, with the facts that show whose it is.
pub type Observed = Entries<ObservedValue>;

impl fmt::Display for Key {
    /// Writes the key as `ip` and `bridge` do, such as `route 10.5.1.0/24`. A metric is written only if it is not the default of the family.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Key::Link(name) => write!(f, "link {name}"),
            Key::Addr(name, net) => write!(f, "addr {net} dev {name}"),
            Key::WgPeer(name, peer) => write!(f, "wireguard peer {peer} dev {name}"),
            Key::AllowedIp(name, net) => write!(f, "allowed ip {net} dev {name}"),
            Key::Fdb(name, mac) => write!(f, "fdb {mac} dev {name}"),
            Key::Neigh(name, ip) => write!(f, "neigh {ip} dev {name}"),
            Key::Route(net, metric) if *metric == self::metric(family(net)) => write!(f, "route {net}"),
            Key::Route(net, metric) => write!(f, "route {net} metric {metric}"),
            Key::Peer(ip) => write!(f, "tunnel peer {ip}"),
            Key::Guard(Family::V4) => f.write_str("tunnel guard over IPv4"),
            Key::Guard(Family::V6) => f.write_str("tunnel guard over IPv6"),
            Key::Open(ip) => write!(f, "way of forwarded packets to node {ip}"),
            Key::Fence(Family::V4) => f.write_str("fence for forwarded IPv4 packets"),
            Key::Fence(Family::V6) => f.write_str("fence for forwarded IPv6 packets"),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Link(link) => link.fmt(f),
            Value::Addr | Value::Peer | Value::Open => Ok(()),
            Value::Fence(fence) => fence.fmt(f),
            Value::Guard(Guard { ports: [a, b], ipip }) => write!(f, "udp {a} {b}{}", if *ipip { " ipip" } else { "" }),
            Value::WgPeer(peer) => peer.fmt(f),
            Value::AllowedIp(key) => write!(f, "key {key}"),
            Value::Fdb(to) => write!(f, "dst {to}"),
            Value::Neigh(mac) => write!(f, "lladdr {mac}"),
            Value::Route(route) => route.fmt(f),
        }
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [self.unreachable.map(|net| ("unreachable", net)), self.blackhole.map(|net| ("blackhole", net))];
        let mut before = "";
        for (what, net) in parts.into_iter().flatten() {
            write!(f, "{before}{what} {net}")?;
            before = ", ";
        }
        f.write_str(if self.whole { "" } else { " (damaged)" })
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Route::Unicast { via, dev, onlink } => {
                write!(f, "via {via} dev {dev}{}", if *onlink { " onlink" } else { "" })
            }
            Route::Device { dev } => write!(f, "dev {dev}"),
            Route::Blackhole => f.write_str("blackhole"),
            Route::Unreachable => f.write_str("unreachable"),
            Route::Other => f.write_str("of another form"),
        }
    }
}
