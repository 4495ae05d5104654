// SPDX-License-Identifier: Apache-2.0
//! How often the leases of others may cause work. Each lease has an allowance, and devices have one together: who uses up its own
//! waits, with its newest record alone, and delays nobody else. A change of thousands of leases, each once, waits for nothing.
//! Time is an input. docs/adr/008-bounds-per-lease.md says why these numbers.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use weft_backends::diff;
use weft_backends::index::Changed;
use weft_backends::state::{Key, Name, Value};
use weft_subnet::lease::{Id, Record};

use super::REST;

/// What a change costs that makes or removes a device, and so asks for a look at everything.
const DEVICE: Duration = Duration::from_secs(10);
/// What any other change costs for each [`ENTRIES`] entries, or a part of them, that it changes, also in other leases.
const PLAIN: Duration = Duration::from_secs(1);
/// A lease of both families has about as many entries.
const ENTRIES: usize = 8;
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
    /// Something else waits for that look as well.
    look_wanted: bool,
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
            look_wanted: false,
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

    /// A lease changed, which led to these changes of entries. One change costs no more than what a lease may owe, so that whoever
    /// changed much once waits a minute or two, and not hours.
    pub(super) fn charge(&mut self, id: &Id, changed: &[Changed], now: Instant) {
        if changed.is_empty() {
            return;
        }
        let least = if changed.iter().any(|(key, ..)| matches!(key, Key::Link(_))) { DEVICE } else { PLAIN };
        let entries = u32::try_from(changed.len().div_ceil(ENTRIES)).unwrap_or(u32::MAX);
        let cost = PLAIN.saturating_mul(entries).clamp(least, CREDIT);
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
        (self.look_wanted || !self.late.is_empty())
            .then(|| self.looks_paid_at.checked_sub(LOOKS).unwrap_or(self.looks_paid_at))
    }

    /// Everything is looked at now, whatever for.
    pub(super) fn nothing_is_late(&mut self) {
        self.late.clear();
        self.look_wanted = false;
    }

    /// Asks for a look at everything as soon as it is paid for. These devices wait for it.
    pub(super) fn want_look(&mut self, devices: impl IntoIterator<Item = Name>) {
        self.late.extend(devices);
        self.look_wanted = true;
    }

    /// True for an entry that stands on a device which waits for the next look: it is not written before.
    pub(super) fn is_late(&self, key: &Key, value: &Value) -> bool {
        !self.late.is_empty() && diff::device(key, value).is_some_and(|name| self.late.contains(&name))
    }

    /// Lets devices, and what is to stand on them, wait. What remains is written now: entries on other devices, and all removals,
    /// because the node that an entry leads to may be gone.
    pub(super) fn leave_late(&mut self, changed: Vec<Changed>) -> Vec<Changed> {
        self.late.extend(changed.iter().filter_map(|(key, ..)| match key {
            Key::Link(name) => Some(*name),
            _ => None,
        }));
        if self.late.is_empty() {
            return changed;
        }
        let now = |(key, before, after): Changed| match (before, after) {
            _ if matches!(key, Key::Link(_)) => None,
            (before, Some(after)) if self.is_late(&key, &after) => Some((key, Some(before?), None)),
            change => Some((key, change.0, change.1)),
        };
        changed.into_iter().filter_map(now).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::{Route, Value};

    use weft_subnet::lease::Unreadable;

    use super::*;

    fn record(id: &str, text: &str) -> Record {
        Record { id: id.into(), lease: Err(Unreadable::new(text)) }
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

    /// A change that makes others lose or get entries costs as much as it makes the node write.
    #[test]
    fn a_change_costs_by_the_entries_that_it_changes() {
        let many = |count: u8| (0..count).map(|third| route(third, "flannel.1")).collect::<Vec<_>>();
        assert!((149..=151).contains(&admitted(&many(8))), "the entries of one lease");
        assert!((15..=16).contains(&admitted(&many(80))), "ten times as many");
        let now = Instant::now();
        let mut churn = Churn::new(now);
        for _ in 0..2 {
            assert!(churn.admit(record("once", "x"), now).is_some());
            churn.charge(&"once".into(), &(0..1000).flat_map(|_| many(255)).collect::<Vec<_>>(), now);
        }
        churn.admit(record("once", "x"), now);
        assert_eq!(churn.next(now), Some(now + CREDIT), "one change of very many entries delays nobody for hours");
    }

    #[test]
    fn what_stands_on_a_late_device_is_removed_at_once() {
        let mut churn = Churn::new(Instant::now());
        let gone = |third, dev| {
            let (key, _, value) = route(third, dev);
            (key, value, None)
        };
        let moved = |third, from, to| (route(third, from).0, route(third, from).2, route(third, to).2);
        let (link, _, made) = device("flannel.2");
        let changed =
            vec![(link, made, None), gone(3, "flannel.2"), device("flannel.9"), moved(4, "flannel.1", "flannel.9")];
        // The route of 10.5.4.0/24 still leads to where that node was.
        assert_eq!(churn.leave_late(changed), [gone(3, "flannel.2"), gone(4, "flannel.1")]);
        assert_eq!(churn.leave_late(vec![gone(8, "flannel.9")]), [gone(8, "flannel.9")], "a later one, too");
        assert_eq!(churn.leave_late(vec![moved(5, "flannel.9", "flannel.1")]), [moved(5, "flannel.9", "flannel.1")]);
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
