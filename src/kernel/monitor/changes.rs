// SPDX-License-Identifier: Apache-2.0
//! What notifications that are read at once say together.

use std::collections::HashMap;

use weft_backends::state::{Key, ObservedValue};

use super::super::Notice;

/// What changed, according to the notifications that were read at once. Each entry is listed once with its last state, at the position
/// of its first notification.
#[derive(Debug, Default)]
pub(super) struct Changes {
    entries: Vec<(Key, Option<ObservedValue>)>,
    at: HashMap<Key, usize>,
    pub(super) links: bool,
    pub(super) tables: Tables,
    pub(super) lost: bool,
}

/// The routing tables that changed, apart from the entries that are listed one by one.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// Routes of other programs; if they matter, also those of other tables, and policy rules.
    pub(super) foreign: bool,
    fence: bool,
}

impl Tables {
    /// Notes that a rule, or a route outside the main table, changed. It is one of our fence, or else it matters only if `foreign` is true.
    pub(super) fn note(&mut self, ours: bool, foreign: bool) {
        self.fence |= ours;
        self.foreign |= foreign && !ours;
    }
}

impl Changes {
    /// Notes the state of an entry. `None`: it is gone.
    pub(super) fn put(&mut self, key: Key, now: Option<ObservedValue>) {
        match self.at.get(&key) {
            Some(at) => self.entries[*at].1 = now,
            None => {
                self.at.insert(key, self.entries.len());
                self.entries.push((key, now));
            }
        }
    }

    /// Returns what the agent is told.
    pub(super) fn notices(self) -> Vec<Notice> {
        let mut notices = Vec::new();
        if self.lost {
            notices.push(Notice::Lost);
        }
        if self.links {
            notices.push(Notice::Links);
        }
        if self.tables.foreign {
            notices.push(Notice::Routes);
        }
        if self.tables.fence {
            notices.push(Notice::Fence);
        }
        notices.extend(self.entries.into_iter().map(|(key, now)| Notice::Entry(key, now)));
        notices
    }
}

#[cfg(test)]
mod tests {
    use weft_backends::state::Value;

    use super::*;

    #[test]
    fn of_several_changes_of_one_entry_the_last_one_is_reported() {
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|ip| Key::Open(ip.parse().unwrap()));
        let there = || Some(ObservedValue::from(Value::Open));
        let mut changes = Changes::default();
        changes.put(one, there());
        changes.put(other, None);
        changes.put(one, None);
        changes.put(other, there());
        assert_eq!(changes.notices(), [Notice::Entry(one, None), Notice::Entry(other, there())]);
    }
}
