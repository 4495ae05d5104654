// SPDX-License-Identifier: Apache-2.0
//! Rules of firewalls on this node that drop packets between nodes: those of the tunnel itself, and forwarded packets of pods.

use std::io;
use std::rc::Rc;

use ipnet::IpNet;
use weft_backends::owner::PROTOCOL;
use weft_cni::iptables::{Table, builtin_chain};
use weft_netlink::nftables::{self, BaseChain, Hook, base_chains, link_chains};
use weft_netlink::rtnl::{Link, Route};
use weft_netlink::socket::{Netlink, absent};

use super::host_firewalls::HostFirewall;
use super::tables::Tables;
use super::tunnel::{PeerPackets, Tunnel, TunnelPacket};
use crate::kernel::Kernel;
use crate::kernel::entries::{Packet, Proto, unspecified};
use crate::kernel::ipset::CachedSets;
use crate::kernel::links::{Point, drops};
use crate::kernel::nft;
use crate::kernel::queues;
use crate::kernel::rules::{Connection, Fate, Outcome, Tested, follow};
use crate::known_links::{BRIDGE, bridge};
use crate::saved_rules::{FILTER, SavedRules, is_listed};
use crate::sources::NodeSources;

/// The tables of weft. Its guard drops packets of strangers on purpose.
const OURS: &str = "weft";
/// Maximum number of peers, for each family, whose pods' packets are followed. Network policies may be thousands of rules.
const MAX_PEERS: usize = 16;

/// A chain that certainly drops packets between nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppingRule {
    /// The chain, for people.
    pub chain: String,
    /// The rule or the policy.
    pub rule: String,
    /// The packets, for people.
    pub what: String,
    /// What lets the packets pass: a command, and what to do then.
    pub remedy: String,
    /// True for the packets of the tunnel, false for those of pods.
    pub of_tunnel: bool,
    /// Only what is beyond a rate or chosen at random is dropped.
    pub beyond_rate: bool,
}

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It goes from pods to pods.
    Pods,
    /// It belongs to the tunnel to a peer.
    Tunnel,
    /// It belongs to the tunnel, and any node may have sent it, because no peer is known yet.
    AnyNode,
}

/// A packet between this node and another one.
struct Flow {
    kind: Kind,
    packet: Packet,
    /// How many bits of the addresses are known, if the packet stands for those between two subnets, or from everywhere.
    known_bits: Option<(u8, u8)>,
    /// The packet is for this host.
    to_local: bool,
    input: Option<String>,
    output: Option<String>,
    connection: Connection,
    may_have_mark: bool,
    /// The hooks that it passes, in order.
    hooks: &'static [Hook],
    /// What it is, for people.
    what: String,
    /// Tests that match it, for iptables and for nftables.
    tests: [String; 2],
    /// The links and bridges that it passes.
    points: Vec<Point>,
    /// The queues that programs read, if they are known.
    queues: Option<Vec<u16>>,
    /// The sets of ipset, with what the kernel has answered for any of the flows.
    sets: Rc<CachedSets>,
}

impl Flow {
    fn tested(&self) -> Tested<'_> {
        let mut tested = Tested::new(&self.packet, self.input.as_deref(), self.output.as_deref());
        tested.may_have_mark = self.may_have_mark;
        // A rule that translates packets of the tunnel is another finding, and these pods send to each other without a service.
        let (is_translated, to_local) = (Some(false), Some(self.to_local));
        let (connection, known_bits, queues) = (self.connection, self.known_bits, self.queues.as_deref());
        Tested { connection, is_translated, known_bits, to_local, queues, sets: Some(&*self.sets), ..tested }
    }

    fn of_tunnel(&self) -> bool {
        self.kind != Kind::Pods
    }

    /// Returns what makes the firewall of the host accept the packet, if this is a packet of the tunnel to this host.
    fn accepted_by(&self, firewall: HostFirewall) -> Option<String> {
        let from = (self.kind == Kind::Tunnel).then(|| self.packet.from.to_string());
        let port = self.packet.port.filter(|_| self.of_tunnel() && self.to_local)?;
        Some(firewall.accept(from.as_deref(), port, self.input.as_deref()?))
    }

    /// Returns the rule that drops the packet, if one certainly does. `command` accepts it, unless the chains are those of the firewall of a host.
    fn dropped(
        &self,
        outcome: Outcome,
        chain: String,
        command: &str,
        firewall: Option<HostFirewall>,
    ) -> Option<DroppingRule> {
        let by_firewall = firewall.and_then(|firewall| Some((firewall.name(), self.accepted_by(firewall)?)));
        // Nobody needs packets of the tunnel before a node runs an agent. Only a firewall that is known to keep everything out is named then.
        if self.kind == Kind::AnyNode && (by_firewall.is_none() || outcome.certainly_dropped().is_none()) {
            return None;
        }
        let (rule, beyond_rate) = match outcome.certainly_dropped() {
            Some(rule) => (rule.to_owned(), false),
            None => (outcome.drops_some()?.to_owned(), true),
        };
        // A rule is reported for the first node alone whose packets it drops.
        let others = if self.of_tunnel() { " for each node" } else { "" };
        let usual =
            || format!("{command}; then write this{others} into the configuration of the program that makes the rules");
        let (chain, remedy) = match by_firewall {
            Some((name, remedy)) => (format!("{chain} ({name})"), remedy),
            None => (chain, usual()),
        };
        Some(DroppingRule { chain, rule, what: self.what.clone(), remedy, of_tunnel: self.of_tunnel(), beyond_rate })
    }
}

/// Follows packets of the tunnel between this node and some peers, and those between pods of this node and of peers, through all firewalls.
/// `tunnel` says what the packets to peers are, if the backend has a tunnel. Each rule is reported once. `subnets` are those of this node.
///
/// # Errors
/// The kernel does not answer.
pub(super) fn read(
    tables: &Tables<'_>,
    sources: &NodeSources,
    tunnel: Option<Tunnel>,
    subnets: &[IpNet],
    iptables: &[SavedRules],
) -> io::Result<Vec<DroppingRule>> {
    let mut flows = Vec::new();
    if let Some(tunnel) = tunnel {
        let mut kernel = Kernel::open()?;
        for peer in &sources.peers {
            let packets = tunnel.packets(&mut kernel, tables, sources, *peer);
            flows.extend(packets.into_iter().flat_map(of_tunnel));
        }
        let port = tunnel.port().filter(|_| sources.peers.is_empty());
        flows.extend(port.and_then(|port| from_any_node(tables, port)));
    }
    if let Some(bridge) = bridge(tables.links) {
        let ports: Vec<&Link> = tables.links.iter().filter(|link| link.master == bridge.index).collect();
        for own in subnets.iter().map(IpNet::trunc) {
            flows.extend(of_pods(tables, &ports, own));
            flows.extend(between_ports(&ports, own));
        }
    }
    let (readers, sets) = (queues::readers(), Rc::default());
    for flow in &mut flows {
        flow.queues.clone_from(&readers);
        flow.sets = Rc::clone(&sets);
    }
    let mut found = match of_nftables(&mut flows, iptables) {
        Ok(rules) => rules,
        // A kernel without nftables has no such rules.
        Err(error) if absent(&error) => Vec::new(),
        Err(error) => return Err(error),
    };
    found.extend(of_iptables(&flows, iptables));
    let mut once: Vec<DroppingRule> = Vec::new();
    for rule in found {
        if !once.iter().any(|known| known.chain == rule.chain && known.rule == rule.rule) {
            once.push(rule);
        }
    }
    Ok(once)
}

/// Returns the ways of the packets from a peer and to it.
fn of_tunnel(packets: PeerPackets<'_>) -> [Flow; 2] {
    let PeerPackets { link, to_peer, from_peer, .. } = packets;
    let flow = |one: TunnelPacket, hooks: &'static [Hook], point: Point| Flow {
        kind: Kind::Tunnel,
        packet: one.packet,
        known_bits: None,
        to_local: one.input.is_some(),
        input: one.input,
        output: one.output,
        connection: Connection::New,
        may_have_mark: false,
        hooks,
        what: one.what,
        tests: one.tests,
        points: vec![point],
        queues: None,
        sets: Rc::default(),
    };
    [
        flow(from_peer, &[Hook::Prerouting, Hook::Input], Point::Arrives(link.name.clone())),
        flow(to_peer, &[Hook::Output, Hook::Postrouting], Point::Leaves(link.name.clone())),
    ]
}

/// Returns a packet of the tunnel that any node may have sent, over the link of the default route: that of IPv4, if there is one. As long
/// as no peer is known, nodes that have it are expected to use it.
fn from_any_node(tables: &Tables<'_>, port: u16) -> Option<Flow> {
    let of_family = |is_ipv4: bool| {
        let mut routes = tables.routes.iter().filter(|route| route.v6 != is_ipv4);
        let default = routes.find(|route| route.len == 0 && !route.refuses())?;
        Some(any_node(port, &tables.link(default.index)?.name, is_ipv4))
    };
    // Whether IPv6 is used beside IPv4 is not known before the first start.
    of_family(true).or_else(|| of_family(false))
}

fn any_node(port: u16, link: &str, is_ipv4: bool) -> Flow {
    let any = unspecified(is_ipv4);
    Flow {
        kind: Kind::AnyNode,
        packet: Packet { from: any, to: any, proto: Some(Proto::Udp), port: Some(port) },
        known_bits: Some((0, 0)),
        to_local: true,
        input: Some(link.to_owned()),
        output: None,
        connection: Connection::New,
        may_have_mark: false,
        hooks: &[Hook::Prerouting, Hook::Input],
        what: format!("packets of the tunnel (UDP port {port}) from other nodes"),
        tests: Tunnel::Udp(port).tests(),
        points: Vec::new(),
        queues: None,
        sets: Rc::default(),
    }
}

/// Returns the packets between the pods of this node and those of peers, in both directions.
fn of_pods(tables: &Tables<'_>, ports: &[&Link], own: IpNet) -> Vec<Flow> {
    let is_of_weft = |route: &&Route| route.protocol == PROTOCOL && !route.refuses();
    let of_peers = tables.routes.iter().filter(|route| route.v6 == own.addr().is_ipv6()).filter(is_of_weft);
    let mut flows: Vec<Flow> = Vec::new();
    for route in of_peers.take(MAX_PEERS) {
        let peer = route.dst.and_then(|dst| IpNet::new(dst, route.len).ok());
        let (Some(peer), Some(link)) = (peer.filter(|net| !net.contains(&own)), tables.link(route.index)) else {
            continue;
        };
        // The places at all pods are looked at for the first peer alone.
        let ports = if flows.is_empty() { ports } else { &[] };
        let (bridge, link) = (BRIDGE.to_owned(), link.name.clone());
        let mut there: Vec<Point> = ports.iter().flat_map(|port| Point::from_port(&port.name)).collect();
        there.extend([Point::Arrives(bridge.clone()), Point::Leaves(link.clone())]);
        let mut back = vec![Point::Arrives(link.clone()), Point::Leaves(bridge.clone())];
        back.extend(ports.iter().flat_map(|port| Point::to_port(&port.name)));
        flows.push(forwarded(Nets { from: own, to: peer }, bridge.clone(), link.clone(), there));
        flows.push(forwarded(Nets { from: peer, to: own }, link, bridge, back));
    }
    flows
}

/// From where packets come, and where they go to.
#[derive(Clone, Copy)]
struct Nets {
    from: IpNet,
    to: IpNet,
}

/// Returns the packets between two subnets of pods.
fn forwarded(nets: Nets, input: String, output: String, points: Vec<Point>) -> Flow {
    let Nets { from, to } = nets;
    let family = if from.addr().is_ipv4() { "ip" } else { "ip6" };
    Flow {
        kind: Kind::Pods,
        packet: Packet { from: from.network(), to: to.network(), proto: None, port: None },
        known_bits: Some((from.prefix_len(), to.prefix_len())),
        to_local: false,
        input: Some(input),
        output: Some(output),
        connection: Connection::New,
        may_have_mark: false,
        hooks: &[Hook::Prerouting, Hook::Forward, Hook::Postrouting],
        what: format!("packets from pods of {from} to pods of {to}"),
        tests: [format!("-s {from} -d {to}"), format!("{family} saddr {from} {family} daddr {to}")],
        points,
        queues: None,
        sets: Rc::default(),
    }
}

/// Returns the packets between two pods of this node, which pass the bridge alone.
fn between_ports(ports: &[&Link], own: IpNet) -> Option<Flow> {
    let [first, second, ..] = ports else { return None };
    let (first, second) = (first.name.clone(), second.name.clone());
    let forward = Point::Bridge { hook: "forward", input: Some(first.clone()), output: Some(second.clone()) };
    let what = "packets between pods of this node".to_owned();
    Some(Flow { what, hooks: &[], ..forwarded(Nets { from: own, to: own }, first, second, vec![forward]) })
}

fn of_iptables(flows: &[Flow], iptables: &[SavedRules]) -> Vec<DroppingRule> {
    let mut found = Vec::new();
    for saved in iptables {
        let tables: Vec<(&str, &Table)> = saved.filters().collect();
        for flow in flows.iter().filter(|flow| flow.packet.to.is_ipv4() != saved.program.starts_with("ip6")) {
            found.extend(of_tables(flow, &tables, &saved.program));
        }
    }
    found
}

/// Follows one packet through tables of iptables. A rule of the table raw may take it out of connection tracking.
fn of_tables(flow: &Flow, tables: &[(&str, &Table)], program: &str) -> Vec<DroppingRule> {
    let mut found = Vec::new();
    let (mut connection, mut may_have_mark) = (flow.connection, flow.may_have_mark);
    for (name, table) in tables.iter().copied() {
        let is_filter = name == FILTER;
        let filters = [Hook::Input, Hook::Forward, Hook::Output];
        let at_hooks = flow.hooks.iter().copied().filter(|hook| !is_filter || filters.contains(hook));
        for (hook, chain) in at_hooks.map(|hook| (hook, builtin_chain(hook))) {
            if !table.contains_key(chain) {
                continue;
            }
            let outcome = follow(table, chain, Tested { connection, may_have_mark, ..flow.tested() }.at(hook));
            may_have_mark |= outcome.may_have_mark;
            if outcome.untracked {
                connection = Connection::Untracked;
            }
            let (of_table, option) = match is_filter {
                true => (String::new(), String::new()),
                false => (format!(" (table {name})"), format!("-t {name} ")),
            };
            let command = format!("{program} {option}-I {chain} {} -j ACCEPT", flow.tests[0]);
            let firewall = HostFirewall::of_iptables(table).filter(|_| is_filter);
            found.extend(flow.dropped(outcome, format!("{chain} of {program}{of_table}"), &command, firewall));
        }
    }
    found
}

/// The tables that the programs of iptables have listed are left out. Flows that a rule takes out of connection tracking
/// are marked.
fn of_nftables(flows: &mut [Flow], iptables: &[SavedRules]) -> io::Result<Vec<DroppingRule>> {
    let mut netlink = nftables::open()?;
    let mut found = at_links(&mut netlink, flows)?;
    for hook in [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting] {
        for chain in base_chains(&mut netlink, hook)? {
            if chain.is_nat || is_listed(iptables, &chain) || chain.table.starts_with(OURS) {
                continue;
            }
            let sees = |flow: &&mut Flow| flow.hooks.contains(&hook) && chain.sees(flow.packet.to.is_ipv4());
            for flow in flows.iter_mut().filter(sees) {
                found.extend(of_chain(&mut netlink, &chain, hook, flow)?);
            }
        }
    }
    Ok(found)
}

fn of_chain(netlink: &mut Netlink, chain: &BaseChain, hook: Hook, flow: &mut Flow) -> io::Result<Option<DroppingRule>> {
    let mut outcome = nft::follow(netlink, chain, flow.tested().at(hook))?;
    flow.may_have_mark |= outcome.may_have_mark;
    if outcome.untracked {
        flow.connection = Connection::Untracked;
    }
    if outcome.fate.is_none() && chain.drops {
        outcome.fate = Some((Fate::Dropped, "policy drop".to_owned()));
    }
    let command = format!("nft insert rule {} {} accept", chain.path(), flow.tests[1]);
    let firewall = HostFirewall::of_nftables(&chain.table);
    Ok(flow.dropped(outcome, format!("{} of nftables", chain.path()), &command, firewall))
}

/// Returns the chains at links and in bridges that drop packets.
fn at_links(netlink: &mut Netlink, flows: &[Flow]) -> io::Result<Vec<DroppingRule>> {
    let chains = link_chains(netlink)?;
    let mut found = Vec::new();
    if chains.is_empty() {
        return Ok(found);
    }
    for flow in flows {
        for drop in drops(netlink, &chains, flow.tested(), &flow.points)? {
            found.push(DroppingRule {
                chain: format!("{} of nftables", drop.chain),
                rule: drop.rule,
                what: format!("{} {}", flow.what, drop.place),
                remedy: drop.remedy,
                of_tunnel: flow.of_tunnel(),
                beyond_rate: false,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_cni::iptables::Saved;

    const UFW: &str = ":INPUT DROP [0:0]
-A INPUT -j ufw-before-input
-A ufw-before-input -i lo -j ACCEPT
-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw-before-input -m conntrack --ctstate INVALID -j DROP
-A ufw-before-input -p udp -m udp --sport 67 --dport 68 -j ACCEPT
-A ufw-before-input -j ufw-not-local
-A ufw-before-input -d 224.0.0.251/32 -p udp -m udp --dport 5353 -j ACCEPT
-A ufw-before-input -j ufw-user-input
-A ufw-not-local -m addrtype --dst-type LOCAL -j RETURN
-A ufw-not-local -m addrtype --dst-type MULTICAST -j RETURN
-A ufw-not-local -m limit --limit 3/min --limit-burst 10 -j ufw-logging-deny
-A ufw-not-local -j DROP
-A ufw-user-input -p tcp -m tcp --dport 22 -j ACCEPT
";

    fn saved(program: &str, filter: &str) -> SavedRules {
        let tables = Saved::parse(&format!("*filter\n{filter}"));
        SavedRules { program: program.to_owned(), tables, ..SavedRules::default() }
    }

    #[test]
    fn before_a_peer_is_known_ufw_is_found_only_if_it_certainly_accepts_no_packets_of_the_tunnel() {
        for (more, found) in [
            ("", true),
            ("-A ufw-user-input -p tcp -m tcp --dport 8472 -j ACCEPT\n", true),
            ("-A ufw-user-input -p udp -m udp --dport 8400:8471 -j ACCEPT\n", true),
            ("-A ufw-user-input -i eth9 -j ACCEPT\n", true),
            ("-A ufw-user-input -p udp -m udp --dport 8472 -j ACCEPT\n", false),
            ("-A ufw-user-input -p udp -m multiport --dports 51820,8472 -j ACCEPT\n", false),
            ("-A ufw-user-input -p udp -m multiport --dports 8000:9000 -j ACCEPT\n", false),
            ("-A ufw-user-input -s 192.168.0.0/16 -j ACCEPT\n", false),
            ("-A ufw-user-input -i eth0 -j ACCEPT\n", false),
            ("-A ufw-before-input -p udp -m udp --dport 8472 -j ACCEPT\n", false),
            ("-A INPUT -p udp -m udp --dport 8472 -j ACCEPT\n", false),
        ] {
            let rules = saved("iptables-nft", &format!("{UFW}{more}"));
            let dropping = of_iptables(&[any_node(8472, "eth0", true)], &[rules]);
            assert_eq!(dropping.len(), usize::from(found), "{more}: {dropping:?}");
            let remedy = "ufw allow proto udp from NODES to any port 8472, where NODES is the network of the nodes";
            assert!(dropping.iter().all(|one| one.chain == "INPUT of iptables-nft (ufw)" && one.remedy == remedy));
        }
        let none = |rules: &[SavedRules]| of_iptables(&[any_node(8472, "eth0", true)], rules);
        assert_eq!(none(&[saved("iptables-nft", ":INPUT DROP [0:0]\n")]), [], "these rules are somebody's own");
        let six = UFW.replace("ufw", "ufw6");
        assert_eq!(none(&[saved("ip6tables-nft", &six)]), [], "whether the nodes have IPv6 is not known");
        assert_eq!(of_iptables(&[any_node(8472, "eth0", false)], &[saved("ip6tables-nft", &six)]).len(), 1);
    }

    #[test]
    fn the_firewall_of_the_host_is_told_to_accept_the_packets_of_a_peer_of_either_family() {
        let flow = |peer: &str| {
            let packet = Packet {
                from: peer.parse().unwrap(),
                to: peer.parse().unwrap(),
                ..any_node(8472, "eth0", true).packet
            };
            Flow { kind: Kind::Tunnel, known_bits: None, packet, ..any_node(8472, "eth0", true) }
        };
        let rules = [saved("iptables-nft", UFW), saved("ip6tables-nft", &UFW.replace("ufw", "ufw6"))];
        for (peer, chain) in [("192.0.2.9", "INPUT of iptables-nft (ufw)"), ("fd00::9", "INPUT of ip6tables-nft (ufw)")]
        {
            let found = of_iptables(&[flow(peer)], &rules);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].chain, chain);
            assert!(
                found[0].remedy.starts_with(&format!("ufw allow proto udp from {peer} to any port 8472;")),
                "{found:?}"
            );
        }
        let accept = "-A ufw6-user-input -p udp -m udp --dport 8472 -j ACCEPT\n";
        let open = saved("ip6tables-nft", &(UFW.replace("ufw", "ufw6") + accept));
        assert_eq!(of_iptables(&[flow("fd00::9")], &[rules[0].clone(), open]), [], "rules of IPv4 do not matter");
        let zones = ":INPUT ACCEPT [0:0]\n-A INPUT -i lo -j ACCEPT\n-A INPUT -j INPUT_ZONES\n-A INPUT -j REJECT\n";
        let found = of_iptables(&[flow("192.0.2.9")], &[saved("iptables-legacy", zones)]);
        assert!(found[0].remedy.starts_with("firewall-cmd --permanent --add-port=8472/udp && "), "{found:?}");
    }

    /// kube-proxy and other programs may write into one flavour while the other one still drops.
    #[test]
    fn of_two_flavours_of_iptables_the_one_that_drops_is_named_with_its_own_program() {
        let nets = Nets { from: "10.5.7.0/24".parse().unwrap(), to: "10.5.9.0/24".parse().unwrap() };
        let flow = || forwarded(nets, BRIDGE.to_owned(), "flannel.1".to_owned(), Vec::new());
        let nft = ":FORWARD ACCEPT [0:0]\n:KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n";
        for (drops, accepts) in [("iptables-legacy", "iptables-nft"), ("iptables-nft", "iptables-legacy")] {
            let found = of_iptables(&[flow()], &[saved(accepts, nft), saved(drops, ":FORWARD DROP [0:0]\n")]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].chain, format!("FORWARD of {drops}"));
            assert_eq!(found[0].rule, "policy DROP of FORWARD");
            let remedy = format!("{drops} -I FORWARD -s 10.5.7.0/24 -d 10.5.9.0/24 -j ACCEPT;");
            assert!(found[0].remedy.starts_with(&remedy), "{found:?}");
        }
    }
}
