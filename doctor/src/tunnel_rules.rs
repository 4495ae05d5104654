// SPDX-License-Identifier: Apache-2.0
//! Rules of firewalls on this node that drop the packets of the tunnel itself, to and from other nodes.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;

use weft_netlink::nftables::{BaseChain, Hook, base_chains};
use weft_netlink::socket::Netlink;

use super::explain::facts::{Lookup, Packet, Proto};
use super::explain::kernel::Kernel;
use super::explain::nft;
use super::explain::rules::{Chains, Fate, Outcome, Tested, follow};
use super::other_rules::SavedRules;

/// The tables of weft. Its guard drops packets of strangers on purpose.
const OURS: &str = "weft";
/// The tables of iptables that its programs have listed already.
const LISTED: [&str; 2] = ["filter", "nat"];

/// A chain that certainly drops packets of the tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppingRule {
    /// The chain, for people.
    pub chain: String,
    /// The rule or the policy.
    pub rule: String,
    /// True for packets that arrive, false for those that leave.
    pub incoming: bool,
    /// The other node.
    pub peer: IpAddr,
    /// The command that lets the packets pass.
    pub command: String,
}

/// A packet of the tunnel between this node and a peer.
struct Outer {
    packet: Packet,
    link: String,
    incoming: bool,
    peer: IpAddr,
}

impl Outer {
    fn tested(&self) -> Tested<'_> {
        let link = Some(self.link.as_str());
        let (input, output) = if self.incoming { (link, None) } else { (None, link) };
        Tested { packet: &self.packet, input, output, may_have_mark: false }
    }

    /// Returns the rule that drops the packet, if one certainly does.
    fn dropped(&self, outcome: Outcome, chain: String, command: String) -> Option<DroppingRule> {
        // A rule that is not evaluated may accept the packet before.
        let (Some((Fate::Dropped, rule)), None) = (outcome.fate, outcome.not_evaluated) else { return None };
        Some(DroppingRule { chain, rule, incoming: self.incoming, peer: self.peer, command })
    }
}

/// A table of `iptables-save`.
struct Saved(HashMap<String, (Option<String>, Vec<String>)>);

impl Saved {
    fn parse(text: &str) -> Saved {
        let mut chains: HashMap<String, (Option<String>, Vec<String>)> = HashMap::new();
        for line in text.lines() {
            if let Some((name, rest)) = line.strip_prefix(':').and_then(|line| line.split_once(' ')) {
                let policy = rest.split(' ').next().filter(|policy| *policy != "-").map(str::to_owned);
                chains.entry(name.to_owned()).or_default().0 = policy;
            } else if let Some((name, rule)) = line.strip_prefix("-A ").and_then(|line| line.split_once(' ')) {
                chains.entry(name.to_owned()).or_default().1.push(rule.to_owned());
            }
        }
        Saved(chains)
    }
}

impl Chains for Saved {
    fn chain(&self, name: &str) -> Option<(Option<&str>, &[String])> {
        self.0.get(name).map(|(policy, rules)| (policy.as_deref(), rules.as_slice()))
    }
}

/// Follows packets of the tunnel between this node and each of these peers through all firewalls. Each chain is reported once.
///
/// # Errors
/// The kernel does not answer.
pub fn read(peers: &[IpAddr], port: u16, iptables: &[SavedRules]) -> io::Result<Vec<DroppingRule>> {
    let mut kernel = Kernel::open()?;
    let devices = kernel.devices()?;
    let mut outers = Vec::new();
    for peer in peers {
        let any = if peer.is_ipv4() { IpAddr::from([0, 0, 0, 0]) } else { IpAddr::from([0; 16]) };
        let proto = Some(Proto::Udp);
        let Lookup::Route(route) = kernel.route(&Packet { from: any, to: *peer, proto, port: Some(port) }, None) else {
            continue;
        };
        let link = devices.iter().find(|device| device.index == route.device);
        let (Some(own), Some(link)) = (route.source, link) else { continue };
        for (incoming, from, to) in [(true, *peer, own), (false, own, *peer)] {
            let packet = Packet { from, to, proto, port: Some(port) };
            outers.push(Outer { packet, link: link.name.clone(), incoming, peer: *peer });
        }
    }
    let mut found = of_iptables(&outers, iptables, port);
    match of_nftables(&outers, !iptables.is_empty(), port) {
        Ok(rules) => found.extend(rules),
        // A kernel without nftables has no such rules.
        Err(error) if weft_netlink::socket::absent(&error) => {}
        Err(error) => return Err(error),
    }
    let mut once: Vec<DroppingRule> = Vec::new();
    for rule in found {
        if !once.iter().any(|known| known.chain == rule.chain && known.rule == rule.rule) {
            once.push(rule);
        }
    }
    Ok(once)
}

fn of_iptables(outers: &[Outer], iptables: &[SavedRules], port: u16) -> Vec<DroppingRule> {
    let mut found = Vec::new();
    for saved in iptables {
        let (table, program) = (Saved::parse(&saved.filter), &saved.program);
        for outer in outers.iter().filter(|outer| outer.peer.is_ipv4() != program.starts_with("ip6")) {
            let chain = if outer.incoming { "INPUT" } else { "OUTPUT" };
            if table.chain(chain).is_none() {
                continue;
            }
            let command = format!("{program} -I {chain} -p udp --dport {port} -j ACCEPT");
            found.extend(outer.dropped(
                follow(&table, chain, outer.tested()),
                format!("{chain} of {program}"),
                command,
            ));
        }
    }
    found
}

/// The tables that the programs of iptables have listed are left out, if they were installed.
fn of_nftables(outers: &[Outer], has_iptables: bool, port: u16) -> io::Result<Vec<DroppingRule>> {
    let mut netlink = Netlink::open_on(nix::libc::NETLINK_NETFILTER as isize)?;
    let mut found = Vec::new();
    for hook in [Hook::Prerouting, Hook::Input, Hook::Output, Hook::Postrouting] {
        for chain in base_chains(&mut netlink, hook)? {
            let is_listed = has_iptables && chain.family != "inet" && LISTED.contains(&chain.table.as_str());
            if chain.is_nat || is_listed || chain.table.starts_with(OURS) {
                continue;
            }
            let is_incoming = matches!(hook, Hook::Prerouting | Hook::Input);
            for outer in outers.iter().filter(|outer| outer.incoming == is_incoming && chain.sees(outer.peer.is_ipv4()))
            {
                found.extend(of_chain(&mut netlink, &chain, outer, port)?);
            }
        }
    }
    Ok(found)
}

fn of_chain(netlink: &mut Netlink, chain: &BaseChain, outer: &Outer, port: u16) -> io::Result<Option<DroppingRule>> {
    let mut outcome = nft::follow(netlink, chain, outer.tested())?;
    if outcome.fate.is_none() && chain.drops {
        outcome.fate = Some((Fate::Dropped, "policy drop".to_owned()));
    }
    let command = format!("nft insert rule {} udp dport {port} accept", chain.path());
    Ok(outer.dropped(outcome, format!("{} of nftables", chain.path()), command))
}
