// SPDX-License-Identifier: Apache-2.0
//! The answer to `weft status`. The agent makes it on request, the socket carries it as JSON, and the client prints it.

pub mod table;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use weft_subnet::lease::{Id, Lease};
use weft_subnet::outside::wall_clock;

use crate::observe::problem::Problem;

/// The whole answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// Host name.
    pub node: String,
    /// True if /readyz answers 200.
    pub ready: bool,
    /// Why the node is not ready, and what else is wrong.
    pub problems: Vec<Problem>,
    /// What an operator should know although nothing is wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
    /// The own subnets, such as `10.5.1.0/24,fd00::/64`. Empty before there is a lease.
    pub subnet: String,
    /// Seconds until the lease ends unless it is renewed. `None` if it does not end.
    pub lease_ttl_s: Option<u64>,
    /// The addresses that the own lease names.
    pub public: Vec<IpAddr>,
    /// The networks of the cluster.
    pub network: String,
    /// The type of the own backend.
    pub backend: String,
    /// While the backend changes: the types of the earlier backends by which peers still reach this node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_ways: Vec<String>,
    /// The MTU of subnet.env in bytes.
    pub mtu: u32,
    /// The port of `--healthz-port`. `None` if it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_port: Option<u16>,
    /// Name, addresses and MTU of the uplink, for people.
    pub uplink: String,
    /// The name of the uplink. Empty before there is a lease, and in the answer of an older agent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uplink_name: String,
    /// The addresses of the uplink from which tunnels send. Empty as [`Status::uplink_name`] is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub uplink_addresses: Vec<IpAddr>,
    /// The store, described for people.
    pub store: String,
    /// Seconds since the last answer of the store.
    pub store_silent_s: u64,
    /// The last error of the store, until it answers again.
    pub store_trouble: Option<String>,
    /// Every peer, sorted by subnet.
    pub peers: Vec<Peer>,
    /// The last pass that wrote something.
    pub last_pass: Option<Pass>,
    /// The last error. It may be long ago.
    pub last_error: Option<Failure>,
    /// Seconds between two audits. The interval is longer if an audit is costly.
    pub audit_interval_s: f64,
    /// Seconds between two comparisons of WireGuard peers, which no other audit contains. `None`: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wireguard_audit_s: Option<f64>,
    /// Number of full passes since the start, by cause (see [`Pass::cause`]).
    #[serde(default)]
    pub full_passes: BTreeMap<String, u64>,
    /// Seconds until the next audit.
    #[serde(default)]
    pub next_audit_s: f64,
    /// Number of peers that are held, because many leases vanished at once.
    pub held: usize,
    /// Traffic rules.
    #[serde(default)]
    pub rules: RuleStatus,
    /// The tunnel through which the agent itself carries packets. `None` if the backend has none.
    #[serde(default)]
    pub tunnel: Option<TunnelStatus>,
    /// The UDP port on which this node receives the packets of the own backend, if the links of the kernel do not show it (udp, wireguard).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel_port: Option<u16>,
}

/// The tunnel of the backend udp.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TunnelStatus {
    /// The TUN device.
    pub device: String,
    /// The address and port of the UDP socket.
    pub socket: String,
    /// True if packets are carried. Otherwise [`Status::problems`] says why not.
    pub running: bool,
    /// Number of peers in its table.
    pub peers: usize,
    /// How often it was started.
    pub starts: u64,
    /// Packets from this node to peers.
    pub sent: TunnelCounts,
    /// Packets from peers to this node.
    pub received: TunnelCounts,
}

/// The packets of one direction since the start of the agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TunnelCounts {
    /// Packets that were carried.
    pub packets: u64,
    /// Their bytes, with their IP headers.
    pub bytes: u64,
    /// Packets that were dropped, by reason. A reason without packets is left out.
    pub dropped: BTreeMap<String, u64>,
}

/// The traffic rules, as `weft status rules` shows them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RuleStatus {
    /// The packet filter that they are in, such as `nftables, table weft`. Empty before this is known.
    #[serde(default)]
    pub filter: String,
    /// True if all of them are in the kernel.
    pub in_place: bool,
    /// The wanted rules, one sentence each.
    pub rules: Vec<String>,
    /// How often they were written.
    pub writes: u64,
    /// How many of these writes restored rules that another program had changed.
    pub mended: u64,
    /// What the tunnel guard does, or why it does nothing. `None` if it is off.
    pub guard: Option<String>,
    /// What the fence keeps this host from forwarding, or what the kernel refused of it. `None` if it is off.
    #[serde(default)]
    pub fence: Option<String>,
}

/// One peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// Its subnets, separated by commas, or the id of the record if it cannot be read.
    pub subnet: String,
    /// The addresses that its lease names, separated by commas.
    pub public: String,
    /// The type of its backend.
    pub backend: String,
    /// How far its entries are.
    pub state: PeerState,
    /// True if packets to it go in clear text, although the backend of this node encrypts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub not_encrypted: bool,
    /// The reason for the state. For `programmed`: which other lease claims the same address.
    pub reason: Option<String>,
    /// The traffic over WireGuard devices. Empty for other backends.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sessions: Vec<PeerSession>,
    /// What probes found. `None` if the peer was not asked yet, or if probes are off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<PeerProbe>,
}

impl Peer {
    /// Returns its subnets. There are none if the record cannot be read.
    pub fn subnets(&self) -> impl Iterator<Item = IpNet> {
        parts(&self.subnet)
    }

    /// Returns the addresses that its lease names.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        parts(&self.public)
    }

    /// Returns a peer whose lease can be read. It has no traffic and no probe yet, and does not go in clear text.
    pub fn of(lease: &Lease, state: PeerState, reason: Option<String>) -> Peer {
        Peer {
            subnet: lease.subnets.to_string(),
            public: joined(lease.attrs.published(), ","),
            backend: lease.attrs.backend_type.clone(),
            state,
            not_encrypted: false,
            reason,
            sessions: Vec::new(),
            probe: None,
        }
    }

    /// Returns a record that cannot be read.
    pub fn unreadable(id: &Id, reason: String) -> Peer {
        Peer {
            subnet: id.to_string(),
            public: String::new(),
            backend: String::new(),
            state: PeerState::SetAside,
            not_encrypted: false,
            reason: Some(reason),
            sessions: Vec::new(),
            probe: None,
        }
    }
}

/// Returns these addresses as one text, with the separator between them.
pub fn joined(addresses: impl IntoIterator<Item = IpAddr>, separator: &str) -> String {
    addresses.into_iter().map(|ip| ip.to_string()).collect::<Vec<_>>().join(separator)
}

/// Returns the parts of a list in one text, such as [`Peer::public`]. What cannot be parsed is left out.
pub fn parts<T: FromStr>(list: &str) -> impl Iterator<Item = T> {
    list.split([',', ' ']).filter_map(|part| part.parse().ok())
}

/// What probes found about the way to a peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerProbe {
    /// The address that is asked.
    pub address: String,
    /// The last round trip in microseconds. `None` if it never answered.
    pub round_trip_us: Option<u64>,
    /// How many of the last requests were not answered.
    pub lost: u32,
    /// The number of these requests, at most 8.
    pub asked: u32,
    /// The largest packet in bytes that reached the peer and was answered. It is never larger than the MTU of the network.
    pub mtu: Option<u16>,
    /// True if the peer answers TCP connections, and no echo requests: a firewall drops ICMP, and loss and path MTU are not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub silent: bool,
    /// Why packets do not reach the peer: `underlay`, `tunnel`, `one-direction` or `mtu`. [`Peer::reason`] explains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// What the operator should look at because of the cause, if it is one thing on the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspect: Option<Suspect>,
}

/// What probably keeps packets from a peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Suspect {
    /// This published address of the peer does not answer: its node is down or cut off, or the address is wrong.
    Silent(IpAddr),
    /// A firewall drops these packets, in words: `UDP port 8472`.
    Dropped(String),
    /// A link of the path carries only packets of this size in bytes. All packets would fit if the uplinks of all nodes had this MTU.
    UplinkMtu(u32),
}

/// The traffic with a peer over one WireGuard device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerSession {
    /// The device.
    pub device: String,
    /// Where the peer was heard last, or else where its lease says that it is.
    pub endpoint: Option<String>,
    /// Seconds since the last handshake. `None` if there was none.
    pub handshake_s: Option<u64>,
    /// Seconds by which the last handshake is in the future, because the clock was set back since.
    #[serde(default)]
    pub handshake_ahead_s: u64,
    /// Received bytes.
    pub received: u64,
    /// Sent bytes.
    pub sent: u64,
}

/// How far the entries of a peer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    /// All entries are in the kernel.
    Programmed,
    /// An entry could not be written and will be tried again.
    Pending,
    /// The kernel refused an entry.
    Failed,
    /// The lease is not believed, or not all of its entries can be planned.
    SetAside,
    /// Its lease is gone together with many others. It is kept for the grace time.
    Held,
    /// All entries are in the kernel, and packets do not reach it.
    Unreachable,
}

impl PeerState {
    /// Returns the state as it is written in JSON, tables and metrics.
    pub fn word(self) -> &'static str {
        match self {
            PeerState::Programmed => "programmed",
            PeerState::Pending => "pending",
            PeerState::Failed => "failed",
            PeerState::SetAside => "set-aside",
            PeerState::Held => "held",
            PeerState::Unreachable => "unreachable",
        }
    }
}

/// An error and its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// What went wrong, in one sentence.
    pub text: String,
}

impl Failure {
    /// Returns an error that has just happened.
    pub fn now(text: String) -> Failure {
        Failure { at_ms: now_ms(), text }
    }
}

/// Returns the current time in milliseconds since 1970.
pub fn now_ms() -> u64 {
    u64::try_from(wall_clock().as_millis()).unwrap_or(u64::MAX)
}

/// A pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Its duration in microseconds.
    pub took_us: u64,
    /// Number of writes to the kernel.
    pub writes: usize,
    /// Number of writes that failed.
    pub failed: usize,
    /// Why it ran: `start`, `lease`, `kernel`, `audit`, `retry`.
    pub cause: String,
}
