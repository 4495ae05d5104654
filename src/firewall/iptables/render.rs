// SPDX-License-Identifier: Apache-2.0
//! Rules as text for `iptables-restore --noflush`: only what differs from what `iptables-save` printed. Pure functions.
//!
//! The text of one table is one transaction: iptables writes all of it or nothing, so no packet meets an incomplete chain.

use std::collections::BTreeSet;

use weft_backends::traffic_rules::{FamilyRules, Rule, Test, Verdict};
use weft_cni::iptables::{Saved, Table, target, words};

use super::meaning::{options, role};
use crate::firewall::forward_chain;

/// A chain of our own, and the chain of iptables that jumps to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookedChain {
    /// `nat` or `filter`.
    pub table: &'static str,
    /// `POSTROUTING` or `FORWARD`.
    pub hook: &'static str,
    /// The name of our chain.
    pub chain: String,
}

/// The two chains of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookedChains {
    /// The chain in table `nat`.
    pub masquerade: HookedChain,
    /// The chain in table `filter`.
    pub forward: HookedChain,
}

impl HookedChains {
    /// Returns the chains of an instance: `WEFT-POSTRTG` and `WEFT-FWD`, or `WEFT-1A2B3C4D-...` (at most 28 bytes).
    pub fn of(instance: &str) -> HookedChains {
        HookedChains::with_prefix(&instance.to_uppercase())
    }

    /// Returns the chains of flannel.
    pub fn of_flannel() -> HookedChains {
        HookedChains::with_prefix("FLANNEL")
    }

    fn with_prefix(prefix: &str) -> HookedChains {
        let chain = |table, hook, end| HookedChain { table, hook, chain: format!("{prefix}-{end}") };
        HookedChains { masquerade: chain("nat", "POSTROUTING", "POSTRTG"), forward: chain("filter", "FORWARD", "FWD") }
    }

    fn both(&self) -> [&HookedChain; 2] {
        [&self.masquerade, &self.forward]
    }
}

/// Returns the text that brings the chains to these rules, or `None` if they are there already. `random_fully` is true if the program knows
/// `--random-fully`.
pub fn changes(saved: &Saved, chains: &HookedChains, rules: &FamilyRules, random_fully: bool) -> Option<String> {
    let wanted = [&rules.masquerade, &rules.forward];
    let parts = chains.both().into_iter().zip(wanted).map(|(hooked, rules)| {
        let rules: Vec<String> = rules.iter().flat_map(|rule| lines(rule, random_fully)).collect();
        if rules.is_empty() { removal_of(saved, hooked) } else { change_of(saved, hooked, &rules) }
    });
    joined(parts)
}

/// Returns the text that removes the chains and every jump to them, or `None` if there are none.
pub fn removal(saved: &Saved, chains: &HookedChains) -> Option<String> {
    joined(chains.both().into_iter().map(|hooked| removal_of(saved, hooked)))
}

/// Returns the names of those of the chains that exist, or that a rule jumps to.
pub fn present(saved: &Saved, chains: &HookedChains) -> Vec<String> {
    let present = chains.both().into_iter().filter(|hooked| removal_of(saved, hooked).is_some());
    present.map(|hooked| hooked.chain.clone()).collect()
}

fn joined(parts: impl Iterator<Item = Option<String>>) -> Option<String> {
    let text: String = parts.flatten().collect();
    (!text.is_empty()).then_some(text)
}

fn change_of(saved: &Saved, hooked: &HookedChain, wanted: &[String]) -> Option<String> {
    let none = Table::new();
    let table = saved.table(hooked.table).unwrap_or(&none);
    let mut text = String::new();
    if !table.get(&hooked.chain).is_some_and(|chain| same(&chain.rules, wanted)) {
        // This line creates the chain, or empties it when it exists.
        text += &format!(":{} - [0:0]\n", hooked.chain);
        wanted.iter().for_each(|rule| text += &format!("-A {} {rule}\n", hooked.chain));
    }
    let jumps = jumps(table, &hooked.chain);
    let hook = table.get(hooked.hook).map(|chain| chain.rules.as_slice()).unwrap_or_default();
    // The jump was written before a rule that drops all remaining packets. When it is behind such a rule, a person put the rule
    // before it, and the jump stays where it is.
    let is_right =
        |jump: &Jump<'_>| jump.chain == hooked.hook && options(jump.rule) == [format!("-j {}", hooked.chain)];
    if jumps.len() != 1 || !jumps.iter().all(is_right) {
        for Jump { chain, rule } in &jumps {
            text += &format!("-D {chain} {rule}\n");
        }
        // The rules of other programs come first, because network policies are among them. But no packet passes a rule that drops
        // all remaining packets, so the jump goes before it.
        let roles = hook.iter().map(|rule| role(rule, &hooked.chain));
        let others: Vec<_> = roles.filter(|role| *role != forward_chain::Rule::Ours).collect();
        let at = forward_chain::index_of_new_rule(&others);
        text += &match at < others.len() {
            true => format!("-I {} {} -j {}\n", hooked.hook, at + 1, hooked.chain),
            false => format!("-A {} -j {}\n", hooked.hook, hooked.chain),
        };
    }
    transaction(hooked, &text)
}

fn removal_of(saved: &Saved, hooked: &HookedChain) -> Option<String> {
    let table = saved.table(hooked.table)?;
    let mut text = String::new();
    for Jump { chain, rule } in jumps(table, &hooked.chain) {
        // Rules in our own chain are removed with the chain.
        if chain != hooked.chain {
            text += &format!("-D {chain} {rule}\n");
        }
    }
    if table.contains_key(&hooked.chain) {
        text += &format!("-F {0}\n-X {0}\n", hooked.chain);
    }
    transaction(hooked, &text)
}

fn transaction(hooked: &HookedChain, text: &str) -> Option<String> {
    (!text.is_empty()).then(|| format!("*{}\n{text}COMMIT\n", hooked.table))
}

/// A rule that jumps to a chain, and the chain that it is in.
struct Jump<'a> {
    chain: &'a str,
    rule: &'a str,
}

/// Returns every rule of the table that jumps to the chain.
fn jumps<'a>(table: &'a Table, to: &str) -> Vec<Jump<'a>> {
    let leads = |rule: &str| rule.contains(to) && target(&words(rule)).is_some_and(|(target, _)| target == to);
    let all = table.iter().flat_map(|(chain, content)| content.rules.iter().map(move |rule| Jump { chain, rule }));
    all.filter(|jump| leads(jump.rule)).collect()
}

/// Returns the forward rules as rules of a chain.
pub fn accepts(rules: &FamilyRules) -> Vec<String> {
    rules.forward.iter().flat_map(|rule| lines(rule, true)).collect()
}

/// Returns true if a rule does exactly what `wanted` does. Its comment does not matter.
pub fn is_same(rule: &str, wanted: &str) -> bool {
    options(rule).into_iter().filter(|option| !option.starts_with("--comment ")).eq(options(wanted))
}

fn same(present: &[String], wanted: &[String]) -> bool {
    present.len() == wanted.len() && present.iter().zip(wanted).all(|(one, two)| options(one) == options(two))
}

/// Returns the lines for one rule. A rule with a list of destinations needs one line for each of them.
fn lines(rule: &Rule, random_fully: bool) -> Vec<String> {
    let mut all = vec![String::new()];
    for test in &rule.tests {
        let words: BTreeSet<String> = match test {
            // Every packet is from and to this network. iptables-save does not print such an option, so a rule that has it is never found again.
            Test::From(net) | Test::To(net) if net.prefix_len() == 0 => [String::new()].into(),
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
