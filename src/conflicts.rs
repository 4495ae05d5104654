// SPDX-License-Identifier: Apache-2.0
//! Detects conflicts with other programs. If another program repeatedly replaces or deletes the same entry, the two
//! must not overwrite each other at full speed. After the third repair within a minute, the entry is reported and left
//! to the audit. The caller passes the time, so that tests need no clock.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use weft_backends::state::{Key, Seen};

/// Repairs within this time are counted together.
const WINDOW: Duration = Duration::from_secs(60);
/// Number of repairs within the window that are made at once.
const MAX_REPAIRS: usize = 3;
/// Number of rules and routes of a fence. A program that flushes rules and routes deletes them one after the other.
const PARTS_OF_A_FENCE: usize = 6;
/// Minimum time between two removals of old records.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The repairs of the last minute, by key. Only keys that were repaired have a record, so the memory does not grow with
/// the number of peers.
#[derive(Debug, Default)]
pub struct Conflicts {
    repairs: HashMap<Key, VecDeque<Instant>>,
    swept: Option<Instant>,
}

impl Conflicts {
    /// Returns true if this entry may be repaired at once. `seen` is the entry that the kernel has instead of ours, or
    /// `None` if ours was deleted.
    pub fn allow(&mut self, key: Key, seen: Option<Seen>, now: Instant) -> bool {
        // Old records are not removed at each call: with many repairs, that would take quadratic time.
        if self.repairs.len() > 1024 && self.swept.is_none_or(|at| now - at >= SWEEP_INTERVAL) {
            self.swept = Some(now);
            self.repairs.retain(|_, times| times.back().is_some_and(|last| now - *last < WINDOW));
        }
        let times = self.repairs.entry(key).or_default();
        while times.front().is_some_and(|first| now - *first >= WINDOW) {
            times.pop_front();
        }
        let max = if matches!(key, Key::Fence(_)) { MAX_REPAIRS * PARTS_OF_A_FENCE } else { MAX_REPAIRS };
        if times.len() < max {
            times.push_back(now);
            return true;
        }
        if times.len() == max {
            // This extra time limits the message to one a minute. It leaves the window together with the others.
            times.push_back(now);
            let protocol = seen.map(|seen| seen.protocol);
            tracing::warn!(%key, ?protocol, "another program repeatedly replaces or deletes this entry: weft repairs it at each audit only");
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_backends::state::Name;

    #[test]
    fn the_fourth_repair_within_a_minute_is_left_to_the_audit() {
        let key = Key::Link(Name::new("flannel.1").unwrap());
        let start = Instant::now();
        let mut conflicts = Conflicts::default();
        for second in 0..3 {
            assert!(conflicts.allow(key, None, start + Duration::from_secs(second)), "second {second}");
        }
        assert!(!conflicts.allow(key, None, start + Duration::from_secs(4)));
        assert!(!conflicts.allow(key, None, start + Duration::from_secs(5)));
        assert!(
            conflicts.allow(Key::Link(Name::new("other").unwrap()), None, start),
            "another key must not be affected"
        );
        assert!(
            conflicts.allow(key, None, start + Duration::from_secs(65)),
            "the entry must be repaired again after a minute"
        );
    }
    #[test]
    fn a_program_that_flushes_all_rules_and_routes_a_few_times_is_no_fight() {
        let fence = Key::Fence(weft_subnet::cidr::Family::V4);
        let start = Instant::now();
        let mut conflicts = Conflicts::default();
        for part in 0..MAX_REPAIRS * PARTS_OF_A_FENCE {
            assert!(conflicts.allow(fence, None, start), "part {part}");
        }
        assert!(!conflicts.allow(fence, None, start));
    }
}
