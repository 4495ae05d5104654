// SPDX-License-Identifier: Apache-2.0
//! The bytes that an encapsulation adds to each packet. A packet of a pod with `mtu` bytes plus the overhead has exactly the MTU of the
//! underlay.

use weft_subnet::cidr::Family;

/// Outer IPv4 header without options.
const IPV4: u32 = 20;
/// Outer IPv6 header without extensions.
const IPV6: u32 = 40;
/// UDP header.
const UDP: u32 = 8;
/// VXLAN header (RFC 7348).
const VXLAN: u32 = 8;
/// Header (16 bytes) and authentication tag (16 bytes) of a WireGuard packet.
const WIREGUARD: u32 = 32;
/// Inner Ethernet header: vxlan carries frames.
const ETHERNET: u32 = 14;

/// Returns the bytes that vxlan adds over an underlay of this family: 50 over IPv4, 70 over IPv6.
pub fn vxlan(underlay: Family) -> u32 {
    let outer = match underlay {
        Family::V4 => IPV4,
        Family::V6 => IPV6,
    };
    outer + UDP + VXLAN + ETHERNET
}

/// Returns the bytes that ipip adds: one more IPv4 header, 20.
pub fn ipip() -> u32 {
    IPV4
}

/// Returns the bytes that WireGuard adds: 80 over IPv6, and 60 over IPv4. The larger number counts for both, so that the MTU of pods is that of
/// flannel's nodes in the same cluster.
pub fn wireguard() -> u32 {
    IPV6 + UDP + WIREGUARD
}

/// Returns the bytes that the backend udp adds: an IPv4 header and a UDP header, 28.
pub fn udp() -> u32 {
    IPV4 + UDP
}

#[cfg(test)]
mod tests {
    use super::{Family, ipip, udp, vxlan, wireguard};

    #[test]
    fn documented_numbers() {
        assert_eq!((vxlan(Family::V4), vxlan(Family::V6), ipip(), udp(), wireguard()), (50, 70, 20, 28, 80));
    }
}
