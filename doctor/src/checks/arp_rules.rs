// SPDX-License-Identifier: Apache-2.0
//! Chains that drop all ARP packets, of nftables (also those of arptables-nft) and of arptables-legacy. Other hosts and pods then do not find this
//! node, or it does not find them.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::remedies::remove_nft_rule;

/// The verdicts behind which other rules, or the policy, may not see every packet.
const PASSES: [&str; 4] = ["accept", "jump", "goto", "return"];

/// A chain that drops all ARP packets.
#[derive(Debug, PartialEq, Eq)]
struct Drops {
    chain: String,
    rule: &'static str,
    /// True if it sees the packets that arrive.
    arriving: bool,
    remedy: String,
}

/// Chains that drop all ARP packets of this node.
pub(super) fn found(facts: &NodeFacts) -> Vec<NodeFinding> {
    let of_nft = facts.rules.nft.as_deref().map(of_nftables).unwrap_or_default();
    let one = |drops: Drops| {
        let Drops { chain, rule, arriving, remedy } = drops;
        let effect = if arriving { "gets neither requests nor answers" } else { "sends neither requests nor answers" };
        let evidence =
            format!("chain {chain} drops ARP ({rule}): this node {effect}, so pods and other hosts cannot reach it");
        finding(evidence, remedy)
    };
    of_nft.into_iter().chain(of_legacy(&facts.rules.arptables)).map(one).collect()
}

/// The hook of a chain of nftables.
#[derive(Clone, Copy)]
struct ArpHook {
    /// True if it sees the packets that arrive.
    arriving: bool,
    /// Its policy is drop.
    drops: bool,
}

/// Returns the chains among those that `nft list ruleset` prints.
fn of_nftables(text: &str) -> Vec<Drops> {
    let mut found = Vec::new();
    let mut table = None;
    let mut chain = "";
    // The hook of a chain in which nothing has passed or dropped a packet so far.
    let mut open: Option<ArpHook> = None;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("table ") {
            table = name.strip_prefix("arp ").and_then(|name| name.strip_suffix(" {"));
            continue;
        }
        let Some(table) = table else { continue };
        let path = format!("arp {table} {chain}");
        if let Some(name) = line.strip_prefix("chain ").and_then(|rest| rest.strip_suffix(" {")) {
            chain = name;
        } else if let Some(hook) = line.strip_prefix("type filter hook ") {
            let drops = line.contains("policy drop");
            open = match hook.split(' ').next() {
                Some("input") => Some(ArpHook { arriving: true, drops }),
                Some("output") => Some(ArpHook { arriving: false, drops }),
                _ => None,
            };
        } else if line == "}" {
            if let Some(ArpHook { arriving, drops: true }) = open.take() {
                let remedy = format!("nft add chain {path} '{{ policy accept; }}'; then find the program that made it");
                found.push(Drops { chain: path, rule: "policy drop", arriving, remedy });
            }
        } else if let Some(ArpHook { arriving, .. }) = open {
            let words: Vec<&str> = line.split_whitespace().collect();
            if drops_all(&words) {
                let remedy = remove_nft_rule(&path);
                found.push(Drops { chain: path, rule: "drop", arriving, remedy });
                open = None;
            } else if words.iter().any(|word| PASSES.contains(word)) {
                open = None;
            }
        }
    }
    found
}

/// Returns true for a rule without a test that drops packets. A counter is no test.
fn drops_all(words: &[&str]) -> bool {
    match words {
        ["counter", "packets", _, "bytes", _, rest @ ..] | ["counter", rest @ ..] => drops_all(rest),
        ["drop", rest @ ..] => rest.first().is_none_or(|word| *word == "comment"),
        _ => false,
    }
}

/// Returns the chains among those that `arptables-legacy-save` prints.
fn of_legacy(text: &str) -> Vec<Drops> {
    let one = |(chain, arriving): (&str, bool)| {
        let is_policy = text.lines().any(|line| line.starts_with(&format!(":{chain} DROP")));
        let mut rules = text.lines().filter_map(|line| line.strip_prefix(&format!("-A {chain} "))).map(str::trim);
        let first = rules.find(|rule| *rule == "-j DROP" || !rule.ends_with("-j DROP"));
        let (rule, remedy) = match first {
            Some("-j DROP") => ("-j DROP", format!("arptables-legacy -D {chain} -j DROP")),
            None if is_policy => ("policy DROP", format!("arptables-legacy -P {chain} ACCEPT")),
            _ => return None,
        };
        Some(Drops { chain: format!("{chain} of arptables-legacy"), rule, arriving, remedy })
    };
    [("INPUT", true), ("OUTPUT", false)].into_iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_or_a_rule_without_a_test_drops_all_arp_packets_of_nftables() {
        let chain = |body: &str| {
            let text = format!(
                "table ip filter {{\n\tchain INPUT {{\n\t\tdrop\n\t}}\n}}\ntable arp filter {{\n\tchain C {{\n{body}\n\t}}\n}}\n"
            );
            of_nftables(&text).into_iter().map(|drops| (drops.chain, drops.rule, drops.arriving)).collect::<Vec<_>>()
        };
        let dropped = |rule, arriving| vec![("arp filter C".to_owned(), rule, arriving)];
        let input = "\t\ttype filter hook input priority filter; policy accept;";
        let policy = "\t\ttype filter hook output priority filter; policy drop;";
        for (body, wanted) in [
            (policy.to_owned(), dropped("policy drop", false)),
            (format!("{policy}\n\t\tarp saddr ip 192.0.2.9 drop"), dropped("policy drop", false)),
            (format!("{policy}\n\t\tarp saddr ip 192.0.2.9 accept"), Vec::new()),
            (format!("{input}\n\t\tdrop"), dropped("drop", true)),
            (format!("{input}\n\t\tcounter packets 3 bytes 84 drop"), dropped("drop", true)),
            (format!("{input}\n\t\tcounter drop comment \"x\""), dropped("drop", true)),
            (format!("{input}\n\t\tjump other\n\t\tdrop"), Vec::new()),
            (format!("{input}\n\t\tarp saddr ip 192.0.2.9 drop"), Vec::new()),
            (input.to_owned(), Vec::new()),
            ("\t\tdrop".to_owned(), Vec::new()),
        ] {
            assert_eq!(chain(&body), wanted, "{body}");
        }
    }

    #[test]
    fn a_policy_or_a_rule_without_a_test_drops_all_arp_packets_of_arptables_legacy() {
        for (text, wanted) in [
            ("*filter\n:INPUT DROP\n:OUTPUT ACCEPT\n", Some("arptables-legacy -P INPUT ACCEPT")),
            (":INPUT DROP\n-A INPUT -s 192.0.2.9 -j ACCEPT\n", None),
            (
                ":OUTPUT ACCEPT\n-A OUTPUT -s 192.0.2.9 -j DROP\n-A OUTPUT -j DROP\n",
                Some("arptables-legacy -D OUTPUT -j DROP"),
            ),
            (":INPUT ACCEPT\n:OUTPUT ACCEPT\n", None),
            ("", None),
        ] {
            let found = of_legacy(text);
            assert_eq!(found.first().map(|drops| drops.remedy.as_str()), wanted, "{text}");
        }
    }
}
