// SPDX-License-Identifier: Apache-2.0
//! The steps for chains of a firewall.

use super::explanation::{State, Step};
use crate::kernel::rules::{Fate, Outcome};

/// What the step of a chain says that translates the source address.
pub(super) const TRANSLATED: &str = "the source address is translated";

impl Outcome {
    /// Returns the outcome of a chain that translates source addresses, as a step.
    pub fn nat_step(self, name: &str) -> Step {
        let mut text = match &self.fate {
            Some((Fate::SourceTranslated, rule)) => format!("{name}: {TRANSLATED}: {rule}"),
            _ => format!("{name}: the source address stays"),
        };
        if let Some((_, unread)) = &self.not_evaluated {
            text.push_str(&format!("; not evaluated: {unread}"));
        }
        Step::ok("rules", text)
    }

    /// Returns the outcome as a step. `name` says which chain it is, and `remedy` what to do if it drops the packet.
    pub fn step(self, name: &str, remedy: &str) -> Step {
        let decided = |text: &str| match text {
            "" => "no rule decides".to_owned(),
            text => text.to_owned(),
        };
        let (fate, rule) = self.fate.map_or((Fate::Accepted, String::new()), |(fate, rule)| (fate, rule));
        let word = match fate {
            Fate::Accepted => "accepted",
            Fate::Dropped => "dropped",
            Fate::SourceTranslated => "source address translated",
            Fate::DestinationTranslated => "destination address translated",
        };
        let mut text = format!("{name}: {word}: {}", decided(&rule));
        let other = match fate {
            Fate::Dropped => self.may_pass.or(self.some_pass).map(|rule| (Fate::Accepted, rule)),
            _ => self.not_evaluated.filter(|(other, _)| *other != fate),
        };
        if let Some((_, unread)) = &other {
            text.push_str(&format!("; not evaluated: {unread}"));
        }
        let step = Step::ok("rules", text);
        match (fate, other) {
            (Fate::Accepted, _) if self.limited.is_some() => Step {
                state: State::Doubt,
                because: self.limited.map(|rule| format!("{name} drops what is beyond a rate or at random: {rule}")),
                remedy: Some(remedy.to_owned()),
                ..step
            },
            (Fate::Dropped, None) => step.broken(format!("{name} drops the packet: {rule}"), remedy),
            (Fate::Dropped, Some((_, unread))) => Step {
                state: State::Doubt,
                because: Some(format!(
                    "{name} drops the packet unless this rule accepts it, which is not evaluated: {unread}"
                )),
                remedy: Some(remedy.to_owned()),
                ..step
            },
            (_, Some((Fate::Dropped, _))) => Step { state: State::Unknown, ..step },
            _ => step,
        }
    }
}
