// SPDX-License-Identifier: Apache-2.0
//! Counts messages that are logged again and again, instead of logging each of them (docs/adr/027-log-format.md).
//!
//! A message is logged at once. The same message is then only counted until its window ends, and one line says how often it came. The
//! first window is short, and each further one is twice as long, so that the state of something that changes to and fro is still seen.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

/// The first window of a message.
const FIRST_WINDOW: Duration = Duration::from_secs(10);
/// The longest window. A message that did not come for this time is forgotten.
const LONGEST_WINDOW: Duration = Duration::from_secs(600);
/// Number of messages that are remembered. The one that has not come for the longest time is forgotten first.
const MAX_MESSAGES: usize = 256;
/// Number of bytes that are kept of the text of a message.
const MAX_TEXT: usize = 1000;

/// The target of the lines that say how often a message came. They are not counted themselves.
pub const TARGET: &str = "weft::log::repeats";

/// One message that was logged.
#[derive(Debug)]
struct Message {
    level: Level,
    /// When it was last logged, or counted in a line.
    logged: Instant,
    /// How long repeats are only counted since then.
    window: Duration,
    /// When it last came.
    last: Instant,
    /// How often it came since it was logged.
    repeats: u64,
    /// Its text, as soon as it has been repeated.
    text: String,
}

impl Message {
    fn window_end(&self) -> Instant {
        self.logged + self.window
    }

    /// Begins the next window.
    fn next_window(&mut self, now: Instant) {
        self.logged = now;
        self.window = (self.window * 2).min(LONGEST_WINDOW);
    }

    /// Takes the repeats that were counted, and begins the next window.
    fn take(&mut self, now: Instant) -> Repeated {
        let (within, ago) = (now - self.logged, now - self.last);
        let repeated = Repeated {
            level: self.level,
            text: std::mem::take(&mut self.text),
            times: std::mem::take(&mut self.repeats),
            within,
            ago,
        };
        self.next_window(now);
        repeated
    }
}

/// What happens with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It did not come before, or long ago. If it is logged, [`Repeats::remember`] must get this number.
    New(u64),
    /// It came before, and is logged again because its window has ended.
    Again,
    /// It was counted, and is not logged.
    Counted,
}

/// The repeats of one message within a window.
#[derive(Debug, PartialEq, Eq)]
struct Repeated {
    level: Level,
    text: String,
    times: u64,
    within: Duration,
    /// Time since it last came.
    ago: Duration,
}

impl Repeated {
    fn log(&self) {
        let Repeated { text, times, .. } = self;
        let unit = if *times == 1 { "time" } else { "times" };
        let (within, ago) = (words(self.within), words(self.ago));
        match self.level {
            Level::ERROR => {
                tracing::error!(target: TARGET, "{text} (logged {times} more {unit} within {within}, the last time {ago} ago)");
            }
            Level::WARN => {
                tracing::warn!(target: TARGET, "{text} (logged {times} more {unit} within {within}, the last time {ago} ago)");
            }
            _ => {
                tracing::info!(target: TARGET, "{text} (logged {times} more {unit} within {within}, the last time {ago} ago)");
            }
        }
    }
}

/// Formats a duration as `40 s` or `10 minutes`.
fn words(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s"),
        seconds => format!("{} minutes", seconds / 60),
    }
}

/// The messages that were logged recently.
#[derive(Debug, Default)]
pub struct Repeats {
    /// By a hash of the place in the program and the whole text. Its keys are random, so that nobody can make two messages equal.
    messages: Mutex<HashMap<u64, Message>>,
    random: RandomState,
    /// A message has its first repeat, so a line will be due.
    changed: Notify,
}

impl Repeats {
    /// Decides about a message, and counts it if it is a repeat.
    pub fn judge(&self, event: &Event<'_>, now: Instant) -> Decision {
        let key = self.key(event);
        let mut messages = self.messages();
        let Some(message) = messages.get_mut(&key) else { return Decision::New(key) };
        let is_forgotten = message.repeats == 0 && now - message.last >= LONGEST_WINDOW;
        if is_forgotten {
            messages.remove(&key);
            return Decision::New(key);
        }
        message.last = now;
        if message.repeats == 0 && now >= message.window_end() {
            message.next_window(now);
            return Decision::Again;
        }
        message.repeats += 1;
        if message.repeats == 1 {
            message.text = Text::of(event);
            self.changed.notify_one();
        }
        Decision::Counted
    }

    /// Remembers a new message that is logged now.
    pub fn remember(&self, key: u64, level: Level, now: Instant) {
        let message = Message { level, logged: now, window: FIRST_WINDOW, last: now, repeats: 0, text: String::new() };
        let oldest = {
            let mut messages = self.messages();
            let is_full = messages.len() >= MAX_MESSAGES;
            let oldest = is_full.then(|| messages.iter().min_by_key(|(_, message)| message.last).map(|(key, _)| *key));
            let oldest = oldest.flatten().and_then(|key| messages.remove(&key));
            messages.insert(key, message);
            oldest
        };
        if let Some(mut oldest) = oldest.filter(|oldest| oldest.repeats > 0) {
            oldest.take(now).log();
        }
    }

    /// Logs how often messages were repeated, as soon as their windows have ended. This never returns.
    pub async fn report(&self) {
        loop {
            let next = self.next();
            tokio::select! {
                () = self.changed.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => self.log(Some(Instant::now())),
            }
        }
    }

    /// Logs all repeats that were counted, whether or not their windows have ended.
    pub fn log_all(&self) {
        self.log(None);
    }

    fn log(&self, ended: Option<Instant>) {
        // The lock must be free while something is logged.
        self.take(ended, Instant::now()).iter().for_each(Repeated::log);
    }

    /// Takes the repeats whose windows ended at `ended`, or all of them. The one that came last is the last one.
    fn take(&self, ended: Option<Instant>, now: Instant) -> Vec<Repeated> {
        let mut messages = self.messages();
        let has_ended = |message: &Message| ended.is_none_or(|ended| message.window_end() <= ended);
        let due = messages.values_mut().filter(|message| message.repeats > 0 && has_ended(message));
        let mut all: Vec<Repeated> = due.map(|message| message.take(now)).collect();
        all.sort_by_key(|repeated| std::cmp::Reverse(repeated.ago));
        all
    }

    /// Returns when the next line is due.
    fn next(&self) -> Option<Instant> {
        self.messages().values().filter(|message| message.repeats > 0).map(Message::window_end).min()
    }

    fn key(&self, event: &Event<'_>) -> u64 {
        let mut hash = Hash(self.random.build_hasher());
        std::hash::Hash::hash(&event.metadata().callsite(), &mut hash.0);
        event.record(&mut Fields(&mut hash));
        hash.0.finish()
    }

    fn messages(&self) -> MutexGuard<'_, HashMap<u64, Message>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the fields of an event as the log shows them: the message, then ` name=value` for each other field.
struct Fields<'a, W>(&'a mut W);

impl<W: Write> Visit for Fields<'_, W> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Neither a hash nor a text that is cut off can fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

/// A hash of all text that is written into it.
struct Hash(DefaultHasher);

impl Write for Hash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

/// The beginning of the text that is written into it.
struct Text(String);

impl Text {
    fn of(event: &Event<'_>) -> String {
        let mut text = Text(String::new());
        event.record(&mut Fields(&mut text));
        text.0
    }
}

impl Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = MAX_TEXT.saturating_sub(self.0.len());
        self.0.push_str(&text[..text.floor_char_boundary(room)]);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
