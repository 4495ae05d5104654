// SPDX-License-Identifier: Apache-2.0
//! The answer to `weft history`: what the agent changed in the kernel's tables, and why (docs/adr/022-history.md).
//!
//! The node hands out a [`HistoryRecord`] for each pass that changed something. [`ring::Ring`] keeps the newest ones, and [`recorder::Recorder`]
//! also writes them to a file, so that they survive a restart of the agent.

pub mod recorder;
pub mod ring;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::log::text::printable;
use crate::observe::entries;
use crate::observe::status::now_ms;

/// Maximum number of changes that a record lists one by one. A pass that makes more, such as the first one, is summarised.
pub const MAX_LISTED: usize = 64;

/// A history record: one pass that changed something, or that an earlier agent was killed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryRecord {
    /// Its number, which grows. The next number is the time in microseconds since 1970, or one more than the last number.
    pub seq: u64,
    /// When the pass ended, in milliseconds since 1970.
    pub at_ms: u64,
    /// Why it ran: `start`, `lease`, `kernel`, `audit`, `retry`; or `rules` if the traffic rules were written.
    pub cause: String,
    /// The event that led to it, for people.
    pub event: String,
    /// Its duration in microseconds. The traffic rules are written beside the loop, and their duration is not known.
    pub took_us: u64,
    /// Number of operations that the kernel carried out.
    pub done: usize,
    /// Number of operations that the kernel refused.
    pub failed: usize,
    /// The changes one by one. Empty if there were more than [`MAX_LISTED`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
    /// Number of operations by kind of entry, if the changes are not listed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counts: BTreeMap<String, usize>,
}

impl HistoryRecord {
    /// Returns true for a pass, which changed something or tried to.
    fn is_pass(&self) -> bool {
        self.done > 0 || self.failed > 0
    }
}

/// What happened to one entry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The entry, such as `route 10.5.2.0/24`.
    pub entry: String,
    /// The value before. `None` if there was no entry, or if it is not known.
    pub before: Option<String>,
    /// The value after. `None` if the entry was removed.
    pub after: Option<String>,
    /// What another program had done to the entry, if the kernel announced it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// Why the kernel refused the operation, or a part of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Which records to return.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query {
    /// Only records since this time, in milliseconds since 1970.
    #[serde(default)]
    pub since_ms: u64,
    /// Only records with a higher number than this one.
    #[serde(default)]
    pub after: u64,
}

impl Query {
    /// Asks for the records of this time before now.
    pub fn of_last(time: Duration) -> Query {
        let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Query { since_ms: now_ms().saturating_sub(ms), after: 0 }
    }
}

/// Returns a record for people: a line that says when, why and at what cost, and a line for each change.
pub fn render(record: &HistoryRecord) -> String {
    let failed = if record.failed > 0 { format!(", {} refused", record.failed) } else { String::new() };
    let took = if record.took_us > 0 { format!(" in {:.1} ms", micros(record.took_us)) } else { String::new() };
    let HistoryRecord { cause, event, done, .. } = record;
    // The end of an earlier agent is no pass.
    let result = if record.is_pass() { format!("; {done} written{failed}{took}") } else { String::new() };
    let mut out = format!("{}  {cause}: {event}{result}\n", time(record.at_ms));
    for Change { entry, before, after, by, error } in &record.changes {
        let values = entries::change(before.as_deref(), after.as_deref());
        let word = match (error, before, after) {
            (Some(_), ..) => "refused",
            (_, _, None) => "remove",
            (_, Some(_), Some(_)) => "replace",
            (_, None, Some(_)) => "add",
        };
        let notes = by.iter().chain(error).map(|note| format!(" ({note})"));
        // Writing into a String cannot fail.
        let _ = writeln!(out, "    {word:8}  {entry}  {values}{}", notes.collect::<String>());
    }
    if !record.counts.is_empty() {
        let counts: Vec<String> = record.counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
        let _ = writeln!(out, "    too many to list: {}", counts.join(", "));
    }
    printable(&out)
}

#[allow(clippy::cast_precision_loss, reason = "the tenth of a millisecond is shown")]
fn micros(took_us: u64) -> f64 {
    took_us as f64 / 1000.0
}

/// Formats a time in milliseconds since 1970. A damaged file may contain a time that no calendar has.
fn time(at_ms: u64) -> String {
    match i64::try_from(at_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok()) {
        Some(time) => time.strftime("%Y-%m-%d %H:%M:%S.%3f UTC").to_string(),
        None => format!("{at_ms} ms after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_says_when_why_what_and_at_what_cost() {
        let change = |before: Option<&str>, after: Option<&str>| Change {
            entry: "route 10.5.2.0/24".into(),
            before: before.map(str::to_owned),
            after: after.map(str::to_owned),
            ..Change::default()
        };
        let record = HistoryRecord {
            at_ms: 1_795_288_000_123,
            cause: "kernel".into(),
            event: "another program changed entries".into(),
            took_us: 1250,
            done: 3,
            failed: 1,
            changes: vec![
                Change { by: Some("another program deleted it".into()), ..change(None, Some("via 10.5.2.0")) },
                change(Some("via 1.1.1.1 protocol bird"), Some("via 10.5.2.0")),
                change(Some("via \u{1b}[2J"), None),
                Change { error: Some("no carrier".into()), ..change(None, Some("via 10.5.2.0")) },
            ],
            ..HistoryRecord::default()
        };
        let wanted = "\
2026-11-21 19:06:40.123 UTC  kernel: another program changed entries; 3 written, 1 refused in 1.2 ms
    add       route 10.5.2.0/24  via 10.5.2.0 (another program deleted it)
    replace   route 10.5.2.0/24  via 1.1.1.1 protocol bird -> via 10.5.2.0
    remove    route 10.5.2.0/24  via \\u{1b}[2J
    refused   route 10.5.2.0/24  via 10.5.2.0 (no carrier)
";
        assert_eq!(render(&record), wanted);
        let killed = HistoryRecord { done: 0, failed: 0, changes: vec![], took_us: 0, ..record.clone() };
        assert_eq!(render(&killed), "2026-11-21 19:06:40.123 UTC  kernel: another program changed entries\n");
        let counts = [("fdb".to_owned(), 50_000), ("route".to_owned(), 50_000)].into();
        let summary = HistoryRecord { changes: vec![], counts, at_ms: u64::MAX, ..record };
        assert!(render(&summary).ends_with("\n    too many to list: fdb 50000, route 50000\n"), "{}", render(&summary));
    }
}
