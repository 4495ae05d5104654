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

#[cfg(test)]
mod tests {
    use weft_backends::traffic_rules::{Policy, rules};
    use weft_subnet::cidr::{Family, Subnets};

    use super::*;

    /// Returns the rule that accepts packets from 10.5.0.0/16.
    fn accept() -> Accept {
        let networks = Subnets { v4: "10.5.0.0/16".parse().ok(), v6: None };
        let own = Subnets { v4: "10.5.7.0/24".parse().ok(), v6: None };
        let rules = rules(&networks, &own, &Policy { masquerade: None, forward: true });
        Accept::all(rules.of(Family::V4).unwrap()).remove(0)
    }

    fn cmp(data: &[u8]) -> Expr {
        Expr::Cmp { equal: true, data: data.to_vec() }
    }

    /// The rule as iptables writes it: it loads the two bytes of the prefix from the source address.
    fn by_iptables() -> Vec<Expr> {
        let load = Expr::Payload { base: Base::Network, offset: 12, len: 2 };
        vec![load, cmp(&[10, 5]), Expr::Counter, Expr::Accept]
    }

    /// A rule that accepts fewer packets does not make ours superfluous.
    #[test]
    fn only_a_rule_that_accepts_exactly_our_packets_says_the_same() {
        let (accept, family) = (accept(), [Expr::Family, cmp(&[2])]);
        let of_both_families = [&family[..], &by_iptables()[..]].concat();
        for same in [accept.exprs.clone(), by_iptables(), of_both_families.clone()] {
            assert!(accept.is_said_by(&same) && accept.has_same_test(&same), "{same:?}");
        }
        let with = |at: usize, expr: Expr| {
            let mut rule = by_iptables();
            rule[at] = expr;
            rule
        };
        let not_of_family = {
            let mut rule = of_both_families;
            rule[1] = Expr::Cmp { equal: false, data: vec![2] };
            rule
        };
        for other in [
            Vec::new(),
            with(0, Expr::Payload { base: Base::Network, offset: 16, len: 2 }),
            with(1, cmp(&[10, 6])),
            with(1, Expr::Cmp { equal: false, data: vec![10, 5] }),
            with(3, Expr::Drop),
            [&expr::l4proto(6)[..], &by_iptables()[..]].concat(),
            [&by_iptables()[..2], &expr::l4proto(6)[..], &[Expr::Accept][..]].concat(),
            not_of_family,
        ] {
            assert!(!accept.is_said_by(&other), "{other:?}");
        }
        assert!(accept.has_same_test(&with(3, Expr::Drop)), "whatever it does with the packet");
        assert!(!accept.has_same_test(&with(1, cmp(&[10, 6]))));
    }

    #[test]
    fn a_chain_ends_with_a_rule_of_another_program_that_drops_or_rejects_all_packets() {
        let ours = "weft forward";
        let rule = |comment: &str, exprs: &[Expr]| ReadRule {
            exprs: [&[Expr::Counter][..], exprs].concat(),
            comment: comment.to_owned(),
            handle: 1,
        };
        let (drops, some) = (rule("", &[Expr::Drop]), rule("", &[Expr::L4Proto, cmp(&[6]), Expr::Drop]));
        let rejects = |name: &str| rule("", &[Expr::Other(name.to_owned())]);
        for (last, wanted) in [
            (drops.clone(), Ending::Default(1)),
            (rejects("reject"), Ending::Default(1)),
            (rejects("REJECT"), Ending::Default(1)),
            (rejects("LOG"), Ending::Policy),
            (rule("", &[Expr::Accept]), Ending::Policy),
            (some.clone(), Ending::Policy),
            (rule(ours, &[Expr::Drop]), Ending::Policy),
        ] {
            assert_eq!(ending(&[some.clone(), last.clone()], ours), wanted, "{last:?}");
        }
        assert_eq!(ending(&[drops, some], ours), Ending::Block(0));
    }
}
