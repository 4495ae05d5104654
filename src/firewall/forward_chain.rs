// SPDX-License-Identifier: Apache-2.0
//! Where rules that accept our packets go in another program's chain of forwarded packets. Pure functions.
//!
//! A rule at the end of a chain that drops all remaining packets is the default of that chain, and our rules go before it. A rule that
//! drops all packets before any other rule is checked was put there on purpose, for example to cut a node off by hand. Nothing of ours
//! goes before such a rule.

/// What a rule of the chain does, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// The rule is ours.
    Ours,
    /// It drops every packet.
    DropsAll,
    /// It rejects every packet.
    RejectsAll,
    /// Any other rule.
    Other,
}

/// What happens to packets that no rule of the chain accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The policy of the chain decides.
    Policy,
    /// The rule at this index drops all remaining packets by default. Our rules go before it.
    Default(usize),
    /// The rule at this index drops all packets, and a person put it there on purpose.
    Block(usize),
}

impl Ending {
    /// Returns the ending of a chain with these rules.
    pub fn of(rules: &[Rule]) -> Ending {
        let Some(at) = rules.iter().position(|rule| matches!(rule, Rule::DropsAll | Rule::RejectsAll)) else {
            return Ending::Policy;
        };
        // Our rules are written before a default. When they are behind the rule, a person put the rule before them.
        let is_last = at + 1 == rules.len();
        // Distributions load a chain with a single REJECT. A single DROP was added by a person.
        let is_only_drop = at == 0 && rules[at] == Rule::DropsAll;
        if is_last && !is_only_drop { Ending::Default(at) } else { Ending::Block(at) }
    }

    /// Rules from this index on are never reached, in a chain of `len` rules.
    pub fn reach(self, len: usize) -> usize {
        match self {
            Ending::Policy => len,
            Ending::Default(at) | Ending::Block(at) => at,
        }
    }
}

/// Returns the index for a new rule of ours: at the end, but before a rule that drops all remaining packets there.
pub fn index_of_new_rule(rules: &[Rule]) -> usize {
    match rules {
        [] | [Rule::DropsAll] => rules.len(),
        [rest @ .., Rule::DropsAll | Rule::RejectsAll] => rest.len(),
        _ => rules.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::Ending::{self, Block, Default, Policy};
    use super::Rule::{DropsAll, Other, Ours, RejectsAll};
    use super::index_of_new_rule;

    #[test]
    fn a_last_rule_is_a_default_and_an_earlier_one_is_a_block() {
        for (rules, wanted) in [
            (&[][..], Policy),
            (&[Other, Ours], Policy),
            (&[RejectsAll], Default(0)),
            (&[Other, RejectsAll], Default(1)),
            (&[Other, DropsAll], Default(1)),
            (&[Other, Ours, DropsAll], Default(2)),
            (&[Ours, DropsAll], Default(1)),
            (&[DropsAll], Block(0)),
            (&[DropsAll, Ours], Block(0)),
            (&[RejectsAll, Ours], Block(0)),
            (&[DropsAll, Ours, RejectsAll], Block(0)),
            (&[Other, DropsAll, Other], Block(1)),
        ] {
            assert_eq!(Ending::of(rules), wanted, "{rules:?}");
        }
        assert_eq!((Policy.reach(3), Default(1).reach(3), Block(0).reach(3)), (3, 1, 0));
    }

    #[test]
    fn a_new_rule_goes_to_the_end_but_before_a_default() {
        for (rules, wanted) in [
            (&[][..], 0),
            (&[DropsAll], 1),
            (&[RejectsAll], 0),
            (&[Other], 1),
            (&[Other, DropsAll], 1),
            (&[DropsAll, Other, RejectsAll], 2),
        ] {
            assert_eq!(index_of_new_rule(rules), wanted, "{rules:?}");
        }
    }
}
