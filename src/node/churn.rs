// SPDX-License-Identifier: Apache-2.0
//! How often the leases of others may cause work. Each lease has an allowance, and devices have one together: who uses up its own
//! waits, with its newest record alone, and delays nobody else. A change of thousands of leases, each once, waits for nothing.
//! Time is an input. docs/adr/008-bounds-per-lease.md says why these numbers.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use weft_backends::diff;
use weft_backends::index::Changed;
use weft_backends::state::{Key, Name};
use weft_subnet::lease::{Id, Record};

use super::REST;

/// What a change costs that makes or removes a device, and so asks for a look at everything.
const DEVICE: Duration = Duration::from_secs(10);
/// What any other change costs for every [`ENTRIES`] entries that it changes.
const PLAIN: Duration = Duration::from_secs(1);
/// A dual-stack node that gets another address changes twelve. A lease that takes what several others claim changes more.
const ENTRIES: usize = 16;
/// A lease may owe so much and still change once more: ten changes with a device or ninety others at once, then one in ten seconds or
/// one a second. No node changes its lease so often; one that restarts all the time does once in a few seconds.
const CREDIT: Duration = Duration::from_secs(90);
/// Looks at everything that devices of peers cost, of all leases together: twenty at once, then one a second, or a fifth of a core.
const LOOK: Duration = Duration::from_secs(1);
const LOOKS: Duration = Duration::from_secs(19);
/// So many leases in debt are kept without a look at which of them have paid.
const FEW: usize = 64;

/// Who owes what, and what waits.
#[derive(Debug)]
pub(super) struct Churn {
    /// When each lease that changed lately is out of debt.
    paid_at: HashMap<Id, Instant>,
    /// The newest records of leases that have changed too often.
    waiting: HashMap<Id, Record>,
    /// How many were in debt when that was looked at last.
    in_debt: usize,
    /// When looks at everything are paid for.
    looks_paid_at: Instant,
    /// Devices whose making or removal waits for the next look at everything.
    late: BTreeSet<Name>,
}

impl Churn {
    /// Nobody owes anything.
    pub(super) fn new(now: Instant) -> Churn {
        Churn {
            paid_at: HashMap::new(),
            waiting: HashMap::new(),
            in_debt: 0,
            looks_paid_at: now,
            late: BTreeSet::new(),
        }
    }

    /// The record if its lease may change now; else it waits, in place of an older one, until [`Churn::due`] gives it back.
    pub(super) fn admit(&mut self, record: Record, now: Instant) -> Option<Record> {
        if self.allowed_at(&record.id, now) <= now {
            self.waiting.remove(&record.id);
            return Some(record);
        }
        self.waiting.insert(record.id.clone(), record);
        None
    }

    /// A lease changed, which led to these changes of entries.
    pub(super) fn charge(&mut self, id: &Id, changed: &[Changed], now: Instant) {
        if changed.is_empty() {
            return;
        }
        let device = changed.iter().any(|(key, ..)| matches!(key, Key::Link(_)));
        let entries = PLAIN * changed.len().div_ceil(ENTRIES) as u32;
        let cost = if device { DEVICE.max(entries) } else { entries };
        if self.paid_at.len() > FEW.max(2 * self.in_debt) {
            self.paid_at.retain(|_, at| *at > now);
            self.paid_at.shrink_to(2 * self.paid_at.len());
            self.in_debt = self.paid_at.len();
        }
        let paid_at = self.paid_at.entry(id.clone()).or_insert(now);
        *paid_at = (*paid_at).max(now) + cost;
    }

    /// This lease is gone, and so is what it said last.
    pub(super) fn gone(&mut self, id: &Id) {
        self.waiting.remove(id);
    }

    /// Only these leases are there.
    pub(super) fn only(&mut self, there: impl Fn(&Id) -> bool) {
        self.waiting.retain(|id, _| there(id));
    }

    /// Records whose leases may change again.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Record> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        let due: Vec<Id> = self.waiting.keys().filter(|id| self.allowed_at(id, now) <= now).cloned().collect();
        due.iter().filter_map(|id| self.waiting.remove(id)).collect()
    }

    /// When there is something to do: records or devices that waited.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        let records = self.waiting.keys().map(|id| self.allowed_at(id, now)).min();
        records.into_iter().chain(self.look_due()).min()
    }

    fn allowed_at(&self, id: &Id, now: Instant) -> Instant {
        self.paid_at.get(id).and_then(|at| at.checked_sub(CREDIT)).unwrap_or(now)
    }

    /// True when a device may be looked for at once.
    pub(super) fn may_look(&self, now: Instant) -> bool {
        self.looks_paid_at.checked_sub(LOOKS).is_none_or(|at| at <= now)
    }

    /// Everything was looked at because of a device of a peer, which took so long.
    pub(super) fn looked(&mut self, took: Duration, now: Instant) {
        self.looks_paid_at = self.looks_paid_at.max(now) + LOOK.max(took * REST);
    }

    /// When the look that devices wait for may happen.
    pub(super) fn look_due(&self) -> Option<Instant> {
        (!self.late.is_empty()).then(|| self.looks_paid_at.checked_sub(LOOKS).unwrap_or(self.looks_paid_at))
    }

    /// Everything is looked at now, whatever for.
    pub(super) fn nothing_is_late(&mut self) {
        self.late.clear();
    }

    /// Lets devices and their entries wait. What remains stands on devices that are there, and is written now.
    pub(super) fn leave_late(&mut self, mut changed: Vec<Changed>) -> Vec<Changed> {
        self.late.extend(changed.iter().filter_map(|(key, ..)| match key {
            Key::Link(name) => Some(*name),
            _ => None,
        }));
        if !self.late.is_empty() {
            changed.retain(|(key, before, after)| {
                let device = after.as_ref().or(before.as_ref()).and_then(|value| diff::device(key, value));
                !matches!(key, Key::Link(_)) && device.is_none_or(|name| !self.late.contains(&name))
            });
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::{Route, Value};

    use super::*;

    fn record(id: &str, text: &str) -> Record {
        Record { id: id.into(), lease: Err(text.into()) }
    }

    fn dev(name: &str) -> Name {
        Name::new(name).unwrap()
    }

    fn device(name: &str) -> Changed {
        let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
        (Key::Link(dev(name)), None, Some(Value::link(link)))
    }

    fn route(third: u8, name: &str) -> Changed {
        let via = [10, 5, third, 0].into();
        let route = Value::Route(Route::Unicast { via, dev: dev(name), onlink: true });
        (Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0), None, Some(route))
    }

    /// How many of a thousand changes within a minute come through.
    fn admitted(changed: &[Changed]) -> usize {
        let start = Instant::now();
        let mut churn = Churn::new(start);
        let mut count = 0;
        for n in 0..1000 {
            let now = start + Duration::from_millis(60 * n);
            let due = churn.due(now);
            assert!(due.len() <= 1);
            for _ in due.into_iter().chain(churn.admit(record("restless", &n.to_string()), now)) {
                count += 1;
                churn.charge(&"restless".into(), changed, now);
            }
        }
        count
    }

    #[test]
    fn a_lease_that_never_rests_is_heard_a_few_times_a_minute() {
        assert!((15..=16).contains(&admitted(&[device("flannel.2"), route(1, "flannel.2")])));
        assert!((149..=151).contains(&admitted(&[route(1, "flannel.1")])));
        assert_eq!(admitted(&[]), 1000, "what changes nothing costs nothing");
    }

    #[test]
    fn the_newest_record_comes_when_its_time_has_come_unless_the_lease_is_gone() {
        let now = Instant::now();
        let mut churn = Churn::new(now);
        let id: Id = "restless".into();
        for _ in 0..10 {
            assert!(churn.admit(record(&id, "x"), now).is_some());
            churn.charge(&id, &[device("flannel.2")], now);
        }
        assert_eq!(churn.next(now), None);
        assert_eq!(churn.admit(record(&id, "older"), now), None);
        assert_eq!(churn.admit(record(&id, "newest"), now), None);
        assert!(churn.admit(record("another", "x"), now).is_some(), "nobody else waits");
        let then = churn.next(now).unwrap();
        assert_eq!(then, now + DEVICE);
        assert_eq!(churn.due(then - Duration::from_millis(1)), []);
        assert_eq!(churn.due(then), [record(&id, "newest")]);
        assert_eq!(churn.next(then), None);
        churn.admit(record(&id, "x"), now);
        churn.gone(&id);
        assert_eq!((churn.due(then), churn.next(then)), (vec![], None));
    }

    #[test]
    fn a_cluster_that_changes_once_waits_for_nothing_and_leaves_nothing() {
        let start = Instant::now();
        let mut churn = Churn::new(start);
        for n in 0..50_000_u32 {
            let id: Id = n.to_string().into();
            assert!(churn.admit(record(&id, "x"), start).is_some());
            churn.charge(&id, &[route(1, "flannel.2")], start);
        }
        let later = start + Duration::from_secs(2);
        churn.charge(&"last".into(), &[route(1, "flannel.2")], later);
        // Not before it is worth it; then all at once.
        for n in 0..50_001_u32 {
            churn.charge(&format!("{n} again").into(), &[route(1, "flannel.2")], later + PLAIN * n);
        }
        assert!(churn.paid_at.len() < 2 * FEW, "{}", churn.paid_at.len());
    }

    #[test]
    fn devices_of_many_leases_wait_and_honest_entries_do_not() {
        let start = Instant::now();
        let mut churn = Churn::new(start);
        for look in 0..20 {
            assert!(churn.may_look(start), "look {look}");
            churn.looked(Duration::from_millis(5), start);
        }
        assert!(!churn.may_look(start));
        let changed = vec![device("flannel.9"), route(9, "flannel.9"), route(1, "flannel.1")];
        assert_eq!(churn.leave_late(changed), [route(1, "flannel.1")]);
        assert_eq!(churn.leave_late(vec![route(8, "flannel.9"), route(2, "flannel.1")]), [route(2, "flannel.1")]);
        let due = churn.look_due().unwrap();
        assert_eq!(due, start + LOOK);
        assert!(churn.may_look(due));
        churn.looked(Duration::from_secs(1), due);
        churn.nothing_is_late();
        assert_eq!(churn.look_due(), None);
        assert!(!churn.may_look(due + Duration::from_secs(3)), "a slow look is paid with four times its time");
        assert!(churn.may_look(due + Duration::from_secs(4)));
    }
}
