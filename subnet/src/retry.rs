// SPDX-License-Identifier: Apache-2.0
//! Retries: back-off, rate-limited messages for failures that last, and errors with their causes on one line.

use std::error::Error;
use std::time::{self, Duration};

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::source::{Event, random};

/// First delay of the back-off.
const FIRST: Duration = Duration::from_millis(100);
/// Default limit of the back-off.
const MAX: Duration = Duration::from_secs(5);
/// A failure that lasts is reported again after this time.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Counts the failures of a watch since it worked last, and computes the back-off.
#[derive(Debug)]
pub(crate) struct Trouble {
    /// Limit of the back-off.
    max: Duration,
    failures: usize,
    /// Time of the last report.
    reported: Option<Instant>,
    /// The next delay; `None` means the first one.
    delay: Option<Duration>,
}

impl Default for Trouble {
    fn default() -> Trouble {
        Trouble::new(MAX)
    }
}

impl Trouble {
    /// Creates a counter without failures whose back-off is at most `max`.
    pub(crate) fn new(max: Duration) -> Trouble {
        Trouble { max, failures: 0, reported: None, delay: None }
    }

    /// Resets the counter: the watch works again.
    pub(crate) fn over(&mut self) {
        *self = Trouble::new(self.max);
    }

    /// Counts a failure, reports it to `out` if that is due, and waits. Returns false if nobody receives the events any
    /// more.
    pub(crate) async fn pause(&mut self, error: &dyn Error, endpoints: usize, out: &mpsc::Sender<Event>) -> bool {
        let (report, delay) = self.count(endpoints);
        let text = chain(error);
        tracing::debug!(error = %text, "the watch failed");
        if report && out.send(Event::Trouble(text)).await.is_err() {
            return false;
        }
        sleep(delay).await;
        true
    }

    /// Counts a failure. Returns whether to report it, and how long to wait. A failure is reported the first time and
    /// then once a minute.
    ///
    /// The first `endpoints - 1` failures are not reported: if one of several endpoints fails and the next one answers,
    /// there is nothing to report.
    fn count(&mut self, endpoints: usize) -> (bool, Duration) {
        self.failures += 1;
        let delay = self.delay.unwrap_or(FIRST);
        self.delay = Some((delay * 2).min(self.max));
        let report = self.failures >= endpoints && self.reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL);
        if report {
            self.reported = Some(Instant::now());
        }
        (report, jitter(delay))
    }
}

/// Limits how often a lasting condition is reported, e.g. "config is missing".
#[derive(Debug, Default)]
pub struct Reminder {
    last: Option<(String, time::Instant)>,
}

impl Reminder {
    /// Returns true if the text should be reported now: it is new, or was last reported a minute ago.
    pub fn due(&mut self, text: &str, now: time::Instant) -> bool {
        let due = self.last.as_ref().is_none_or(|(last, at)| last != text || now - *at >= REPORT_INTERVAL);
        if due {
            self.last = Some((text.to_owned(), now));
        }
        due
    }
}

/// If a session lasted longer than this, the watch worked, whatever ended the session.
#[cfg(feature = "dir")]
pub(crate) const RECOVERED: Duration = MAX;

/// Returns a random duration between half of `delay` and all of it, so that clients that failed together do not retry
/// together.
pub fn jitter(delay: Duration) -> Duration {
    delay.mul_f64(0.5 + (random() % 1000) as f64 / 2000.0)
}

/// Formats an error and its causes on one line: `read config from X: connection refused`. A cause that the text
/// contains already is left out.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_delay_doubles_and_failures_are_reported_once_a_minute() {
        let mut trouble = Trouble::default();
        let mut waits = Vec::new();
        for round in 0..8 {
            let (report, wait) = trouble.count(1);
            assert_eq!(report, round == 0, "round {round}");
            waits.push(wait);
        }
        for (wait, most) in waits.iter().zip([100, 200, 400, 800, 1600, 3200, 5000, 5000]) {
            let most = Duration::from_millis(most);
            assert!((most / 2..=most).contains(wait), "{wait:?} of {most:?}");
        }
        advance(REPORT_INTERVAL).await;
        assert!(trouble.count(1).0, "a minute later the failure must be reported again");
        trouble.over();
        let reported: Vec<bool> = (0..4).map(|_| trouble.count(3).0).collect();
        assert_eq!(reported, [false, false, true, false], "with three endpoints, the third failure must be reported");
    }

    #[test]
    fn a_lasting_condition_is_reported_once_a_minute() {
        let (mut patience, start) = (Reminder::default(), time::Instant::now());
        assert!(patience.due("config is missing", start));
        assert!(!patience.due("config is missing", start + Duration::from_secs(59)));
        assert!(patience.due("config is missing", start + Duration::from_secs(60)));
        assert!(patience.due("config is broken", start + Duration::from_secs(61)));
    }
}
