// SPDX-License-Identifier: Apache-2.0
//! `Backend.Mode` of net-conf. It decides how many devices a node has, and over which family it reaches a peer.

use std::net::{Ipv4Addr, Ipv6Addr};

use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Family;

use crate::host::Host;

/// `Backend.Mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// A device for each family, which carries and uses only this family.
    Separate,
    /// One device for both families. The family of the underlay is chosen for each peer.
    Auto,
    /// One device for both families, over IPv4.
    Ipv4,
    /// One device for both families, over IPv6.
    Ipv6,
}

impl Mode {
    /// Reads the option. As in flannel, the case of letters matters.
    pub(super) fn parse(text: &str) -> Option<Mode> {
        Some(match text {
            "separate" => Mode::Separate,
            "auto" => Mode::Auto,
            "ipv4" => Mode::Ipv4,
            "ipv6" => Mode::Ipv6,
            _ => return None,
        })
    }

    /// Returns the family without which a node with this mode reaches no peer.
    pub(super) fn needs(self) -> Option<Family> {
        match self {
            Mode::Separate | Mode::Auto => None,
            Mode::Ipv4 => Some(Family::V4),
            Mode::Ipv6 => Some(Family::V6),
        }
    }

    /// Returns the family over which the only device reaches this peer. The rules of `auto` are those of flannel: IPv6 is used if both nodes have
    /// a global IPv6 address and the peer's IPv4 address is private.
    pub(super) fn underlay(self, peer: &Attrs, host: &Host) -> Family {
        match self {
            Mode::Ipv6 => Family::V6,
            Mode::Separate | Mode::Ipv4 => Family::V4,
            Mode::Auto => {
                let Some(theirs) = peer.public_ipv6 else { return Family::V4 };
                if peer.public_ip.is_none() {
                    return Family::V6;
                }
                let has_v4 = host.public_v4.is_some() || host.uplink.v4.is_some();
                if has_v4 && !peer.public_ip.is_some_and(|ip| Ipv4Addr::is_private(&ip)) {
                    return Family::V4;
                }
                let ours = host.public_v6.or(host.uplink.v6);
                let global = |ip: Ipv6Addr| !ip.is_unique_local();
                if global(theirs) && ours.is_some_and(global) { Family::V6 } else { Family::V4 }
            }
        }
    }
}
