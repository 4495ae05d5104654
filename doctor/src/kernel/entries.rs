// SPDX-License-Identifier: Apache-2.0
//! What the kernel is asked about, and what it answers: packets, devices, routes and neighbours.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use nix::errno::Errno;
use weft_backends::owner::PROTOCOL;
pub use weft_backends::state::Mac;

/// The packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Its source address.
    pub from: IpAddr,
    /// Its destination address.
    pub to: IpAddr,
    /// Its transport protocol, if the operator named one.
    pub proto: Option<Proto>,
    /// Its destination port.
    pub port: Option<u16>,
}

impl Packet {
    /// Returns an answer to this packet. Its destination port is not known.
    pub fn answer(self) -> Packet {
        Packet { from: self.to, to: self.from, port: None, ..self }
    }

    /// Returns this packet as arguments of `weft explain`.
    pub fn arguments(&self) -> String {
        let proto = self.proto.map(|proto| match proto {
            Proto::Tcp => " --proto tcp",
            Proto::Udp => " --proto udp",
            Proto::Icmp => " --proto icmp",
            // No operator asks for such a packet.
            Proto::Ipip => "",
        });
        let port = self.port.map(|port| format!(" --port {port}")).unwrap_or_default();
        format!("{} {}{port}{}", self.from, self.to, proto.unwrap_or_default())
    }
}

/// Returns the address that stands for any one of this family: 0.0.0.0 or ::.
pub(crate) fn unspecified(addr: IpAddr) -> IpAddr {
    if addr.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proto {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// ICMP, or ICMPv6 between IPv6 addresses.
    Icmp,
    /// An IPv4 packet in an IPv4 packet.
    Ipip,
}

/// What came of a question to the kernel about one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read<T> {
    /// The entry.
    Found(T),
    /// There is no such entry.
    Missing,
    /// The kernel does not answer the question. The text says why.
    Unreadable(String),
}

/// A device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Interface index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// How it carries packets.
    pub kind: DeviceKind,
    /// MTU in bytes.
    pub mtu: u32,
    /// True if it is administratively up.
    pub up: bool,
    /// True if it has a carrier.
    pub carrier: bool,
    /// True if its alias says that an agent of weft made it.
    pub of_weft: bool,
    /// Its MAC address, if it has one.
    pub mac: Option<Mac>,
    /// Interface index of the bridge that it is a port of, or 0.
    pub master: u32,
    /// Interface index of the link by which a tunnel device sends its packets, or 0 if it is bound to none.
    pub lower: u32,
    /// Interface index of the other end of a veth pair, in the namespace of that end, or 0.
    pub link: u32,
    /// The number of the network namespace of the other end, if that is another namespace.
    pub peer_netns: Option<i32>,
}

/// How a device carries packets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// To a neighbour with a MAC address.
    #[default]
    Ethernet,
    /// As Ethernet, over one of its ports.
    Bridge,
    /// To this host itself.
    Loopback,
    /// In UDP packets, to the address of an FDB entry.
    Vxlan {
        /// The network identifier.
        vni: u32,
        /// UDP port.
        port: u16,
    },
    /// In IP packets, to the gateway of the route.
    Ipip,
    /// In encrypted UDP packets, to the endpoint of a peer.
    WireGuard,
    /// To a process, which is the agent for the backend udp.
    Tun,
}

impl DeviceKind {
    /// Returns true if the packets leave this host inside other packets.
    pub fn is_tunnel(&self) -> bool {
        !matches!(self, DeviceKind::Ethernet | DeviceKind::Bridge | DeviceKind::Loopback)
    }
}

/// What the kernel does with packets for a destination.
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

/// A route, as the kernel answers for one packet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Route {
    /// What it does.
    pub kind: RouteKind,
    /// The destination of the entry of the routing table, if the kernel names it.
    pub prefix: Option<IpNet>,
    /// Who wrote the entry (`RTPROT_*`).
    pub protocol: u8,
    /// The routing table.
    pub table: u32,
    /// The next hop, if there is one.
    pub gateway: Option<IpAddr>,
    /// Interface index of the device, or 0.
    pub device: u32,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// The MTU in bytes that the route has, or that the kernel has learned for this destination.
    pub mtu: Option<u32>,
}

impl Route {
    /// Returns true if weft wrote it.
    pub fn of_weft(&self) -> bool {
        self.protocol == PROTOCOL
    }
}

/// What came of the question for a route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    /// The route.
    Route(Route),
    /// The kernel would not send the packet.
    Refused(Errno),
    /// The question could not be asked.
    Unreadable(String),
}

/// An entry of the neighbour table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// MAC address, if it is known.
    pub mac: Option<Mac>,
    /// `NUD_*` of linux/neighbour.h.
    pub state: u16,
}
