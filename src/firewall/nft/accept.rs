// SPDX-License-Identifier: Apache-2.0
//! Recognises, in chains of other programs, the rules that accept what our forward rules accept, and how such a chain ends. Pure
//! functions over rules that were read from the kernel.

use weft_backends::traffic_rules::FamilyRules;

use super::expr::{self, Base, Expr};
use super::table::ReadRule;
use crate::firewall::forward_chain::{Ending, Rule};

/// One of our forward rules, in the two forms in which programs write it.
#[derive(Debug)]
pub struct Accept {
    /// The rule as we write it.
    pub exprs: Vec<Expr>,
    forms: [Vec<Expr>; 2],
}

impl Accept {
    /// Returns the forward rules of a family.
    pub fn all(rules: &FamilyRules) -> Vec<Accept> {
        let accept = |exprs: Vec<Expr>| Accept { forms: forms(&exprs), exprs };
        rules.forward.iter().map(|rule| accept(expr::of(rule))).collect()
    }

    /// Returns true if a rule accepts exactly the packets that ours accepts. Counters do not matter.
    pub fn is_said_by(&self, rule: &[Expr]) -> bool {
        let found: Vec<&Expr> = rule.iter().filter(|expr| **expr != Expr::Counter).collect();
        self.forms.iter().any(|form| {
            let Some(at) = found.len().checked_sub(form.len()) else { return false };
            found[at..].iter().copied().eq(form.iter()) && tests_family_only(&found[..at])
        })
    }

    /// Returns true if a rule tests the same addresses, whatever it does with the packet.
    pub fn has_same_test(&self, rule: &[Expr]) -> bool {
        // The last expression of each form is the verdict.
        let tests = self.forms.each_ref().map(|form| &form[..form.len() - 1]);
        tests.iter().any(|test| rule.windows(test.len()).any(|part| part == *test))
    }
}

/// In a table of both families, a rule tests the family of the packet first.
fn tests_family_only(exprs: &[&Expr]) -> bool {
    matches!(exprs, [] | [Expr::Family, Expr::Cmp { equal: true, .. }])
}

/// Returns a rule as we write it, which loads the whole address and masks it, and as iptables writes it, which loads only the bytes of the
/// prefix.
fn forms(exprs: &[Expr]) -> [Vec<Expr>; 2] {
    let plain: Vec<Expr> = exprs.iter().filter(|expr| **expr != Expr::Counter).cloned().collect();
    let mut short = plain.clone();
    if let [Expr::Payload { base: Base::Network, offset, .. }, Expr::Mask(mask), Expr::Cmp { equal, data }, rest @ ..] =
        &plain[..]
    {
        let bytes = mask.iter().take_while(|byte| **byte == 255).count();
        if mask.iter().skip(bytes).all(|byte| *byte == 0) {
            let len = u32::try_from(bytes).unwrap_or_default();
            let load = Expr::Payload { base: Base::Network, offset: *offset, len };
            let cmp = Expr::Cmp { equal: *equal, data: data[..bytes].to_vec() };
            short = [load, cmp].into_iter().chain(rest.iter().cloned()).collect();
        }
    }
    [plain, short]
}

/// Returns how a chain with these rules ends. Rules with this comment are ours.
pub fn ending(rules: &[ReadRule], comment: &str) -> Ending {
    let role = |rule: &ReadRule| {
        let mut exprs = rule.exprs.iter().filter(|expr| **expr != Expr::Counter);
        match (exprs.next(), exprs.next()) {
            _ if rule.comment == comment => Rule::Ours,
            (Some(Expr::Drop), None) => Rule::DropsAll,
            (Some(Expr::Other(name)), None) if name == "reject" || name == "REJECT" => Rule::RejectsAll,
            _ => Rule::Other,
        }
    };
    Ending::of(&rules.iter().map(role).collect::<Vec<_>>())
}
