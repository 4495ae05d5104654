// SPDX-License-Identifier: Apache-2.0
//! Rules of this node that translate addresses of the tunnel's own packets. Another destination loses them for certain. Another source is accepted by
//! most tunnels, but not by a guard of the peer (`--guard-tunnel`), a firewall, or the network of a cloud. A masquerade that keeps the address, as the usual
//! `-o eth0 -j MASQUERADE` does, is harmless: which source port such a packet has matters to no tunnel. Connection tracking keeps a translation as long as
//! packets come, so its entries are looked at, too, while a peer is not reached.

use std::io;
use std::net::IpAddr;
use std::rc::Rc;

use ipnet::IpNet;
use weft_cni::iptables::builtin_chain;
use weft_netlink::nftables::{self, Hook, base_chains};
use weft_netlink::rtnl::Addr;
use weft_netlink::socket::absent;

use super::limits;
use super::tables::Tables;
use super::tunnel::{PeerPackets, Tunnel, TunnelPacket};
use crate::kernel::Kernel;
use crate::kernel::entries::Packet;
use crate::kernel::ipset::CachedSets;
use crate::kernel::nft;
use crate::kernel::rules::{Connection, Fate, Outcome, Tested, follow, names_source, new_source};
use crate::kernel::tracked::{Tracked, translated};
use crate::saved_rules::{SavedRules, is_listed};
use crate::sources::NodeSources;

/// A rule that translates an address of the tunnel's packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translation {
    /// The chain, or that connection tracking does it, for people.
    pub place: String,
    /// The rule, or the entry.
    pub rule: String,
    /// The packets, for people.
    pub what: String,
    /// What the rule translates.
    pub change: Change,
    /// The command that lets these packets pass the rule unchanged.
    pub remedy: String,
    /// The rule translates packets of a peer that is reached, too.
    pub of_reached: bool,
}

/// What a rule translates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The destination.
    Destination,
    /// The source.
    Source {
        /// The source before the rule.
        from: IpAddr,
        /// The one behind it, if it is known.
        to: Option<IpAddr>,
    },
}

/// A packet of the tunnel, and what is to be known about its translation.
struct Flow {
    of_tunnel: TunnelPacket,
    hooks: &'static [Hook],
    /// The address that a masquerade would give it.
    masqueraded: Option<IpAddr>,
    /// The command that makes connection tracking forget it. What was translated once stays translated as long as packets come.
    forget: String,
    /// The peer is reached.
    of_reached: bool,
    /// The sets of ipset, with what the kernel has answered for any of the flows.
    sets: Rc<CachedSets>,
}

impl Flow {
    fn tested(&self) -> Tested<'_> {
        let TunnelPacket { packet, input, output, .. } = &self.of_tunnel;
        let tested = Tested::new(packet, input.as_deref(), output.as_deref());
        let sets = &*self.sets;
        Tested { connection: Connection::New, to_local: Some(input.is_some()), sets: Some(sets), ..tested }
    }

    fn is_ipv4(&self) -> bool {
        self.of_tunnel.packet.to.is_ipv4()
    }

    /// Returns the translation that a connection keeps, if it has the packets of this flow. A source that this node publishes is the right one.
    fn kept(&self, tracked: &Tracked, published: &[IpAddr]) -> Option<Translation> {
        let Tracked { packet, answer } = tracked;
        let is_published = self.of_tunnel.output.is_some() && published.contains(&answer.to);
        let (change, rule) = if answer.from != packet.to {
            (Change::Destination, format!("it sends packets for {} to {}", packet.to, answer.from))
        } else if is_published {
            return None;
        } else {
            let change = Change::Source { from: packet.from, to: Some(answer.to) };
            (change, format!("it sends packets for {} from {} instead of {}", packet.to, answer.to, packet.from))
        };
        let remedy = format!(
            "{}; if the entry comes back, `iptables -t nat -S` and `nft list ruleset` show the rules of which one makes it",
            self.forget
        );
        (*packet == self.of_tunnel.packet).then(|| Translation {
            place: "an entry of connection tracking".to_owned(),
            rule,
            what: self.of_tunnel.what.clone(),
            change,
            remedy,
            of_reached: false,
        })
    }

    /// Returns the rule that certainly translates an address of the packet to another one. `command` comes before it.
    fn translated(
        &self,
        outcome: Outcome,
        place: String,
        command: String,
        published: &[IpAddr],
    ) -> Option<Translation> {
        let (fate, rule) = outcome.certain()?;
        let change = match fate {
            Fate::DestinationTranslated => Change::Destination,
            Fate::SourceTranslated => {
                let is_named = names_source(&rule);
                let named = new_source(&rule).filter(|new| new.is_only).map(|new| new.addr);
                let to = if is_named { named } else { self.masqueraded };
                let is_kept = to.is_some_and(|to| to == self.of_tunnel.packet.from || published.contains(&to));
                // Of a link without an address it is not known what a masquerade does.
                if is_kept || (to.is_none() && !is_named) {
                    return None;
                }
                Change::Source { from: self.of_tunnel.packet.from, to }
            }
            Fate::Accepted | Fate::Dropped => return None,
        };
        let remedy = format!(
            "{command}; {}; then exclude the packets of the tunnel in the program that writes the rule",
            self.forget
        );
        let what = self.of_tunnel.what.clone();
        Some(Translation { place, rule, what, change, remedy, of_reached: self.of_reached })
    }
}

/// Follows the packets of the tunnel between this node and some peers through the chains that translate addresses. The second value is the error if the
/// table of connection tracking cannot be read, for example by another user than root: then nothing is known of its entries.
///
/// # Errors
/// The kernel does not answer.
pub(super) fn read(
    tables: &Tables<'_>,
    sources: &NodeSources,
    tunnel: Option<Tunnel>,
    iptables: &[SavedRules],
) -> io::Result<(Vec<Translation>, io::Result<()>)> {
    let Some(tunnel) = tunnel else { return Ok((Vec::new(), Ok(()))) };
    let mut kernel = Kernel::open()?;
    let packets = |peer: &IpAddr| tunnel.packets(&mut kernel, tables, sources, *peer);
    let of_peers = sources.peers.iter().filter_map(packets);
    let sets = Rc::default();
    let flows: Vec<Flow> = of_peers.flat_map(|packets| of_tunnel(packets, tables, sources, tunnel, &sets)).collect();
    let mut found = of_iptables(&flows, iptables, &sources.published);
    match of_nftables(&flows, iptables, &sources.published) {
        Ok(rules) => found.extend(rules),
        // A kernel without nftables has no such rules.
        Err(error) if absent(&error) => {}
        Err(error) => return Err(error),
    }
    // Without connection tracking there are no entries, and the question for them would load it.
    let table = if sources.unreachable > 0 && limits::conntrack().is_some() {
        kept(&flows, &found, &sources.published).map(|entries| found.extend(entries))
    } else {
        Ok(())
    };
    let mut once: Vec<Translation> = Vec::new();
    for one in found {
        match once.iter_mut().find(|known| known.place == one.place && known.rule == one.rule) {
            Some(known) => known.of_reached |= one.of_reached,
            None => once.push(one),
        }
    }
    Ok((once, table))
}

/// Returns what connection tracking translates although no rule is known that does it: one that is gone, or one that cannot be decided. Packets to peers
/// that are reached do not matter, and a source that such a peer accepts is not the reason why others are not reached.
///
/// # Errors
/// The table cannot be read.
fn kept(flows: &[Flow], rules: &[Translation], published: &[IpAddr]) -> io::Result<Vec<Translation>> {
    let packets: Vec<Packet> = flows.iter().map(|flow| flow.of_tunnel.packet).collect();
    let entries = translated(&packets)?;
    let of_flow = |flow: &Flow| entries.iter().filter_map(|entry| flow.kept(entry, published)).collect::<Vec<_>>();
    let (reached, others): (Vec<&Flow>, Vec<&Flow>) = flows.iter().partition(|flow| flow.of_reached);
    let accepted: Vec<Change> = reached.into_iter().flat_map(of_flow).map(|one| one.change).collect();
    let is_open = |flow: &&Flow| !rules.iter().any(|rule| rule.what == flow.of_tunnel.what);
    let matters = |one: &Translation| one.change == Change::Destination || !accepted.contains(&one.change);
    Ok(others.into_iter().filter(is_open).filter_map(|flow| of_flow(flow).into_iter().find(matters)).collect())
}

/// Returns what is to be known about the translation of the packets to a peer and from it.
fn of_tunnel(
    packets: PeerPackets<'_>,
    tables: &Tables<'_>,
    sources: &NodeSources,
    tunnel: Tunnel,
    sets: &Rc<CachedSets>,
) -> [Flow; 2] {
    let PeerPackets { link, nexthop, to_peer, from_peer } = packets;
    let Packet { from: own, to: peer, .. } = to_peer.packet;
    let of_reached = sources.peer_addresses.iter().any(|known| known.addr == peer && known.reached);
    let forget = |option: &str| {
        let of_ipv6 = if peer.is_ipv4() { "" } else { " -f ipv6" };
        // The words of iptables for the protocol and the port are those of this program, too.
        format!("conntrack -D{of_ipv6} {} {option} {peer}", tunnel.tests()[0])
    };
    [
        Flow {
            of_tunnel: to_peer,
            hooks: &[Hook::Output, Hook::Postrouting],
            masqueraded: masqueraded(tables, link.index, own, nexthop),
            forget: forget("-d"),
            of_reached,
            sets: Rc::clone(sets),
        },
        Flow {
            of_tunnel: from_peer,
            hooks: &[Hook::Prerouting],
            masqueraded: None,
            forget: forget("-s"),
            of_reached,
            sets: Rc::clone(sets),
        },
    ]
}

/// Returns the address that a masquerade gives to packets that leave by a link (`inet_select_addr` of the kernel): the first one of the link in the
/// network of the next hop, or else the first one. For IPv6 the kernel has many rules, so an address of the link counts as kept.
fn masqueraded(tables: &Tables<'_>, link: u32, own: IpAddr, nexthop: IpAddr) -> Option<IpAddr> {
    let of_link =
        || tables.addrs.iter().filter(|addr| addr.index == link && addr.global && addr.addr.is_ipv4() == own.is_ipv4());
    if own.is_ipv6() {
        return of_link().map(|addr| addr.addr).find(|addr| *addr == own).or_else(|| Some(of_link().next()?.addr));
    }
    let has_nexthop = |addr: &&Addr| IpNet::new(addr.addr, addr.len).is_ok_and(|net| net.contains(&nexthop));
    of_link().find(has_nexthop).or_else(|| of_link().next()).map(|addr| addr.addr)
}

fn of_iptables(flows: &[Flow], iptables: &[SavedRules], published: &[IpAddr]) -> Vec<Translation> {
    let mut found = Vec::new();
    for saved in iptables {
        let Some(nat) = saved.tables.table("nat") else { continue };
        for flow in flows.iter().filter(|flow| flow.is_ipv4() != saved.program.starts_with("ip6")) {
            for hook in flow.hooks {
                let chain = builtin_chain(*hook);
                let outcome = follow(nat, chain, flow.tested().at(*hook));
                let command = format!("{} -t nat -I {chain} {} -j ACCEPT", saved.program, flow.of_tunnel.tests[0]);
                found.extend(flow.translated(
                    outcome,
                    format!("chain {chain} of {} (table nat)", saved.program),
                    command,
                    published,
                ));
            }
        }
    }
    found
}

fn of_nftables(flows: &[Flow], iptables: &[SavedRules], published: &[IpAddr]) -> io::Result<Vec<Translation>> {
    let mut netlink = nftables::open()?;
    let mut found = Vec::new();
    for hook in [Hook::Prerouting, Hook::Output, Hook::Postrouting] {
        for chain in base_chains(&mut netlink, hook)? {
            if !chain.is_nat || is_listed(iptables, &chain) {
                continue;
            }
            for flow in flows.iter().filter(|flow| flow.hooks.contains(&hook) && chain.sees(flow.is_ipv4())) {
                let outcome = nft::follow(&mut netlink, &chain, flow.tested().at(hook))?;
                let command = format!("nft insert rule {} {} accept", chain.path(), flow.of_tunnel.tests[1]);
                found.extend(flow.translated(
                    outcome,
                    format!("chain {} of nftables", chain.path()),
                    command,
                    published,
                ));
            }
        }
    }
    Ok(found)
}
