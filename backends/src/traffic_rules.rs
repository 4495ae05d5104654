// SPDX-License-Identifier: Apache-2.0
//! The traffic rules as a value: those that masquerade packets of pods, and those that let them be forwarded. nftables and iptables get one
//! rule for each [`Rule`], in this order, and nothing is decided there.
//!
//! Traffic inside the cluster keeps its addresses. Traffic that leaves the cluster, or enters it towards the pods of another node, gets the
//! address of this node. The six masquerade rules are those of flannel's iptables mode.

use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_subnet::cidr::{Family, Subnets, family};

use crate::family::label;

/// kube-proxy sets this bit of the mark on packets that it masquerades itself. The other bits belong to other programs and are not tested.
pub const KUBE_MARK: u32 = 0x4000;

/// The rules that the flags ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// `--ip-masq`. `None` means no masquerade rules.
    pub masquerade: Option<Masquerade>,
    /// `--iptables-forward-rules`.
    pub forward: bool,
}

/// How to masquerade.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Masquerade {
    /// Choose source ports at random, so that two connections do not compete for one port. `--ip-masq-fully-random-disable` turns it off.
    pub fully_random: bool,
    /// `MasqueradeExcept`: pods reach these destinations with their own addresses.
    pub except: Vec<IpNet>,
    /// `MasqueradeToNodes: false`: pods reach these nodes with their own addresses. If it is empty, traffic to all nodes is masqueraded.
    pub nodes: Vec<IpAddr>,
}

/// All rules, with one part for each family in use, IPv4 first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    /// At most one part for each family. A family without rules has none.
    pub families: Vec<FamilyRules>,
}

/// The rules of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyRules {
    /// The family.
    pub family: Family,
    /// The rules for the nat hook after routing, in order. If there are none, there is no chain. A packet that reaches the end of the chain
    /// is not masqueraded by us.
    pub masquerade: Vec<Rule>,
    /// The rules for the filter hook of forwarded packets, in order. If there are none, there is no chain.
    pub forward: Vec<Rule>,
}

/// One rule. It has at most one test of the source and one of the destination, so it is one rule of iptables, except with
/// [`Test::ToOneOf`], which needs one for each address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The rule applies if all of these are true.
    pub tests: Vec<Test>,
    /// What happens then.
    pub verdict: Verdict,
}

/// A test of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Test {
    /// All these bits of the packet mark are set.
    Mark(u32),
    /// The source is inside.
    From(IpNet),
    /// The source is outside.
    NotFrom(IpNet),
    /// The destination is inside.
    To(IpNet),
    /// The destination is outside.
    NotTo(IpNet),
    /// The destination is one of these addresses, which are sorted and unique. The list is not empty.
    ToOneOf(Vec<IpAddr>),
}

/// What happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The rest of our rules is skipped.
    Return,
    /// The packet is let through.
    Accept,
    /// The source becomes the address of the outgoing interface.
    Masquerade {
        /// True if source ports are chosen at random.
        fully_random: bool,
    },
}

/// Returns the rules for a node with this subnet in these networks.
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
        // kube-proxy has already decided.
        Rule::new([Test::Mark(KUBE_MARK)], Verdict::Return),
        Rule::new([Test::From(own), Test::To(network)], Verdict::Return),
        Rule::new([Test::From(network), Test::To(own)], Verdict::Return),
        // Our own pods see the address of a client from outside.
        Rule::new([Test::NotFrom(network), Test::To(own)], Verdict::Return),
    ];
    let mut except: Vec<IpNet> = how.except.iter().map(IpNet::trunc).filter(|net| family(net) == this).collect();
    except.sort();
    except.dedup();
    rules.extend(except.into_iter().map(|net| Rule::new([Test::From(network), Test::To(net)], Verdict::Return)));
    let mut nodes: Vec<IpAddr> = how.nodes.iter().copied().filter(|ip| Family::of(*ip) == this).collect();
    nodes.sort();
    nodes.dedup();
    if !nodes.is_empty() {
        rules.push(Rule::new([Test::From(network), Test::ToOneOf(nodes)], Verdict::Return));
    }
    rules.push(Rule::new([Test::From(network), Test::NotTo(multicast(this))], masquerade));
    // A packet from outside (this node, or the client of a NodePort) to a pod of another node: the answer must come back through this node.
    rules.push(Rule::new([Test::NotFrom(network), Test::To(network)], masquerade));
    rules
}

fn forward(network: IpNet) -> Vec<Rule> {
    vec![Rule::new([Test::From(network)], Verdict::Accept), Rule::new([Test::To(network)], Verdict::Accept)]
}

/// Returns the multicast addresses of a family, which are not masqueraded: 224.0.0.0/4 or ff00::/8.
pub fn multicast(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::V4(Ipv4Net::new_assert([224, 0, 0, 0].into(), 4)),
        Family::V6 => IpNet::V6(Ipv6Net::new_assert([0xff00, 0, 0, 0, 0, 0, 0, 0].into(), 8)),
    }
}

impl Rules {
    /// Returns true if there is no rule.
    pub fn is_empty(&self) -> bool {
        self.families.is_empty()
    }

    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.families.iter().map(|part| part.masquerade.len() + part.forward.len()).sum()
    }

    /// Returns the part of a family.
    pub fn of(&self, family: Family) -> Option<&FamilyRules> {
        self.families.iter().find(|part| part.family == family)
    }

    /// Returns true if something is masqueraded. This is the value of IPMASQ in subnet.env.
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
    /// Writes one rule in each line, below the name of its chain.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.families {
            let family = label(part.family);
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
