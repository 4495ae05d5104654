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
