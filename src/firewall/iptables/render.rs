// SPDX-License-Identifier: Apache-2.0
//! Rules as text for `iptables-restore --noflush`: only what differs from what `iptables-save` printed. Pure.
//!
//! The text of one table is one transaction: iptables takes all of it or nothing, and no packet meets a chain half filled.

use std::collections::BTreeSet;

use weft_backends::masq::{FamilyRules, Rule, Test, Verdict};

use super::saved::{Saved, Table, options, role, target};
use crate::firewall::forward_chain;

/// A chain and the hook that jumps to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// `nat`, `filter`.
    pub table: &'static str,
    /// `POSTROUTING`, `FORWARD`.
    pub hook: &'static str,
    /// The chain.
    pub chain: String,
}

/// The two chains of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// In `nat`.
    pub masquerade: Place,
    /// In `filter`.
    pub forward: Place,
}

impl Places {
    /// `WEFT-POSTRTG` and `WEFT-FWD`, or `WEFT-1A2B3C4D-...` (at most 28 bytes).
    pub fn of(instance: &str) -> Places {
        Places::with_prefix(&instance.to_uppercase())
    }

    /// Those of flannel.
    pub fn flannels() -> Places {
        Places::with_prefix("FLANNEL")
    }

    fn with_prefix(prefix: &str) -> Places {
        let place = |table, hook, end| Place { table, hook, chain: format!("{prefix}-{end}") };
        Places { masquerade: place("nat", "POSTROUTING", "POSTRTG"), forward: place("filter", "FORWARD", "FWD") }
    }

    fn both(&self) -> [&Place; 2] {
        [&self.masquerade, &self.forward]
    }
}

/// What brings the chains to these rules; `None`: they are so already. `random_fully`: the program knows `--random-fully`.
pub fn changes(saved: &Saved, places: &Places, rules: &FamilyRules, random_fully: bool) -> Option<String> {
    let wanted = [&rules.masquerade, &rules.forward];
    let parts = places.both().into_iter().zip(wanted).map(|(place, rules)| {
        let rules: Vec<String> = rules.iter().flat_map(|rule| lines(rule, random_fully)).collect();
        if rules.is_empty() { removal_of(saved, place) } else { change_of(saved, place, &rules) }
    });
    joined(parts)
}

/// What removes the chains and every jump to them; `None`: neither is there.
pub fn removal(saved: &Saved, places: &Places) -> Option<String> {
    joined(places.both().into_iter().map(|place| removal_of(saved, place)))
}

/// Which of these chains, or jumps to them, are there.
pub fn present(saved: &Saved, places: &Places) -> Vec<String> {
    let there = places.both().into_iter().filter(|place| removal_of(saved, place).is_some());
    there.map(|place| place.chain.clone()).collect()
}

fn joined(parts: impl Iterator<Item = Option<String>>) -> Option<String> {
    let text: String = parts.flatten().collect();
    (!text.is_empty()).then_some(text)
}

fn change_of(saved: &Saved, place: &Place, wanted: &[String]) -> Option<String> {
    let none = Table::new();
    let table = saved.table(place.table).unwrap_or(&none);
    let mut text = String::new();
    if !table.get(&place.chain).is_some_and(|chain| same(&chain.rules, wanted)) {
        // To name a chain here creates it, or empties it when it is there.
        text += &format!(":{} - [0:0]\n", place.chain);
        wanted.iter().for_each(|rule| text += &format!("-A {} {rule}\n", place.chain));
    }
    let jumps = jumps(table, &place.chain);
    let hook = table.get(place.hook).map(|chain| chain.rules.as_slice()).unwrap_or_default();
    // Ours were written before what drops all the rest. Behind such a rule they are only where someone put that rule before them:
    // left there.
    let right = |(chain, _, spec): &(&str, usize, &str)| {
        *chain == place.hook && options(spec) == [format!("-j {}", place.chain)]
    };
    if jumps.len() != 1 || !jumps.iter().all(right) {
        for (chain, _, spec) in &jumps {
            text += &format!("-D {chain} {spec}\n");
        }
        // Others' rules come first (policies for pods are among them), but nothing comes after what drops all the rest.
        let roles = hook.iter().map(|rule| role(rule, &place.chain));
        let others: Vec<_> = roles.filter(|role| *role != forward_chain::Rule::Ours).collect();
        let at = forward_chain::place(&others);
        text += &match at < others.len() {
            true => format!("-I {} {} -j {}\n", place.hook, at + 1, place.chain),
            false => format!("-A {} -j {}\n", place.hook, place.chain),
        };
    }
    transaction(place, &text)
}

fn removal_of(saved: &Saved, place: &Place) -> Option<String> {
    let table = saved.table(place.table)?;
    let mut text = String::new();
    for (chain, _, spec) in jumps(table, &place.chain) {
        // Rules in our own chain go with it.
        if chain != place.chain {
            text += &format!("-D {chain} {spec}\n");
        }
    }
    if table.contains_key(&place.chain) {
        text += &format!("-F {0}\n-X {0}\n", place.chain);
    }
    transaction(place, &text)
}

fn transaction(place: &Place, text: &str) -> Option<String> {
    (!text.is_empty()).then(|| format!("*{}\n{text}COMMIT\n", place.table))
}

/// Every rule of the table that goes on to the chain: where it is, its place there, and its text.
fn jumps<'a>(table: &'a Table, to: &str) -> Vec<(&'a str, usize, &'a str)> {
    let mut jumps = Vec::new();
    for (name, chain) in table {
        for (at, spec) in chain.rules.iter().enumerate() {
            if spec.contains(to) && target(spec).is_some_and(|target| target == to) {
                jumps.push((name.as_str(), at, spec.as_str()));
            }
        }
    }
    jumps
}

/// What accepts the packets that these rules accept, as rules of a chain.
pub fn accepts(rules: &FamilyRules) -> Vec<String> {
    rules.forward.iter().flat_map(|rule| lines(rule, true)).collect()
}

/// Whether a rule, its comment aside, says just this.
pub fn is_same(rule: &str, wanted: &str) -> bool {
    options(rule).into_iter().filter(|option| !option.starts_with("--comment ")).eq(options(wanted))
}

fn same(there: &[String], wanted: &[String]) -> bool {
    there.len() == wanted.len() && there.iter().zip(wanted).all(|(one, two)| options(one) == options(two))
}

/// One rule of the core is one rule here, but for a list of destinations: that is one for each.
fn lines(rule: &Rule, random_fully: bool) -> Vec<String> {
    let mut all = vec![String::new()];
    for test in &rule.tests {
        let words: BTreeSet<String> = match test {
            Test::Mark(bits) => [format!("-m mark --mark {bits:#x}/{bits:#x} ")].into(),
            Test::From(net) => [format!("-s {net} ")].into(),
            Test::NotFrom(net) => [format!("! -s {net} ")].into(),
            Test::To(net) => [format!("-d {net} ")].into(),
            Test::NotTo(net) => [format!("! -d {net} ")].into(),
            Test::ToOneOf(nodes) => nodes.iter().map(|ip| format!("-d {} ", ipnet::IpNet::from(*ip))).collect(),
        };
        all = all.iter().flat_map(|line| words.iter().map(move |word| format!("{line}{word}"))).collect();
    }
    let verdict = match rule.verdict {
        Verdict::Return => "-j RETURN",
        Verdict::Accept => "-j ACCEPT",
        Verdict::Masquerade { fully_random: true } if random_fully => "-j MASQUERADE --random-fully",
        Verdict::Masquerade { .. } => "-j MASQUERADE",
    };
    all.iter_mut().for_each(|line| line.push_str(verdict));
    all
}

#[cfg(test)]
mod tests;
