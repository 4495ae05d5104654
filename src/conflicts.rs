// SPDX-License-Identifier: Apache-2.0
//! Detects conflicts with other programs. If another program repeatedly replaces or deletes the same entry, the two
//! must not overwrite each other at full speed. After the third repair within a minute, the entry is reported and left
//! to the audit, which comes soon (`src/node/schedule.rs`). The caller passes the time, so that tests need no clock.
//!
//! Devices and their addresses are different: without them the node has no network, so each full pass repairs them. After several such
//! passes in a short time, the node waits before the next one (`src/node/schedule.rs`). Here the repairs are counted, so that the conflict
//! is reported.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::diff::Op;
use weft_backends::state::{Key, ObservedValue, Value};

use crate::observe::entries::protocol;

/// Repairs within this time are counted together.
const WINDOW: Duration = Duration::from_secs(60);
/// Number of repairs within the window that are made at once.
const MAX_REPAIRS: usize = 3;
/// Number of rules and routes of a fence. A program that flushes rules and routes deletes them one after the other.
const PARTS_OF_A_FENCE: usize = 6;
/// Minimum time between two removals of old records.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// A conflict is shown for this time after the last repair that was one too many. Audits bring such repairs, and an audit rarely comes later.
const SHOWN: Duration = Duration::from_secs(90);

/// The repairs of one entry.
#[derive(Debug, Default)]
struct Repairs {
    /// The times of the repairs within the window.
    times: VecDeque<Instant>,
    /// When it was last reported that there are too many.
    reported: Option<Instant>,
    /// When there was last one too many.
    exceeded: Option<Instant>,
    /// The protocol of the route that was last seen in the place of ours.
    protocol: Option<u8>,
}

/// What the number of repairs means.
#[derive(Debug, PartialEq, Eq)]
enum Count {
    /// There were few repairs.
    Few,
    /// There were too many, and it is time to report that.
    Report,
    /// There were too many, which was reported within the window.
    TooMany,
}

impl Repairs {
    /// Counts a repair at this time, of which `max` are allowed in the window.
    fn count(&mut self, max: usize, now: Instant) -> Count {
        while self.times.front().is_some_and(|first| now - *first >= WINDOW) {
            self.times.pop_front();
        }
        if self.times.len() <= max {
            self.times.push_back(now);
        }
        if self.times.len() <= max {
            return Count::Few;
        }
        self.exceeded = Some(now);
        if self.reported.is_some_and(|at| now - at < WINDOW) {
            return Count::TooMany;
        }
        self.reported = Some(now);
        Count::Report
    }

    /// Returns true if a repair within the window is counted.
    fn is_recent(&self, now: Instant) -> bool {
        self.times.back().is_some_and(|last| now - *last < WINDOW)
    }

    /// Returns true if the conflict is shown.
    fn is_shown(&self, now: Instant) -> bool {
        self.exceeded.is_some_and(|at| now - at < SHOWN)
    }
}

/// The repairs of the last minute, and the conflicts that are shown. Only entries that were repaired have a record, so the memory does not
/// grow with the number of peers.
#[derive(Debug, Default)]
pub struct Conflicts {
    repairs: HashMap<Key, Repairs>,
    swept: Option<Instant>,
    /// True if an entry was left to the audit, and nobody has asked for that since.
    left: bool,
    /// The links and addresses that weft wrote, with their value.
    devices: HashMap<Key, (Value, Repairs)>,
}

impl Conflicts {
    /// Returns true if this entry may be repaired at once. `seen` is the entry that the kernel has instead of ours, or
    /// `None` if ours was deleted.
    pub fn allow(&mut self, key: Key, seen: Option<ObservedValue>, now: Instant) -> bool {
        // Old records are not removed at each call: with many repairs, that would take quadratic time.
        if self.repairs.len() > 1024 && self.swept.is_none_or(|at| now - at >= SWEEP_INTERVAL) {
            self.swept = Some(now);
            self.repairs.retain(|_, repairs| repairs.is_recent(now) || repairs.is_shown(now));
        }
        let max = if matches!(key, Key::Fence(_)) { MAX_REPAIRS * PARTS_OF_A_FENCE } else { MAX_REPAIRS };
        let repairs = self.repairs.entry(key).or_default();
        if let (Key::Route(..), Some(seen)) = (key, &seen) {
            repairs.protocol = Some(seen.protocol);
        }
        let count = repairs.count(max, now);
        if count == Count::Report {
            let protocol = seen.map(|seen| seen.protocol);
            tracing::warn!(%key, ?protocol, "another program repeatedly replaces or deletes this entry: weft repairs it, but no longer at once");
        }
        self.left |= count != Count::Few;
        count == Count::Few
    }

    /// Returns true if an entry was left to the audit since the last call.
    pub fn take_left(&mut self) -> bool {
        std::mem::take(&mut self.left)
    }

    /// Takes notice that the kernel has carried out `op`. Reports a link or an address that weft has to write again and again with the
    /// same value, although weft itself did not remove it. Returns true if it was reported now.
    pub fn applied(&mut self, op: &Op, now: Instant) -> bool {
        let (key, value) = match op {
            Op::Ensure(key, value) | Op::Recreate(key, value) => (key, value),
            Op::Remove(Key::Link(name), _) => {
                self.devices.retain(|key, _| !matches!(key, Key::Link(of) | Key::Addr(of, _) if of == name));
                return false;
            }
            Op::Remove(key, _) => {
                self.devices.remove(key);
                return false;
            }
        };
        if !matches!(key, Key::Link(_) | Key::Addr(..)) {
            return false;
        }
        match self.devices.get_mut(key) {
            Some((before, repairs)) if before == value => {
                let reported = repairs.count(MAX_REPAIRS, now) == Count::Report;
                if reported {
                    tracing::warn!(%key, "another program repeatedly changes or deletes this device or address: weft repairs it, but no longer at once");
                }
                reported
            }
            // weft wrote it for the first time, or the plan changed.
            _ => {
                self.devices.insert(*key, (value.clone(), Repairs::default()));
                false
            }
        }
    }

    /// Returns a sentence about the entries that another program deletes or replaces again and again, if there are any. It names the first
    /// one and counts the others. Only entries for which `counts` returns true are looked at.
    pub fn fights(&self, now: Instant, counts: impl Fn(&Key) -> bool) -> Option<String> {
        let devices = self.devices.iter().map(|(key, (_, repairs))| (key, repairs));
        let (mut first, mut others): (Option<(&Key, &Repairs)>, usize) = (None, 0);
        for (key, repairs) in self.repairs.iter().chain(devices) {
            if !repairs.is_shown(now) || !counts(key) {
                continue;
            }
            others += usize::from(first.is_some());
            if first.is_none_or(|(before, _)| key < before) {
                first = Some((key, repairs));
            }
        }
        let (key, repairs) = first?;
        let more = if others > 0 { format!(" and {others} more") } else { String::new() };
        let writer = repairs.protocol.map(|number| format!(" (protocol {number}, {})", protocol(number)));
        let writer = writer.unwrap_or_default();
        Some(format!("another program repeatedly deletes or replaces {key}{more}{writer}"))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::Name;

    use super::*;

    fn link(name: &str) -> Key {
        Key::Link(Name::new(name).unwrap())
    }

    /// Returns one of many routes.
    fn route(n: u32) -> Key {
        Key::Route(ipnet::Ipv4Net::new((0x0a00_0000 + (n << 8)).into(), 24).unwrap().into(), 0)
    }

    #[test]
    fn the_fourth_repair_within_a_minute_is_left_to_the_audit() {
        let key = link("flannel.1");
        let start = Instant::now();
        let mut conflicts = Conflicts::default();
        for second in 0..3 {
            assert!(conflicts.allow(key, None, start + Duration::from_secs(second)), "second {second}");
        }
        assert!(!conflicts.take_left(), "all repairs were made at once");
        assert!(!conflicts.allow(key, None, start + Duration::from_secs(4)));
        assert!(conflicts.take_left() && !conflicts.take_left(), "one audit is enough");
        assert!(!conflicts.allow(key, None, start + Duration::from_secs(5)));
        assert!(conflicts.allow(link("other"), None, start), "another key must not be affected");
        assert!(
            conflicts.allow(key, None, start + Duration::from_secs(65)),
            "the entry must be repaired again after a minute"
        );
    }

    /// Repairs of many entries must not take memory for ever, and none of the last minute may be forgotten.
    #[test]
    fn repairs_are_forgotten_after_a_minute_and_not_before() {
        let (mut conflicts, start) = (Conflicts::default(), Instant::now());
        for n in 0..2000 {
            assert!(conflicts.allow(route(n), None, start), "route {n}");
        }
        let (busy, second) = (route(5000), Duration::from_secs(1));
        for _ in 0..MAX_REPAIRS {
            assert!(conflicts.allow(busy, None, start + WINDOW - second));
        }
        assert!(!conflicts.allow(busy, None, start + WINDOW), "its repairs were a second ago");
        assert_eq!(conflicts.repairs.len(), 1);
    }

    #[test]
    fn a_fight_is_shown_as_long_in_a_conflict_over_very_many_entries() {
        let (mut conflicts, start) = (Conflicts::default(), Instant::now());
        for _ in 0..=MAX_REPAIRS {
            for n in 0..2000 {
                conflicts.allow(route(n), None, start);
            }
        }
        let second = Duration::from_secs(1);
        for (now, is_shown) in [(start + SHOWN - second, true), (start + SHOWN, false)] {
            // Any repair removes old records.
            conflicts.allow(route(5000), None, now);
            assert_eq!(conflicts.repairs.contains_key(&route(0)), is_shown);
            assert_eq!(conflicts.fights(now, |_| true).is_some(), is_shown);
        }
    }

    #[test]
    fn a_program_that_flushes_all_rules_and_routes_a_few_times_is_no_conflict() {
        let fence = Key::Fence(weft_subnet::cidr::Family::V4);
        let start = Instant::now();
        let mut conflicts = Conflicts::default();
        for part in 0..MAX_REPAIRS * PARTS_OF_A_FENCE {
            assert!(conflicts.allow(fence, None, start), "part {part}");
        }
        assert!(!conflicts.allow(fence, None, start));
    }

    #[test]
    fn a_fight_is_shown_until_some_time_after_the_last_repair() {
        let route = |n: u8| Key::Route(format!("10.5.{n}.0/24").parse().unwrap(), 0);
        let seen = |protocol| ObservedValue { value: Value::Addr, protocol, mark: false };
        let (mut conflicts, start) = (Conflicts::default(), Instant::now());
        let shown = |conflicts: &Conflicts, second| conflicts.fights(start + Duration::from_secs(second), |_| true);
        for second in 0..3 {
            conflicts.allow(route(7), None, start + Duration::from_secs(second));
        }
        assert_eq!(shown(&conflicts, 3), None, "three repairs are no fight");
        for second in 0..30 {
            for n in 2..6 {
                conflicts.allow(route(n), Some(seen(4)), start + Duration::from_secs(second));
            }
        }
        let text = "another program repeatedly deletes or replaces route 10.5.2.0/24 and 3 more (protocol 4, static)";
        assert_eq!(shown(&conflicts, 30).as_deref(), Some(text));
        conflicts.allow(route(3), None, start + Duration::from_secs(40));
        let text = "another program repeatedly deletes or replaces route 10.5.3.0/24 (protocol 4, static)";
        assert_eq!(shown(&conflicts, 120).as_deref(), Some(text), "only one goes on");
        let now = start + Duration::from_secs(120);
        assert_eq!(conflicts.fights(now, |key| *key != route(3)), None, "the kernel refuses this one");
        assert_eq!(shown(&conflicts, 131), None);
        let write = Op::Ensure(link("flannel.1"), Value::Addr);
        for _ in 0..5 {
            conflicts.applied(&write, now);
        }
        let text = "another program repeatedly deletes or replaces link flannel.1";
        assert_eq!(shown(&conflicts, 131).as_deref(), Some(text));
    }

    /// Returns after how many of these writes, one a second, a conflict was reported.
    fn reported(ops: impl Iterator<Item = Op>) -> Vec<u64> {
        let (mut conflicts, start) = (Conflicts::default(), Instant::now());
        let numbered = (0..).zip(ops);
        numbered.filter(|(n, op)| conflicts.applied(op, start + Duration::from_secs(*n))).map(|(n, _)| n).collect()
    }

    #[test]
    fn a_device_that_is_repaired_four_times_within_a_minute_is_reported_once_a_minute() {
        let value = |mtu| Value::link(Link { kind: Arc::new(Foreign), mtu, mac: None, up: true });
        let ensure = |mtu| Op::Ensure(link("flannel.1"), value(mtu));
        // The first write is no repair. The report is repeated once a minute.
        assert_eq!(reported((0..100).map(|_| ensure(1450))), [4, 64]);
        assert_eq!(reported((0..4).map(|_| ensure(1450))), [0; 0]);
        assert_eq!(reported((0..100).map(|n| ensure(1450 - n))), [0; 0], "changes of the plan are no conflict");
        let removed = |n| if n % 2 == 0 { ensure(1450) } else { Op::Remove(link("flannel.1"), value(1450)) };
        assert_eq!(reported((0..100).map(removed)), [0; 0], "weft itself removed the device");
        // Addresses go with their device, so they are written again for the same reason.
        let address = Key::Addr(Name::new("flannel.1").unwrap(), "10.5.1.0/32".parse().unwrap());
        let with_address = |n| match n % 3 {
            0 => ensure(1450),
            1 => Op::Ensure(address, Value::Addr),
            _ => Op::Remove(link("flannel.1"), value(1450)),
        };
        assert_eq!(reported((0..100).map(with_address)), [0; 0], "weft itself removed the address with the device");
        assert_eq!(
            reported((0..5).map(|_| Op::Ensure(address, Value::Addr))),
            [4],
            "another program removes the address"
        );
    }
}
