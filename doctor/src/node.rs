// SPDX-License-Identifier: Apache-2.0
//! Reads what `weft doctor` examines: files, sysctls and the kernel's tables, without drawing conclusions.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::Context;
use ipnet::IpNet;
use nix::unistd::geteuid;
use weft_netlink::rtnl::{Addr, Link, Neigh, Rtnl};

use super::absent_agent::{self, AbsentAgent};
use super::agent_problems::AgentProblem;
use super::base::{BRIDGE, Fill, SubnetFile, read_subnet_file, sysctl, unwritable};
use super::cni_files::{self, CniFiles, CniSources};
use super::duplicates::{self, Duplicate, SameMac};
use super::filters::{self, PodFilter};
use super::finding::NodeFinding;
use super::forwarding::{self, Forwarding};
use super::ipsec::{self, Taken};
use super::limits::{self, Limits};
use super::locks::{self, HeldLock};
use super::lossy::LossyPeer;
use super::offload::{self, Offloaded};
use super::other_networks::{self, Leftover};
use super::other_rules::{self, RuleFacts};
use super::pod_addresses;
use super::pod_links::{self, PodLinks};
use super::policy_rules::PolicyRules;
use super::port_users;
use super::processes;
use super::store::{self, StoreAnswer, StoreFacts, StoreSources};
use super::tunnel::{self, Tunnel};
use super::tunnel_rules::{self, DroppingRule};
use super::underlay::{self, Fault, PeerAddress, Tables};
use super::uplinks::{self, PathLinks};
use super::ways::{self, WayFacts};

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
    /// The addresses of peers, if the agent named them: of those that packets do not reach, and of some others.
    pub peer_addresses: Vec<PeerAddress>,
    /// Published addresses of peers: of those that packets do not reach, and of one more.
    pub peers: Vec<IpAddr>,
    /// Number of peers that packets do not reach.
    pub unreachable: usize,
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

/// The bridge of the CNI plugin.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Bridge {
    /// MTU in bytes.
    pub mtu: u32,
    /// Its addresses whose scope is wider than the link.
    pub addrs: Vec<IpAddr>,
}

/// Everything that was read.
#[derive(Debug, Default, Clone)]
pub struct NodeFacts {
    /// The path of the subnet file.
    pub path: PathBuf,
    /// The content of the subnet file.
    pub subnet_file: SubnetFile,
    /// Why the directory of the subnet file cannot be written, if it cannot.
    pub unwritable: Option<String>,
    /// The UDP port of the tunnel: that of weft's vxlan device, if there is one.
    pub port: u16,
    /// The programs that have a socket on this port, with their process IDs.
    pub port_users: Vec<String>,
    /// The bridge, if there is one.
    pub bridge: Option<Bridge>,
    /// net.bridge.bridge-nf-call-iptables; `None` without the module br_netfilter.
    pub bridge_calls_iptables: Option<u64>,
    /// net.bridge.bridge-nf-call-ip6tables; `None` without the module br_netfilter.
    pub bridge_calls_ip6tables: Option<u64>,
    /// The entries below net.ipv6.conf that switch IPv6 off for our links, now or when they are made.
    pub ipv6_disabled: Vec<String>,
    /// The connection tracking table, if the module is loaded.
    pub conntrack: Option<Fill>,
    /// The neighbour tables of IPv4 and IPv6, each with the name in the sysctl. They have limits in the host's namespace alone.
    pub neighbours: Vec<(&'static str, Fill)>,
    /// What concerns packets between nodes.
    pub ways: WayFacts,
    /// The links of pods.
    pub pods: PodLinks,
    /// Whether packets are forwarded.
    pub forwarding: Forwarding,
    /// The links by which packets between nodes pass.
    pub path_links: PathLinks,
    /// The filters of tc at links of pods that drop packets, or may do so.
    pub filters: Vec<PodFilter>,
    /// The IPv4 addresses of this node that another host has, too.
    pub duplicates: Vec<Duplicate>,
    /// The MAC addresses of this node that another host has, too.
    pub same_macs: Vec<SameMac>,
    /// The policies of IPsec that take packets between pods.
    pub ipsec: Vec<Taken>,
    /// The tunnel devices that leave checksums to a card that may spoil them.
    pub offload: Vec<Offloaded>,
    /// Number of peers that packets do not reach.
    pub unreachable: usize,
    /// Other peers, to which some packets get lost.
    pub lossy: Vec<LossyPeer>,
    /// The rules of other programs.
    pub rules: RuleFacts,
    /// The rules that drop packets of the tunnel.
    pub dropping: Vec<DroppingRule>,
    /// What other networks for pods left behind.
    pub leftovers: Vec<Leftover>,
    /// Agents of flannel that run beside ours.
    pub other_agents: Vec<String>,
    /// The files of CNI.
    pub cni: CniFiles,
    /// The addresses in our subnets that pods have, each with the number of pods.
    pub pod_addresses: BTreeMap<IpAddr, usize>,
    /// Limits of the machine.
    pub limits: Limits,
    /// Locks that a program holds for too long.
    pub locks: Vec<HeldLock>,
    /// The store, net-conf and certificates.
    pub store: StoreFacts,
    /// What the agent answered.
    pub agent: AgentAnswer,
    /// The finding about an agent that does not answer.
    pub absent_agent: Option<NodeFinding>,
    /// Why packets cannot reach the addresses of peers.
    pub underlay: Vec<(IpAddr, Fault)>,
    /// The backend of the agent; empty if this is not known.
    pub backend: String,
    /// What could not be examined: the name of the check, and a text for people.
    pub not_examined: Vec<(&'static str, String)>,
}

/// Reads everything.
///
/// # Errors
/// The kernel's tables or /proc cannot be read.
pub fn read(sources: &NodeSources) -> anyhow::Result<NodeFacts> {
    let mut kernel = Rtnl::open()?;
    let (links, addrs) = (kernel.links()?, kernel.addrs()?);
    let subnet_file = read_subnet_file(&sources.subnet_file);
    let subnets = subnet_file.subnets();
    let (routes, neighbours) = (kernel.main_table()?, kernel.neighbours()?);
    let policy = PolicyRules::read().context("read the policy rules")?;
    let tables = Tables { links: &links, addrs: &addrs, routes: &routes, neighbours: &neighbours, policy: &policy };
    let ways = ways::read(&tables, &subnets)?;
    let rules = other_rules::read((&links, &addrs), &subnets, &ways.to_peers);
    let (tunnel, vxlan_port) = (Tunnel::of(sources, &ways), tunnel::vxlan_port(sources, &ways));
    // A kernel without queueing disciplines has none that matters.
    let qdiscs = kernel.qdiscs().unwrap_or_default();
    let path_links = uplinks::read(&links, (&addrs, &routes), &qdiscs, &sources.published);
    let peer_subnets: Vec<IpNet> = ways.to_peers.iter().map(|(_, subnet)| *subnet).collect();
    let mut not_examined = not_examined(sources);
    let duplicates = duplicates::read(&links, &addrs, &path_links);
    let duplicates = known(
        "duplicate-address",
        "whether another host has an IPv4 address of this node",
        duplicates,
        &mut not_examined,
    );
    Ok(NodeFacts {
        path: sources.subnet_file.clone(),
        subnet_file,
        unwritable: unwritable(&sources.subnet_file),
        port: ways.port().unwrap_or(sources.port),
        port_users: port_users::read(vxlan_port).context("look for the programs that use UDP ports")?,
        bridge: bridge(&links, &addrs),
        bridge_calls_iptables: sysctl("bridge/bridge-nf-call-iptables"),
        bridge_calls_ip6tables: sysctl("bridge/bridge-nf-call-ip6tables"),
        ipv6_disabled: ipv6_disabled(&links, &ways),
        conntrack: conntrack(),
        neighbours: neighbour_tables(&neighbours),
        pods: pod_links::read(&links, &addrs, &routes),
        pod_addresses: pod_addresses::read(&links, &subnets).unwrap_or_default(),
        forwarding: forwarding::read(&links, &routes),
        duplicates,
        same_macs: duplicates::same_macs(&tables, &path_links),
        offload: offload::read(&links, &path_links, Path::new("/sys/class/net")),
        path_links,
        // A kernel without filters has none that drop packets.
        filters: filters::read(&links, &qdiscs).unwrap_or_default(),
        ipsec: known("ipsec", "policies of IPsec", ipsec::read(&subnets, &peer_subnets), &mut not_examined),
        unreachable: sources.unreachable,
        lossy: sources.lossy.clone(),
        dropping: tunnel_rules::read(tunnel.map(|tunnel| (&*sources.peers, tunnel)), &subnets, &rules.iptables)?,
        leftovers: other_networks::read(&links, &rules.iptables),
        other_agents: sources.other_agents.clone(),
        cni: cni_files::read(&sources.cni),
        limits: limits::read(&[&sources.state_dir, &sources.cni.networks]),
        locks: locks::read(&sources.cni.networks),
        rules,
        ways,
        store: store::read(&sources.store),
        agent: sources.agent.clone(),
        absent_agent: absent_agent::absent_agent(sources, &links),
        underlay: underlay::read(&tables, sources, tunnel.and_then(Tunnel::port))
            .context("ask for the ways to peers")?,
        backend: sources.backend.clone(),
        not_examined,
    })
}

fn bridge(links: &[Link], addrs: &[Addr]) -> Option<Bridge> {
    let link = links.iter().find(|link| link.name == BRIDGE && link.kind == "bridge")?;
    let of_link = addrs.iter().filter(|addr| addr.index == link.index && addr.global);
    Some(Bridge { mtu: link.mtu, addrs: of_link.map(|addr| addr.addr).collect() })
}

fn conntrack() -> Option<Fill> {
    let (entries, max) = sysctl("netfilter/nf_conntrack_count").zip(sysctl("netfilter/nf_conntrack_max"))?;
    Some(Fill { entries, max })
}

/// Returns what was read, or nothing if it could not be read, for example by another user than root. Then a text for people says so.
fn known<T: Default>(
    check: &'static str,
    what: &str,
    read: io::Result<T>,
    not_examined: &mut Vec<(&'static str, String)>,
) -> T {
    read.unwrap_or_else(|error| {
        not_examined.push((check, format!("{what}: {error}")));
        T::default()
    })
}

/// Returns what this process cannot see.
fn not_examined(sources: &NodeSources) -> Vec<(&'static str, String)> {
    let mut texts = Vec::new();
    if sources.agent == AgentAnswer::None {
        let place = sources.socket.display();
        texts.push(("agent", format!("what only a running agent knows: no agent answers on {place}")));
    }
    if sources.store.answer == StoreAnswer::NotAsked {
        texts.push((
            "store",
            "the store and its certificates: give --check-store and the flags of the store".to_owned(),
        ));
    }
    if !geteuid().is_root() {
        texts.push(("port", "programs of other users: you are not root".to_owned()));
    }
    texts.extend(processes::unreadable().map(|text| ("port", text)));
    texts
}

/// Returns the IPv6 entries that are switched off: those of the links that pods' packets pass, and the one for links that are
/// made later.
fn ipv6_disabled(links: &[Link], ways: &WayFacts) -> Vec<String> {
    let carries = |link: &Link| ways.to_peers.iter().any(|(name, dst)| *name == link.name && dst.addr().is_ipv6());
    let is_ours = |link: &Link| link.name == BRIDGE || link.name.starts_with("flannel-v6.") || carries(link);
    let ours = links.iter().filter(|link| is_ours(link));
    let names = ours.map(|link| link.name.as_str()).chain(["default"]);
    let disabled =
        names.filter(|name| sysctl(&format!("ipv6/conf/{name}/disable_ipv6")).is_none_or(|value| value != 0));
    disabled.map(str::to_owned).collect()
}

/// Counts the neighbours of both families. Permanent ones, as weft writes them, do not count against the limit.
fn neighbour_tables(all: &[Neigh]) -> Vec<(&'static str, Fill)> {
    let table = |name: &'static str, v6: bool| {
        let max = sysctl(&format!("{name}/neigh/default/gc_thresh3"))?;
        let counted = all.iter().filter(|neigh| !neigh.permanent && neigh.addr.is_ipv6() == v6).count();
        Some((name, Fill { entries: counted as u64, max }))
    };
    [table("ipv4", false), table("ipv6", true)].into_iter().flatten().collect()
}
