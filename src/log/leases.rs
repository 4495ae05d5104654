// SPDX-License-Identifier: Apache-2.0
//! Limits the lines in the log about leases. Whoever can write leases must not be able to fill the log.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::lease::Id;

use super::limit::Allowance;

/// A lease gets at most one line in this time.
const EVERY: Duration = Duration::from_secs(60);

/// Decides which lines about leases are logged, and counts the others. A lease that changes a thousand times a minute gets one line. Of
/// ten thousand leases that change at once, only some get a line. Only leases that got a line within the last minute use memory.
#[derive(Debug, Default)]
pub struct LeaseLog {
    allowance: Allowance,
    logged: HashMap<Id, Logged>,
    /// Number of lines left out about leases that got no line themselves.
    left_out: u64,
    /// When that number is logged.
    left_out_due: Option<Instant>,
}

/// The last line about one lease.
#[derive(Debug)]
struct Logged {
    at: Instant,
    /// Number of lines about this lease that were left out since.
    repeats: u64,
}

impl LeaseLog {
    /// Returns true if a line about this lease may be logged now. Otherwise the line is counted as left out.
    pub fn due(&mut self, id: &Id, now: Instant) -> bool {
        if let Some(logged) = self.logged.get_mut(id) {
            if now - logged.at < EVERY {
                logged.repeats += 1;
                return false;
            }
            // The number of lines left out must be in the log before the next line.
            self.log_left_out(now);
        }
        if self.allowance.take(now) {
            self.logged.retain(|_, logged| logged.repeats > 0 || now - logged.at < EVERY);
            self.logged.insert(id.clone(), Logged { at: now, repeats: 0 });
            return true;
        }
        self.left_out += 1;
        self.left_out_due.get_or_insert(now + EVERY);
        false
    }

    /// Logs that a lease is set aside.
    pub fn log_set_aside(&mut self, id: &Id, reason: &str) {
        if self.due(id, Instant::now()) {
            tracing::warn!(lease = %id, reason, "lease set aside");
        }
    }

    /// Returns the time at which [`LeaseLog::log_left_out`] has something to log.
    pub fn next(&self) -> Option<Instant> {
        let repeated = self.logged.values().filter(|logged| logged.repeats > 0).map(|logged| logged.at + EVERY);
        repeated.chain(self.left_out_due).min()
    }

    /// Logs how many lines were left out, once a minute.
    pub fn log_left_out(&mut self, now: Instant) {
        for (id, lines) in self.take_repeated(now) {
            tracing::warn!(lease = %id, lines, "more lines about this lease within a minute were not logged");
        }
        if let Some(lines) = self.take_left_out(now) {
            tracing::warn!(
                lines,
                "lines about other leases within a minute were not logged: weft status has all of them"
            );
        }
    }

    fn take_repeated(&mut self, now: Instant) -> Vec<(Id, u64)> {
        let due = |logged: &Logged| logged.repeats > 0 && now - logged.at >= EVERY;
        self.logged.extract_if(|_, logged| due(logged)).map(|(id, logged)| (id, logged.repeats)).collect()
    }

    fn take_left_out(&mut self, now: Instant) -> Option<u64> {
        self.left_out_due.take_if(|at| *at <= now)?;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::{Output, text_of};

    #[test]
    fn how_many_lines_were_left_out_is_told_before_the_next_line_about_the_lease() {
        let output = Output::default();
        let lines = tracing_subscriber::fmt().with_writer(output.writer()).finish();
        tracing::subscriber::with_default(lines, || {
            let (mut log, start, id) = (LeaseLog::default(), Instant::now(), Id::from("busy"));
            assert!(log.due(&id, start) && !log.due(&id, start));
            assert!(log.due(&id, start + EVERY));
        });
        let text = text_of(&output);
        assert!(text.contains("within a minute were not logged lease=busy lines=1"), "{text}");
    }

    #[test]
    fn a_lease_gets_one_line_a_minute_and_the_others_are_counted() {
        let (mut log, start) = (LeaseLog::default(), Instant::now());
        let id: Id = "busy".into();
        assert!(log.due(&id, start));
        assert_eq!(log.next(), None, "no line was left out");
        let more = (1..1000).filter(|n| log.due(&id, start + Duration::from_millis(59 * n))).count();
        assert_eq!((more, log.next()), (0, Some(start + EVERY)));
        assert!(log.due(&"another".into(), start));
        assert_eq!(log.take_repeated(start + EVERY), [(id.clone(), 999)]);
        assert_eq!((log.next(), log.take_repeated(start + EVERY)), (None, vec![]));
        assert!(log.due(&id, start + EVERY));
    }

    #[test]
    fn ten_thousand_leases_get_a_hundred_lines_and_the_others_are_counted() {
        let (mut log, start) = (LeaseLog::default(), Instant::now());
        let lines =
            |log: &mut LeaseLog, now| (0..10_000).filter(|n| log.due(&format!("lease {n}").into(), now)).count();
        assert_eq!(lines(&mut log, start), 100);
        assert_eq!(lines(&mut log, start), 0);
        let repeats: u64 = log.logged.values().map(|logged| logged.repeats).sum();
        assert_eq!((log.left_out, repeats), (19_800, 100));
        let later = start + EVERY;
        assert_eq!((log.next(), log.take_left_out(later)), (Some(later), Some(19_800)));
        assert_eq!(log.take_repeated(later).len(), 100);
        assert_eq!((lines(&mut log, later), log.logged.len()), (10, 10), "from then on ten lines a minute");
        assert_eq!(lines(&mut log, start + 100 * EVERY), 100, "after a quiet time as many as at first");
        assert!(log.logged.len() <= 110);
    }
}
