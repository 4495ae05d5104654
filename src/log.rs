// SPDX-License-Identifier: Apache-2.0
//! The log goes to stderr, one line for each event and without colours, because it ends in a journal or a file. The level follows
//! klog's `-v`. A message that comes again and again is counted instead ([`Repeats`]), and each place in the program has an allowance of
//! lines ([`limit::Allowance`]). docs/adr/027-log-format.md says why.

pub mod leases;
pub mod limit;
pub mod repeats;
pub mod text;

use std::io;
use std::sync::Arc;

use tracing::{Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;

pub use repeats::Repeats;
pub use weft_subnet::retry::{Reminder, chain};

/// The value of `-v` from which on the log contains lines of libraries (hyper, tonic, h2).
const LIBRARIES: u8 = 6;

/// Returns the level of weft's own lines for klog's `-v`: 0 is info, 1 to 3 is debug (passes), and 4 or more is trace (messages).
pub fn level(verbosity: u8) -> Level {
    match verbosity {
        0 => Level::INFO,
        1..=3 => Level::DEBUG,
        _ => Level::TRACE,
    }
}

/// The form of the lines (`--log-format`). The comments of the values are shown by `--help`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Lines for people.
    #[default]
    Text,
    /// A JSON object on each line, for programs.
    Json,
}

/// Installs the logger of the process. With `repeats`, messages that come again and again are counted there. A second call has no effect.
pub fn init(verbosity: u8, format: Format, repeats: Option<Arc<Repeats>>) {
    let _ = tracing::subscriber::set_global_default(subscriber(verbosity, format, repeats, io::stderr));
}

fn subscriber<W>(
    verbosity: u8,
    format: Format,
    repeats: Option<Arc<Repeats>>,
    writer: W,
) -> impl Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let level = level(verbosity);
    let others = if verbosity >= LIBRARIES { level } else { Level::WARN };
    let lines = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false).with_target(verbosity > 0);
    let lines: Box<dyn Layer<Registry> + Send + Sync> = match format {
        Format::Text => Box::new(lines),
        Format::Json => Box::new(lines.json().flatten_event(true).with_current_span(false).with_span_list(false)),
    };
    // kube_client logs each failed attempt as an error. The caller logs what failed.
    let kube = if verbosity >= LIBRARIES { LevelFilter::from(level) } else { LevelFilter::OFF };
    let filter = Targets::new().with_default(others).with_target("weft", level).with_target("kube_client", kube);
    tracing_subscriber::registry().with(lines).with(filter).with(limit::Limit::new(repeats))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// What a test has logged.
    #[derive(Debug, Clone, Default)]
    pub struct Output(Arc<Mutex<Vec<u8>>>);

    impl Output {
        /// Returns what makes a writer for each line.
        pub fn writer(&self) -> impl Fn() -> Output + Send + Sync + 'static {
            let output = self.clone();
            move || output.clone()
        }
    }

    impl io::Write for Output {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).write(text)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Takes the text that was logged.
    pub fn text_of(output: &Output) -> String {
        String::from_utf8(std::mem::take(&mut *output.0.lock().unwrap())).unwrap()
    }

    #[test]
    fn the_level_follows_klog() {
        assert_eq!(level(0), Level::INFO);
        assert_eq!(level(1), Level::DEBUG);
        assert_eq!(level(3), Level::DEBUG);
        assert_eq!(level(4), Level::TRACE);
        assert_eq!(level(10), Level::TRACE);
    }

    /// Returns what is logged in this form by a warning, an information and a line for debugging.
    fn lines(verbosity: u8, format: Format) -> Vec<String> {
        let output = Output::default();
        tracing::subscriber::with_default(subscriber(verbosity, format, None, output.writer()), || {
            tracing::warn!(lease = %"10.5.1.0-24", count = 7, "lease set\naside: {}", "\"x\"");
            tracing::info!("ready");
            tracing::debug!("a pass");
        });
        text_of(&output).lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_line_of_json_has_the_message_and_its_fields_beside_the_level() {
        let all: Vec<serde_json::Value> =
            lines(0, Format::Json).iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(all.len(), 2);
        let mut first = all[0].clone();
        let time = first.as_object_mut().unwrap().remove("timestamp").unwrap();
        assert!(time.as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{time}");
        let wanted = serde_json::json!({
            "level": "WARN", "message": "lease set\naside: \"x\"", "lease": "10.5.1.0-24", "count": 7
        });
        assert_eq!(first, wanted);
        assert_eq!((&all[1]["level"], &all[1]["message"]), (&"INFO".into(), &"ready".into()));
        assert!(lines(1, Format::Json)[2].contains(r#""target":"weft::log::tests""#));
    }

    #[test]
    fn text_is_a_line_for_people() {
        let all = lines(0, Format::Text);
        assert!(all.last().unwrap().ends_with("Z  INFO ready"), "{all:?}");
        assert_eq!(lines(1, Format::Text).len(), all.len() + 1);
    }

    #[test]
    fn libraries_are_heard_from_level_6_on_and_their_warnings_always() {
        let heard = |verbosity| {
            let output = Output::default();
            tracing::subscriber::with_default(subscriber(verbosity, Format::Text, None, output.writer()), || {
                tracing::warn!(target: "hyper::proto", "a warning");
                tracing::info!(target: "hyper::proto", "a request");
                tracing::error!(target: "kube_client::client", "an attempt");
            });
            let text = text_of(&output);
            ["a warning", "a request", "an attempt"].map(|words| text.contains(words))
        };
        assert_eq!((heard(0), heard(5)), ([true, false, false], [true, false, false]));
        assert_eq!(heard(6), [true; 3]);
    }
}
