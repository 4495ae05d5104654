// SPDX-License-Identifier: Apache-2.0
//! Whoever takes the same entry again and again is not fought at wire speed: after the third time in a minute it is left to the
//! audit, and named (design.md, "What a node must survive"). Time is an input.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use weft_backends::state::{Key, Seen};

const WINDOW: Duration = Duration::from_secs(60);
const PATIENCE: usize = 3;
const SWEEP_EVERY: Duration = Duration::from_secs(1);

/// Repairs of the last minute, by key. Only keys that were taken from us stand here.
#[derive(Debug, Default)]
pub struct Fights {
    repairs: HashMap<Key, VecDeque<Instant>>,
    swept: Option<Instant>,
}

impl Fights {
    /// May this entry be repaired at once? `seen` is what stands there instead of ours (`None`: deleted).
    pub fn allow(&mut self, key: Key, seen: Option<Seen>, now: Instant) -> bool {
        // Not at each of many repairs: that would be quadratic.
        if self.repairs.len() > 1024 && self.swept.is_none_or(|at| now - at >= SWEEP_EVERY) {
            self.swept = Some(now);
            self.repairs.retain(|_, times| times.back().is_some_and(|last| now - *last < WINDOW));
        }
        let times = self.repairs.entry(key).or_default();
        while times.front().is_some_and(|first| now - *first >= WINDOW) {
            times.pop_front();
        }
        if times.len() < PATIENCE {
            times.push_back(now);
            return true;
        }
        if times.len() == PATIENCE {
            // One line a minute: the marker leaves the window with the others.
            times.push_back(now);
            let protocol = seen.map(|seen| seen.protocol);
            tracing::warn!(%key, ?protocol, "somebody takes this entry again and again: left to the audit");
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_backends::state::Name;

    #[test]
    fn the_fourth_time_in_a_minute_is_left_to_the_audit() {
        let key = Key::Link(Name::new("flannel.1").unwrap());
        let start = Instant::now();
        let mut fights = Fights::default();
        for second in 0..3 {
            assert!(fights.allow(key, None, start + Duration::from_secs(second)), "second {second}");
        }
        assert!(!fights.allow(key, None, start + Duration::from_secs(4)));
        assert!(!fights.allow(key, None, start + Duration::from_secs(5)));
        assert!(fights.allow(Key::Link(Name::new("other").unwrap()), None, start), "another key is not concerned");
        assert!(fights.allow(key, None, start + Duration::from_secs(65)), "the minute is over");
    }
}
