// SPDX-License-Identifier: Apache-2.0
//! The programs of iptables, and a parser of the text in which they print rules (`iptables-save`, `iptables -S`). The plugin, the agent and
//! `weft doctor` have it in common. Each of them runs the programs in its own way. What a rule means for a packet is decided elsewhere.

use std::collections::BTreeMap;
use std::fmt;

use weft_netlink::nftables::Hook;
use weft_subnet::cidr::Family;

/// Programs of iptables write to one of two sets of tables in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// `iptables-nft`, which writes to nf_tables.
    Nft,
    /// `iptables-legacy`, which writes to ip_tables.
    Legacy,
    /// `iptables`, where neither of the other two is installed. It is one of them under the plain name.
    Plain,
}

impl Flavour {
    /// All flavours, in the order in which they are tried.
    pub const ALL: [Flavour; 3] = [Flavour::Nft, Flavour::Legacy, Flavour::Plain];

    /// Returns the program that changes the rules of a family, such as `ip6tables-nft`. With `-save` or `-restore` at its end, the name is
    /// that of the program that lists them, or writes many at once.
    pub fn program(self, family: Family) -> String {
        let six = if family == Family::V6 { "6" } else { "" };
        let flavour = match self {
            Flavour::Nft => "-nft",
            Flavour::Legacy => "-legacy",
            Flavour::Plain => "",
        };
        format!("ip{six}tables{flavour}")
    }
}

impl fmt::Display for Flavour {
    /// Writes the name of the program for IPv4.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.program(Family::V4))
    }
}

/// Returns the file in which the kernel lists the tables of iptables-legacy of this network namespace, one on each line. To open a table
/// instead would create it when it does not exist.
pub fn legacy_tables_file(family: Family) -> &'static str {
    match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    }
}

/// Returns the chain of iptables at a hook.
pub fn builtin_chain(hook: Hook) -> &'static str {
    match hook {
        Hook::Prerouting => "PREROUTING",
        Hook::Input => "INPUT",
        Hook::Forward => "FORWARD",
        Hook::Output => "OUTPUT",
        Hook::Postrouting => "POSTROUTING",
    }
}

/// The tables that `iptables-save` printed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Saved {
    tables: BTreeMap<String, Table>,
}

/// The chains of one table, by name.
pub type Table = BTreeMap<String, Chain>;

/// One chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Chain {
    /// `ACCEPT` or `DROP`; `None` for a chain that belongs to no hook.
    pub policy: Option<String>,
    /// The text behind `-A CHAIN` of each rule, in order.
    pub rules: Vec<String>,
}

impl Saved {
    /// Parses the text. Lines that are neither a table nor a chain nor a rule are ignored.
    pub fn parse(text: &str) -> Saved {
        let mut saved = Saved::default();
        let mut table: Option<&mut Table> = None;
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = Some(saved.tables.entry(name.trim().to_owned()).or_default());
                continue;
            }
            let Some(chains) = table.as_deref_mut() else { continue };
            if let Some((name, rest)) = line.strip_prefix(':').and_then(|rest| rest.split_once(' ')) {
                let policy = rest.split(' ').next().filter(|word| *word != "-").map(str::to_owned);
                chains.entry(name.to_owned()).or_default().policy = policy;
            } else if let Some(rest) = line.strip_prefix("-A ") {
                let (name, rule) = rest.split_once(' ').unwrap_or((rest, ""));
                chains.entry(name.to_owned()).or_default().rules.push(rule.to_owned());
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
        self.tables.values().flat_map(|table| table.keys().map(String::as_str))
    }
}

/// Splits a rule into words. Spaces separate words, double quotes group them, and inside quotes a backslash escapes the next character.
pub fn words(rule: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quoted) = (None::<String>, false);
    let mut chars = rule.chars();
    while let Some(c) = chars.next() {
        match c {
            ' ' if !quoted => words.extend(word.take()),
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' if quoted => word.get_or_insert_default().extend(chars.next()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// Returns the word behind an option, if the rule has this option.
pub fn value<'a>(words: &'a [String], option: &str) -> Option<&'a str> {
    words.iter().skip_while(|word| *word != option).nth(1).map(String::as_str)
}

/// Returns the chain or target that a rule leads to, and true if packets do not come back from there (`-g`).
pub fn target(words: &[String]) -> Option<(&str, bool)> {
    let at = words.iter().position(|word| matches!(word.as_str(), "-j" | "--jump" | "-g" | "--goto"))?;
    let is_goto = matches!(words[at].as_str(), "-g" | "--goto");
    words.get(at + 1).map(|target| (target.as_str(), is_goto))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"# Generated by iptables-save v1.8.9
*mangle
:PREROUTING ACCEPT [0:0]
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*nat
:POSTROUTING ACCEPT [3:180]
:X - [0:0]
-A POSTROUTING -m comment --comment "kubernetes \"postrouting\" rules" -j KUBE-POSTROUTING
-A POSTROUTING -g X
COMMIT
*filter
:FORWARD DROP [0:0]
COMMIT
"#;

    #[test]
    fn each_flavour_and_family_has_its_programs() {
        assert_eq!(Flavour::Nft.program(Family::V4), "iptables-nft");
        assert_eq!(Flavour::Legacy.program(Family::V6), "ip6tables-legacy");
        assert_eq!(Flavour::Plain.program(Family::V6), "ip6tables");
        assert_eq!(Flavour::Legacy.to_string(), "iptables-legacy");
    }

    #[test]
    fn each_hook_and_each_family_has_its_name() {
        use Hook::{Forward, Input, Output, Postrouting, Prerouting};
        let names = [Prerouting, Input, Forward, Output, Postrouting].map(builtin_chain);
        assert_eq!(names, ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"]);
        assert!(legacy_tables_file(Family::V4).ends_with("/ip_tables_names"));
        assert!(legacy_tables_file(Family::V6).ends_with("/ip6_tables_names"));
    }

    #[test]
    fn chains_policies_and_rules_are_parsed() {
        let saved = Saved::parse(TEXT);
        let nat = saved.table("nat").unwrap();
        assert_eq!(nat["POSTROUTING"].policy.as_deref(), Some("ACCEPT"));
        assert_eq!(nat["POSTROUTING"].rules.len(), 2);
        assert_eq!(nat["X"], Chain::default());
        assert_eq!(saved.table("filter").unwrap()["FORWARD"].policy.as_deref(), Some("DROP"));
        assert!(saved.table("raw").is_none());
        assert!(saved.chains().any(|name| name == "KUBE-KUBELET-CANARY"));
        let rules: Vec<_> = nat["POSTROUTING"].rules.iter().map(|rule| words(rule)).collect();
        assert_eq!(value(&rules[0], "--comment"), Some("kubernetes \"postrouting\" rules"));
        assert_eq!(value(&rules[1], "--comment"), None);
        let targets: Vec<_> = rules.iter().map(|rule| target(rule).unwrap()).collect();
        assert_eq!(targets, [("KUBE-POSTROUTING", false), ("X", true)]);
    }

    #[test]
    fn words_are_grouped_by_quotes() {
        assert_eq!(words(r#"-A X --comment "a \"b\" c" -j Y"#), ["-A", "X", "--comment", "a \"b\" c", "-j", "Y"]);
        assert_eq!(
            words(r#"-i a\b  --comment "" -m"#),
            ["-i", r"a\b", "--comment", "", "-m"],
            "a backslash escapes only inside quotes"
        );
        assert_eq!(target(&words("-s 10.5.0.0/16")), None);
        assert_eq!(target(&words("-s 10.5.0.0/16 -j")), None);
    }
}
