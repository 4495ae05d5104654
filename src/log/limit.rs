// SPDX-License-Identifier: Apache-2.0
//! Limits how often each place in the program may log, so that a repeated fault does not fill a disk.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Number of lines that may be logged at once.
const AT_ONCE: u32 = 100;
/// After these, one more line may be logged in this time.
const ONE_IN: Duration = Duration::from_secs(6);

/// A number of lines that may be logged: 100 at once, and then one in six seconds.
#[derive(Debug, Default)]
pub struct Allowance {
    /// Each line moves this time by [`ONE_IN`]. When it is past, the whole allowance is there again.
    paid_at: Option<Instant>,
}

impl Allowance {
    /// Uses one line of the allowance. Returns false if none is left.
    pub fn take(&mut self, now: Instant) -> bool {
        let owed = self.paid_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        if owed > ONE_IN * (AT_ONCE - 1) {
            return false;
        }
        self.paid_at = Some(now + owed + ONE_IN);
        true
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
/// Lines below the level INFO are not limited, because the operator asked for them.
#[derive(Debug, Default)]
pub struct Limit(Mutex<HashMap<Identifier, CallSite>>);

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let line = {
            let mut sites = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            sites.entry(event.metadata().callsite()).or_default().line(Instant::now())
        };
        if let Some(lines) = line.filter(|lines| *lines > 0) {
            // This line comes through here as well, so the lock must be free.
            tracing::warn!(lines, "lines like the next one were not logged");
        }
        line.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn a_place_logs_a_hundred_lines_then_ten_a_minute_with_the_number_left_out() {
        let (mut site, start) = (CallSite::default(), Instant::now());
        let logged = |site: &mut CallSite, now| (0..10_000).filter_map(|_| site.line(now)).collect::<Vec<_>>();
        assert_eq!(logged(&mut site, start), [0; 100]);
        let minute = logged(&mut site, start + Duration::from_secs(60));
        assert_eq!(minute.len(), 10);
        assert_eq!((minute[0], minute[9]), (9_900, 0));
    }

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Output {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(text)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_place_has_its_own_limit_and_debug_lines_have_none() {
        let output = Output::default();
        let copy = output.clone();
        let lines = tracing_subscriber::fmt().with_writer(move || copy.clone()).with_max_level(Level::DEBUG).finish();
        tracing::subscriber::with_default(lines.with(Limit::default()), || {
            for n in 0..1000 {
                tracing::warn!("loud {n}");
                tracing::debug!("asked for");
            }
            tracing::info!("another place");
        });
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        let count = |words: &str| text.matches(words).count();
        assert_eq!((count("loud"), count("asked for"), count("another place")), (100, 1000, 1));
    }
}
