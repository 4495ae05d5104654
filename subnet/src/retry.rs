// SPDX-License-Identifier: Apache-2.0
//! Trying again: how long to wait, how often to say what lasts, and an error with its causes on one line.

use std::error::Error;
use std::time::{self, Duration};

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::source::{Event, random};

const FIRST: Duration = Duration::from_millis(100);
const MAX: Duration = Duration::from_secs(5);
/// A condition that lasts is said again after this time.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// The failures of a watch since it worked last.
#[derive(Debug)]
pub(crate) struct Trouble {
    /// The longest wait.
    max: Duration,
    failures: usize,
    said: Option<Instant>,
    delay: Option<Duration>,
}

impl Default for Trouble {
    fn default() -> Trouble {
        Trouble::new(MAX)
    }
}

impl Trouble {
    /// None yet; waits at most so long.
    pub(crate) fn new(max: Duration) -> Trouble {
        Trouble { max, failures: 0, said: None, delay: None }
    }

    /// It works again.
    pub(crate) fn over(&mut self) {
        *self = Trouble::new(self.max);
    }

    /// One more failure: says it when it is due, and waits. False = nobody listens.
    pub(crate) async fn pause(&mut self, error: &dyn Error, endpoints: usize, out: &mpsc::Sender<Event>) -> bool {
        let (say, delay) = self.more(endpoints);
        let text = chain(error);
        tracing::debug!(error = %text, "the watch broke");
        if say && out.send(Event::Trouble(text)).await.is_err() {
            return false;
        }
        sleep(delay).await;
        true
    }

    /// One more failure: whether to say it (the first time, then once a minute), and how long to wait. One endpoint of several
    /// that fails is no trouble as long as the next one answers: the first `endpoints - 1` failures are not said.
    fn more(&mut self, endpoints: usize) -> (bool, Duration) {
        self.failures += 1;
        let delay = self.delay.unwrap_or(FIRST);
        self.delay = Some((delay * 2).min(self.max));
        let say = self.failures >= endpoints && self.said.is_none_or(|at| at.elapsed() >= SAY_EVERY);
        if say {
            self.said = Some(Instant::now());
        }
        (say, jitter(delay))
    }
}

/// One condition that may last, e.g. "config is missing".
#[derive(Debug, Default)]
pub struct Patience {
    last: Option<(String, time::Instant)>,
}

impl Patience {
    /// True when this text should be said now: it is new, or a minute has gone by.
    pub fn due(&mut self, text: &str, now: time::Instant) -> bool {
        let due = self.last.as_ref().is_none_or(|(last, at)| last != text || now - *at >= SAY_EVERY);
        if due {
            self.last = Some((text.to_owned(), now));
        }
        due
    }
}

/// A session that lasted longer was a recovery, whatever ended it.
#[cfg(feature = "dir")]
pub(crate) const RECOVERED: Duration = MAX;

/// Between half of this and all of it: those who failed together do not come again together.
pub fn jitter(delay: Duration) -> Duration {
    delay.mul_f64(0.5 + (random() % 1000) as f64 / 2000.0)
}

/// An error and its causes: `read config from X: connection refused`. A cause that repeats what stands already is left out.
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
    async fn waits_twice_as_long_each_time_and_speaks_once_a_minute() {
        let mut trouble = Trouble::default();
        let mut waits = Vec::new();
        for round in 0..8 {
            let (say, wait) = trouble.more(1);
            assert_eq!(say, round == 0, "round {round}");
            waits.push(wait);
        }
        for (wait, most) in waits.iter().zip([100, 200, 400, 800, 1600, 3200, 5000, 5000]) {
            let most = Duration::from_millis(most);
            assert!((most / 2..=most).contains(wait), "{wait:?} of {most:?}");
        }
        advance(SAY_EVERY).await;
        assert!(trouble.more(1).0, "a minute later");
        trouble.over();
        let said: Vec<bool> = (0..4).map(|_| trouble.more(3).0).collect();
        assert_eq!(said, [false, false, true, false], "three endpoints");
    }

    #[test]
    fn a_lasting_condition_is_said_once_a_minute() {
        let (mut patience, start) = (Patience::default(), time::Instant::now());
        assert!(patience.due("config is missing", start));
        assert!(!patience.due("config is missing", start + Duration::from_secs(59)));
        assert!(patience.due("config is missing", start + Duration::from_secs(60)));
        assert!(patience.due("config is broken", start + Duration::from_secs(61)));
    }
}
