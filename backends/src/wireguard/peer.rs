// SPDX-License-Identifier: Apache-2.0
//! A peer of a WireGuard device, as an entry.

use std::fmt;
use std::net::SocketAddr;

use super::key::PublicKey;

/// A peer of a WireGuard device, as it should be or as it is. Its prefixes are entries of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WgPeer {
    /// Its public key.
    pub key: PublicKey,
    /// Where packets to it are sent. WireGuard replaces this by the address from which the peer was heard last.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between two keepalive packets; 0 is off.
    pub keepalive: u16,
    /// In the desired state: the preshared key of net-conf is used. In the observed state: the peer has the one of net-conf if there is
    /// one, or else any.
    pub preshared: bool,
    /// Observed only: the last handshake is so young that the endpoint works, whatever the lease says.
    pub is_live: bool,
    /// Observed only: the endpoint that this agent wrote last, if it wrote one since its start.
    pub written: Option<SocketAddr>,
}

impl WgPeer {
    /// True if the observed peer `have` needs no write. An endpoint that works is left alone: the peer may have a new address, or be
    /// behind a NAT, and WireGuard learned that from authenticated packets. But if another endpoint is wanted than was written last, it is
    /// written: the lease, or net-conf, has changed since.
    pub fn agrees(&self, have: &WgPeer) -> bool {
        let is_learned = have.is_live && (have.written.is_none() || have.written == self.endpoint);
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
        WgPeer { key: PublicKey([7; 32]), endpoint, keepalive: 0, preshared: false, is_live, written: None }
    }

    #[test]
    fn an_endpoint_that_works_is_not_fought() {
        let (wanted, learned) = ("192.0.2.1:51820", "203.0.113.9:1024");
        assert!(peer(wanted, false).agrees(&peer(learned, true)));
        assert!(!peer(wanted, false).agrees(&peer(learned, false)), "no handshake for long");
        assert!(peer(wanted, false).agrees(&peer(wanted, false)));
        let written = |at: &str| WgPeer { written: at.parse().ok(), ..peer(learned, true) };
        assert!(peer(wanted, false).agrees(&written(wanted)));
        assert!(!peer(wanted, false).agrees(&written("192.0.2.1:7777")), "another endpoint is wanted now");
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
