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

/// Delays between attempts. Each delay is twice the previous one, up to a limit.
#[derive(Debug, Clone, Copy)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    /// Each delay is shortened at random.
    has_jitter: bool,
    /// Number of delays since the start or the last [`Backoff::reset`].
    count: u32,
}

impl Backoff {
    /// Creates a back-off whose delays are `first` to `max`, each shortened at random ([`jitter`]). It is for everything that asks a
    /// server, because many nodes may fail together.
    pub const fn new(first: Duration, max: Duration) -> Backoff {
        Backoff { first, max, has_jitter: true, count: 0 }
    }

    /// Creates a back-off whose delays are exactly `first` to `max`. It is for what asks no server, and for what begins at another time
    /// on each node.
    pub const fn without_jitter(first: Duration, max: Duration) -> Backoff {
        Backoff { first, max, has_jitter: false, count: 0 }
    }

    /// Returns the delay with this number, without jitter. The first one has the number 0.
    pub fn nth(&self, number: u32) -> Duration {
        self.first.saturating_mul(1 << number.min(31)).min(self.max)
    }

    /// Returns the delay before the next attempt.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.nth(self.count);
        self.count = self.count.saturating_add(1);
        if self.has_jitter { jitter(delay) } else { delay }
    }

    /// Begins again with the first delay.
    pub fn reset(&mut self) {
        self.count = 0;
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

    #[test]
    fn delays_double_up_to_the_limit_and_begin_again_after_a_reset() {
        let (first, max) = (Duration::from_secs(1), Duration::from_secs(5));
        let (mut exact, mut random) = (Backoff::without_jitter(first, max), Backoff::new(first, max));
        for round in 0..2 {
            for delay in [1, 2, 4, 5, 5].map(Duration::from_secs) {
                assert_eq!(exact.next_delay(), delay, "round {round}");
                let shorter = random.next_delay();
                assert!((delay / 2..delay).contains(&shorter), "round {round}: {shorter:?} of {delay:?}");
            }
            exact.reset();
            random.reset();
        }
        assert_eq!([0, 1, 31, u32::MAX].map(|number| random.nth(number)), [first, first * 2, max, max]);
    }

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
    fn an_error_is_shown_with_each_cause_once() {
        use crate::source::Error;
        let unavailable =
            |what: &str, cause: &str| Error::Unavailable { what: what.into(), source: Some(cause.into()) };
        let refused = "connection refused (os error 111)";
        assert_eq!(chain(&unavailable("read config", refused)), format!("read config: {refused}"));
        let said = format!("read config: {refused}");
        assert_eq!(chain(&unavailable(&said, refused)), said, "the text has its cause already");
        let outer = Error::Refused { what: "acquire".into(), source: Box::new(unavailable("read config", refused)) };
        assert_eq!(chain(&outer), format!("acquire: read config: {refused}"));
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
