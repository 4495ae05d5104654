// SPDX-License-Identifier: Apache-2.0
//! The newest records of the history, bounded by their size in memory.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{HistoryRecord, Query};

/// Maximum size of all records in bytes: their text, and [`OVERHEAD`] for each. This is what the history costs in memory. While the file
/// is written as a whole, there is a second copy of the text.
pub const MAX_BYTES: usize = 512 << 10;
/// Bytes of memory for each record besides its text.
const OVERHEAD: usize = 64;
/// Maximum size of the text of one record in bytes. The changes of a larger record are left out.
const MAX_RECORD: usize = 64 << 10;
/// A higher number in the file was not written by an agent: it is the year 2200, in microseconds since 1970. The limit is not the time of
/// the clock, which stands in 1970 at the start of a computer without a battery.
const MAX_SEQ: u64 = 230 * 365 * 24 * 3600 * 1_000_000;

/// A record as one line of JSON, which takes less memory than its parts.
#[derive(Debug)]
struct Entry {
    seq: u64,
    at_ms: u64,
    line: Arc<str>,
}

/// The newest records.
#[derive(Debug, Default)]
pub struct Ring {
    entries: VecDeque<Entry>,
    bytes: usize,
    last: u64,
}

impl Ring {
    /// Adds a record with the time and the next number. The oldest records make room for it.
    pub fn add(&mut self, mut record: HistoryRecord, now_ms: u64) {
        record.at_ms = now_ms;
        record.seq = now_ms.saturating_mul(1000).max(self.last + 1);
        self.push(record);
    }

    /// Adds the records of a file. A line that is no record, or whose number is not higher than that of the line before it, is left
    /// out: the file may be torn, or somebody may have edited it.
    pub fn load(&mut self, text: &[u8]) {
        for line in text.split(|byte| *byte == b'\n').filter(|line| line.len() <= MAX_RECORD) {
            let Ok(record) = serde_json::from_slice::<HistoryRecord>(line) else { continue };
            if record.seq > self.last && record.seq <= MAX_SEQ {
                self.push(record);
            }
        }
    }

    fn push(&mut self, mut record: HistoryRecord) {
        // A record contains only strings, numbers, and maps with strings as keys, so it can always be written as JSON.
        let Ok(mut line) = serde_json::to_string(&record) else { return };
        if line.len() > MAX_RECORD {
            record.changes = Vec::new();
            record.counts = BTreeMap::from([("entries".to_owned(), record.done + record.failed)]);
            record.event.truncate(record.event.floor_char_boundary(MAX_RECORD / 8));
            let Ok(short) = serde_json::to_string(&record) else { return };
            line = short;
        }
        self.last = record.seq;
        self.bytes += line.len() + OVERHEAD;
        self.entries.push_back(Entry { seq: record.seq, at_ms: record.at_ms, line: line.into() });
        while self.bytes > MAX_BYTES {
            let Some(oldest) = self.entries.pop_front() else { break };
            self.bytes -= oldest.line.len() + OVERHEAD;
        }
    }

    /// Returns the records that the query asks for, from the oldest to the newest. The texts are shared and not copied.
    pub fn query(&self, query: &Query) -> Vec<Arc<str>> {
        let begin = self.entries.partition_point(|entry| entry.seq <= query.after);
        let wanted = self.entries.range(begin..).filter(|entry| entry.at_ms >= query.since_ms);
        wanted.map(|entry| entry.line.clone()).collect()
    }

    /// Returns when the newest record of this event was made, in milliseconds since 1970. The event must be a text that JSON does not
    /// change.
    pub fn newest(&self, event: &str) -> Option<u64> {
        self.entries.iter().rev().find(|entry| entry.line.contains(event)).map(|entry| entry.at_ms)
    }

    /// Returns the number of the newest record, or 0 if there was none.
    pub fn last(&self) -> u64 {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::super::Change;
    use super::*;

    fn record(event: &str) -> HistoryRecord {
        HistoryRecord { cause: "lease".into(), event: event.into(), ..HistoryRecord::default() }
    }

    fn events(ring: &Ring, query: Query) -> Vec<String> {
        let parse = |line: &Arc<str>| serde_json::from_str::<HistoryRecord>(line).unwrap().event;
        ring.query(&query).iter().map(parse).collect()
    }

    #[test]
    fn the_newest_records_stay_and_their_size_is_bounded() {
        let mut ring = Ring::default();
        for n in 0..20_000 {
            ring.add(record(&format!("record {n} {}", "x".repeat(500))), 1000 + n);
        }
        assert!(ring.bytes <= MAX_BYTES && ring.entries.len() > 500, "{} bytes", ring.bytes);
        let kept = events(&ring, Query::default());
        assert!(kept.last().unwrap().starts_with("record 19999 "), "the newest record must be there");
        let many = vec![Change { entry: "x".repeat(10_000), ..Change::default() }; 64];
        ring.add(HistoryRecord { changes: many, done: 64, ..record("huge") }, 30_000);
        let newest = ring.entries.back().unwrap();
        assert!(newest.line.contains("huge") && newest.line.len() < 1000, "the changes of a huge record are left out");
        ring.add(record(&"y".repeat(2 * MAX_RECORD)), 30_001);
        assert!(ring.entries.back().unwrap().line.len() <= MAX_RECORD, "a huge event is cut off");
    }

    #[test]
    fn numbers_grow_also_when_the_clock_is_set_back_and_queries_use_them() {
        let mut ring = Ring::default();
        for (event, at) in [("a", 5000), ("b", 5000), ("c", 1000), ("d", 9000)] {
            ring.add(record(event), at);
        }
        let second = ring.entries[1].seq;
        assert!(ring.entries.iter().map(|entry| entry.seq).is_sorted_by(|a, b| a < b));
        assert_eq!(events(&ring, Query { after: second, since_ms: 0 }), ["c", "d"]);
        assert_eq!(events(&ring, Query { after: 0, since_ms: 5000 }), ["a", "b", "d"]);
        assert_eq!(events(&ring, Query { after: ring.last(), since_ms: 0 }), [""; 0]);
        // `weft history --follow` asks the next agent for what is newer than its last number.
        let mut of_next_agent = Ring::default();
        of_next_agent.add(record("e"), 9001);
        assert!(of_next_agent.last() > ring.last(), "an agent without the file goes on with higher numbers");
    }

    /// A computer without a battery for its clock starts in 1970, and gets the time later.
    #[test]
    fn records_are_kept_while_the_clock_is_not_set() {
        let now = 1_795_288_000_000;
        let mut ring = Ring::default();
        ring.add(record("before"), now);
        let text = ring.query(&Query::default()).join("\n");
        let mut after_boot = Ring::default();
        after_boot.load(text.as_bytes());
        after_boot.add(record("at the start"), 9000);
        after_boot.add(record("with the time"), now + 60_000);
        assert_eq!(events(&after_boot, Query::default()), ["before", "at the start", "with the time"]);
    }

    #[test]
    fn the_newest_record_of_an_event_says_when_it_was() {
        let mut ring = Ring::default();
        for (event, at) in [("killed", 1000), ("changed", 2000), ("killed", 3000), ("changed", 4000)] {
            ring.add(record(event), at);
        }
        assert_eq!((ring.newest("killed"), ring.newest("crashed")), (Some(3000), None));
    }

    #[test]
    fn lines_that_are_no_records_are_left_out_and_the_others_stay() {
        let mut ring = Ring::default();
        ring.add(record("first"), 1000);
        ring.add(record("second"), 2000);
        let lines = ring.query(&Query::default());
        let far = serde_json::to_string(&HistoryRecord { seq: u64::MAX, ..record("far in the future") }).unwrap();
        let mut text = format!("{}\n{far}\n{{\"seq\":1}}\n{}\n{}\n", lines[0], lines[1], lines[0]).into_bytes();
        text.extend(b"\xff\xfe\0\n");
        text.extend(&lines[1].as_bytes()[..20]);
        let mut loaded = Ring::default();
        loaded.load(&text);
        assert_eq!(events(&loaded, Query::default()), ["first", "second"]);
        loaded.add(record("third"), 3000);
        assert_eq!(events(&loaded, Query { after: ring.last(), since_ms: 0 }), ["third"]);
    }
}
