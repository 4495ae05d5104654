// SPDX-License-Identifier: Apache-2.0
//! Entries that could not be written, and when to try them again. Asking for the next time costs nothing per entry.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use weft_backends::state::Key;

const FIRST_RETRY: Duration = Duration::from_millis(100);
const LAST_RETRY: Duration = Duration::from_secs(30);

/// An entry that could not be written.
#[derive(Debug, Clone)]
pub struct Pending {
    /// What the kernel said.
    pub reason: String,
    /// Trying again soon may help; else only the audit tries.
    pub retry: bool,
    /// It is there all the same, without all of its attributes.
    pub stands: bool,
    /// It is there, and packets need none of the attributes that it lacks.
    pub works: bool,
    tries: u32,
    due: Instant,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Pendings {
    entries: HashMap<Key, Pending>,
    /// No entry is due before; one that left may have been the first.
    next: Option<Instant>,
    /// Counts changes.
    version: u64,
}

impl Pendings {
    /// True when all is written.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Grows with every change: who counts entries counts again only then.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Why this entry waits, if it does.
    pub fn get(&self, key: &Key) -> Option<&Pending> {
        self.entries.get(key)
    }

    /// Every entry that waits.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Pending)> {
        self.entries.iter()
    }

    /// When to ask [`Self::due`] again, at the latest.
    pub fn next(&self) -> Option<Instant> {
        self.next
    }

    /// The entries that are due.
    pub fn due(&mut self, now: Instant) -> Vec<Key> {
        if self.next.is_none_or(|next| next > now) {
            return Vec::new();
        }
        let waiting = || self.entries.iter().filter(|(_, pending)| pending.retry);
        let due = waiting().filter(|(_, pending)| pending.due <= now).map(|(key, _)| *key).collect();
        self.next = waiting().map(|(_, pending)| pending.due).filter(|due| *due > now).min();
        due
    }

    /// It failed. True when it had not failed before.
    pub fn failed(&mut self, key: Key, reason: String, retry: bool, now: Instant) -> bool {
        let tries = self.entries.get(&key).map_or(0, |pending| pending.tries + 1);
        let due = now + back_off(tries);
        if retry {
            self.wake(due);
        }
        self.version += 1;
        self.entries.insert(key, Pending { reason, retry, stands: false, works: false, tries, due });
        tries == 0
    }

    /// What failed last of this entry is no more than an attribute; `works`: one that packets do not need.
    pub fn stands(&mut self, key: &Key, works: bool) {
        if let Some(pending) = self.entries.get_mut(key) {
            (pending.stands, pending.works) = (true, works);
        }
    }

    /// Not now, and later the next time.
    pub fn postpone(&mut self, key: &Key, now: Instant) {
        let Some(pending) = self.entries.get_mut(key) else { return };
        pending.tries += 1;
        pending.due = now + back_off(pending.tries);
        let due = pending.due;
        self.wake(due);
    }

    /// It is in place, or no longer wanted.
    pub fn remove(&mut self, key: &Key) {
        if !self.entries.is_empty() && self.entries.remove(key).is_some() {
            self.version += 1;
        }
    }

    /// Only these wait still.
    pub fn retain(&mut self, mut keep: impl FnMut(&Key) -> bool) {
        let before = self.entries.len();
        self.entries.retain(|key, _| keep(key));
        if self.entries.len() != before {
            self.version += 1;
        }
    }

    fn wake(&mut self, due: Instant) {
        self.next = Some(self.next.map_or(due, |next| next.min(due)));
    }
}

fn back_off(tries: u32) -> Duration {
    (FIRST_RETRY * 2u32.saturating_pow(tries.min(16))).min(LAST_RETRY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(third: u8) -> Key {
        Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0)
    }

    #[test]
    fn what_fails_again_waits_longer_and_what_left_wakes_nobody_twice() {
        let start = Instant::now();
        let mut all = Pendings::default();
        assert!(all.failed(key(1), "no carrier".into(), true, start));
        assert!(!all.failed(key(1), "no carrier".into(), true, start));
        assert!(all.failed(key(2), "not permitted".into(), false, start));
        assert_eq!(all.due(start), []);
        let soon = all.next().unwrap();
        assert_eq!(all.due(soon), [], "the second failure waits twice as long");
        let then = all.next().unwrap();
        assert_eq!((then - start, all.due(then)), (FIRST_RETRY * 2, vec![key(1)]));
        assert_eq!(all.next(), None, "the refused one is left to the audit");
        all.postpone(&key(1), then);
        let version = all.version();
        all.remove(&key(1));
        all.remove(&key(1));
        assert_eq!(all.version(), version + 1);
        let due = all.next().unwrap();
        assert_eq!((all.due(due), all.next()), (vec![], None));
    }
}
