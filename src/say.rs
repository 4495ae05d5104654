// SPDX-License-Identifier: Apache-2.0
//! Saying things to people: once, not once a second; and an error with its causes on one line.

use std::time::{Duration, Instant};

pub use weft_subnet::retry::chain;

/// A condition that lasts is said again after this time.
const AGAIN: Duration = Duration::from_secs(60);

/// One condition that may last, e.g. "config is missing".
#[derive(Debug, Default)]
pub struct Patience {
    last: Option<(String, Instant)>,
}

impl Patience {
    /// True when this text should be said now: it is new, or a minute has gone by.
    pub fn due(&mut self, text: &str, now: Instant) -> bool {
        let due = self.last.as_ref().is_none_or(|(last, at)| last != text || now - *at >= AGAIN);
        if due {
            self.last = Some((text.to_owned(), now));
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_condition_is_said_once_a_minute() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        assert!(patience.due("config is missing", start));
        assert!(!patience.due("config is missing", start + Duration::from_secs(59)));
        assert!(patience.due("config is missing", start + Duration::from_secs(60)));
        assert!(patience.due("config is broken", start + Duration::from_secs(61)));
    }
}
