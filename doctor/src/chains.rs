// SPDX-License-Identifier: Apache-2.0
//! Follows a packet through the chains of `iptables-save`, as far as its rules say what they match. Pure functions.

use std::collections::HashMap;

use ipnet::IpNet;

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

struct Rule<'a> {
    text: &'a str,
    matches: Match,
    target: String,
}

/// What happens to the packet in a chain.
enum Outcome<'a> {
    /// The caller goes on.
    Return,
    /// Nothing more happens to it in this table.
    Done,
    /// This rule replaces its source address.
    Masqueraded(&'a str),
}

/// Returns the rule that replaces the source address of these packets, if there certainly is one. `saved` is the table nat.
pub fn masquerading_rule<'a>(saved: &'a str, packet: &PodPacket<'_>) -> Option<&'a str> {
    let mut chains: HashMap<&str, Vec<&str>> = HashMap::new();
    for line in saved.lines() {
        let mut words = line.split(' ');
        if let (Some("-A"), Some(chain)) = (words.next(), words.next()) {
            chains.entry(chain).or_default().push(line);
        }
    }
    match follow(&chains, "POSTROUTING", packet, DEPTH) {
        Outcome::Masqueraded(rule) => Some(rule),
        Outcome::Return | Outcome::Done => None,
    }
}

fn follow<'a>(chains: &HashMap<&str, Vec<&'a str>>, chain: &str, packet: &PodPacket<'_>, depth: u8) -> Outcome<'a> {
    for line in chains.get(chain).into_iter().flatten() {
        let rule = parse(line, packet);
        match (rule.target.as_str(), rule.matches) {
            (_, Match::None) => {}
            ("MASQUERADE" | "SNAT", Match::Some | Match::All) => return Outcome::Masqueraded(rule.text),
            // What comes after a rule that may have taken the packet is not certain.
            ("RETURN", Match::Unknown | Match::All) => return Outcome::Return,
            ("ACCEPT" | "DROP", Match::Unknown | Match::All) => return Outcome::Done,
            (target, Match::Some | Match::All) if depth > 0 && chains.contains_key(target) => {
                match follow(chains, target, packet, depth - 1) {
                    Outcome::Return => {}
                    outcome => return outcome,
                }
            }
            _ => {}
        }
    }
    Outcome::Return
}

fn parse<'a>(text: &'a str, packet: &PodPacket<'_>) -> Rule<'a> {
    let words = split(text);
    let mut rule = Rule { text, matches: Match::All, target: String::new() };
    let (mut at, mut negated) = (2, false);
    while let Some(word) = words.get(at) {
        let value = words.get(at + 1).map(String::as_str).unwrap_or_default();
        let net =
            || value.parse::<IpNet>().ok().or_else(|| value.parse().ok().map(|addr: std::net::IpAddr| addr.into()));
        let (matches, taken) = match word.as_str() {
            "!" => {
                (negated, at) = (true, at + 1);
                continue;
            }
            "-j" | "-g" => {
                value.clone_into(&mut rule.target);
                break;
            }
            "-s" => (net().map_or(Match::Unknown, |net| of_net(net, packet.from, negated)), 2),
            "-d" => (net().map_or(Match::Unknown, |net| of_net(net, packet.to, negated)), 2),
            "-o" => (of_links(value, packet.links, negated), 2),
            "-m" if value == "comment" => (Match::All, 2),
            "--comment" => (Match::All, 2),
            _ => (Match::Unknown, 1),
        };
        (rule.matches, at, negated) = (rule.matches.min(matches), at + taken, false);
    }
    rule
}

fn of_net(net: IpNet, range: IpNet, negated: bool) -> Match {
    match (net.contains(&range), range.contains(&net), negated) {
        (true, _, false) | (false, false, true) => Match::All,
        (false, true, _) => Match::Some,
        (true, _, true) | (false, false, false) => Match::None,
    }
}

fn of_links(name: &str, links: &[&str], negated: bool) -> Match {
    let is_it = |link: &&&str| name.strip_suffix('+').map_or(**link == name, |start| link.starts_with(start));
    let matched = links.iter().filter(|link| is_it(link) != negated).count();
    match matched {
        0 => Match::None,
        all if all == links.len() => Match::All,
        _ => Match::Some,
    }
}

/// Splits a line of `iptables-save` into words. Words in quotes are comments, whose quotes inside have a backslash.
fn split(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted, mut escaped) = (Vec::new(), String::new(), false, false);
    for char in text.chars() {
        match char {
            _ if escaped => {
                word.push(char);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            _ => word.push(char),
        }
    }
    words.push(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(rules: &str) -> Option<String> {
        let saved = format!("*nat\n:POSTROUTING ACCEPT [0:0]\n{rules}\nCOMMIT\n");
        let (from, to) = ("10.5.7.0/24".parse().unwrap(), "10.5.0.0/16".parse().unwrap());
        masquerading_rule(&saved, &PodPacket { from, to, links: &["flannel.1"] }).map(str::to_owned)
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
            "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE",
            // kube-proxy: only what is marked passes the first rule.
            "-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n\
             -A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0\n-A KUBE-POSTROUTING -j MASQUERADE --random-fully",
            // flannel's own rules.
            "-A POSTROUTING -j FLANNEL-POSTRTG\n-A FLANNEL-POSTRTG -s 10.5.0.0/16 -d 10.5.0.0/16 -j RETURN\n\
             -A FLANNEL-POSTRTG -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE",
            // A chain that calls itself ends.
            "-A POSTROUTING -j A\n-A A -j A",
        ] {
            assert_eq!(found(rules), None, "{rules}");
        }
    }
}
