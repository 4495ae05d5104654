// SPDX-License-Identifier: Apache-2.0
//! The leases of the peers. A lease that is written enters the plan at once. A lease that is removed leaves it at once,
//! unless so many are removed together that this may be a mistake.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::index::Changed;
use weft_subnet::hold::Hold;
use weft_subnet::lease::{Id, Record};
use weft_subnet::source::RecordChange;

use super::Node;
use super::event::StoreEvent;
use super::rate_limit::RateLimit;
use crate::kernel::Kernel;
use crate::observe::report::PeerList;
use crate::pass::{Cause, Trigger};

/// What is known about the leases of the peers besides the plan.
#[derive(Debug)]
pub(super) struct PeerLeases {
    pub(super) list: PeerList,
    /// Removals that wait for the end of the grace time.
    pub(super) hold: Hold,
    pub(super) rate_limit: RateLimit,
}

impl PeerLeases {
    /// Returns a state without a list. `grace` is the time for which sudden removals are held.
    pub(super) fn new(grace: Duration, now: Instant) -> PeerLeases {
        PeerLeases { list: PeerList::Missing, hold: Hold::new(grace), rate_limit: RateLimit::new(now) }
    }

    /// Returns when [`Node::remove_held_peers`] or [`Node::apply_delayed`] has something to do.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        self.hold.next().map(Instant::from_std).into_iter().chain(self.rate_limit.next(now)).min()
    }
}

impl<K: Kernel> Node<K> {
    /// Returns true if the peers are known, from the store or from the saved leases.
    pub(super) fn knows_peers(&self) -> bool {
        self.peers.list != PeerList::Missing
    }

    /// Returns true if the store has sent a complete list of leases.
    pub(super) fn has_list(&self) -> bool {
        self.peers.list == PeerList::Complete
    }

    /// Applies a complete list of the store. `reset` is true if the store is not the same as before.
    pub(super) fn apply_list(&mut self, records: Vec<Record>, reset: bool) -> Vec<Changed> {
        if reset {
            tracing::warn!("the store is not the same as before: it was wiped or restored, or it is another cluster");
            self.peers.hold.suspect(Instant::now().into_std());
        }
        let own = self.plan.own().id.clone();
        let listed: HashSet<&Id> = records.iter().map(|record| &record.id).collect();
        let mut gone: Vec<Id> = self.plan.peers().ids().filter(|id| !listed.contains(id)).cloned().collect();
        gone.sort_unstable();
        let is_first = !self.has_list();
        if let PeerList::Saved(_) = std::mem::replace(&mut self.peers.list, PeerList::Complete) {
            tracing::info!("the store answers: peers are compared with its leases");
        }
        let has_peers = listed.iter().any(|id| **id != own);
        let grace = self.context.options.hold_removals;
        // The store may have been wiped. Then the peers come back one by one, so a second list with a few of them says no
        // more than the first one. Only the end of the grace time lets entries of the others be removed.
        if is_first && !has_peers && !grace.is_zero() {
            self.passer.keep_stale_until = Some(Instant::now() + grace);
        }
        if !listed.contains(&own) {
            self.own_record_removed(&own);
        }
        self.peers.rate_limit.keep_delayed(|id| listed.contains(id));
        let mut changed = self.remove_peers(gone);
        for record in records {
            // A full pass follows the first list. So its changes need not be collected, and are not charged to the leases.
            if is_first {
                self.put_at_once(record);
            } else {
                changed.extend(self.put(record));
            }
        }
        if is_first {
            // A start keeps the other ways that our lease names. This run may know nothing of their backends.
            self.update_own_lease();
        }
        changed
    }

    /// Applies changes of single leases.
    pub(super) fn apply_changes(&mut self, changes: Vec<RecordChange>) -> Vec<Changed> {
        self.probe_changed(&changes);
        let mut gone: HashSet<Id> = HashSet::new();
        let (mut changed, mut written) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                RecordChange::Written(record) => {
                    gone.remove(&record.id);
                    written.push(record.id.clone());
                    changed.extend(self.put(record));
                }
                RecordChange::Removed(id) if id == self.plan.own().id => self.own_record_removed(&id),
                RecordChange::Removed(id) => {
                    self.peers.rate_limit.forget_delayed(&id);
                    gone.insert(id);
                }
            }
        }
        written.retain(|id| !gone.contains(id));
        changed.extend(self.remove_peers(gone.into_iter().collect()));
        // A removal may be held only now, after a lease for the same subnet was written.
        changed.extend(written.iter().flat_map(|id| self.prefer_to_held(id)));
        changed
    }

    /// Applies the records of leases that changed too often, and runs the full pass that devices wait for, when it is time.
    pub(super) async fn apply_delayed(&mut self, now: Instant) {
        let due = self.peers.rate_limit.due(now);
        if !due.is_empty() {
            let mut event = StoreEvent::default();
            due.iter().for_each(|record| event.lease(&record.id, "changed too often and was delayed"));
            let changed: Vec<Changed> = due.into_iter().flat_map(|record| self.put(record)).collect();
            self.save_later();
            self.write(changed, event.to_string()).await;
        }
        if self.peers.rate_limit.full_pass_due().is_some_and(|at| at <= now) {
            let trigger = Trigger::new(Cause::Lease, "devices of peers changed, and were delayed");
            self.full_pass_for_devices(trigger, now).await;
        }
    }

    /// Removes the peers whose grace time is over.
    pub(super) async fn remove_held_peers(&mut self, now: Instant) {
        let due = self.peers.hold.due(now.into_std());
        if due.is_empty() {
            return;
        }
        tracing::warn!(peers = due.len(), "the grace time of held removals is over: peers removed");
        let mut event = StoreEvent::default();
        due.iter().for_each(|id| event.lease(id, "was gone from the store until the end of its grace time"));
        let changed = due.iter().flat_map(|id| self.plan.remove(id)).collect();
        self.save_later();
        self.write(changed, event.to_string()).await;
    }

    /// Applies a record, unless its lease changes too often. Then the record is applied later.
    fn put(&mut self, record: Record) -> Vec<Changed> {
        let (id, now) = (record.id.clone(), Instant::now());
        if id == self.plan.own().id {
            return self.put_at_once(record);
        }
        let Some(record) = self.peers.rate_limit.admit(record, now) else {
            // Its value is not used yet, but the lease exists, so the peer must not be removed.
            self.peers.hold.cancel(&id);
            if self.plan.lease_log.due(&id, now) {
                tracing::warn!(lease = %id, "lease changes too often: its last value is applied later");
            }
            return Vec::new();
        };
        let changed = self.put_at_once(record);
        self.peers.rate_limit.charge(&id, &changed, now);
        changed
    }

    fn put_at_once(&mut self, record: Record) -> Vec<Changed> {
        if record.id == self.plan.own().id {
            // The plan gets this record, too: it becomes the lease of a peer when this node moves to another subnet.
            self.own_record_written(&record);
        }
        if self.peers.hold.cancel(&record.id) && self.plan.lease_log.due(&record.id, Instant::now()) {
            tracing::info!(lease = %record.id, "held lease is back");
        }
        let id = record.id.clone();
        let mut changed = self.plan.put(record);
        changed.extend(self.prefer_to_held(&id));
        changed
    }

    /// Removes the held peers because of which this lease is set aside. A lease in the store wins over one that is only held.
    fn prefer_to_held(&mut self, id: &Id) -> Vec<Changed> {
        let (mut changed, now) = (Vec::new(), Instant::now());
        while let Some(winner) = self.plan.peers().beaten_by(id).cloned() {
            if !self.peers.hold.cancel(&winner) {
                break;
            }
            if self.plan.lease_log.due(&winner, now) {
                tracing::info!(lease = %winner, by = %id, "held peer removed: a lease in the store claims its subnet or address");
            }
            changed.extend(self.plan.remove(&winner));
        }
        changed
    }

    /// Removes peers from the plan. If they are many, some of them are held.
    fn remove_peers(&mut self, ids: Vec<Id>) -> Vec<Changed> {
        if ids.is_empty() {
            return Vec::new();
        }
        let all = ids.len();
        let now = self.peers.hold.remove(ids, self.plan.peers().len(), Instant::now().into_std());
        if now.len() < all {
            let grace_s = self.context.options.hold_removals.as_secs();
            tracing::warn!(
                held = all - now.len(),
                grace_s,
                "many leases vanished at once: their peers are kept for now"
            );
        }
        now.iter().flat_map(|id| self.plan.remove(id)).collect()
    }
}
