// SPDX-License-Identifier: Apache-2.0
//! What `weft status` shows: the agent fills it on request, the socket carries it as JSON, the client prints it.

pub mod table;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The whole answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// Host name.
    pub node: String,
    /// True when /readyz says 200.
    pub ready: bool,
    /// Why it is not ready, and what else is wrong (degraded), as sentences.
    pub problems: Vec<String>,
    /// Own subnets, `10.5.1.0/24,fd00::/64`; empty before there is a lease.
    pub subnet: String,
    /// Seconds until the lease ends if nobody renews; `None` = does not expire.
    pub lease_ttl_s: Option<u64>,
    /// Public addresses as published.
    pub public: Vec<String>,
    /// Cluster networks.
    pub network: String,
    /// Backend type.
    pub backend: String,
    /// MTU of subnet.env, bytes.
    pub mtu: u32,
    /// Name, addresses and MTU of the external interface.
    pub uplink: String,
    /// The store, for people.
    pub store: String,
    /// Seconds since the last answer of the store.
    pub store_silent_s: u64,
    /// Trouble with the store, if any.
    pub store_trouble: Option<String>,
    /// Every peer, sorted by subnet.
    pub peers: Vec<Peer>,
    /// The last full pass or event pass that wrote something.
    pub last_pass: Option<Pass>,
    /// The last error, perhaps of long ago.
    pub last_error: Option<Failure>,
    /// Seconds between audits now (stretched on large nodes).
    pub audit_interval_s: f64,
    /// How often the whole plan was compared with a dump of the kernel since the start, by cause (see [`Pass::cause`]).
    #[serde(default)]
    pub full_passes: BTreeMap<String, u64>,
    /// Seconds until the next comparison of the whole plan with the kernel. Far away on a node to which nothing happens.
    #[serde(default)]
    pub next_audit_s: f64,
    /// Removals held because emptiness came suddenly.
    pub held: usize,
    /// Traffic rules.
    #[serde(default)]
    pub rules: RuleStatus,
}

/// Traffic rules, as `weft status rules` shows them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RuleStatus {
    /// What carries them: `nftables, table weft`; empty before that is known.
    pub carrier: String,
    /// All of them are in the kernel.
    pub in_place: bool,
    /// What is wanted, one a line.
    pub rules: Vec<String>,
    /// How often they were written.
    pub writes: u64,
    /// How many of these because others had changed them.
    pub mended: u64,
    /// The tunnel guard: what it does or why it does not; `None` = not asked for.
    pub guard: Option<String>,
    /// What this host does not forward, or what the kernel refused of it; `None` = not asked for.
    #[serde(default)]
    pub fence: Option<String>,
}

/// One peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// Subnets, or the record's id when they could not be read.
    pub subnet: String,
    /// Public addresses.
    pub public: String,
    /// Backend type.
    pub backend: String,
    /// State.
    pub state: PeerState,
    /// Why, for all but `programmed`; there, what others claim of it.
    pub reason: Option<String>,
}

/// How far a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerState {
    /// All entries are in the kernel.
    Programmed,
    /// Some entry waits for a retry or the carrier.
    Pending,
    /// The kernel refused an entry.
    Failed,
    /// The lease is not believed, or the backend cannot reach it.
    SetAside,
    /// Gone from the store all of a sudden: kept for the grace time.
    Held,
}

impl PeerState {
    /// The state as it is written in JSON, tables and metrics.
    pub fn word(self) -> &'static str {
        match self {
            PeerState::Programmed => "programmed",
            PeerState::Pending => "pending",
            PeerState::Failed => "failed",
            PeerState::SetAside => "set-aside",
            PeerState::Held => "held",
        }
    }
}

/// What went wrong, and when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// One sentence.
    pub text: String,
}

/// A pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pass {
    /// Milliseconds since 1970.
    pub at_ms: u64,
    /// Microseconds it took.
    pub took_us: u64,
    /// Writes.
    pub writes: usize,
    /// Writes that failed.
    pub failed: usize,
    /// Why it ran: `start`, `lease`, `kernel`, `audit`, `retry`.
    pub cause: String,
}
