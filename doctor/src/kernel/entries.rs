// SPDX-License-Identifier: Apache-2.0
//! What the kernel is asked about, and what it answers: packets, devices, routes and neighbours.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::overhead;
use weft_backends::owner::{ALIAS, PROTOCOL};
pub use weft_backends::state::Mac;
pub use weft_netlink::rtnl::RouteKind;
use weft_netlink::rtnl::{self, Link};
use weft_subnet::cidr::Family;

use crate::processes::ticks;

/// The number of the main routing table.
pub const MAIN: u32 = libc::RT_TABLE_MAIN as u32;

/// The number of the table of local addresses.
pub const LOCAL: u32 = libc::RT_TABLE_LOCAL as u32;

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

/// Returns the address that stands for any one of a family: 0.0.0.0 or ::.
pub fn unspecified(is_ipv4: bool) -> IpAddr {
    if is_ipv4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
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

/// A link, as a part of the way of a packet. It is another type than [`Link`], because it says in one enum how the link carries packets, so that
/// the compiler lists what must decide about each kind, and it has nothing else of what only checks ask about.
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own in the kernel")]
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
    /// True if the kernel asks for no MAC addresses on it, and answers no such request (IFF_NOARP).
    pub no_arp: bool,
    /// True for a port of a bridge that passes nothing to and from other ports with this flag.
    pub isolated: bool,
}

impl From<Link> for Device {
    fn from(link: Link) -> Device {
        Device {
            kind: DeviceKind::of(&link),
            up: link.up,
            carrier: link.has_carrier(),
            no_arp: link.is_without_arp(),
            isolated: link.port.is_some_and(|port| port.isolated),
            of_weft: link.alias.starts_with(ALIAS),
            index: link.index,
            name: link.name,
            mtu: link.mtu,
            mac: link.mac.map(Mac),
            master: link.master,
            lower: link.lower,
            link: link.peer,
            peer_netns: link.peer_netns,
        }
    }
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
    fn of(link: &Link) -> DeviceKind {
        match link.kind.as_str() {
            "vxlan" => {
                let vxlan = link.vxlan.unwrap_or_default();
                DeviceKind::Vxlan { vni: vxlan.vni, port: vxlan.port }
            }
            "ipip" => DeviceKind::Ipip,
            "bridge" => DeviceKind::Bridge,
            "wireguard" => DeviceKind::WireGuard,
            "tun" => DeviceKind::Tun,
            _ if link.is_loopback() => DeviceKind::Loopback,
            _ => DeviceKind::Ethernet,
        }
    }

    /// Returns the bytes that it adds to each packet which it sends to this address of another node.
    pub fn overhead(&self, remote: IpAddr) -> u32 {
        match self {
            DeviceKind::Vxlan { .. } => overhead::vxlan(Family::of(remote)),
            DeviceKind::Ipip => overhead::ipip(),
            DeviceKind::WireGuard if remote.is_ipv4() => overhead::wireguard() - 20,
            DeviceKind::WireGuard => overhead::wireguard(),
            DeviceKind::Tun => overhead::udp(),
            DeviceKind::Ethernet | DeviceKind::Bridge | DeviceKind::Loopback => 0,
        }
    }

    /// Returns true if the packets leave this host inside other packets.
    pub fn is_tunnel(&self) -> bool {
        !matches!(self, DeviceKind::Ethernet | DeviceKind::Bridge | DeviceKind::Loopback)
    }
}

/// A route, as the kernel answers for one packet. It is another type than [`rtnl::Route`], the entry of a table: the kernel may not say which
/// destination the entry has, and its next hop counts, whatever family that has.
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
    /// The kernel has learned the MTU from an ICMP error, which anybody may have sent, and forgets it after some minutes.
    pub mtu_is_learned: bool,
    /// In how many seconds the kernel forgets a learned MTU, or the route itself, if it does so.
    pub expires_s: Option<u64>,
}

impl Route {
    /// Returns true if weft wrote it.
    pub fn of_weft(&self) -> bool {
        self.protocol == PROTOCOL
    }
}

impl From<rtnl::Route> for Route {
    fn from(route: rtnl::Route) -> Route {
        Route {
            kind: route.kind,
            prefix: IpNet::new(route.dst.unwrap_or_else(|| unspecified(!route.v6)), route.len).ok(),
            protocol: route.protocol,
            table: route.table,
            gateway: route.gateway.or(route.via),
            device: route.index,
            source: route.source,
            mtu: route.mtu,
            mtu_is_learned: false,
            expires_s: route.expires.and_then(|number| ticks(number.into())).map(|time| time.as_secs()),
        }
    }
}

/// A route of type local, which keeps packets on this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalRoute {
    /// Its destination, if the kernel names it.
    pub prefix: Option<IpNet>,
    /// Its table.
    pub table: u32,
}

impl From<&Route> for LocalRoute {
    fn from(route: &Route) -> LocalRoute {
        LocalRoute { prefix: route.prefix, table: route.table }
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

/// What an entry of the neighbour table says, in an answer about this entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// MAC address, if it is known.
    pub mac: Option<Mac>,
    /// `NUD_*` of linux/neighbour.h.
    pub state: u16,
}
