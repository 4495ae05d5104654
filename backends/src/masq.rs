// SPDX-License-Identifier: Apache-2.0
//! Masquerade and forward rules as a value. Renderings (nftables, iptables) turn each [`Rule`] into one rule of theirs, in this
//! order, and decide nothing.
//!
//! Traffic inside the cluster keeps its addresses; what leaves it, and what enters towards another node's pods, gets the
//! node's. Source of the six masquerade rules: flannel's iptables mode, where they have been proven.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_subnet::cidr::{Family, Subnets, family};

/// kube-proxy marks with this bit what it masquerades itself. Other bits of the mark belong to others: test the bit alone.
pub const KUBE_MARK: u32 = 0x4000;

/// What was asked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// `--ip-masq`; `None`: no masquerade rules.
    pub masquerade: Option<Masquerade>,
    /// `--iptables-forward-rules`.
    pub forward: bool,
}

/// How to masquerade.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Masquerade {
    /// Choose source ports at random (two connections cannot race for one port); off by `--ip-masq-fully-random-disable`.
    pub fully_random: bool,
    /// `MasqueradeExcept`: pods reach these destinations with their own address.
    pub except: Vec<IpNet>,
    /// `MasqueradeToNodes: false`: pods reach these nodes with their own address. Empty: all nodes are masqueraded to.
    pub nodes: Vec<IpAddr>,
}

/// All rules, a part for each family in use, IPv4 first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// At most one per family; a family without any rule has no part.
    pub families: Vec<FamilyRules>,
}

/// The rules of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyRules {
    /// Which.
    pub family: Family,
    /// For the nat hook after routing, in order; empty: no chain. A packet that leaves it is not masqueraded by us.
    pub masquerade: Vec<Rule>,
    /// For the filter hook of forwarded packets, in order; empty: no chain.
    pub forward: Vec<Rule>,
}

/// One rule: all tests must hold. At most one test of the source and one of the destination, so each is one iptables rule
/// (but for [`Test::ToOneOf`], which iptables spells out).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// All must hold.
    pub tests: Vec<Test>,
    /// What then happens.
    pub verdict: Verdict,
}

/// What a packet is tested for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Test {
    /// All these bits of the packet mark are set.
    Mark(u32),
    /// Source inside.
    From(IpNet),
    /// Source outside.
    NotFrom(IpNet),
    /// Destination inside.
    To(IpNet),
    /// Destination outside.
    NotTo(IpNet),
    /// Destination is one of these addresses: sorted, without doubles, not empty.
    ToOneOf(Vec<IpAddr>),
}

/// What happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The rest of our rules is skipped.
    Return,
    /// Let through.
    Accept,
    /// Source becomes the address of the outgoing interface.
    Masquerade {
        /// With source ports chosen at random.
        fully_random: bool,
    },
}

/// The rules for a node with this subnet in these networks.
pub fn rules(networks: &Subnets, own: &Subnets, policy: &Policy) -> Rules {
    let part = |network: IpNet| {
        let family = family(&network);
        let own = own.of(family);
        let masquerade = policy.masquerade.as_ref().zip(own).map(|(how, own)| masquerade(network, own, how));
        let forward = if policy.forward { forward(network) } else { Vec::new() };
        FamilyRules { family, masquerade: masquerade.unwrap_or_default(), forward }
    };
    let families = networks.iter().map(part).filter(|part| !part.is_empty()).collect();
    Rules { families }
}

fn masquerade(network: IpNet, own: IpNet, how: &Masquerade) -> Vec<Rule> {
    let this = family(&network);
    let masquerade = Verdict::Masquerade { fully_random: how.fully_random };
    let mut rules = vec![
        // kube-proxy has decided already.
        Rule::new([Test::Mark(KUBE_MARK)], Verdict::Return),
        Rule::new([Test::From(own), Test::To(network)], Verdict::Return),
        Rule::new([Test::From(network), Test::To(own)], Verdict::Return),
        // From outside to our own pods: they see the client.
        Rule::new([Test::NotFrom(network), Test::To(own)], Verdict::Return),
    ];
    let mut except: Vec<IpNet> = how.except.iter().map(IpNet::trunc).filter(|net| family(net) == this).collect();
    except.sort();
    except.dedup();
    rules.extend(except.into_iter().map(|net| Rule::new([Test::From(network), Test::To(net)], Verdict::Return)));
    let mut nodes: Vec<IpAddr> = how.nodes.iter().copied().filter(|ip| family(&IpNet::from(*ip)) == this).collect();
    nodes.sort();
    nodes.dedup();
    if !nodes.is_empty() {
        rules.push(Rule::new([Test::From(network), Test::ToOneOf(nodes)], Verdict::Return));
    }
    rules.push(Rule::new([Test::From(network), Test::NotTo(multicast(this))], masquerade));
    // From outside (this node, a NodePort's client) to another node's pods: the answer must come back through us.
    rules.push(Rule::new([Test::NotFrom(network), Test::To(network)], masquerade));
    rules
}

fn forward(network: IpNet) -> Vec<Rule> {
    vec![Rule::new([Test::From(network)], Verdict::Accept), Rule::new([Test::To(network)], Verdict::Accept)]
}

/// Multicast is not masqueraded: 224.0.0.0/4, ff00::/8.
pub fn multicast(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::V4(Ipv4Net::new_assert([224, 0, 0, 0].into(), 4)),
        Family::V6 => IpNet::V6(Ipv6Net::new_assert([0xff00, 0, 0, 0, 0, 0, 0, 0].into(), 8)),
    }
}

impl Rules {
    /// No rule at all.
    pub fn is_empty(&self) -> bool {
        self.families.is_empty()
    }

    /// How many rules.
    pub fn len(&self) -> usize {
        self.families.iter().map(|part| part.masquerade.len() + part.forward.len()).sum()
    }

    /// The part of a family.
    pub fn of(&self, family: Family) -> Option<&FamilyRules> {
        self.families.iter().find(|part| part.family == family)
    }

    /// True when something is masqueraded: what IPMASQ in subnet.env says.
    pub fn masquerades(&self) -> bool {
        self.families.iter().any(|part| !part.masquerade.is_empty())
    }
}

impl FamilyRules {
    fn is_empty(&self) -> bool {
        self.masquerade.is_empty() && self.forward.is_empty()
    }
}

impl Rule {
    fn new(tests: impl Into<Vec<Test>>, verdict: Verdict) -> Rule {
        Rule { tests: tests.into(), verdict }
    }
}

impl fmt::Display for Rules {
    /// For people: one rule a line, under the name of its chain.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.families {
            let family = match part.family {
                Family::V4 => "IPv4",
                Family::V6 => "IPv6",
            };
            for (chain, rules) in [("masquerade", &part.masquerade), ("forward", &part.forward)] {
                for rule in rules {
                    writeln!(f, "{family} {chain}: {rule}")?;
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for test in &self.tests {
            write!(f, "{test} ")?;
        }
        self.verdict.fmt(f)
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Test::Mark(bits) => write!(f, "mark {bits:#x}/{bits:#x}"),
            Test::From(net) => write!(f, "from {net}"),
            Test::NotFrom(net) => write!(f, "from outside {net}"),
            Test::To(net) => write!(f, "to {net}"),
            Test::NotTo(net) => write!(f, "to outside {net}"),
            Test::ToOneOf(nodes) if nodes.len() > 8 => write!(f, "to one of {} nodes", nodes.len()),
            Test::ToOneOf(nodes) => {
                f.write_str("to one of")?;
                nodes.iter().try_for_each(|ip| write!(f, " {ip}"))
            }
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Return => "return",
            Verdict::Accept => "accept",
            Verdict::Masquerade { fully_random: true } => "masquerade fully-random",
            Verdict::Masquerade { fully_random: false } => "masquerade",
        })
    }
}

#[cfg(test)]
mod tests;
