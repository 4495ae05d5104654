// SPDX-License-Identifier: Apache-2.0
//! How a peer is reached: the key and the endpoint that its lease names. A lease that would do harm is refused.

use std::net::SocketAddr;

use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Family;

use super::error::ReachError;
use super::lease::{self, Data};
use super::mode::Mode;
use super::{Device, Wireguard, pair};
use crate::family::{label, public, public_member};
use crate::host::Host;
use crate::wireguard_key::PublicKey;

/// How a peer is reached.
pub(super) struct Reached {
    pub(super) key: PublicKey,
    pub(super) endpoint: SocketAddr,
    /// The lease names no port of the node, so that of net-conf is assumed.
    pub(super) assumes_port: bool,
}

impl Wireguard {
    /// Returns how this device reaches a peer, as its lease says.
    ///
    /// # Errors
    /// The lease names no key or no address with which packets can be sent, or one that would do harm.
    pub(super) fn reach(&self, host: &Host, device: &Device, attrs: &Attrs) -> Result<Reached, ReachError> {
        let underlay = match self.mode {
            Mode::Separate => device.families.first().copied().unwrap_or(Family::V4),
            mode => mode.underlay(attrs, host),
        };
        let missing = || ReachError::Missing(public_member(underlay));
        let address = public(attrs, underlay).ok_or_else(missing)?;
        if host.uplink.address(underlay).is_none() {
            return Err(ReachError::NoLocal { family: label(underlay), uplink: host.uplink.name });
        }
        // As in flannel, the key of IPv6 counts if IPv6 is enabled. A node has one key for both.
        let keyed = device.families.last().copied().unwrap_or(Family::V4);
        let data = match lease::data(attrs, keyed) {
            Err(ReachError::Missing(_)) if keyed == Family::V6 && self.mode != Mode::Separate => {
                lease::data(attrs, Family::V4)?
            }
            data => data?,
        };
        let key = data.key;
        if key.is_zero() {
            return Err(ReachError::ZeroKey);
        }
        let ours = pair(host).ok_or(ReachError::NoOwnKey)?;
        if key.id() == ours.public_key().id() {
            return Err(ReachError::OurKey(key));
        }
        let inside = self.networks.iter().find(|network| network.contains(&address));
        if let Some(network) = inside.filter(|_| host.routes.on_link(address).is_none()) {
            return Err(ReachError::Loop { address, network });
        }
        let named = self.named_port(attrs, &data);
        let port = named.unwrap_or(self.usual_port(underlay));
        Ok(Reached { key, endpoint: SocketAddr::new(address, port), assumes_port: named.is_none() })
    }

    /// Returns the UDP port on which a peer listens, if its lease names it. A lease of flannel before 0.26.5 names none. Then we assume that the
    /// peer listens on the port of net-conf.
    fn named_port(&self, attrs: &Attrs, data: &Data) -> Option<u16> {
        if self.mode == Mode::Separate {
            return data.port;
        }
        // The only device of flannel listens on the port of BackendData, even if its lease names another one for IPv6. A node of flannel
        // without IPv4 names only the port on which it does not listen.
        let wrong = self.ports[1];
        lease::data(attrs, Family::V4).map_or_else(|_| data.port.filter(|port| *port != wrong), |v4| v4.port)
    }
}
