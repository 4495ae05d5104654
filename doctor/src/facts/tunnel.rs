// SPDX-License-Identifier: Apache-2.0
//! What the packets between nodes look like on the underlay.

use std::fmt;
use std::net::IpAddr;

use weft_backends::register::device_kind;
use weft_backends::{ipip, vxlan, wireguard};
use weft_netlink::rtnl::Link;

use super::tables::Tables;
use super::ways::WayFacts;
use crate::kernel::Kernel;
use crate::kernel::ends::Ends;
use crate::kernel::entries::{Lookup, Packet, Proto, RouteKind, unspecified};
use crate::sources::NodeSources;

/// The packets of the tunnel between nodes, as rules of firewalls see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tunnel {
    /// UDP packets to this port.
    Udp(u16),
    /// IPv4 packets in IPv4 packets, protocol 4.
    Ipip,
}

/// A packet of the tunnel, as the chains of this node see it.
#[derive(Debug, Clone)]
pub(super) struct TunnelPacket {
    /// The packet.
    pub packet: Packet,
    /// The link by which it arrives, if the peer sends it.
    pub input: Option<String>,
    /// The link by which it leaves, if this node sends it.
    pub output: Option<String>,
    /// What it is, for people.
    pub what: String,
    /// Tests that match it, for iptables and for nftables.
    pub tests: [String; 2],
}

/// The packets of the tunnel between this node and a peer.
#[derive(Debug, Clone)]
pub(super) struct PeerPackets<'a> {
    /// The link by which they leave and arrive.
    pub link: &'a Link,
    /// The next hop to the peer, which is the peer itself on the same link.
    pub nexthop: IpAddr,
    /// A packet to the peer.
    pub to_peer: TunnelPacket,
    /// A packet from the peer.
    pub from_peer: TunnelPacket,
}

impl Tunnel {
    /// Returns the tunnel of the backend. `None` if it has none, or if its port is not known.
    pub(super) fn of(sources: &NodeSources, ways: &WayFacts) -> Option<Tunnel> {
        let port = match device_kind(&sources.backend) {
            Some(ipip::DEVICE_KIND) => return Some(Tunnel::Ipip),
            Some(vxlan::DEVICE_KIND) => vxlan_port(sources, ways),
            None if sources.backend.is_empty() => vxlan_port(sources, ways),
            Some(_) => sources.tunnel_port,
            None => None,
        };
        port.map(Tunnel::Udp)
    }

    /// Returns the protocol of the packets.
    pub(super) fn proto(self) -> Proto {
        match self {
            Tunnel::Udp(_) => Proto::Udp,
            Tunnel::Ipip => Proto::Ipip,
        }
    }

    /// Returns the destination port of the packets, if they have one.
    pub(super) fn port(self) -> Option<u16> {
        match self {
            Tunnel::Udp(port) => Some(port),
            Tunnel::Ipip => None,
        }
    }

    /// Returns the tests that match the packets, for iptables and for nftables.
    pub(super) fn tests(self) -> [String; 2] {
        match self {
            Tunnel::Udp(port) => [format!("-p udp --dport {port}"), format!("udp dport {port}")],
            Tunnel::Ipip => ["-p 4".to_owned(), "ip protocol 4".to_owned()],
        }
    }

    /// Returns the packets between this node and a peer. `None` if this node sends none to that address, or if its own addresses in them are not
    /// known (see [`Ends`]).
    pub(super) fn packets<'a>(
        self,
        kernel: &mut Kernel,
        tables: &Tables<'a>,
        sources: &NodeSources,
        peer: IpAddr,
    ) -> Option<PeerPackets<'a>> {
        if peer.is_ipv6() && self == Tunnel::Ipip {
            return None;
        }
        let is_wireguard = device_kind(&sources.backend) == Some(wireguard::DEVICE_KIND);
        let local = tables.first_here(&sources.uplink_addrs, peer).filter(|_| !is_wireguard);
        let from = local.unwrap_or_else(|| unspecified(peer.is_ipv4()));
        let asked = Packet { from, to: peer, proto: Some(self.proto()), port: self.port() };
        let Lookup::Route(route) = kernel.route(&asked, None) else { return None };
        let published = tables.first_here(&sources.published, peer);
        let (ends, link) = (Ends::new(is_wireguard, local, published, route.source)?, tables.link(route.device)?);
        let name = || Some(link.name.clone());
        (route.kind == RouteKind::Unicast).then(|| PeerPackets {
            link,
            nexthop: route.gateway.unwrap_or(peer),
            to_peer: TunnelPacket {
                packet: Packet { from: ends.from, ..asked },
                input: None,
                output: name(),
                what: format!("packets of the tunnel ({self}) to {peer}"),
                tests: self.tests_with(["-d", "daddr"], peer),
            },
            from_peer: TunnelPacket {
                packet: Packet { from: peer, to: ends.at, ..asked },
                input: name(),
                output: None,
                what: format!("packets of the tunnel ({self}) from {peer}"),
                tests: self.tests_with(["-s", "saddr"], peer),
            },
        })
    }

    /// Returns the tests that match the packets to or from this peer, for iptables and for nftables.
    fn tests_with(self, [option, field]: [&str; 2], peer: IpAddr) -> [String; 2] {
        let [iptables, nft] = self.tests();
        let family = if peer.is_ipv4() { "ip" } else { "ip6" };
        [format!("{option} {peer} {iptables}"), format!("{family} {field} {peer} {nft}")]
    }
}

impl fmt::Display for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tunnel::Udp(port) => write!(f, "UDP port {port}"),
            Tunnel::Ipip => write!(f, "IP protocol 4, ipip"),
        }
    }
}

/// Returns the UDP port of the vxlan device, if packets between nodes may be those of such a device.
pub(super) fn vxlan_port(sources: &NodeSources, ways: &WayFacts) -> Option<u16> {
    may_be_vxlan(&sources.backend).then(|| ways.port().unwrap_or(sources.port))
}

/// Returns true if packets between nodes are those of a vxlan device, or if this is not known because the name of the backend is empty.
pub(crate) fn may_be_vxlan(backend: &str) -> bool {
    backend.is_empty() || device_kind(backend) == Some(vxlan::DEVICE_KIND)
}

#[cfg(test)]
mod tests {
    use weft_netlink::rtnl::Vxlan;

    use super::super::ways::VxlanDevice;
    use super::*;

    #[test]
    fn each_backend_has_the_packets_of_its_own_tunnel() {
        let mut ways = WayFacts::default();
        let of = |ways: &WayFacts, backend: &str, tunnel_port| {
            let backend = backend.to_owned();
            Tunnel::of(&NodeSources { backend, port: 8472, tunnel_port, ..NodeSources::default() }, ways)
        };
        for (backend, port, wanted) in [
            ("vxlan", None, Some(Tunnel::Udp(8472))),
            ("", None, Some(Tunnel::Udp(8472))),
            ("udp", Some(8285), Some(Tunnel::Udp(8285))),
            ("udp", None, None),
            ("wireguard", Some(51820), Some(Tunnel::Udp(51820))),
            ("ipip", None, Some(Tunnel::Ipip)),
            ("host-gw", None, None),
        ] {
            assert_eq!(of(&ways, backend, port), wanted, "{backend}");
        }
        let vxlan = Vxlan { vni: 1, port: 4789, external: false, v6: false };
        for (name, ours, port) in [("vx0", false, 8472), ("flannel.1", true, 4789)] {
            ways.vxlan.push(VxlanDevice { name: name.to_owned(), vxlan, ours });
            assert_eq!(of(&ways, "vxlan", None), Some(Tunnel::Udp(port)), "with {name}");
        }
    }
}
