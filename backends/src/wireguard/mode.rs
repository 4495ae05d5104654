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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Uplink;
    use crate::state::Name;

    fn host(v4: &str, v6: &str) -> Host {
        let (v4, v6) = (v4.parse().ok(), v6.parse().ok());
        Host::new(Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4, v6 })
    }

    #[test]
    fn auto_chooses_the_family_that_probably_works() {
        const PRIVATE: &str = "192.168.0.9";
        const PUBLIC: &str = "203.0.113.9";
        const LOCAL: &str = "fd77::9";
        const GLOBAL: &str = "2001:db8::9";
        // The addresses of this node, and those of the peer.
        for (v4, v6, theirs_v4, theirs_v6, wanted) in [
            (PRIVATE, GLOBAL, PRIVATE, GLOBAL, Family::V6),
            (PRIVATE, GLOBAL, PUBLIC, GLOBAL, Family::V4),
            ("", GLOBAL, PUBLIC, GLOBAL, Family::V6),
            (PRIVATE, GLOBAL, PRIVATE, LOCAL, Family::V4),
            (PRIVATE, LOCAL, PRIVATE, GLOBAL, Family::V4),
            (PRIVATE, "", PRIVATE, GLOBAL, Family::V4),
            (PRIVATE, GLOBAL, PRIVATE, "", Family::V4),
            (PRIVATE, LOCAL, "", LOCAL, Family::V6),
        ] {
            let peer =
                Attrs { public_ip: theirs_v4.parse().ok(), public_ipv6: theirs_v6.parse().ok(), ..Attrs::default() };
            let names = format!("{v4} {v6} to {theirs_v4} {theirs_v6}");
            assert_eq!(Mode::Auto.underlay(&peer, &host(v4, v6)), wanted, "{names}");
            assert_eq!(Mode::Ipv6.underlay(&peer, &host(v4, v6)), Family::V6, "{names}");
            assert_eq!(Mode::Ipv4.underlay(&peer, &host(v4, v6)), Family::V4, "{names}");
        }
        let peer = Attrs { public_ip: PRIVATE.parse().ok(), public_ipv6: GLOBAL.parse().ok(), ..Attrs::default() };
        let published = Host { public_v6: GLOBAL.parse().ok(), ..host(PRIVATE, LOCAL) };
        assert_eq!(Mode::Auto.underlay(&peer, &published), Family::V6, "the published address counts");
    }
}
