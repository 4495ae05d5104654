// SPDX-License-Identifier: Apache-2.0
//! How a chain of forwarded packets ends: where what we accept has its place in other people's chains. Pure.
//!
//! A chain that drops all the rest at its end says what happens by default, and we stand before that. A rule that drops all before
//! anything else is looked at is somebody's will (a node cut off by hand): nothing of ours goes before it.

/// What a rule is to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// One of ours.
    Ours,
    /// Drops everything.
    Drops,
    /// Rejects everything.
    Rejects,
    /// Any other.
    Other,
}

/// How a chain ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closing {
    /// Its policy decides.
    Open,
    /// The rule at this place drops all the rest: ours go before it.
    Default(usize),
    /// The rule at this place drops everything, and someone put it there for that.
    Will(usize),
}

impl Closing {
    /// Of a chain with these rules.
    pub fn of(rules: &[Rule]) -> Closing {
        let Some(at) = rules.iter().position(|rule| matches!(rule, Rule::Drops | Rule::Rejects)) else {
            return Closing::Open;
        };
        let (before, after) = (&rules[..at], &rules[at + 1..]);
        // Ours are written before a default: behind it they are only where someone put it before them.
        let last = after.is_empty();
        // A chain that says nothing but "reject" is what distributions load; nothing but "drop" is a hand's work.
        let alone = before.is_empty() && rules[at] == Rule::Drops;
        if last && !alone { Closing::Default(at) } else { Closing::Will(at) }
    }

    /// Rules from here on are never reached; `len`: how many there are.
    pub fn end(self, len: usize) -> usize {
        match self {
            Closing::Open => len,
            Closing::Default(at) | Closing::Will(at) => at,
        }
    }
}

/// Where a new rule of ours goes: at the end, but before what drops all the rest there.
pub fn place(rules: &[Rule]) -> usize {
    match rules {
        [] | [Rule::Drops] => rules.len(),
        [rest @ .., Rule::Drops | Rule::Rejects] => rest.len(),
        _ => rules.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::Closing::{self, Default, Open, Will};
    use super::Rule::{Drops, Other, Ours, Rejects};
    use super::place;

    #[test]
    fn a_last_rule_is_a_default_an_earlier_one_somebodys_will() {
        for (rules, wanted) in [
            (&[][..], Open),
            (&[Other, Ours], Open),
            (&[Rejects], Default(0)),
            (&[Other, Rejects], Default(1)),
            (&[Other, Drops], Default(1)),
            (&[Other, Ours, Drops], Default(2)),
            (&[Ours, Drops], Default(1)),
            (&[Drops], Will(0)),
            (&[Drops, Ours], Will(0)),
            (&[Rejects, Ours], Will(0)),
            (&[Drops, Ours, Rejects], Will(0)),
            (&[Other, Drops, Other], Will(1)),
        ] {
            assert_eq!(Closing::of(rules), wanted, "{rules:?}");
        }
        for (rules, wanted) in [
            (&[][..], 0),
            (&[Drops], 1),
            (&[Rejects], 0),
            (&[Other], 1),
            (&[Other, Drops], 1),
            (&[Drops, Other, Rejects], 2),
        ] {
            assert_eq!(place(rules), wanted, "{rules:?}");
        }
        assert_eq!((Open.end(3), Default(1).end(3), Will(0).end(3)), (3, 1, 0));
    }
}
