// SPDX-License-Identifier: Apache-2.0
//! Links, as the kernel describes them.

use nix::libc;

/// A link.
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own in the kernel")]
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Name of the interface.
    pub name: String,
    /// The kind of the link (`veth`, `bridge`, ...); empty for a physical device.
    pub kind: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// Interface index of the bridge that the link is a port of, or 0.
    pub master: u32,
    /// Interface index of a veth's other end, in the namespace of that end.
    pub peer: u32,
    /// ID of the other end's namespace, if it is a different one. See [`super::Rtnl::netns_id`].
    pub peer_netns: Option<i32>,
    /// Alias; may be empty.
    pub alias: String,
    /// MAC address.
    pub mac: Option<[u8; 6]>,
    /// True if the link is administratively up (IFF_UP).
    pub up: bool,
    /// The flags of the interface (`IFF_*` of linux/if.h).
    pub flags: u32,
    /// What tells a vxlan device from others; `None` for other kinds.
    pub vxlan: Option<Vxlan>,
    /// Who runs the spanning tree protocol of a bridge: nobody (0), the kernel (1), or a program (2).
    pub stp: u32,
    /// True if a bridge passes packets only between ports that have a VLAN in common.
    pub vlan_filtering: bool,
    /// True if the link takes all packets, also those for other MAC addresses (IFF_PROMISC).
    pub promiscuous: bool,
    /// What the bridge does with this port; `None` if the link is no port of a bridge.
    pub port: Option<BridgePort>,
    /// True if an XDP program sees the packets first.
    pub xdp: bool,
    /// Interface index of the link by which a tunnel device sends its packets, or 0 if it is bound to none.
    pub lower: u32,
}

impl Link {
    /// Returns true if the link is up and has a carrier, and the kernel has acted on that (IFF_RUNNING).
    pub fn is_running(&self) -> bool {
        self.flags & libc::IFF_RUNNING.cast_unsigned() != 0
    }

    /// Returns true if the link has a carrier (IFF_LOWER_UP).
    pub fn has_carrier(&self) -> bool {
        self.flags & libc::IFF_LOWER_UP.cast_unsigned() != 0
    }

    /// Returns true for the link that leads to this host itself (IFF_LOOPBACK).
    pub fn is_loopback(&self) -> bool {
        self.flags & libc::IFF_LOOPBACK.cast_unsigned() != 0
    }

    /// Returns true if the kernel asks for no MAC addresses on the link (IFF_NOARP).
    pub fn is_without_arp(&self) -> bool {
        self.flags & libc::IFF_NOARP.cast_unsigned() != 0
    }
}

/// Formats a MAC address as `ip link` prints it.
pub fn mac_text(mac: &[u8]) -> String {
    mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

/// What tells a vxlan device from others in the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Vxlan {
    /// The VNI.
    pub vni: u32,
    /// The UDP port on which it receives.
    pub port: u16,
    /// True if it receives packets of every VNI (`external`). Such a device receives over IPv4 and IPv6.
    pub external: bool,
    /// True if its packets are those of IPv6, and false for IPv4.
    pub v6: bool,
}

/// What a bridge does with one of its ports.
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own in the kernel")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BridgePort {
    /// The state of the port (`BR_STATE_*` of linux/if_bridge.h).
    pub state: u8,
    /// True if packets are sent back to the port by which they came.
    pub hairpin: bool,
    /// True if the bridge learns from the packets of the port which MAC addresses are behind it.
    pub learning: bool,
    /// True if the port gets packets for MAC addresses that the bridge does not know.
    pub flood: bool,
    /// True if the bridge drops packets from MAC addresses for which it has no entry at this port, and learns none.
    pub locked: bool,
    /// True if the port passes nothing to and from other ports with this flag.
    pub isolated: bool,
    /// True if the port gets no broadcasts of other ports. Those of the bridge itself it gets.
    pub no_broadcasts: bool,
}

impl BridgePort {
    /// The state in which a port passes packets (BR_STATE_FORWARDING).
    pub const FORWARDING: u8 = 3;
}
