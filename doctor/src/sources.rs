// SPDX-License-Identifier: Apache-2.0
//! What the caller of `weft doctor` says: what is examined, and what the agent and the store answered.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

/// What is examined.
#[derive(Debug, Default, Clone)]
pub struct NodeSources {
    /// The subnet file of the agent.
    pub subnet_file: PathBuf,
    /// The UDP port of the tunnel of the backend vxlan.
    pub port: u16,
    /// The socket on which the agent was asked.
    pub socket: PathBuf,
    /// What the agent answered.
    pub agent: AgentAnswer,
    /// How long the process of the agent has run, if it answers and its process is visible.
    pub agent_age: Option<Duration>,
    /// What is known about the agent if it does not answer.
    pub absent_agent: AbsentAgent,
    /// The backend of the agent; empty if this is not known.
    pub backend: String,
    /// The UDP port of the tunnel of the backends udp and wireguard, if it is known.
    pub tunnel_port: Option<u16>,
    /// The addresses that this node publishes, if the agent named them.
    pub published: Vec<IpAddr>,
    /// The link by which the agent reaches peers, if it named one.
    pub uplink: String,
    /// The addresses of that link from which the agent lets its tunnels send.
    pub uplink_addrs: Vec<IpAddr>,
    /// The agent knows leases of other nodes. Those that it sets aside count, too.
    pub has_peers: bool,
    /// The addresses of peers, if the agent named them: of those that packets do not reach, and of some others.
    pub peer_addresses: Vec<PeerAddress>,
    /// Published addresses of peers: of those that packets do not reach, and of one more.
    pub peers: Vec<IpAddr>,
    /// Number of peers that packets do not reach.
    pub unreachable: usize,
    /// By how much the last handshake of WireGuard with such a peer is in the future: then the clock was set back since. Zero in the usual case.
    pub handshake_ahead: Duration,
    /// Other peers, to which some packets get lost.
    pub lossy: Vec<LossyPeer>,
    /// Agents of flannel that run with the same subnet file, for people.
    pub other_agents: Vec<String>,
    /// The directory in which the agent keeps what survives a restart.
    pub state_dir: PathBuf,
    /// The files of CNI.
    pub cni: CniSources,
    /// The store, if it is examined.
    pub store: StoreSources,
}

/// What the agent answered to the question for its status.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub enum AgentAnswer {
    /// No agent answers, as before the first start.
    #[default]
    None,
    /// An agent holds the socket, but does not show its status.
    Failed {
        /// Why it does not, in words.
        why: String,
        /// The process ID of the agent, if its process is stopped.
        stopped: Option<u32>,
    },
    /// The problems that the agent reports.
    Problems(Vec<AgentProblem>),
}

/// A problem that the agent reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentProblem {
    /// What is wrong, in the words of the agent. They may contain what another node says of itself, so no remedy is taken from them.
    pub text: String,
    /// What is known beyond the text.
    pub hint: Hint,
}

impl AgentProblem {
    /// Returns a problem about which nothing is known beyond its text.
    pub fn new(text: impl Into<String>) -> AgentProblem {
        AgentProblem { text: text.into(), hint: Hint::None }
    }
}

/// What is known of a problem beyond its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// Nothing.
    None,
    /// This command ends it.
    Command(String),
    /// The store fails.
    Store,
    /// Packets do not reach some peers.
    Unreachable,
    /// Another program undoes again and again what the agent writes.
    Fight,
    /// This published address of a peer does not answer.
    Silent(IpAddr),
    /// A firewall drops these packets to a peer, in words: `UDP port 8472`.
    Dropped(String),
    /// A link of the path to a peer carries only packets of this size.
    SmallMtu {
        /// The uplink of this node.
        uplink: String,
        /// The size in bytes.
        mtu: u32,
    },
}

/// What is known about an agent that does not answer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct AbsentAgent {
    /// The agents that run with the same subnet file, for people: name and process ID.
    pub running: Vec<String>,
    /// Files that an agent of weft with this subnet file has left in its directory of state.
    pub files: Vec<PathBuf>,
}

/// A peer that only some packets reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LossyPeer {
    /// Its subnet and its published addresses, for people.
    pub name: String,
    /// How many of the last packets were lost.
    pub lost: u32,
    /// The number of these packets.
    pub asked: u32,
}

/// An address that a peer publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// The address.
    pub addr: IpAddr,
    /// False if the agent knows that packets do not reach the peer.
    pub reached: bool,
    /// The UDP port of its tunnel, if it may be another one than that of this node.
    pub port: Option<u16>,
}

/// Where the files are.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CniSources {
    /// The directory of configurations.
    pub conf_dir: PathBuf,
    /// The directories of plugins.
    pub path: Vec<PathBuf>,
    /// The directory of host-local.
    pub networks: PathBuf,
}

/// The store that is examined.
#[derive(Debug, Default, Clone)]
pub struct StoreSources {
    /// The store, for people.
    pub place: String,
    /// What it answered.
    pub answer: StoreAnswer,
    /// Why it refuses writes although it answers.
    pub alarm: Option<StoreAlarm>,
    /// The files with certificates.
    pub certificates: Vec<CertificateFile>,
}

/// Why a store refuses writes although it answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreAlarm {
    /// What is wrong with it, for people.
    pub what: String,
    /// What to do, in one line.
    pub remedy: String,
}

/// A file with certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFile {
    /// What they are for, such as `client certificate`.
    pub purpose: &'static str,
    /// The file.
    pub file: PathBuf,
}

/// What the store answered.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub enum StoreAnswer {
    /// Nobody asked it.
    #[default]
    NotAsked,
    /// It did not answer. The text says why.
    Failed(String),
    /// It answered, and has no net-conf.
    NoNetConf {
        /// Where net-conf should be.
        place: String,
        /// What to do, usually with the command to type.
        remedy: String,
    },
    /// It answered.
    Answered {
        /// The time that its slowest answer took.
        slowest: Duration,
        /// net-conf.
        net_conf: String,
    },
}
