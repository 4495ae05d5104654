// SPDX-License-Identifier: Apache-2.0
//! What a pass did, for metrics and `weft status`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use weft_backends::diff::Op;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, ObservedValue, Value};

use crate::observe::entries;
use crate::observe::history::{Change, HistoryRecord, MAX_LISTED};

/// Why a pass ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It is the first pass, or the own lease, the host or net-conf changed.
    Start,
    /// Leases changed.
    Lease,
    /// The kernel changed.
    Kernel,
    /// The time of the audit came.
    Audit,
    /// The time of a pending entry came.
    Retry,
}

impl Cause {
    /// Returns the word for this cause in metrics and in `weft status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Start => "start",
            Cause::Lease => "lease",
            Cause::Kernel => "kernel",
            Cause::Audit => "audit",
            Cause::Retry => "retry",
        }
    }
}

/// What led to a pass. It is made where the event is known, and the pass carries it into the history.
#[derive(Debug, Clone)]
pub struct Trigger {
    /// The word for metrics.
    pub cause: Cause,
    /// The event, for people.
    pub event: Cow<'static, str>,
}

impl Trigger {
    /// Returns a trigger.
    pub fn new(cause: Cause, event: impl Into<Cow<'static, str>>) -> Trigger {
        Trigger { cause, event: event.into() }
    }
}

/// A cause of which no more is known.
impl From<Cause> for Trigger {
    fn from(cause: Cause) -> Trigger {
        let event = match cause {
            Cause::Start => "first pass",
            Cause::Lease => "leases changed",
            Cause::Kernel => "the kernel's tables changed",
            Cause::Audit => "the time of the audit came",
            Cause::Retry => "an entry that the kernel had refused is tried again",
        };
        Trigger::new(cause, event)
    }
}

/// What is known of an entry before a write.
#[derive(Debug, Clone)]
pub(super) enum Before {
    /// It was like this.
    Observed(ObservedValue),
    /// The kernel announced that it is gone, and this agent had not removed it.
    Deleted,
}

impl Before {
    /// Returns a value that this agent wrote earlier.
    pub(super) fn written(value: Value) -> Before {
        Before::Observed(ObservedValue { value, protocol: PROTOCOL, mark: true })
    }
}

/// What a pass did.
#[derive(Debug)]
pub struct PassReport {
    /// Why it ran.
    pub cause: Cause,
    /// How long it took.
    pub took: Duration,
    /// Number of operations by [`kind`] of entry and outcome. The outcome is true if the kernel carried the operation out.
    pub operations: HashMap<(&'static str, bool), usize>,
    /// What the kernel said to the last operation that failed.
    pub error: Option<String>,
    /// What is known of the entries before they are written, while they are few.
    pub(super) before: HashMap<Key, Before>,
    /// The changes, while they are few.
    changes: Vec<Change>,
    /// Number of changes, also when they are too many to be listed.
    changed: usize,
}

impl PassReport {
    pub(super) fn new(cause: Cause) -> PassReport {
        PassReport {
            cause,
            took: Duration::ZERO,
            operations: HashMap::new(),
            error: None,
            before: HashMap::new(),
            changes: Vec::new(),
            changed: 0,
        }
    }

    /// Remembers what is known of the entries of these operations, if they are few enough to be listed.
    pub(super) fn remember(&mut self, ops: &[Op], before: impl Fn(&Key) -> Option<Before>) {
        if ops.len() <= MAX_LISTED {
            self.before.extend(ops.iter().filter_map(|op| Some((op.key(), before(&op.key())?))));
        }
    }

    /// Notes for the history that an operation changed an entry, or that the kernel refused it for the first time. Later refusals of the
    /// same entry change nothing, so they are not noted.
    pub(super) fn note(&mut self, op: &Op, error: Option<&str>) {
        self.changed += 1;
        if self.changed > MAX_LISTED {
            self.changes = Vec::new();
            return;
        }
        let key = op.key();
        let (known, after) = match op {
            Op::Ensure(_, value) | Op::Recreate(_, value) => (self.before.remove(&key), Some(entries::value(value))),
            Op::Remove(_, value) => {
                let known = self.before.remove(&key);
                (Some(known.unwrap_or_else(|| Before::written(value.clone()))), None)
            }
        };
        let (before, by) = match known {
            Some(Before::Observed(seen)) => (Some(entries::seen(&key, &seen)), None),
            Some(Before::Deleted) => (None, Some("another program or the kernel had deleted it".to_owned())),
            None => (None, None),
        };
        self.changes.push(Change { entry: key.to_string(), before, after, by, error: error.map(str::to_owned) });
    }

    /// Returns the record for the history, or `None` if nothing changed.
    pub fn record(&self, event: &str) -> Option<HistoryRecord> {
        if self.changed == 0 {
            return None;
        }
        let mut counts = BTreeMap::new();
        if self.changes.is_empty() {
            for ((kind, _), count) in &self.operations {
                *counts.entry((*kind).to_owned()).or_default() += count;
            }
        }
        Some(HistoryRecord {
            cause: self.cause.as_str().to_owned(),
            event: event.to_owned(),
            took_us: u64::try_from(self.took.as_micros()).unwrap_or(u64::MAX),
            done: self.writes() - self.failed(),
            failed: self.failed(),
            changes: self.changes.clone(),
            counts,
            ..HistoryRecord::default()
        })
    }

    /// Returns how many operations were tried.
    pub fn writes(&self) -> usize {
        self.operations.values().sum()
    }

    /// Returns how many operations failed.
    pub fn failed(&self) -> usize {
        self.operations.iter().filter(|((_, done), _)| !done).map(|(_, count)| count).sum()
    }
}

/// Returns the word for this kind of entry in metrics.
pub fn kind(key: &Key) -> &'static str {
    match key {
        Key::Link(_) => "link",
        Key::Addr(..) => "address",
        Key::WgPeer(..) => "wireguard-peer",
        Key::AllowedIp(..) => "allowed-ip",
        Key::Fdb(..) => "fdb",
        Key::Neigh(..) => "neighbour",
        Key::Route(..) => "route",
        Key::Peer(_) | Key::Guard(_) => "guard",
        Key::Open(_) | Key::Fence(_) => "fence",
    }
}
