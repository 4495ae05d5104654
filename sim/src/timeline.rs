// SPDX-License-Identifier: Apache-2.0
//! The virtual time, and the log of everything that happens, in which each line has its time and its machine.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use weft_subnet::outside::{self, FileStep, Simulated};

/// The wall clock at the beginning of each simulation, in seconds since 1970: 2026-01-01.
const BEGIN: Duration = Duration::from_secs(1_767_225_600);
/// The last lines that are kept, in bytes.
const MOST: usize = 64 << 20;

thread_local! {
    static START: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The machine whose agent runs now, and by how many seconds its wall clock is wrong.
    static MACHINE: Cell<Option<(usize, i64)>> = const { Cell::new(None) };
    static LINES: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Begins the virtual time. This needs a tokio runtime with a paused clock. The functions carry out the steps of a write of the agents, and
/// return how long a write beside their loop takes.
pub fn begin(file_step: fn(FileStep<'_>) -> io::Result<()>, write_time: fn() -> Duration) {
    START.set(Some(Instant::now()));
    outside::simulate(Some(Simulated { wall_clock, random: crate::chance::agents, file_step, write_time }));
}

/// Returns the machine whose agent runs now.
pub fn machine() -> Option<usize> {
    MACHINE.get().map(|(machine, _)| machine)
}

/// Returns the virtual time since the simulation began.
pub fn elapsed() -> Duration {
    START.get().map_or(Duration::ZERO, |start| start.elapsed())
}

fn wall_clock() -> Duration {
    let now = BEGIN + elapsed();
    let wrong = MACHINE.get().map_or(0, |(_, wrong)| wrong);
    let by = Duration::from_secs(wrong.unsigned_abs());
    if wrong < 0 { now.saturating_sub(by) } else { now + by }
}

/// Returns the true time as text of the Kubernetes API.
pub fn date() -> String {
    let time = Timestamp::UNIX_EPOCH.checked_add(BEGIN + elapsed()).unwrap_or(Timestamp::MAX);
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Calls a function as this machine, whose wall clock is wrong by so many seconds.
pub fn on_machine<T>(machine: usize, wrong: i64, function: impl FnOnce() -> T) -> T {
    let before = MACHINE.replace(Some((machine, wrong)));
    let result = function();
    MACHINE.set(before);
    result
}

/// Returns the virtual time as `1:02:03.456`.
pub fn shown(time: Duration) -> String {
    let s = time.as_secs();
    format!("{}:{:02}:{:02}.{:03}", s / 3600, s / 60 % 60, s % 60, time.subsec_millis())
}

/// Adds a line about the simulation itself.
pub fn note(text: &str) {
    push(format!("{} ---- {text}\n", shown(elapsed())).as_bytes());
}

fn push(bytes: &[u8]) {
    LINES.with_borrow_mut(|lines| {
        if lines.len() < MOST {
            lines.push_str(&String::from_utf8_lossy(bytes));
        }
    });
}

/// Returns all lines so far.
pub fn lines() -> String {
    LINES.with_borrow(Clone::clone)
}

/// Writes the log of the agents into the timeline.
pub fn collect_logs(level: tracing::Level) {
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_target(false)
        .with_max_level(level)
        .with_timer(Prefix)
        .with_writer(Lines)
        .finish();
    let _ = tracing::subscriber::set_global_default(subscriber);
}

struct Prefix;

impl FormatTime for Prefix {
    fn format_time(&self, w: &mut Writer<'_>) -> fmt::Result {
        let machine = MACHINE.get().map_or("-".to_owned(), |(machine, _)| format!("n{machine}"));
        write!(w, "{} {machine:4}", shown(elapsed()))
    }
}

struct Lines;

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Lines;

    fn make_writer(&self) -> Lines {
        Lines
    }
}
