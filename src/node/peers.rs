// SPDX-License-Identifier: Apache-2.0
//! The leases of the others, as the store tells of them: into the plan at once, out of it unless so many vanish that it is
//! suspicious.

use std::collections::HashSet;
use std::time::Instant;

use weft_backends::index::Changed;
use weft_subnet::lease::{Id, Record};

use super::Node;
use crate::kernel::Kernel;
use crate::pass::Cause;

impl<K: Kernel> Node<K> {
    pub(super) fn snapshot(&mut self, records: Vec<Record>, reset: bool) -> Vec<Changed> {
        if reset {
            tracing::warn!("the store is not the same as before: it was wiped or restored, or it is another cluster");
            self.hold.suspect(Instant::now());
        }
        let own = self.plan.own().id.clone();
        let there: HashSet<&Id> = records.iter().map(|record| &record.id).collect();
        let mut gone: Vec<Id> = self.plan.peers().ids().filter(|id| !there.contains(id)).cloned().collect();
        gone.sort_unstable();
        let first = !self.snapshot_applied;
        self.snapshot_applied = true;
        self.answered_by_store();
        let (alone, own_there) = (!there.iter().any(|id| **id != own), there.contains(&own));
        // Only time ends it: after a wipe the others come back one by one, and the second list has but a few of them.
        if first && alone && !self.world.options.hold_removals.is_zero() {
            self.passer.keep_stale_until = Some(Instant::now() + self.world.options.hold_removals);
        }
        if !own_there {
            self.own_gone(&own);
        }
        self.churn.only(|id| there.contains(id));
        let mut changed = self.remove(gone);
        for record in records {
            // The first one leads to a look at everything: what it brings need not be listed, and costs nothing by itself.
            if first {
                self.put_now(record);
            } else {
                changed.extend(self.put(record));
            }
        }
        changed
    }

    /// Records that waited because their leases change too often, and devices that waited for a look.
    pub(super) async fn let_in(&mut self, now: Instant) {
        let due = self.churn.due(now);
        if !due.is_empty() {
            let changed: Vec<Changed> = due.into_iter().flat_map(|record| self.put(record)).collect();
            self.unsaved();
            self.write(changed).await;
        }
        if self.churn.look_due().is_some_and(|at| at <= now) {
            self.look_for_devices(Cause::Lease, now).await;
        }
    }

    /// Looks at everything because of a device of a peer.
    pub(super) async fn look_for_devices(&mut self, cause: Cause, now: Instant) {
        self.full(cause).await;
        self.churn.looked(now.elapsed(), now);
    }

    pub(super) fn changes(&mut self, changes: Vec<Result<Record, Id>>) -> Vec<Changed> {
        let mut gone: HashSet<Id> = HashSet::new();
        let mut changed = Vec::new();
        for change in changes {
            match change {
                Ok(record) => {
                    gone.remove(&record.id);
                    changed.extend(self.put(record));
                }
                Err(id) if id == self.plan.own().id => self.own_gone(&id),
                Err(id) => {
                    self.churn.gone(&id);
                    gone.insert(id);
                }
            }
        }
        changed.extend(self.remove(gone.into_iter().collect()));
        changed
    }

    /// A record, or nothing yet when its lease changes too often.
    fn put(&mut self, record: Record) -> Vec<Changed> {
        let (id, now) = (record.id.clone(), Instant::now());
        if id == self.plan.own().id {
            return self.put_now(record);
        }
        let Some(record) = self.churn.admit(record, now) else {
            // It is there, whatever it says.
            self.hold.cancel(&id);
            if self.plan.lines.due(&id, now) {
                tracing::warn!(lease = %id, "lease changes too often: its last value is applied later");
            }
            return Vec::new();
        };
        let changed = self.put_now(record);
        self.churn.charge(&id, &changed, now);
        changed
    }

    fn put_now(&mut self, record: Record) -> Vec<Changed> {
        if record.id == self.plan.own().id {
            // Known to the plan, too: it becomes a peer's when we move to another subnet.
            self.own_put(&record);
        }
        let now = Instant::now();
        if self.hold.cancel(&record.id) && self.plan.lines.due(&record.id, now) {
            tracing::info!(lease = %record.id, "held lease is back");
        }
        let id = record.id.clone();
        let mut changed = self.plan.put(record);
        // A lease that is there wins over one that is only held.
        while let Some(winner) = self.plan.peers().beaten_by(&id).cloned() {
            if !self.hold.cancel(&winner) {
                break;
            }
            if self.plan.lines.due(&winner, now) {
                tracing::info!(lease = %winner, by = %id, "held peer removed: a lease in the store claims the same");
            }
            changed.extend(self.plan.remove(&winner));
        }
        changed
    }

    fn remove(&mut self, ids: Vec<Id>) -> Vec<Changed> {
        if ids.is_empty() {
            return Vec::new();
        }
        let asked = ids.len();
        let now = self.hold.remove(ids, self.plan.peers().len(), Instant::now());
        if now.len() < asked {
            let grace_s = self.world.options.hold_removals.as_secs();
            tracing::warn!(
                held = asked - now.len(),
                grace_s,
                "many leases vanished at once: their peers are kept for now"
            );
        }
        now.iter().flat_map(|id| self.plan.remove(id)).collect()
    }
}
