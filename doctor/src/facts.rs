// SPDX-License-Identifier: Apache-2.0
//! What `weft doctor` knows about a node: files, sysctls and the kernel's tables. Each subject has a file with its facts, and with the function that
//! reads them and draws no conclusions.

mod arp_tables;
pub(crate) mod bridge_vlans;
pub(crate) mod certificates;
pub(crate) mod checksums;
pub(crate) mod clashes;
pub(crate) mod cni_files;
pub(crate) mod cni_plugins;
mod counters;
pub(crate) mod duplicates;
mod early_clock;
pub(crate) mod filters;
mod forwarding;
mod host_firewalls;
pub(crate) mod ipsec;
mod ipv6_sysctls;
pub(crate) mod k3s_flannel;
pub(crate) mod limits;
pub(crate) mod locks;
pub mod memory_kills;
pub(crate) mod modules;
pub(crate) mod offload;
pub(crate) mod other_networks;
pub(crate) mod other_pods;
pub(crate) mod other_rules;
pub(crate) mod own_pods;
pub(crate) mod path_links;
mod peer_port;
mod pod_addresses;
pub(crate) mod pod_links;
pub mod pod_way;
pub(crate) mod policy_rules;
mod port_users;
#[cfg(feature = "kube")]
mod runtime;
pub(crate) mod self_assigned;
pub(crate) mod store;
mod tables;
pub(crate) mod tunnel;
pub(crate) mod tunnel_nat;
pub(crate) mod tunnel_rules;
pub(crate) mod underlay;
pub mod unserved;
pub(crate) mod virtual_nat;
pub(crate) mod ways;

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use ipnet::IpNet;
use nix::unistd::geteuid;
use weft_backends::owner;
use weft_netlink::rtnl::{Link, Rtnl};

use crate::processes::{self, ProcessList};
use crate::sources::{AbsentAgent, AgentAnswer, LossyPeer, NodeSources, StoreAnswer};
use crate::subnet_file::{self, SubnetFile};
use crate::sysctl;
use bridge_vlans::BridgeVlans;
use checksums::ChecksumErrors;
use clashes::Clashes;
use cni_files::{CniFiles, Misplaced};
use counters::Counters;
use duplicates::{Duplicate, SameMac};
use filters::PodFilter;
use forwarding::Forwarding;
use ipsec::Taken;
use limits::{Fill, Limits, NeighbourTable};
use locks::HeldLock;
use memory_kills::MemoryKill;
use modules::NeededModule;
use offload::Offloaded;
use other_networks::Leftover;
use other_pods::OtherPod;
use other_rules::RuleFacts;
use own_pods::LedAway;
use path_links::PathLinks;
use pod_links::{Bridge, PodLinks};
use pod_way::PodWay;
use policy_rules::PolicyRules;
use self_assigned::SelfAssigned;
use store::StoreFacts;
use tables::Tables;
use tunnel::Tunnel;
use tunnel_nat::Translation;
use tunnel_rules::DroppingRule;
use underlay::PeerFault;
use virtual_nat::VirtualNat;
use ways::WayFacts;

/// What the check `duplicate-address` asks other hosts.
const OTHER_HOSTS: &str = "whether another host has an IPv4 address of this node";

/// What the check `firewall` looks for in the table of connection tracking.
const KEPT: &str = "whether connection tracking translates packets of the tunnel";

/// What the check `agent` looks for in the log of the kernel.
const KILLS: &str = "whether the kernel killed an agent for memory (/dev/kmsg)";

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
    /// The VLANs of the bridge and of its ports, if it filters by them.
    pub bridge_vlans: Option<BridgeVlans>,
    /// net.bridge.bridge-nf-call-iptables; `None` without the module br_netfilter.
    pub bridge_calls_iptables: Option<u64>,
    /// net.bridge.bridge-nf-call-ip6tables; `None` without the module br_netfilter.
    pub bridge_calls_ip6tables: Option<u64>,
    /// The kernel has no IPv6 at all, as after a boot with ipv6.disable=1.
    pub kernel_lacks_ipv6: bool,
    /// The entries below net.ipv6.conf that switch IPv6 off for our links, now or when they are made.
    pub ipv6_disabled: Vec<String>,
    /// The connection tracking table, if the module is loaded.
    pub conntrack: Option<Fill>,
    /// Packets that were dropped because of a clash in that table, if services are carried and this is known.
    pub clashes: Option<Clashes>,
    /// The neighbour tables of IPv4 and IPv6. They have limits in the host's namespace alone.
    pub neighbours: Vec<NeighbourTable>,
    /// What concerns packets between nodes.
    pub ways: WayFacts,
    /// Packets with a wrong checksum, for each protocol.
    pub checksums: Vec<ChecksumErrors>,
    /// The links of pods.
    pub pods: PodLinks,
    /// Pods that are connected to another network.
    pub other_pods: Vec<OtherPod>,
    /// Packets of this node to its pods that a policy rule leads away.
    pub own_pods: Vec<LedAway>,
    /// Links of weft and of pods with addresses that another program chose.
    pub self_assigned: Option<SelfAssigned>,
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
    /// True if this is a machine of VMware.
    pub on_vmware: bool,
    /// A published address behind the NAT of a hypervisor.
    pub virtual_nat: Option<VirtualNat>,
    /// The agent knows leases of other nodes. Those that it sets aside count, too.
    pub has_peers: bool,
    /// Number of peers that packets do not reach.
    pub unreachable: usize,
    /// By how much the last handshake of WireGuard with such a peer is in the future.
    pub handshake_ahead: Duration,
    /// Other peers, to which some packets get lost.
    pub lossy: Vec<LossyPeer>,
    /// The rules of other programs.
    pub rules: RuleFacts,
    /// The rules that drop packets of the tunnel.
    pub dropping: Vec<DroppingRule>,
    /// The rules that translate addresses of packets of the tunnel.
    pub translations: Vec<Translation>,
    /// What other networks for pods left behind.
    pub leftovers: Vec<Leftover>,
    /// Agents of flannel that run beside ours.
    pub other_agents: Vec<String>,
    /// k3s with its process ID, if it runs a flannel of its own.
    pub k3s_flannel: Option<String>,
    /// The files of CNI.
    pub cni: CniFiles,
    /// Plugins that are not where the container runtime looks for them.
    pub misplaced: Option<Misplaced>,
    /// The addresses in our subnets that pods have, in order, each with the number of pods.
    pub pod_addresses: Vec<(IpAddr, usize)>,
    /// Limits of the machine.
    pub limits: Limits,
    /// Locks that a program holds for too long.
    pub locks: Vec<HeldLock>,
    /// What the clock says, in seconds since 1970, if it was before weft existed.
    pub early_clock: Option<u64>,
    /// The store, net-conf and certificates.
    pub store: StoreFacts,
    /// The module of the kernel that the backend needs, if it needs one.
    pub module: Option<NeededModule>,
    /// What the agent answered.
    pub agent: AgentAnswer,
    /// How long the process of the agent has run, if it answers and its process is visible.
    pub agent_age: Option<Duration>,
    /// The agent that the kernel killed last, if that was not long ago.
    pub memory_kill: Option<MemoryKill>,
    /// The socket on which the agent was asked.
    pub socket: PathBuf,
    /// What is known about the agent if it does not answer.
    pub absent_agent: AbsentAgent,
    /// The name of a device whose alias says that an agent with this subnet file made it.
    pub own_device: Option<String>,
    /// Why packets cannot reach the addresses of peers.
    pub underlay: Vec<PeerFault>,
    /// Whether packets with addresses of pods get to other nodes.
    pub pod_way: PodWay,
    /// The backend of the agent; empty if this is not known.
    pub backend: String,
    /// What could not be examined.
    pub not_examined: Vec<NotExamined>,
}

/// Something that could not be examined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotExamined {
    /// The name of the check.
    pub check: &'static str,
    /// What it is, and why it was not examined, for people.
    pub what: String,
}

/// Reads everything.
///
/// # Errors
/// The kernel's tables or /proc cannot be read.
pub fn read(sources: &NodeSources) -> anyhow::Result<NodeFacts> {
    let mut kernel = Rtnl::open()?;
    let (links, addrs) = (kernel.links()?, kernel.addrs()?);
    let subnet_file = subnet_file::read(&sources.subnet_file);
    let subnets = subnet_file.subnets();
    let (routes, neighbours) = (kernel.main_table()?, kernel.neighbours()?);
    let policy = PolicyRules::read().context("read the policy rules")?;
    let processes = ProcessList::read().context("read /proc")?;
    let tables = Tables { links: &links, addrs: &addrs, routes: &routes, neighbours: &neighbours, policy: &policy };
    let ways = ways::read(&tables, &subnets)?;
    let rules = other_rules::read(&tables, &subnets, &ways.to_peers, &processes);
    let (tunnel, vxlan_port) = (Tunnel::of(sources, &ways), tunnel::vxlan_port(sources, &ways));
    // A kernel without queueing disciplines has none that matters.
    let qdiscs = kernel.qdiscs().unwrap_or_default();
    let path_links = path_links::read(&tables, &qdiscs, &sources.published);
    let peer_subnets: Vec<IpNet> = ways.to_peers.iter().map(|way| way.example).collect();
    let counters = counters::read(rules.carry_services());
    let machine = of_the_machine(&tables, sources, &subnets, &processes, counters);
    let store = store::read(&sources.store);
    let mut not_examined = not_examined(sources, &machine, &store);
    let duplicates = known("duplicate-address", OTHER_HOSTS, duplicates::read(&tables, &path_links), &mut not_examined);
    let (translations, kept) = tunnel_nat::read(&tables, sources, tunnel, &rules.iptables)?;
    known("firewall", KEPT, kept, &mut not_examined);
    Ok(NodeFacts {
        pod_way: known("underlay", "packets for pods", pod_way::read(&tables, &subnets), &mut not_examined),
        path: sources.subnet_file.clone(),
        subnet_file,
        unwritable: limits::unwritable(&sources.subnet_file),
        port: ways.port().unwrap_or(sources.port),
        port_users: port_users::read(vxlan_port, &processes),
        bridge: pod_links::bridge(&tables),
        bridge_vlans: known("bridge", "VLANs of the bridge", bridge_vlans::read(&links), &mut not_examined),
        bridge_calls_iptables: sysctl::number("bridge/bridge-nf-call-iptables"),
        bridge_calls_ip6tables: sysctl::number("bridge/bridge-nf-call-ip6tables"),
        kernel_lacks_ipv6: sysctl::kernel_lacks_ipv6(),
        ipv6_disabled: ipv6_sysctls::disabled(&links, &ways),
        conntrack: limits::conntrack(),
        neighbours: limits::neighbour_tables(&neighbours),
        pods: pod_links::read(&tables),
        forwarding: forwarding::read(&tables),
        duplicates,
        same_macs: duplicates::same_macs(&tables, &path_links),
        offload: offload::read(&links, &path_links, Path::new("/sys/class/net")),
        path_links,
        // A kernel without filters has none that drop packets.
        filters: filters::read(&links, &qdiscs).unwrap_or_default(),
        ipsec: known("ipsec", "policies of IPsec", ipsec::read(&subnets, &peer_subnets), &mut not_examined),
        dropping: tunnel_rules::read(&tables, sources, tunnel, &subnets, &rules.iptables)?,
        translations,
        leftovers: other_networks::read(&links, &rules.iptables),
        rules,
        ways,
        store,
        memory_kill: known("agent", KILLS, memory_kills::read(&memory_kills::AGENTS), &mut not_examined),
        own_device: own_device(&sources.subnet_file, &links),
        underlay: underlay::read(&tables, sources, tunnel).context("ask for the ways to peers")?,
        not_examined,
        ..machine
    })
}

/// Reads what concerns the machine, the container runtime and its pods more than packets between nodes.
fn of_the_machine(
    tables: &Tables<'_>,
    sources: &NodeSources,
    subnets: &[IpNet],
    processes: &ProcessList,
    Counters { checksums, clashes }: Counters,
) -> NodeFacts {
    let reserved_before = cni_files::reserved(&sources.cni.networks);
    let pod_addresses = pod_addresses::read(tables.links, subnets, processes).unwrap_or_default();
    let cni = cni_files::read(&sources.cni, &sources.subnet_file, processes);
    NodeFacts {
        pod_addresses: pod_addresses::without_ending(pod_addresses, &reserved_before, &cni.reserved),
        // Only kubelets are asked about, and the libraries for their files and those of containerd make the agent's file 0.8 MB larger.
        #[cfg(feature = "kube")]
        misplaced: runtime::read(&sources.cni, &cni, processes),
        #[cfg(not(feature = "kube"))]
        misplaced: None,
        cni,
        limits: limits::read(&[&sources.state_dir, &sources.cni.networks], processes),
        locks: locks::read(&sources.cni.networks),
        other_pods: other_pods::read(tables, subnets, processes),
        // The kernel has answered such questions before.
        own_pods: own_pods::read(tables, sources, subnets).unwrap_or_default(),
        self_assigned: self_assigned::read(tables, processes),
        on_vmware: offload::on_vmware(Path::new("/sys/class/dmi/id/sys_vendor")),
        virtual_nat: virtual_nat::read(tables, &sources.published),
        early_clock: early_clock::read(),
        module: modules::read(sources),
        checksums,
        clashes,
        k3s_flannel: k3s_flannel::read(processes),
        ..of_the_agent(sources)
    }
}

/// Returns what is known of the agent.
fn of_the_agent(sources: &NodeSources) -> NodeFacts {
    NodeFacts {
        agent: sources.agent.clone(),
        agent_age: sources.agent_age,
        socket: sources.socket.clone(),
        absent_agent: sources.absent_agent.clone(),
        other_agents: sources.other_agents.clone(),
        backend: sources.backend.clone(),
        has_peers: sources.has_peers,
        unreachable: sources.unreachable,
        handshake_ahead: sources.handshake_ahead,
        lossy: sources.lossy.clone(),
        ..NodeFacts::default()
    }
}

/// Returns the name of a device that an agent with this subnet file made.
fn own_device(subnet_file: &Path, links: &[Link]) -> Option<String> {
    let alias = format!("{}{}", owner::ALIAS, subnet_file.display());
    links.iter().find(|link| link.alias == alias).map(|link| link.name.clone())
}

/// Returns what was read, or nothing if it could not be read, for example by another user than root. Then a text for people says so.
fn known<T: Default>(check: &'static str, what: &str, read: io::Result<T>, not_examined: &mut Vec<NotExamined>) -> T {
    read.unwrap_or_else(|error| {
        not_examined.push(NotExamined { check, what: format!("{what}: {error}") });
        T::default()
    })
}

/// Returns what this process cannot see.
fn not_examined(sources: &NodeSources, machine: &NodeFacts, store: &StoreFacts) -> Vec<NotExamined> {
    let mut all = Vec::new();
    let mut add = |check: &'static str, what: String| all.push(NotExamined { check, what });
    if sources.agent == AgentAnswer::None {
        let place = sources.socket.display();
        add("agent", format!("what only a running agent knows: no agent answers on {place}"));
    }
    if sources.store.answer == StoreAnswer::NotAsked {
        add("store", "the store and its certificates: give --check-store and the flags of the store".to_owned());
    }
    if !geteuid().is_root() {
        add("port", "programs of other users: you are not root".to_owned());
    }
    if let Some(text) = processes::unreadable() {
        add("port", text);
    }
    let denied = &machine.cni.denied;
    if !denied.is_empty() {
        let paths: Vec<String> = denied.iter().map(|path| path.display().to_string()).collect();
        add("cni", format!("configurations of CNI: you may not read {}", paths.join(", ")));
    }
    store.denied.iter().for_each(|why| add("certificates", why.clone()));
    for ChecksumErrors { protocol, wrong, received, .. } in machine.checksums.iter().filter(|errors| errors.are_old()) {
        let (protocol, seconds) = (protocol.to_uppercase(), counters::WAIT.as_secs());
        let what = format!(
            "whether wrong checksums still arrive: {wrong} of {received} received {protocol} packets had one since the start of this machine, \
             and none in the last {seconds} s"
        );
        add("checksum", what);
    }
    all
}

#[cfg(test)]
impl NodeFacts {
    /// Returns the facts of a node with an IPv4 subnet.
    pub(crate) fn of_a_node() -> NodeFacts {
        let text = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        let env = weft_subnet::env::SubnetEnv::parse(text).unwrap();
        NodeFacts { subnet_file: SubnetFile::Good(env), port: 8472, ..NodeFacts::default() }
    }

    /// Returns the facts of a node whose store answered so, a thousand days after 1970.
    pub(crate) fn with_store(answer: StoreAnswer) -> NodeFacts {
        let store = StoreFacts { place: "etcd".to_owned(), answer, now: 1000 * 24 * 3600, ..StoreFacts::default() };
        NodeFacts { store, ..NodeFacts::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::StoreSources;

    /// Returns what is said to be missing in the results of a check.
    fn said(check: &str, sources: &NodeSources, machine: &NodeFacts, store: &StoreFacts) -> Vec<String> {
        let all = not_examined(sources, machine, store).into_iter();
        all.filter(|one| one.check == check).map(|one| one.what).collect()
    }

    #[test]
    fn what_cannot_be_seen_is_said_with_the_check_that_needs_it() {
        let (silent, mut machine, mut store) = (NodeSources::default(), NodeFacts::default(), StoreFacts::default());
        assert!(said("agent", &silent, &machine, &store)[0].starts_with("what only a running agent knows: "));
        assert!(said("store", &silent, &machine, &store)[0].contains("give --check-store"));
        let answer = StoreAnswer::Failed("connection refused".to_owned());
        let asked = NodeSources {
            agent: AgentAnswer::Problems(Vec::new()),
            store: StoreSources { answer, ..StoreSources::default() },
            ..NodeSources::default()
        };
        for check in ["agent", "store", "cni", "checksum", "certificates"] {
            assert_eq!(said(check, &asked, &machine, &store), [""; 0], "{check}");
        }
        machine.cni.denied = vec!["/etc/cni/net.d".into()];
        store.denied = vec!["client certificate: permission denied".to_owned()];
        assert!(said("cni", &asked, &machine, &store)[0].ends_with("you may not read /etc/cni/net.d"));
        assert_eq!(said("certificates", &asked, &machine, &store), store.denied);
        for (recent, is_said) in [(0, true), (1, false)] {
            machine.checksums = vec![ChecksumErrors { protocol: "Udp", wrong: 20, received: 100, recent }];
            let said = said("checksum", &asked, &machine, &store);
            assert_eq!(said.len(), usize::from(is_said), "{said:?}");
            assert!(said.iter().all(|text| text.contains("20 of 100 received UDP packets")), "{said:?}");
        }
    }

    #[test]
    fn what_cannot_be_read_counts_as_nothing_and_is_said() {
        let mut missing = Vec::new();
        let mut read = |result: io::Result<Vec<u8>>| known("ipsec", "policies of IPsec", result, &mut missing);
        assert_eq!(read(Ok(vec![7])), [7]);
        assert_eq!(read(Err(io::ErrorKind::PermissionDenied.into())), [0_u8; 0]);
        let texts: Vec<_> = missing.iter().map(|one| (one.check, one.what.as_str())).collect();
        assert_eq!(texts, [("ipsec", "policies of IPsec: permission denied")]);
    }
}
