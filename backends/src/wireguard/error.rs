// SPDX-License-Identifier: Apache-2.0
//! Why WireGuard does not reach a peer, or cannot run.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::state::Name;
use crate::wireguard_key::PublicKey;

/// Why WireGuard cannot run with these options, or on this host.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireguardError {
    #[error("Backend.Mode in net-conf is \"{0}\": give separate, auto, ipv4 or ipv6")]
    Mode(String),
    #[error(
        "Backend.Mode in net-conf reaches peers over {0}, and net-conf does not enable {0}: give auto, or enable it"
    )]
    ModeWithout(&'static str),
    /// The text is not shown, because it is nearly a secret.
    #[error("Backend.PSK in net-conf is not a preshared key: give 44 characters of base64, as `wg genpsk` prints them")]
    Psk,
    #[error(
        "Backend.ListenPort and Backend.ListenPortV6 in net-conf are both {0}, and two devices cannot listen on one port: give two, or \
         one device for both families (Mode auto, ipv4 or ipv6)"
    )]
    OnePort(u16),
    #[error(
        "--wireguard-port {0} is Backend.ListenPortV6 of net-conf, too, and two devices cannot listen on one port: give another port, or \
         one device for both families (Mode auto, ipv4 or ipv6)"
    )]
    OneOwnPort(u16),
    #[error("no key pair was chosen for the WireGuard device")]
    NoKey,
    #[error(
        "BackendType is \"{0}\", and this network is encrypted: packets would go there in clear text. Give its node the type wireguard, or \
         set Backend.AllowPlaintext in net-conf for the time of a migration"
    )]
    Plaintext(String),
}

/// Why a lease cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReachError {
    #[error("the lease has no {0}")]
    Missing(&'static str),
    #[error("{member} is no object ({error})")]
    NoObject { member: &'static str, error: String },
    #[error("{0} has no PublicKey")]
    NoKey(&'static str),
    #[error("PublicKey {key} of {member} is no key of WireGuard (44 characters of base64)")]
    BadKey { key: String, member: &'static str },
    #[error("Port {port} of {member} is no UDP port")]
    BadPort { port: String, member: &'static str },
    #[error("its PublicKey is 32 zeros, which no node can have")]
    ZeroKey,
    #[error("PublicKey {0} is our own: two nodes have one key")]
    OurKey(PublicKey),
    #[error("this node has no key of WireGuard, because the type of its own backend is another one")]
    NoOwnKey,
    #[error("this node has no {family} address on {uplink} to send from")]
    NoLocal { family: &'static str, uplink: Name },
    #[error("its published address {address} lies inside Network {network}, so its tunnel would lead into itself")]
    Loop { address: IpAddr, network: IpNet },
}

/// The subnets of a lease that are not reached, and why.
#[derive(Debug, thiserror::Error)]
pub(super) struct NotReached {
    pub(super) subnets: Vec<IpNet>,
    pub(super) reason: ReachError,
}

impl fmt::Display for NotReached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let subnets: Vec<String> = self.subnets.iter().map(IpNet::to_string).collect();
        write!(f, "{}: {}", subnets.join(", "), self.reason)
    }
}
