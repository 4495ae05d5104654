// SPDX-License-Identifier: Apache-2.0
//! Parses what `iptables-save` prints, for the two tables that our rules are in.

use std::collections::BTreeMap;

use ipnet::IpNet;
use weft_cni::masquerade::words;

use crate::firewall::forward_chain::{Ending, Rule};

/// The tables `nat` and `filter`, and the names of the chains of all tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Saved {
    tables: BTreeMap<String, Table>,
    chains_elsewhere: Vec<String>,
}

/// The chains of one table, by name.
pub type Table = BTreeMap<String, Chain>;

/// One chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// `ACCEPT` or `DROP`; `None` for a chain that belongs to no hook.
    pub policy: Option<String>,
    /// The text behind `-A CHAIN`, in order.
    pub rules: Vec<String>,
}

impl Saved {
    /// Parses the text. Lines that are neither a table nor a chain nor a rule are ignored.
    pub fn parse(text: &str) -> Saved {
        let mut saved = Saved::default();
        let mut table = "";
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name.trim();
                if kept(table) {
                    saved.tables.entry(table.to_owned()).or_default();
                }
            } else if let Some((name, rest)) = line.strip_prefix(':').and_then(|rest| rest.split_once(' ')) {
                let Some(chains) = saved.tables.get_mut(table) else {
                    saved.chains_elsewhere.push(name.to_owned());
                    continue;
                };
                let policy = rest.split(' ').next().filter(|word| *word != "-").map(str::to_owned);
                chains.insert(name.to_owned(), Chain { policy, rules: Vec::new() });
            } else if let Some((name, spec)) = rule(line)
                && let Some(chains) = saved.tables.get_mut(table)
            {
                chains.entry(name.to_owned()).or_default().rules.push(spec.to_owned());
            }
        }
        saved
    }

    /// Returns the chains of a table, or `None` if there is no such table.
    pub fn table(&self, name: &str) -> Option<&Table> {
        self.tables.get(name)
    }

    /// Returns the names of the chains of all tables.
    pub fn chains(&self) -> impl Iterator<Item = &str> {
        let known = self.tables.values().flat_map(|table| table.keys().map(String::as_str));
        known.chain(self.chains_elsewhere.iter().map(String::as_str))
    }

    /// Returns true if FORWARD drops packets that no rule accepts: by its policy, or by a rule that drops every packet.
    pub fn forward_drops(&self) -> bool {
        let policy = self.forward().and_then(|chain| chain.policy.as_deref());
        policy == Some("DROP") || self.forward_ending() != Ending::Policy
    }

    /// Returns how FORWARD ends, whichever program wrote its rules.
    pub fn forward_ending(&self) -> Ending {
        let rules = self.forward().map(|chain| chain.rules.as_slice()).unwrap_or_default();
        Ending::of(&rules.iter().map(|rule| role(rule, "")).collect::<Vec<_>>())
    }

    fn forward(&self) -> Option<&Chain> {
        self.table("filter").and_then(|table| table.get("FORWARD"))
    }

    /// Returns the number of rules in the two tables.
    pub fn rules(&self) -> usize {
        self.tables.values().flat_map(Table::values).map(|chain| chain.rules.len()).sum()
    }
}

fn kept(table: &str) -> bool {
    table == "nat" || table == "filter"
}

fn rule(line: &str) -> Option<(&str, &str)> {
    let rest = line.strip_prefix("-A ")?;
    Some(rest.split_once(' ').unwrap_or((rest, "")))
}

/// Returns the chain or target of a rule: the word after `-j` or `-g`.
pub fn target(spec: &str) -> Option<String> {
    let words = words(spec);
    let at = words.iter().position(|word| matches!(word.as_str(), "-j" | "--jump" | "-g" | "--goto"))?;
    words.get(at + 1).cloned()
}

/// Returns what a rule does, as far as it matters for where ours go. `ours` is the name of our chain.
pub fn role(spec: &str, ours: &str) -> Rule {
    match target(spec) {
        Some(target) if target == ours => Rule::Ours,
        Some(target) if target == "DROP" && ends_all(spec) => Rule::DropsAll,
        Some(_) if ends_all(spec) => Rule::RejectsAll,
        _ => Rule::Other,
    }
}

/// Returns true if no packet passes this rule.
fn ends_all(spec: &str) -> bool {
    let tests = options(spec).into_iter().any(|option| {
        let name = option.split(' ').next().unwrap_or_default();
        !matches!(name, "-j" | "--reject-with" | "--comment")
    });
    !tests && target(spec).is_some_and(|target| target == "DROP" || target == "REJECT")
}

/// Returns the options of a rule with their values, sorted, because versions of iptables print them in different orders.
pub fn options(spec: &str) -> Vec<String> {
    let mut options: Vec<String> = Vec::new();
    let mut negated = false;
    for word in words(spec) {
        let option = word.starts_with('-') && !word[1..].starts_with(|c: char| c.is_ascii_digit());
        match options.last_mut() {
            _ if word == "!" => negated = true,
            _ if option => {
                options.push(if negated { format!("! {word}") } else { word });
                negated = false;
            }
            Some(last) => {
                last.push(' ');
                last.push_str(&value(word));
            }
            None => options.push(word),
        }
    }
    // `-m NAME` loads a match; the options of the match show which one it is.
    options.retain(|option| !option.starts_with("-m "));
    options.sort();
    options
}

/// Returns an address in one spelling: `192.0.2.1` becomes `192.0.2.1/32`.
fn value(word: String) -> String {
    let net = word.parse::<IpNet>().ok().or_else(|| Some(IpNet::from(word.parse::<std::net::IpAddr>().ok()?)));
    net.map_or(word, |net| net.to_string())
}

#[cfg(test)]
mod tests {
    use super::{Saved, ends_all, options, target};

    const TEXT: &str = r#"# Generated by iptables-save v1.8.9
*mangle
:PREROUTING ACCEPT [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:POSTROUTING ACCEPT [3:180]
:X - [0:0]
-A POSTROUTING -m comment --comment "kubernetes \"postrouting\" rules" -j KUBE-POSTROUTING
-A POSTROUTING -j X
COMMIT
*filter
:FORWARD DROP [0:0]
COMMIT
"#;

    #[test]
    fn chains_policies_and_rules_are_parsed() {
        let saved = Saved::parse(TEXT);
        let nat = saved.table("nat").unwrap();
        assert_eq!(nat["POSTROUTING"].policy.as_deref(), Some("ACCEPT"));
        assert_eq!(nat["POSTROUTING"].rules.len(), 2);
        assert_eq!(nat["X"].policy, None);
        assert_eq!(saved.table("filter").unwrap()["FORWARD"].policy.as_deref(), Some("DROP"));
        assert!(saved.table("mangle").is_none());
        assert!(saved.forward_drops());
        let open = TEXT.replace("FORWARD DROP", "FORWARD ACCEPT");
        assert!(!Saved::parse(&open).forward_drops());
        let rejects = open.replace(":FORWARD ACCEPT [0:0]\n", ":FORWARD ACCEPT [0:0]\n-A FORWARD -j REJECT\n");
        assert!(Saved::parse(&rejects).forward_drops());
        assert!(saved.chains().any(|name| name == "KUBE-KUBELET-CANARY"));
        assert_eq!(saved.rules(), 2);
        let targets: Vec<_> = nat["POSTROUTING"].rules.iter().map(|rule| target(rule).unwrap()).collect();
        assert_eq!(targets, ["KUBE-POSTROUTING", "X"]);
    }

    #[test]
    fn the_order_and_spelling_of_options_do_not_matter() {
        let one = "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully";
        let two = "-m mark --mark 0x4000/0x4000 ! -d 192.0.2.1 -s 10.5.0.0/16 -j MASQUERADE --random-fully";
        assert_eq!(options(one), options(two));
        for other in [
            "-s 10.5.0.0/16 -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully",
            "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark ! --mark 0x4000/0x4000 -j MASQUERADE --random-fully",
            "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -j MASQUERADE",
            "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -p tcp -j MASQUERADE --random-fully",
        ] {
            assert_ne!(options(one), options(other), "{other}");
        }
    }

    #[test]
    fn only_a_drop_without_a_test_drops_all_packets() {
        for (spec, ends) in [
            ("-j DROP", true),
            ("-j REJECT --reject-with icmp-host-prohibited", true),
            ("-m comment --comment \"the rest\" -j DROP", true),
            ("-j ACCEPT", false),
            ("-i eth1 -j DROP", false),
            ("! -i eth1 -j DROP", false),
            ("-m conntrack --ctstate INVALID -j DROP", false),
        ] {
            assert_eq!(ends_all(spec), ends, "{spec}");
        }
    }
}
