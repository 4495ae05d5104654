// SPDX-License-Identifier: Apache-2.0
//! Follows the packets from all pods of this node to those of all others through the chains of `iptables-save`, as far as their rules say what they
//! match. [`crate::kernel::rules`] follows one packet, and does not tell a rule for some of these packets from one that is not understood. Pure
//! functions.

use ipnet::IpNet;
use weft_cni::iptables::{Table, words};

use crate::kernel::rules::{is_interface, net};

/// Chains may call each other no deeper than this.
const DEPTH: u8 = 8;

/// A packet from a pod of this node to a pod of another node.
#[derive(Debug, Clone)]
pub struct PodPacket<'a> {
    /// The subnet of this node.
    pub from: IpNet,
    /// The network of all pods.
    pub to: IpNet,
    /// The links over which it may leave.
    pub links: &'a [&'a str],
}

/// How far a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Match {
    /// No such packet.
    None,
    /// It depends on something that is not known here.
    Unknown,
    /// Some of these packets.
    Some,
    /// All of these packets.
    All,
}

/// What happens to the packet in a chain.
enum Outcome {
    /// The caller goes on.
    Return,
    /// Nothing more happens to it in this table.
    Done,
    /// This rule replaces its source address.
    Masqueraded(String),
}

/// Returns the rule of table nat that replaces the source address of these packets, if there certainly is one.
pub fn masquerading_rule(nat: &Table, packet: &PodPacket<'_>) -> Option<String> {
    match follow(nat, "POSTROUTING", packet, DEPTH) {
        Outcome::Masqueraded(rule) => Some(rule),
        Outcome::Return | Outcome::Done => None,
    }
}

fn follow(nat: &Table, chain: &str, packet: &PodPacket<'_>, depth: u8) -> Outcome {
    for rule in nat.get(chain).into_iter().flat_map(|chain| &chain.rules) {
        let Judged { matches, target, is_goto } = judge(rule, packet);
        match (target.as_str(), matches) {
            (_, Match::None) => {}
            ("MASQUERADE" | "SNAT", Match::Some | Match::All) => {
                return Outcome::Masqueraded(format!("-A {chain} {rule}"));
            }
            // What comes after a rule that may have taken the packet is not certain.
            ("RETURN", Match::Unknown | Match::All) => return Outcome::Return,
            ("ACCEPT" | "DROP", Match::Unknown | Match::All) => return Outcome::Done,
            (target, Match::Some | Match::All) if depth > 0 && nat.contains_key(target) => {
                match follow(nat, target, packet, depth - 1) {
                    // The end of a chain that a goto leads to is the end of this one, too.
                    Outcome::Return if is_goto && matches == Match::All => return Outcome::Return,
                    Outcome::Return => {}
                    outcome => return outcome,
                }
            }
            (_, Match::Unknown | Match::All) if is_goto => return Outcome::Return,
            _ => {}
        }
    }
    Outcome::Return
}

/// What a rule does with the packet.
struct Judged {
    /// How far it matches.
    matches: Match,
    /// Its target; empty if it has none.
    target: String,
    /// The packet does not come back from the target to the rules behind this one.
    is_goto: bool,
}

fn judge(rule: &str, packet: &PodPacket<'_>) -> Judged {
    let words = words(rule);
    let (mut all, mut target, mut is_goto) = (Match::All, String::new(), false);
    let (mut at, mut negated) = (0, false);
    while let Some(word) = words.get(at) {
        let value = words.get(at + 1).map(String::as_str).unwrap_or_default();
        let (matches, taken) = match word.as_str() {
            "!" => {
                (negated, at) = (true, at + 1);
                continue;
            }
            "-j" | "-g" => {
                value.clone_into(&mut target);
                is_goto = word == "-g";
                break;
            }
            "-s" => (net(value).map_or(Match::Unknown, |net| of_net(net, packet.from, negated)), 2),
            "-d" => (net(value).map_or(Match::Unknown, |net| of_destination(net, packet, negated)), 2),
            "-o" => (of_links(value, packet.links, negated), 2),
            "-m" if value == "comment" => (Match::All, 2),
            "--comment" => (Match::All, 2),
            _ => (Match::Unknown, 1),
        };
        (all, at, negated) = (all.min(matches), at + taken, false);
    }
    Judged { matches: all, target, is_goto }
}

fn of_net(net: IpNet, range: IpNet, negated: bool) -> Match {
    match (net.contains(&range), range.contains(&net), negated) {
        (true, _, false) | (false, false, true) => Match::All,
        (false, true, _) => Match::Some,
        (true, _, true) | (false, false, false) => Match::None,
    }
}

/// Addresses of the own subnet are none of pods of other nodes.
fn of_destination(net: IpNet, packet: &PodPacket<'_>, negated: bool) -> Match {
    match (packet.from.contains(&net), negated) {
        (true, true) => Match::All,
        (true, false) => Match::None,
        (false, _) => of_net(net, packet.to, negated),
    }
}

fn of_links(name: &str, links: &[&str], negated: bool) -> Match {
    let matched = links.iter().filter(|link| is_interface(name, link) != negated).count();
    match matched {
        0 => Match::None,
        all if all == links.len() => Match::All,
        _ => Match::Some,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_cni::iptables::Saved;

    fn found(rules: &str) -> Option<String> {
        let saved = Saved::parse(&format!("*nat\n:POSTROUTING ACCEPT [0:0]\n{rules}\nCOMMIT\n"));
        let (from, to) = ("10.5.7.0/24".parse().unwrap(), "10.5.0.0/16".parse().unwrap());
        masquerading_rule(saved.table("nat").unwrap(), &PodPacket { from, to, links: &["flannel.1"] })
    }

    #[test]
    fn a_rule_that_hides_pods_from_other_nodes_is_found() {
        for rule in [
            "-A POSTROUTING -j MASQUERADE",
            "-A POSTROUTING -o flannel.1 -j MASQUERADE --random-fully",
            "-A POSTROUTING -o flannel+ -j SNAT --to-source 192.0.2.1",
            "-A POSTROUTING -s 10.0.0.0/8 ! -d 192.168.0.0/16 -m comment --comment \"a \\\"vpn\\\" -j RETURN\" -j MASQUERADE",
            "-A POSTROUTING -s 10.5.7.0/24 ! -o cni0 -j MASQUERADE",
            "-A POSTROUTING -s 10.5.7.9/32 -j MASQUERADE",
        ] {
            assert_eq!(found(rule).as_deref(), Some(rule));
        }
        for (rules, rule) in [
            ("-A POSTROUTING -g A\n-A A -j MASQUERADE", "-A A -j MASQUERADE"),
            // The pods to which the goto does not apply come to the next rule.
            (
                "-A POSTROUTING -s 10.5.7.9/32 -g A\n-A POSTROUTING -j MASQUERADE\n-A A -d 192.0.2.0/24 -j ACCEPT",
                "-A POSTROUTING -j MASQUERADE",
            ),
        ] {
            assert_eq!(found(rules).as_deref(), Some(rule), "{rules}");
        }
        // The bridge plugin of CNI with ipMasq.
        let plugin = "-A POSTROUTING -s 10.5.7.9/32 -m comment --comment \"name: \\\"cbr0\\\"\" -j CNI-1\n\
                      -A CNI-1 -d 10.5.7.0/24 -j ACCEPT\n-A CNI-1 ! -d 224.0.0.0/4 -j MASQUERADE";
        assert_eq!(found(plugin).as_deref(), Some("-A CNI-1 ! -d 224.0.0.0/4 -j MASQUERADE"));
    }

    #[test]
    fn rules_for_other_packets_and_rules_that_are_not_understood_are_not_found() {
        for rules in [
            "-A POSTROUTING -o eth0 -j MASQUERADE",
            "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
            "-A POSTROUTING -s 10.5.0.0/16 ! -d 10.0.0.0/8 -j MASQUERADE",
            // A pod that reaches itself by a service.
            "-A POSTROUTING -s 10.5.7.0/24 -d 10.5.7.0/24 -j MASQUERADE",
            "-A POSTROUTING -s 10.5.7.9/32 -d 10.5.7.9/32 -j MASQUERADE",
            "-A POSTROUTING -s 10.5.7.0/24 ! -d 10.5.7.0/24 -j RETURN\n-A POSTROUTING -j MASQUERADE",
            "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE",
            // kube-proxy: only what is marked passes the first rule.
            "-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
             -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully",
            // flannel's own rules.
            "-A POSTROUTING -j FLANNEL-POSTRTG\n-A FLANNEL-POSTRTG -s 10.5.0.0/16 -d 10.5.0.0/16 -j RETURN\n\
             -A FLANNEL-POSTRTG -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE",
            // A goto does not come back.
            "-A POSTROUTING -g A\n-A POSTROUTING -j MASQUERADE\n-A A -d 192.0.2.0/24 -j ACCEPT",
            "-A POSTROUTING -m mark --mark 0x1 -g A\n-A POSTROUTING -j MASQUERADE\n-A A -j ACCEPT",
            // A chain that calls itself ends.
            "-A POSTROUTING -j A\n-A A -j A",
        ] {
            assert_eq!(found(rules), None, "{rules}");
        }
    }
}
