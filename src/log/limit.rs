// SPDX-License-Identifier: Apache-2.0
//! Limits how often each place in the program may log, so that a repeated fault does not fill a disk.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::debt::Debt;

use super::repeats::{self, Decision, Repeats};

/// Number of lines that may be logged at once.
const AT_ONCE: u32 = 100;
/// After these, one more line may be logged in this time.
const ONE_IN: Duration = Duration::from_secs(6);

/// A number of lines that may be logged: 100 at once, and then one in six seconds.
#[derive(Debug, Default)]
pub struct Allowance {
    debt: Debt,
}

impl Allowance {
    /// Uses one line of the allowance. Returns false if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        let is_allowed = self.debt.allows(ONE_IN * (AT_ONCE - 1), now);
        if is_allowed {
            self.debt.charge(ONE_IN, now);
        }
        is_allowed
    }
}

/// The lines of one place in the program.
#[derive(Debug, Default)]
struct CallSite {
    allowance: Allowance,
    left_out: u64,
}

impl CallSite {
    /// Returns how many lines were left out before this one, or `None` if this line is left out, too.
    fn line(&mut self, now: Instant) -> Option<u64> {
        if self.allowance.take(now) {
            return Some(std::mem::take(&mut self.left_out));
        }
        self.left_out += 1;
        None
    }
}

/// A layer that leaves out lines of places that log too much. It counts them, and logs the number before the next line of that place.
/// With [`Repeats`], a message that was logged recently is counted there instead. Lines below the level INFO are not limited, because
/// the operator asked for them.
#[derive(Debug, Default)]
pub struct Limit {
    sites: Mutex<HashMap<Identifier, CallSite>>,
    repeats: Option<Arc<Repeats>>,
}

impl Limit {
    /// Returns a layer that counts repeats there. Somebody must call [`Repeats::report`].
    pub fn new(repeats: Option<Arc<Repeats>>) -> Limit {
        Limit { sites: Mutex::default(), repeats }
    }

    /// Returns true if the allowance of this place has a line left.
    fn allows(&self, event: &Event<'_>, now: Instant) -> bool {
        let line = {
            let mut sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
            sites.entry(event.metadata().callsite()).or_default().line(now)
        };
        if let Some(lines) = line.filter(|lines| *lines > 0) {
            // This line comes through here as well, so the lock must be free.
            tracing::warn!(lines, "lines like the next one were not logged");
        }
        line.is_some()
    }
}

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let level = *event.metadata().level();
        if level > Level::INFO || event.metadata().target() == repeats::TARGET {
            return true;
        }
        let now = Instant::now();
        let Some(repeats) = &self.repeats else { return self.allows(event, now) };
        match repeats.judge(event, now) {
            Decision::Counted => false,
            Decision::Again => self.allows(event, now),
            Decision::New(key) => {
                let is_allowed = self.allows(event, now);
                if is_allowed {
                    repeats.remember(key, level, now);
                }
                is_allowed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::log::tests::{Output, text_of};

    #[test]
    fn a_place_logs_a_hundred_lines_then_ten_a_minute_with_the_number_left_out() {
        let (mut site, start) = (CallSite::default(), Instant::now());
        let logged = |site: &mut CallSite, now| (0..10_000).filter_map(|_| site.line(now)).collect::<Vec<_>>();
        assert_eq!(logged(&mut site, start), [0; 100]);
        let minute = logged(&mut site, start + Duration::from_secs(60));
        assert_eq!(minute.len(), 10);
        assert_eq!((minute[0], minute[9]), (9_900, 0));
    }

    /// Tells a test that it runs in a process of its own. Only the log of a whole process takes a line while another one is logged.
    const ALONE: &str = "WEFT_TEST_OWN_LOG";

    #[tokio::test(start_paused = true)]
    async fn the_number_of_lines_that_were_left_out_stands_before_the_next_line() {
        #[allow(clippy::disallowed_methods, reason = "the parent process sets it for this test")]
        if std::env::var(ALONE).is_ok() {
            crate::log::init(0, crate::log::Format::Text, None);
            let log = |number: u32| tracing::warn!("loud {number}");
            (0..150).for_each(log);
            tokio::time::advance(ONE_IN).await;
            log(150);
            return;
        }
        let this = "log::limit::tests::the_number_of_lines_that_were_left_out_stands_before_the_next_line";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let out = alone.args(["--exact", this, "--nocapture"]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        let lines: Vec<&str> = said.lines().filter(|line| line.contains("WARN")).collect();
        let [first @ .., number, next] = &lines[..] else { panic!("{said}") };
        assert!(first.len() == 100 && first[99].ends_with("loud 99"), "{said}");
        assert!(number.ends_with("not logged lines=50") && next.ends_with("loud 150"), "{said}");
    }

    #[test]
    fn each_place_has_its_own_limit_and_debug_lines_have_none() {
        let output = Output::default();
        let lines = tracing_subscriber::fmt().with_writer(output.writer()).with_max_level(Level::DEBUG).finish();
        tracing::subscriber::with_default(lines.with(Limit::default()), || {
            for n in 0..1000 {
                tracing::warn!("loud {n}");
                tracing::debug!("asked for");
            }
            tracing::info!("another place");
        });
        let text = text_of(&output);
        let count = |words: &str| text.matches(words).count();
        assert_eq!((count("loud"), count("asked for"), count("another place")), (100, 1000, 1));
    }
}
