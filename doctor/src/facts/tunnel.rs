// SPDX-License-Identifier: Apache-2.0
//! What the packets between nodes look like on the underlay.

use std::fmt;
use std::net::IpAddr;

use weft_backends::register::device_kind;
use weft_backends::{ipip, vxlan};

use super::ways::WayFacts;
use crate::kernel::entries::Proto;
use crate::sources::NodeSources;

/// The packets of the tunnel between nodes, as rules of firewalls see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tunnel {
    /// UDP packets to this port.
    Udp(u16),
    /// IPv4 packets in IPv4 packets, protocol 4.
    Ipip,
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

    /// Returns the tests that match the packets to this peer, for iptables and for nftables.
    pub(super) fn tests_to(self, peer: IpAddr) -> [String; 2] {
        self.tests_with(["-d", "daddr"], peer)
    }

    /// Returns the tests that match the packets from this peer, for iptables and for nftables.
    pub(super) fn tests_from(self, peer: IpAddr) -> [String; 2] {
        self.tests_with(["-s", "saddr"], peer)
    }

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

/// Returns the UDP port of the vxlan device, if packets between nodes are those of such a device. They count as such where the backend is not known.
pub(super) fn vxlan_port(sources: &NodeSources, ways: &WayFacts) -> Option<u16> {
    let has_vxlan = sources.backend.is_empty() || device_kind(&sources.backend) == Some(vxlan::DEVICE_KIND);
    has_vxlan.then(|| ways.port().unwrap_or(sources.port))
}
