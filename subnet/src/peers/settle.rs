// SPDX-License-Identifier: Apache-2.0
//! Judges leases: each by itself first, and then its claim against the claims of others.

use std::sync::Arc;

use crate::cidr::Subnets;
use crate::lease::{Age, Id, Lease};
use crate::old_defects::{Defect, is_back};
use crate::text::Shown;

use super::claims::{Claim, Slot};
use super::entry::{Entry, Judgement, Reason};
use super::{Before, PeerChange, Peers, Queue, judge};

impl Peers {
    /// Withdraws the claim of a slot, and queues the claims that were set aside because of it.
    pub(super) fn withdraw_claim(&mut self, slot: Slot, queue: &mut Queue, before: &mut Before) {
        let entry = &self.entries[slot as usize];
        let Entry::Read(lease, _) = entry else { return };
        before.insert(slot, (lease.id.clone(), entry.believed().cloned()));
        if !entry.has_claim() {
            return;
        }
        let (claim, believed) = (judge::claim(&self.us, lease), entry.is_believed());
        let gone = self.claims.remove(&claim, slot);
        self.queue_covering(&gone, queue);
        let requeue = |other: Slot, queue: &mut Queue| {
            let entry = &self.entries[other as usize];
            if entry.beaten_by() == Some(slot) {
                entry.queue(other, queue);
            }
        };
        if believed {
            self.believed -= 1;
            self.claims.rivals(&claim).for_each(|other| requeue(other, queue));
        } else if self.us.assigned {
            // A claim with its published address in this subnet was set aside, although this claim was not believed.
            self.claims.inside(&claim).for_each(|other| requeue(other, queue));
        }
    }

    /// Judges a lease by itself. If it is possible, it gets a claim, which is queued.
    pub(super) fn judge_alone(&mut self, slot: Slot, queue: &mut Queue) {
        let Entry::Read(lease, judgement) = &mut self.entries[slot as usize] else { return };
        if self.us.id.as_ref() == Some(&lease.id) {
            *judgement = Judgement::Own;
            return;
        }
        if let Err(impossible) = judge::check(&self.us, self.ports, lease) {
            *judgement = Judgement::Impossible(Box::new(Reason(impossible.to_string().into())));
            return;
        }
        *judgement = Judgement::Beaten(None);
        let claim = judge::claim(&self.us, lease);
        queue.insert((lease.age.clone(), lease.id.clone(), slot));
        let new = self.claims.insert(&claim, slot);
        self.queue_covering(&new, queue);
        if self.us.assigned {
            // The published addresses of these leases now lie in the subnet of another lease. It does not matter whether that is believed.
            for other in self.claims.inside(&claim).filter(|other| *other != slot) {
                self.entries[other as usize].queue(other, queue);
            }
        }
    }

    /// Queues the claims whose subnets contain these published addresses, which are new or have gone. Such a subnet may now contain several
    /// published addresses of others, or no longer.
    fn queue_covering(&self, addresses: &Subnets, queue: &mut Queue) {
        if !self.us.assigned {
            self.claims.covering_any_of(addresses).for_each(|other| self.entries[other as usize].queue(other, queue));
        }
    }

    /// Judges the queued claims, oldest first, and those whose judgement changes because of them. A judgement depends only on older claims, so
    /// no claim is judged twice. (Whether a subnet contains addresses of others depends on claims that have all been added already.)
    pub(super) fn settle(&mut self, mut queue: Queue, before: &mut Before) {
        while let Some((age, id, slot)) = queue.pop_first() {
            let entry = &self.entries[slot as usize];
            // The lease may have become impossible after it was queued.
            let Entry::Read(lease, old) = entry else { continue };
            if !entry.has_claim() {
                continue;
            }
            let (claim, was) = (judge::claim(&self.us, lease), *old == Judgement::Believed);
            self.judged += 1;
            let covered = if self.us.assigned { None } else { self.claims.covering(&claim) };
            let judgement = match (covered, self.blocker(slot, &claim, (&age, &id))) {
                _ if is_back(Defect::LanLeasesBelieved) => Judgement::Believed,
                (Some(net), _) => {
                    let reason = format!("subnet {net} contains the published addresses of two other leases or more");
                    Judgement::Covers(Box::new(Reason(reason.into())))
                }
                (None, None) => Judgement::Believed,
                (None, Some((other, winner))) => {
                    let older = if (&winner.age, &winner.id) < (&age, &id) { "the older " } else { "" };
                    let whose = format!("{older}lease {}", Shown(&winner.id));
                    let reason = claim.gives_way(&judge::claim(&self.us, winner), &whose);
                    Judgement::Beaten(Some(Box::new((other, Reason(reason.into())))))
                }
            };
            let now = judgement == Judgement::Believed;
            before.entry(slot).or_insert_with(|| (id.clone(), was.then(|| lease.clone())));
            if let Entry::Read(_, old) = &mut self.entries[slot as usize] {
                *old = judgement;
            }
            if now == was {
                continue;
            }
            self.believed = if now { self.believed + 1 } else { self.believed - 1 };
            for other in self.claims.rivals(&claim) {
                let entry = &self.entries[other as usize];
                let concerned = if now { entry.is_believed() } else { entry.beaten_by() == Some(slot) };
                if concerned && other != slot {
                    entry.queue(other, &mut queue);
                }
            }
        }
    }

    /// Returns the lease because of which this claim does not hold: an older conflicting one that is believed. If subnets are assigned,
    /// it is any lease whose subnet contains the published address of this claim.
    fn blocker(&self, asking: Slot, claim: &Claim, rank: (&Age, &Id)) -> Option<(Slot, &Arc<Lease>)> {
        let older = |slot: Slot| {
            let lease = self.entries[slot as usize].believed()?;
            ((&lease.age, &lease.id) < rank).then_some((slot, lease))
        };
        if !self.us.assigned {
            return self.claims.rivals(claim).find_map(older);
        }
        let around = || {
            self.claims.around(claim).filter(|slot| *slot != asking).find_map(|slot| {
                match &self.entries[slot as usize] {
                    Entry::Read(lease, _) => Some((slot, lease)),
                    Entry::Free | Entry::Unread(_) => None,
                }
            })
        };
        self.claims.overlapping(claim).find_map(older).or_else(around)
    }

    pub(super) fn changes(&self, before: Before) -> Vec<PeerChange> {
        let change = |(slot, (id, before)): (Slot, (Id, Option<Arc<Lease>>))| {
            let after = self.entries[slot as usize].believed();
            (before.as_ref() != after).then(|| PeerChange { id, before, after: after.cloned() })
        };
        in_order(before.into_iter().filter_map(change).collect())
    }
}

/// Sorts changes by id. Leases that are no longer believed come first, so that a subnet is given up before another lease takes it.
pub(super) fn in_order(mut changes: Vec<PeerChange>) -> Vec<PeerChange> {
    changes.sort_by(|a, b| (a.after.is_some(), &a.id).cmp(&(b.after.is_some(), &b.id)));
    changes
}
