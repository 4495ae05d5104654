// SPDX-License-Identifier: Apache-2.0
//! Limits how often the leases of the peers cause work. Each lease has an allowance, and all devices together have one.
//!
//! A lease that has used up its allowance is delayed, and only its newest record is kept. It delays no other lease. When
//! thousands of leases change once each, none of them is delayed. docs/adr/008-bounds-per-lease.md explains the numbers.
//! The caller passes the time, so that tests need no clock.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::diff;
use weft_backends::index::Changed;
use weft_backends::state::{Key, Name, Value};
use weft_subnet::lease::{Id, Record};

use super::schedule::PAUSE;
use crate::debt::Debt;

/// The cost of a change that makes or removes a device, and so needs a full pass.
const DEVICE_COST: Duration = Duration::from_secs(10);
/// The cost of each [`ENTRIES`] entries, or a part of them, that a change affects, in other leases, too.
const PLAIN_COST: Duration = Duration::from_secs(1);
/// Number of entries that a lease of both families has, about.
const ENTRIES: usize = 8;
/// A lease may owe this much and still change once more. So ten changes with a device, or ninety others, are applied at
/// once, and after that one in ten seconds, or one a second. No honest node changes its lease so often: one that restarts
/// all the time does so once in a few seconds.
const CREDIT: Duration = Duration::from_secs(90);
/// The cost of a full pass that devices of peers need, and how much all leases together may owe for them. So twenty are
/// run at once, and after that one a second, or as many as take a fifth of a core.
const FULL_PASS_COST: Duration = Duration::from_secs(1);
const FULL_PASS_CREDIT: Duration = Duration::from_secs(19);
/// Number of leases in debt that are kept without a check which of them have paid.
const FEW: usize = 64;

/// What each lease owes, and what is delayed.
#[derive(Debug)]
pub(super) struct RateLimit {
    /// What each lease that has changed lately owes.
    debts: HashMap<Id, Debt>,
    /// The newest records of leases that have changed too often.
    delayed_records: HashMap<Id, Record>,
    /// Number of leases that were in debt at the last check.
    in_debt: usize,
    began: Instant,
    /// What full passes for devices of peers owe.
    full_passes: Debt,
    /// Devices whose making or removal is delayed until the next full pass.
    delayed_devices: BTreeSet<Name>,
    /// Something else waits for a full pass.
    is_full_pass_requested: bool,
}

impl RateLimit {
    /// Returns a state in which no lease owes anything.
    pub(super) fn new(now: Instant) -> RateLimit {
        RateLimit {
            debts: HashMap::new(),
            delayed_records: HashMap::new(),
            in_debt: 0,
            began: now,
            full_passes: Debt::default(),
            delayed_devices: BTreeSet::new(),
            is_full_pass_requested: false,
        }
    }

    /// Returns the record if its lease may change now. Otherwise the record is delayed until [`RateLimit::due`]
    /// returns it, in place of an older one.
    pub(super) fn admit(&mut self, record: Record, now: Instant) -> Option<Record> {
        if self.allowed_at(&record.id, now) <= now {
            self.delayed_records.remove(&record.id);
            return Some(record);
        }
        self.delayed_records.insert(record.id.clone(), record);
        None
    }

    /// Charges a lease for the changes of entries that its last change has led to. One change costs at most what a lease may
    /// owe. So a lease that has changed very many entries once is delayed for a minute or two, and not for hours.
    pub(super) fn charge(&mut self, id: &Id, changed: &[Changed], now: Instant) {
        if changed.is_empty() {
            return;
        }
        let has_devices = changed.iter().any(|one| matches!(one.key, Key::Link(_)));
        let least = if has_devices { DEVICE_COST } else { PLAIN_COST };
        let entries = u32::try_from(changed.len().div_ceil(ENTRIES)).unwrap_or(u32::MAX);
        let cost = PLAIN_COST.saturating_mul(entries).clamp(least, CREDIT);
        if self.debts.len() > FEW.max(2 * self.in_debt) {
            self.debts.retain(|_, debt| !debt.is_paid(now));
            self.debts.shrink_to(2 * self.debts.len());
            self.in_debt = self.debts.len();
        }
        self.debts.entry(id.clone()).or_default().charge(cost, now);
    }

    /// Forgets the delayed record of a lease that is gone.
    pub(super) fn forget_delayed(&mut self, id: &Id) {
        self.delayed_records.remove(id);
    }

    /// Keeps only the delayed records of leases that exist.
    pub(super) fn keep_delayed(&mut self, exists: impl Fn(&Id) -> bool) {
        self.delayed_records.retain(|id, _| exists(id));
    }

    /// Returns the delayed records whose leases may change again.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Record> {
        if self.delayed_records.is_empty() {
            return Vec::new();
        }
        let due: Vec<Id> = self.delayed_records.keys().filter(|id| self.allowed_at(id, now) <= now).cloned().collect();
        due.iter().filter_map(|id| self.delayed_records.remove(id)).collect()
    }

    /// Returns when a record or a full pass is due.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        let records = self.delayed_records.keys().map(|id| self.allowed_at(id, now)).min();
        records.into_iter().chain(self.full_pass_due()).min()
    }

    fn allowed_at(&self, id: &Id, now: Instant) -> Instant {
        self.debts.get(id).and_then(|debt| debt.allowed_at(CREDIT)).unwrap_or(now)
    }

    /// Returns true if a full pass may run because of a device of a peer.
    pub(super) fn allows_full_pass(&self, now: Instant) -> bool {
        self.full_passes.allows(FULL_PASS_CREDIT, now)
    }

    /// Charges for a full pass that has run because of a device of a peer, and has taken this time.
    pub(super) fn full_pass_ended(&mut self, took: Duration, now: Instant) {
        self.full_passes.charge(FULL_PASS_COST.max(took * PAUSE), now);
    }

    /// Returns when the full pass that devices wait for may run, or `None` if nothing waits for one.
    pub(super) fn full_pass_due(&self) -> Option<Instant> {
        let is_wanted = self.is_full_pass_requested || self.has_delayed_devices();
        is_wanted.then(|| self.full_passes.allowed_at(FULL_PASS_CREDIT).unwrap_or(self.began))
    }

    /// Lets no device wait any longer, because a full pass begins, for whatever reason.
    pub(super) fn clear_delayed_devices(&mut self) {
        self.delayed_devices.clear();
        self.is_full_pass_requested = false;
    }

    /// Asks for a full pass as soon as it is allowed. These devices wait for it.
    pub(super) fn request_full_pass(&mut self, devices: impl IntoIterator<Item = Name>) {
        self.delayed_devices.extend(devices);
        self.is_full_pass_requested = true;
    }

    /// Returns true for an entry on a device that waits for a full pass. The entry is not written before the device.
    pub(super) fn is_delayed(&self, key: &Key, value: &Value) -> bool {
        self.has_delayed_devices() && diff::device(key, value).is_some_and(|name| self.delayed_devices.contains(&name))
    }

    /// Returns true if devices wait for the next full pass.
    pub(super) fn has_delayed_devices(&self) -> bool {
        !self.delayed_devices.is_empty()
    }

    /// Delays changes of devices, and new entries on delayed devices, until the next full pass. Returns the changes that are
    /// written now: entries on other devices, and all removals, because the node that an entry leads to may be gone.
    pub(super) fn delay_devices(&mut self, changed: Vec<Changed>) -> Vec<Changed> {
        self.delayed_devices.extend(changed.iter().filter_map(|one| match one.key {
            Key::Link(name) => Some(name),
            _ => None,
        }));
        let now = |change: Changed| match &change.after {
            _ if matches!(change.key, Key::Link(_)) => None,
            Some(after) if self.is_delayed(&change.key, after) => {
                change.before.is_some().then_some(Changed { after: None, ..change })
            }
            _ => Some(change),
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
        Changed { key: Key::Link(dev(name)), before: None, after: Some(Value::link(link)) }
    }

    fn route(third: u8, name: &str) -> Changed {
        let via = [10, 5, third, 0].into();
        let route = Value::Route(Route::Unicast { via, dev: dev(name), onlink: true });
        let key = Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0);
        Changed { key, before: None, after: Some(route) }
    }

    /// Returns how many of a thousand changes within a minute are applied.
    fn admitted(changed: &[Changed]) -> usize {
        let start = Instant::now();
        let mut limit = RateLimit::new(start);
        let mut count = 0;
        for n in 0..1000 {
            let now = start + Duration::from_millis(60 * n);
            let due = limit.due(now);
            assert!(due.len() <= 1);
            for _ in due.into_iter().chain(limit.admit(record("busy", &n.to_string()), now)) {
                count += 1;
                limit.charge(&"busy".into(), changed, now);
            }
        }
        count
    }

    #[test]
    fn a_lease_that_changes_all_the_time_is_applied_a_few_times_a_minute() {
        assert!((15..=16).contains(&admitted(&[device("flannel.2"), route(1, "flannel.2")])));
        assert!((149..=151).contains(&admitted(&[route(1, "flannel.1")])));
        assert_eq!(admitted(&[]), 1000, "a change without effect costs nothing");
    }

    #[test]
    fn a_lease_that_was_quiet_for_an_hour_has_no_larger_allowance() {
        let start = Instant::now();
        let mut limit = RateLimit::new(start);
        let id: Id = "busy".into();
        limit.charge(&id, &[device("flannel.2")], start);
        let later = start + Duration::from_secs(3600);
        for _ in 0..10 {
            assert!(limit.admit(record(&id, "x"), later).is_some());
            limit.charge(&id, &[device("flannel.2")], later);
        }
        assert_eq!(limit.admit(record(&id, "x"), later), None);
    }

    #[test]
    fn the_newest_record_is_applied_when_it_is_due_unless_its_lease_is_gone() {
        let now = Instant::now();
        let mut limit = RateLimit::new(now);
        let id: Id = "busy".into();
        for _ in 0..10 {
            assert!(limit.admit(record(&id, "x"), now).is_some());
            limit.charge(&id, &[device("flannel.2")], now);
        }
        assert_eq!(limit.next(now), None);
        assert_eq!(limit.admit(record(&id, "older"), now), None);
        assert_eq!(limit.admit(record(&id, "newest"), now), None);
        assert!(limit.admit(record("another", "x"), now).is_some(), "other leases do not wait");
        let then = limit.next(now).unwrap();
        assert_eq!(then, now + DEVICE_COST);
        assert_eq!(limit.due(then - Duration::from_millis(1)), []);
        assert_eq!(limit.due(then), [record(&id, "newest")]);
        assert_eq!(limit.next(then), None);
        limit.admit(record(&id, "x"), now);
        limit.forget_delayed(&id);
        assert_eq!((limit.due(then), limit.next(then)), (vec![], None));
    }

    #[test]
    fn leases_that_change_once_do_not_wait_and_leave_no_memory_behind() {
        let start = Instant::now();
        let mut limit = RateLimit::new(start);
        for n in 0..50_000_u32 {
            let id: Id = n.to_string().into();
            assert!(limit.admit(record(&id, "x"), start).is_some());
            limit.charge(&id, &[route(1, "flannel.2")], start);
        }
        let later = start + Duration::from_secs(2);
        limit.charge(&"last".into(), &[route(1, "flannel.2")], later);
        // Old debts are removed together, once they are many.
        for n in 0..50_001_u32 {
            limit.charge(&format!("{n} again").into(), &[route(1, "flannel.2")], later + PLAIN_COST * n);
        }
        assert!(limit.debts.len() < 2 * FEW, "{}", limit.debts.len());
    }

    #[test]
    fn the_cost_of_a_change_grows_with_the_entries_that_it_affects() {
        let many = |count: u8| (0..count).map(|third| route(third, "flannel.1")).collect::<Vec<_>>();
        assert!((149..=151).contains(&admitted(&many(8))), "the entries of one lease");
        assert!((15..=16).contains(&admitted(&many(80))), "ten times as many");
        let now = Instant::now();
        let mut limit = RateLimit::new(now);
        for _ in 0..2 {
            assert!(limit.admit(record("once", "x"), now).is_some());
            limit.charge(&"once".into(), &(0..1000).flat_map(|_| many(255)).collect::<Vec<_>>(), now);
        }
        limit.admit(record("once", "x"), now);
        assert_eq!(
            limit.next(now),
            Some(now + CREDIT),
            "one change of very many entries does not delay a lease for hours"
        );
    }

    #[test]
    fn entries_on_a_delayed_device_are_removed_at_once() {
        let mut limit = RateLimit::new(Instant::now());
        let gone = |third, dev| {
            let Changed { key, after, .. } = route(third, dev);
            Changed { key, before: after, after: None }
        };
        let moved = |third, from, to| Changed { before: route(third, from).after, ..route(third, to) };
        let Changed { key, after: made, .. } = device("flannel.2");
        let no_device = Changed { key, before: made, after: None };
        let changed = vec![no_device, gone(3, "flannel.2"), device("flannel.9"), moved(4, "flannel.1", "flannel.9")];
        // The route of 10.5.4.0/24 still leads to where that node was.
        assert_eq!(limit.delay_devices(changed), [gone(3, "flannel.2"), gone(4, "flannel.1")]);
        assert_eq!(
            limit.delay_devices(vec![gone(8, "flannel.9")]),
            [gone(8, "flannel.9")],
            "the removal of a later change, too"
        );
        assert_eq!(limit.delay_devices(vec![moved(5, "flannel.9", "flannel.1")]), [moved(5, "flannel.9", "flannel.1")]);
    }

    /// An entry that is to be removed may need a full pass, and no device waits for it.
    #[test]
    fn a_full_pass_that_was_requested_is_due_although_no_device_waits() {
        let mut limit = RateLimit::new(Instant::now());
        limit.request_full_pass([]);
        assert!(limit.full_pass_due().is_some());
        limit.clear_delayed_devices();
        assert_eq!(limit.full_pass_due(), None);
    }

    #[test]
    fn devices_wait_after_twenty_full_passes_and_other_entries_do_not() {
        let start = Instant::now();
        let mut limit = RateLimit::new(start);
        for pass in 0..20 {
            assert!(limit.allows_full_pass(start), "full pass {pass}");
            limit.full_pass_ended(Duration::from_millis(5), start);
        }
        assert!(!limit.allows_full_pass(start));
        let changed = vec![device("flannel.9"), route(9, "flannel.9"), route(1, "flannel.1")];
        assert_eq!(limit.delay_devices(changed), [route(1, "flannel.1")]);
        assert_eq!(limit.delay_devices(vec![route(8, "flannel.9"), route(2, "flannel.1")]), [route(2, "flannel.1")]);
        let due = limit.full_pass_due().unwrap();
        assert_eq!(due, start + FULL_PASS_COST);
        assert!(limit.allows_full_pass(due));
        limit.full_pass_ended(Duration::from_secs(1), due);
        limit.clear_delayed_devices();
        assert_eq!(limit.full_pass_due(), None);
        assert!(
            !limit.allows_full_pass(due + Duration::from_secs(3)),
            "a slow full pass costs four times its duration"
        );
        assert!(limit.allows_full_pass(due + Duration::from_secs(4)));
    }
}
