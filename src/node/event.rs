// SPDX-License-Identifier: Apache-2.0
//! What the store sent, as text for the history. Only a few leases are named, because thousands may change at once.

use std::fmt;

use weft_subnet::lease::Id;
use weft_subnet::source::RecordChange;

/// Maximum number of leases that are named.
const MAX_NAMED: usize = 8;
/// Maximum length of a name. Other programs may write keys of any length into the store.
const MAX_NAME: usize = 64;

/// What came together.
#[derive(Debug, Default)]
pub(super) struct StoreEvent {
    parts: Vec<String>,
    leases: usize,
}

impl StoreEvent {
    /// Adds what happened to this lease.
    pub(super) fn lease(&mut self, id: &Id, what: &str) {
        self.leases += 1;
        if self.leases <= MAX_NAMED {
            let id: String = id.chars().take(MAX_NAME).collect();
            self.parts.push(format!("lease {id} {what}"));
        }
    }

    /// Adds leases that were written or removed.
    pub(super) fn changes(&mut self, changes: &[RecordChange]) {
        for change in changes {
            match change {
                RecordChange::Written(record) => self.lease(&record.id, "changed"),
                RecordChange::Removed(id) => self.lease(id, "was removed"),
            }
        }
    }

    /// Adds that a list of so many leases came.
    pub(super) fn list(&mut self, leases: usize) {
        self.parts.push(format!("the store sent a list of {leases} leases"));
    }

    /// Adds that net-conf changed.
    pub(super) fn net_conf(&mut self) {
        self.parts.push("net-conf changed".to_owned());
    }
}

impl fmt::Display for StoreEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.parts.join(", "))?;
        match self.leases.saturating_sub(MAX_NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} other leases"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_leases_are_named_and_the_others_counted() {
        let named = |leases: usize| {
            let mut event = StoreEvent::default();
            (0..leases).for_each(|number| event.lease(&format!("l{number}").into(), "changed"));
            event.to_string()
        };
        let all = (0..MAX_NAMED).map(|number| format!("lease l{number} changed")).collect::<Vec<_>>().join(", ");
        assert_eq!(named(MAX_NAMED), all);
        assert_eq!(named(MAX_NAMED + 2), format!("{all} and 2 other leases"));
        let mut event = StoreEvent::default();
        event.lease(&"x".repeat(1000).into(), "was removed");
        assert_eq!(event.to_string(), format!("lease {} was removed", "x".repeat(MAX_NAME)));
    }
}
