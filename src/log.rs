// SPDX-License-Identifier: Apache-2.0
//! Logs go to stderr, one line each, never coloured (they end in a journal or a file). The level follows klog's `-v`.
//!
//! Whatever happens, each place in the program has an allowance of lines ([`Allowance`]): a fault that repeats, or somebody who
//! provokes one all the time, does not fill a disk. Lines that were left out are counted. What `-v` asks for is not limited.

pub mod lines;

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::log::lines::Allowance;

/// `-v` from which on the libraries below us (hyper, tonic, h2) are heard too.
const LIBRARIES: u8 = 6;

/// The level of weft's own lines for klog's `-v`: 0 info, 1 to 3 debug (a pass), 4 and more trace (a message).
pub fn level(verbosity: u8) -> Level {
    match verbosity {
        0 => Level::INFO,
        1..=3 => Level::DEBUG,
        _ => Level::TRACE,
    }
}

/// Installs the logger of the process. A second call changes nothing.
pub fn init(verbosity: u8) {
    let level = level(verbosity);
    let others = if verbosity >= LIBRARIES { level } else { Level::WARN };
    let lines = tracing_subscriber::fmt()
        .with_writer(io::stderr)
        .with_ansi(false)
        .with_target(verbosity > 0)
        .with_max_level(level)
        .finish();
    // It calls each failed try an error; what failed is said by whoever called.
    let kube = if verbosity >= LIBRARIES { LevelFilter::from(level) } else { LevelFilter::OFF };
    let filter = Targets::new().with_default(others).with_target("weft", level).with_target("kube_client", kube);
    let _ = tracing::subscriber::set_global_default(lines.with(filter).with(Limit::default()));
}

/// Lines of one place in the program.
#[derive(Debug, Default)]
struct Place {
    allowance: Allowance,
    left_out: u64,
}

impl Place {
    /// Whether a line may be said now, and how many were left out before it.
    fn line(&mut self, now: Instant) -> Option<u64> {
        if self.allowance.take(now) {
            return Some(std::mem::take(&mut self.left_out));
        }
        self.left_out += 1;
        None
    }
}

/// Leaves lines out where a place says too many.
#[derive(Debug, Default)]
struct Limit(Mutex<HashMap<Identifier, Place>>);

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let line = {
            let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            places.entry(event.metadata().callsite()).or_default().line(Instant::now())
        };
        if let Some(lines) = line.filter(|lines| *lines > 0) {
            // The lock is free again: this line asks for it, too.
            tracing::warn!(lines, "lines like the next one were not logged");
        }
        line.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_place_that_never_stops_says_a_hundred_lines_then_ten_a_minute_and_how_many_were_left_out() {
        let (mut place, start) = (Place::default(), Instant::now());
        let said = |place: &mut Place, now| (0..10_000).filter_map(|_| place.line(now)).collect::<Vec<_>>();
        assert_eq!(said(&mut place, start), [0; 100]);
        let minute = said(&mut place, start + Duration::from_secs(60));
        assert_eq!(minute.len(), 10);
        assert_eq!((minute[0], minute[9]), (9_900, 0));
    }

    #[derive(Clone, Default)]
    struct Paper(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Paper {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(text)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_place_is_limited_for_itself_and_what_is_asked_for_is_not() {
        let paper = Paper::default();
        let copy = paper.clone();
        let lines = tracing_subscriber::fmt().with_writer(move || copy.clone()).with_max_level(Level::DEBUG).finish();
        tracing::subscriber::with_default(lines.with(Limit::default()), || {
            for n in 0..1000 {
                tracing::warn!("loud {n}");
                tracing::debug!("asked for");
            }
            tracing::info!("another place");
        });
        let text = String::from_utf8(paper.0.lock().unwrap().clone()).unwrap();
        let count = |words: &str| text.matches(words).count();
        assert_eq!((count("loud"), count("asked for"), count("another place")), (100, 1000, 1));
    }

    #[test]
    fn verbosity_follows_klog() {
        assert_eq!(level(0), Level::INFO);
        assert_eq!(level(1), Level::DEBUG);
        assert_eq!(level(3), Level::DEBUG);
        assert_eq!(level(4), Level::TRACE);
        assert_eq!(level(10), Level::TRACE);
    }
}
