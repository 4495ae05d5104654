// SPDX-License-Identifier: Apache-2.0
//! The leases of the others, as the store tells of them: into the plan at once, out of it unless so many vanish that it is
//! suspicious.

use std::collections::HashSet;
use std::time::Instant;

use weft_backends::index::Changed;
use weft_subnet::lease::{Id, Record};

use super::Node;
use crate::kernel::Kernel;

impl<K: Kernel> Node<K> {
    pub(super) fn snapshot(&mut self, records: Vec<Record>, reset: bool) -> Vec<Changed> {
        if reset {
            tracing::warn!("this is another store than before (wiped, restored or another cluster)");
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
        let mut changed = self.remove(gone);
        for record in records {
            let put = self.put(record);
            // The first one leads to a look at everything: what it brings need not be listed.
            if !first {
                changed.extend(put);
            }
        }
        changed
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
                    gone.insert(id);
                }
            }
        }
        changed.extend(self.remove(gone.into_iter().collect()));
        changed
    }

    fn put(&mut self, record: Record) -> Vec<Changed> {
        if record.id == self.plan.own().id {
            // Known to the plan, too: it becomes a peer's when we move to another subnet.
            self.own_put(&record);
        }
        if self.hold.back(&record.id) {
            tracing::info!(lease = %record.id, "held lease is back");
        }
        let id = record.id.clone();
        let mut changed = self.plan.put(record);
        // A lease that is there wins over one that is only held.
        while let Some(winner) = self.plan.peers().beaten_by(&id).cloned() {
            if !self.hold.back(&winner) {
                break;
            }
            tracing::info!(lease = %winner, by = %id, "held lease gives way");
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
