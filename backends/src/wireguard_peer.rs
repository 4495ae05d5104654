// SPDX-License-Identifier: Apache-2.0
//! A peer of a WireGuard device, as an entry.

use std::fmt;
use std::net::SocketAddr;

use crate::wireguard_key::PublicKey;

/// A peer of a WireGuard device, as it should be or as it is. Its allowed IPs are separate entries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgPeer {
    /// Its public key.
    pub key: PublicKey,
    /// The address and port to which packets for the peer are sent. WireGuard replaces them by those from which it last received a packet of the
    /// peer.
    pub endpoint: Option<SocketAddr>,
    /// The interval of keepalive packets in seconds. 0 means that there are none.
    pub keepalive: u16,
    /// In the desired state: true if the peer must have the preshared key of net-conf. In the observed state: true if it has that key. If net-conf
    /// has none, it is true if the peer has any preshared key.
    pub preshared: bool,
    /// Only in the desired state: true if the lease names no port, so that the port of the endpoint is that of net-conf. The node itself may
    /// not have read the same net-conf.
    pub assumes_port: bool,
    /// Only in the observed state: true if the last handshake is so recent that the endpoint works, even if the lease names another one.
    pub is_live: bool,
    /// Only in the observed state: the endpoint that this agent wrote last, if it has written one since its start.
    pub written: Option<SocketAddr>,
}

impl WgPeer {
    /// Returns true if the observed peer `have` need not be written. An endpoint that works is not changed, because the peer may have a new address
    /// or be behind a NAT, and WireGuard learned that from authenticated packets. But if the wanted endpoint is not the one that was written last,
    /// the lease or net-conf has changed, and it is written. A port that only net-conf names is no reason: the peer works at the port that it has.
    pub fn agrees(&self, have: &WgPeer) -> bool {
        let is_as_written = |written: SocketAddr| match self.endpoint {
            Some(endpoint) if self.assumes_port => endpoint.ip() == written.ip(),
            endpoint => endpoint == Some(written),
        };
        let is_learned = have.is_live && have.written.is_none_or(is_as_written);
        let endpoint = is_learned || self.endpoint == have.endpoint;
        endpoint && (self.key, self.keepalive, self.preshared) == (have.key, have.keepalive, have.preshared)
    }
}

impl fmt::Display for WgPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "key {}", self.key)?;
        if let Some(endpoint) = self.endpoint {
            write!(f, " endpoint {endpoint}")?;
        }
        if self.keepalive > 0 {
            write!(f, " keepalive {} s", self.keepalive)?;
        }
        f.write_str(if self.preshared { " with the preshared key" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(endpoint: &str, is_live: bool) -> WgPeer {
        let endpoint = Some(endpoint.parse().unwrap());
        WgPeer {
            key: PublicKey([7; 32]),
            endpoint,
            keepalive: 0,
            preshared: false,
            assumes_port: false,
            is_live,
            written: None,
        }
    }

    #[test]
    fn an_endpoint_that_works_is_not_changed() {
        let (wanted, learned) = ("192.0.2.1:51820", "203.0.113.9:1024");
        assert!(peer(wanted, false).agrees(&peer(learned, true)));
        assert!(!peer(wanted, false).agrees(&peer(learned, false)), "there was no handshake for a long time");
        assert!(peer(wanted, false).agrees(&peer(wanted, false)));
        let written = |at: &str| WgPeer { written: at.parse().ok(), ..peer(learned, true) };
        assert!(peer(wanted, false).agrees(&written(wanted)));
        assert!(!peer(wanted, false).agrees(&written("192.0.2.1:7777")), "another endpoint is wanted now");
    }

    /// A node of flannel before 0.26.5 stays on its port until it is restarted, and its lease does not name it.
    #[test]
    fn another_port_of_net_conf_alone_does_not_replace_an_endpoint_that_works() {
        let (before, now, elsewhere) = ("192.0.2.1:51820", "192.0.2.1:51900", "192.0.2.9:51900");
        let wanted = |at: &str| WgPeer { assumes_port: true, ..peer(at, false) };
        let have = |is_live| WgPeer { written: before.parse().ok(), ..peer(before, is_live) };
        assert!(wanted(now).agrees(&have(true)));
        assert!(!peer(now, false).agrees(&have(true)), "the lease names this port");
        assert!(!wanted(now).agrees(&have(false)), "the node does not answer at its port");
        assert!(!wanted(elsewhere).agrees(&have(true)), "the lease names another address");
    }

    #[test]
    fn keepalive_and_the_preshared_key_are_compared_whatever_the_endpoint_is() {
        let wanted = peer("192.0.2.1:51820", false);
        let have = peer("192.0.2.1:51820", true);
        assert!(!wanted.agrees(&WgPeer { keepalive: 1, ..have.clone() }));
        assert!(!wanted.agrees(&WgPeer { preshared: true, ..have.clone() }));
        assert!(!wanted.agrees(&WgPeer { key: PublicKey([8; 32]), ..have }));
    }
}
