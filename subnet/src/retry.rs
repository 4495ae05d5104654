// SPDX-License-Identifier: Apache-2.0
//! Retries: back-off, rate-limited messages for failures that last, and errors with their causes on one line.

use std::error::Error;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::outside::random;
use crate::source::Event;

/// First delay of a watch that failed.
const FIRST: Duration = Duration::from_millis(100);
/// A failure that lasts is reported again after this time.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Delays between attempts. Each delay is twice the previous one up to a limit, and is then shortened at random ([`jitter`]).
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    /// Creates a back-off whose delays are `first` to `max`.
    pub const fn new(first: Duration, max: Duration) -> Backoff {
        Backoff { first, max, next: first }
    }

    /// Returns the delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(self.max);
        jitter(delay)
    }

    /// Begins again with the first delay.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// The failures of a task since it worked last: which of them to report, and how long to wait after each.
#[derive(Debug)]
pub(crate) struct Failures {
    backoff: Backoff,
    count: usize,
    /// Time of the last report.
    reported: Option<Instant>,
}

impl Default for Failures {
    fn default() -> Failures {
        Failures::new(RECOVERED)
    }
}

impl Failures {
    /// Creates a counter without failures whose delays begin at 100 ms and are at most `max`.
    pub(crate) fn new(max: Duration) -> Failures {
        Failures::with_backoff(Backoff::new(FIRST, max))
    }

    /// Creates a counter without failures with these delays.
    pub(crate) fn with_backoff(backoff: Backoff) -> Failures {
        Failures { backoff, count: 0, reported: None }
    }

    /// Forgets all failures: the task works again.
    pub(crate) fn reset(&mut self) {
        self.backoff.reset();
        (self.count, self.reported) = (0, None);
    }

    /// Counts a failure, reports it to `out` as this event if that is due, and returns how long to wait. Returns `None` if nobody receives
    /// the events any more.
    pub(crate) async fn report(
        &mut self,
        error: &dyn Error,
        endpoints: usize,
        event: fn(String) -> Event,
        out: &mpsc::Sender<Event>,
    ) -> Option<Duration> {
        let (is_due, delay) = self.count(endpoints);
        let text = chain(error);
        tracing::debug!(error = %text, "the store failed");
        if is_due {
            out.send(event(text)).await.ok()?;
        }
        Some(delay)
    }

    /// Reports that the store is unreachable as [`Failures::report`] does, and waits. Returns false if nobody receives the events any more.
    pub(crate) async fn pause(&mut self, error: &dyn Error, endpoints: usize, out: &mpsc::Sender<Event>) -> bool {
        let Some(delay) = self.report(error, endpoints, Event::Unreachable, out).await else { return false };
        sleep(delay).await;
        true
    }

    /// Counts a failure. Returns whether to report it, and how long to wait. A failure is reported the first time and
    /// then once a minute.
    ///
    /// The first `endpoints - 1` failures are not reported: if one of several endpoints fails and the next one answers,
    /// there is nothing to report.
    fn count(&mut self, endpoints: usize) -> (bool, Duration) {
        self.count += 1;
        let is_due = self.count >= endpoints && self.reported.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL);
        if is_due {
            self.reported = Some(Instant::now());
        }
        (is_due, self.backoff.next_delay())
    }
}

/// Limits how often a lasting condition is reported, e.g. "config is missing".
#[derive(Debug, Default)]
pub struct Reminder {
    last: Option<(String, Instant)>,
}

impl Reminder {
    /// Returns true if the text should be reported now: it is new, or was last reported a minute ago.
    pub fn due(&mut self, text: &str, now: Instant) -> bool {
        let due = self.last.as_ref().is_none_or(|(last, at)| last != text || now - *at >= REPORT_INTERVAL);
        if due {
            self.last = Some((text.to_owned(), now));
        }
        due
    }
}

/// If a session lasted longer than this, the watch worked, whatever ended the session. It is also the longest default delay.
pub(crate) const RECOVERED: Duration = Duration::from_secs(5);

/// Returns a random duration between half of `delay` and all of it, so that clients that failed together do not retry
/// together.
pub fn jitter(delay: Duration) -> Duration {
    delay.mul_f64(0.5 + (random() % 1000) as f64 / 2000.0)
}

/// Formats an error and its causes on one line: `read config from X: connection refused`. A cause that the text
/// contains already is left out.
pub fn chain(error: &dyn Error) -> String {
    with_causes(error.to_string(), error)
}

/// Adds the causes of an error to its text, as [`chain`] does, for an error whose own text is not `text`.
pub(crate) fn with_causes(mut text: String, error: &dyn Error) -> String {
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
        let mut failures = Failures::default();
        let mut waits = Vec::new();
        for round in 0..8 {
            let (report, wait) = failures.count(1);
            assert_eq!(report, round == 0, "round {round}");
            waits.push(wait);
        }
        for (wait, most) in waits.iter().zip([100, 200, 400, 800, 1600, 3200, 5000, 5000]) {
            let most = Duration::from_millis(most);
            assert!((most / 2..=most).contains(wait), "{wait:?} of {most:?}");
        }
        advance(REPORT_INTERVAL).await;
        assert!(failures.count(1).0, "a minute later the failure must be reported again");
        failures.reset();
        let reported: Vec<bool> = (0..4).map(|_| failures.count(3).0).collect();
        assert_eq!(reported, [false, false, true, false], "with three endpoints, the third failure must be reported");
    }

    #[test]
    fn a_lasting_condition_is_reported_once_a_minute() {
        let (mut reminder, start) = (Reminder::default(), Instant::now());
        assert!(reminder.due("config is missing", start));
        assert!(!reminder.due("config is missing", start + Duration::from_secs(59)));
        assert!(reminder.due("config is missing", start + Duration::from_secs(60)));
        assert!(reminder.due("config is broken", start + Duration::from_secs(61)));
    }
}
