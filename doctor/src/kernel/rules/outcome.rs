// SPDX-License-Identifier: Apache-2.0
//! What a chain of a firewall does with a packet, and how certain that is.

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes on unchanged.
    Accepted,
    /// It is dropped.
    Dropped,
    /// Its source address is translated.
    SourceTranslated,
    /// Its destination address is translated.
    DestinationTranslated,
}

/// What a chain does with a packet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outcome {
    /// What becomes of the packet if no rule matches that was not evaluated, with the deciding rule or policy. `None` if the chain ends without a
    /// decision.
    pub fate: Option<(Fate, String)>,
    /// The first rule that was not evaluated and could decide otherwise, with its decision.
    pub not_evaluated: Option<(Fate, String)>,
    /// The first rule that was not evaluated and may let the packet pass before it is dropped. [`Outcome::not_evaluated`] may quote another one.
    pub may_pass: Option<String>,
    /// The first rule that lets some of these packets pass: those up to a rate, or those that a random number chooses.
    pub some_pass: Option<String>,
    /// The first rule that drops some of these packets: those that are beyond a rate, or those that a random number chooses.
    pub limited: Option<String>,
    /// A rule takes the packet out of connection tracking.
    pub untracked: bool,
    /// A rule may have given the packet a mark, which chains behind this one may test.
    pub may_have_mark: bool,
}

impl Outcome {
    /// Remembers a rule that was not evaluated. The first one is quoted, but one that drops packets matters more.
    pub fn doubt(&mut self, fate: Fate, rule: String) {
        if fate != Fate::Dropped {
            self.may_pass.get_or_insert_with(|| rule.clone());
        }
        self.quote(fate, rule);
    }

    /// Remembers a rule that matches only some of these packets, because it tests a rate or a random number.
    pub fn doubt_by_chance(&mut self, fate: Fate, rule: String) {
        let first = if fate == Fate::Dropped { &mut self.limited } else { &mut self.some_pass };
        first.get_or_insert_with(|| rule.clone());
        self.quote(fate, rule);
    }

    fn quote(&mut self, fate: Fate, rule: String) {
        let is_worse = |(before, _): &(Fate, String)| fate == Fate::Dropped && *before != Fate::Dropped;
        if self.not_evaluated.as_ref().is_none_or(is_worse) {
            self.not_evaluated = Some((fate, rule));
        }
    }

    /// Remembers rules of which nothing is known: they may drop the packet or let it pass.
    pub fn not_followed(&mut self, rules: String) {
        self.may_pass.get_or_insert_with(|| rules.clone());
        self.doubt(Fate::Dropped, rules);
    }

    /// Returns true if no rule lets the packet pass before the decision, or might do so.
    pub fn lets_none_pass(&self) -> bool {
        self.may_pass.is_none() && self.some_pass.is_none()
    }

    /// Returns the rule that certainly drops the packet.
    pub fn certainly_dropped(&self) -> Option<&str> {
        match &self.fate {
            Some((Fate::Dropped, rule)) if self.lets_none_pass() => Some(rule),
            _ => None,
        }
    }

    /// Returns what becomes of the packet, with the deciding rule, unless one that was not evaluated could decide otherwise: the packet may never come
    /// to a rule behind it.
    pub fn certain(self) -> Option<(Fate, String)> {
        let (fate, rule) = self.fate?;
        self.not_evaluated.is_none_or(|(other, _)| other == fate).then_some((fate, rule))
    }

    /// Returns the rule because of which only some packets are dropped: it drops them, or it lets the others pass.
    pub fn drops_some(&self) -> Option<&str> {
        let is_dropped = matches!(&self.fate, Some((Fate::Dropped, _))) && self.may_pass.is_none();
        self.limited.as_ref().or(self.some_pass.as_ref().filter(|_| is_dropped)).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Remembers a rule.
    type Change = fn(&mut Outcome);

    fn dropped() -> Outcome {
        Outcome { fate: Some((Fate::Dropped, "drop".to_owned())), ..Outcome::default() }
    }

    #[test]
    fn a_drop_is_certain_unless_a_rule_may_let_the_packet_pass_before() {
        let may_pass: [Change; 3] = [
            |outcome| outcome.doubt(Fate::Accepted, "may accept".to_owned()),
            |outcome| outcome.doubt_by_chance(Fate::Accepted, "accepts some".to_owned()),
            |outcome| outcome.not_followed("a program decides".to_owned()),
        ];
        for change in may_pass {
            let mut outcome = dropped();
            change(&mut outcome);
            assert_eq!(outcome.certainly_dropped(), None, "{outcome:?}");
        }
        let mut outcome = dropped();
        outcome.doubt(Fate::Dropped, "may drop".to_owned());
        assert_eq!(outcome.certainly_dropped(), Some("drop"), "either rule drops it");
        assert_eq!(outcome.certain(), Some((Fate::Dropped, "drop".to_owned())));
        let mut other = dropped();
        other.doubt(Fate::SourceTranslated, "may translate".to_owned());
        assert_eq!(other.certain(), None);
        let accepted = Outcome { fate: Some((Fate::Accepted, "accept".to_owned())), ..Outcome::default() };
        assert_eq!(accepted.certainly_dropped(), None);
    }

    #[test]
    fn some_packets_are_dropped_beyond_a_rate_or_behind_a_rule_that_lets_others_pass() {
        let mut limited = Outcome::default();
        limited.doubt_by_chance(Fate::Dropped, "beyond a rate".to_owned());
        assert_eq!(limited.drops_some(), Some("beyond a rate"));
        let mut up_to = Outcome::default();
        up_to.doubt_by_chance(Fate::Accepted, "up to a rate".to_owned());
        assert_eq!(up_to.drops_some(), None, "the others pass, too");
        up_to.fate = dropped().fate;
        assert_eq!(up_to.drops_some(), Some("up to a rate"));
        up_to.doubt(Fate::Accepted, "may accept".to_owned());
        assert_eq!(up_to.drops_some(), None, "all of them may pass");
    }

    #[test]
    fn the_first_rule_that_may_drop_the_packet_is_quoted_before_others() {
        let mut outcome = Outcome::default();
        for (fate, rule) in [(Fate::Accepted, "first"), (Fate::Dropped, "second"), (Fate::Dropped, "third")] {
            outcome.doubt(fate, rule.to_owned());
        }
        assert_eq!(outcome.not_evaluated, Some((Fate::Dropped, "second".to_owned())));
        assert_eq!(outcome.may_pass.as_deref(), Some("first"));
    }
}
