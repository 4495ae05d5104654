// SPDX-License-Identifier: Apache-2.0
//! Entries that could not be written, and the times at which they are tried again. Asking for the next time takes constant time.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::Key;
use weft_subnet::retry::Backoff;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(30);
const BACKOFF: Backoff = Backoff::without_jitter(FIRST_RETRY, LAST_RETRY);

/// An entry that could not be written.
#[derive(Debug, Clone)]
pub struct Pending {
    /// Why it could not be written: the answer of the kernel, for people.
    pub reason: String,
    /// True if it is tried again soon. Otherwise only the audit tries again.
    pub retry: bool,
    /// True for a link that exists and lacks some of its attributes. It carries entries.
    pub stands: bool,
    /// True for a link that exists and lacks only attributes that packets do not need.
    pub works: bool,
    tries: u32,
    due: Instant,
}

/// All entries that could not be written.
#[derive(Debug, Default)]
pub struct Pendings {
    entries: HashMap<Key, Pending>,
    /// No entry is due before this time. It may be too early, because the entry that set it may be gone.
    next: Option<Instant>,
    /// Number of changes so far.
    version: u64,
}

impl Pendings {
    /// Returns true if every entry is written.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns a number that grows with every change, so that a caller who counts entries need not count again without a change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns this entry if it is pending.
    pub fn get(&self, key: &Key) -> Option<&Pending> {
        self.entries.get(key)
    }

    /// Iterates over all pending entries.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Pending)> {
        self.entries.iter()
    }

    /// Returns the time at which [`Self::due`] should be called again.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// Returns the entries whose time has come.
    pub fn due(&mut self, now: Instant) -> Vec<Key> {
        if self.next.is_none_or(|next| next > now) {
            return Vec::new();
        }
        let waiting = || self.entries.iter().filter(|(_, pending)| pending.retry);
        let due = waiting().filter(|(_, pending)| pending.due <= now).map(|(key, _)| *key).collect();
        self.next = waiting().map(|(_, pending)| pending.due).filter(|due| *due > now).min();
        due
    }

    /// Records that an entry could not be written. Returns true if it was not pending before.
    pub fn failed(&mut self, key: Key, reason: String, retry: bool, now: Instant) -> bool {
        let tries = self.entries.get(&key).map_or(0, |pending| pending.tries + 1);
        let due = now + BACKOFF.nth(tries);
        if retry {
            self.wake(due);
        }
        self.version += 1;
        self.entries.insert(key, Pending { reason, retry, stands: false, works: false, tries, due });
        tries == 0
    }

    /// Records that this link exists, and that only attributes failed. `works` is true if packets do not need these attributes.
    pub fn stands(&mut self, key: &Key, works: bool) {
        if let Some(pending) = self.entries.get_mut(key) {
            (pending.stands, pending.works) = (true, works);
        }
    }

    /// Delays the next attempt, as a failure does.
    pub fn postpone(&mut self, key: &Key, now: Instant) {
        let Some(pending) = self.entries.get_mut(key) else { return };
        pending.tries += 1;
        pending.due = now + BACKOFF.nth(pending.tries);
        let due = pending.due;
        self.wake(due);
    }

    /// Removes an entry, because it is in place or no longer wanted.
    pub fn remove(&mut self, key: &Key) {
        if !self.entries.is_empty() && self.entries.remove(key).is_some() {
            self.version += 1;
        }
    }

    /// Removes the entries for which `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(&Key) -> bool) {
        let before = self.entries.len();
        self.entries.retain(|key, _| keep(key));
        if self.entries.len() != before {
            self.version += 1;
        }
    }

    /// Describes what the kernel lacks of the fence. Returns `None` if no part of the fence is pending.
    pub fn fence_problem(&self) -> Option<String> {
        let (key, entry) = self.entries.iter().find(|(key, _)| key.is_of_fence())?;
        Some(format!("--fail-closed, --ip-blackhole-route: {key}: {}", entry.reason))
    }

    fn wake(&mut self, due: Instant) {
        self.next = Some(self.next.map_or(due, |next| next.min(due)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(third: u8) -> Key {
        Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0)
    }

    #[test]
    fn repeated_failures_wait_longer_and_removed_entries_cause_one_wake_up() {
        let start = Instant::now();
        let mut all = Pendings::default();
        assert!(all.failed(key(1), "no carrier".into(), true, start));
        assert!(!all.failed(key(1), "no carrier".into(), true, start));
        assert!(all.failed(key(2), "not permitted".into(), false, start));
        assert_eq!(all.due(start), []);
        let soon = all.next().unwrap();
        assert_eq!(all.due(soon), [], "after the second failure the delay is twice as long");
        let then = all.next().unwrap();
        assert_eq!((then - start, all.due(then)), (FIRST_RETRY * 2, vec![key(1)]));
        assert_eq!(all.next(), None, "only the audit tries an entry again that was refused for good");
        all.postpone(&key(1), then);
        let version = all.version();
        all.remove(&key(1));
        all.remove(&key(1));
        assert_eq!(all.version(), version + 1);
        let due = all.next().unwrap();
        assert_eq!((all.due(due), all.next()), (vec![], None));
    }
}
