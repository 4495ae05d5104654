// SPDX-License-Identifier: Apache-2.0
//! Decides which leases of the store are believed. A lease that is not believed is set aside with a reason. One change takes time that
//! grows with the logarithm of the number of peers.
//!
//! There are two questions. First, is the lease possible at all? The answer (`judge.rs`) depends only on the lease and on this node: our
//! Network, our subnet, our LAN, our addresses. If it is possible, the lease has a claim to its subnets and addresses (`claims.rs`).
//!
//! Second, does the claim hold against other claims? Two claims conflict if their subnets overlap, or if the subnet of one contains the
//! public address of the other. A claim is believed if it conflicts with no older claim that is believed. After a change, the younger
//! claims that conflict with the changed one are judged again, oldest first. If a verdict changes, the claims that conflict with that one
//! follow. After each call every claim is settled, so the result depends only on the set of records, and never on the order in which
//! they came.
//!
//! A lease whose subnet contains the public addresses of two or more other possible leases is set aside, whatever its age. Otherwise one
//! lie, or one mistake, would cut off all of those nodes.
//!
//! If subnets are assigned (Kubernetes), a node chooses its public address but not its subnet. There an old node could push a younger
//! one aside by publishing an address inside its subnet. So in this case age does not count: a lease whose public address lies in the
//! subnet of another lease is set aside.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use crate::cidr::Subnets;
use crate::connected::Connected;
use crate::lease::{Age, Id, Lease, Record, Unreadable};
use crate::text::Shown;
use claims::{Claim, Claims, Slot};
use entry::{Entry, Reason, Verdict};

mod claims;
mod entry;
mod host_networks;
mod judge;
mod pages;
mod shared;

pub use shared::Shared;

/// What this node is, as far as leases are judged by it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Us {
    /// Our Network. Leases outside are set aside.
    pub networks: Subnets,
    /// The id of our own lease.
    pub id: Option<Id>,
    /// Our own subnet. Leases that overlap it are set aside.
    pub own: Subnets,
    /// The addresses that we publish. Leases that publish one of them are set aside.
    pub public: Vec<IpAddr>,
    /// The addresses of our uplink, if we publish others. Leases that publish one of them are also set aside.
    pub uplink: Vec<IpAddr>,
    /// Our other addresses, and the networks that we are connected to. Leases that overlap one of them are set aside.
    pub connected: Connected,
    /// True if subnets are assigned, as in Kubernetes, so that a node cannot choose its own.
    pub assigned: bool,
}

/// A lease that is believed from now on, or no longer, or with another content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The id of the lease.
    pub id: Id,
    /// The lease that was believed before.
    pub before: Option<Arc<Lease>>,
    /// The lease that is believed now.
    pub after: Option<Arc<Lease>>,
}

/// All records, believed or set aside.
#[derive(Debug, Default)]
pub struct Peers {
    us: Us,
    slots: HashMap<Id, Slot>,
    entries: Vec<Entry>,
    free: Vec<Slot>,
    claims: Claims,
    believed: usize,
    judged: u64,
}

/// The claims to judge again, oldest first.
type Queue = BTreeSet<(Age, Id, Slot)>;

/// For each slot that this call has touched: the lease that was believed before.
type Before = BTreeMap<Slot, (Id, Option<Arc<Lease>>)>;

impl Peers {
    /// Creates an empty set.
    pub fn new(us: Us) -> Peers {
        Peers { us, ..Peers::default() }
    }

    /// Judges all leases again, because this node has another subnet, address or network. Returns the leases whose verdict has changed.
    pub fn judge_for(&mut self, us: Us) -> Vec<Change> {
        if us == self.us {
            return Vec::new();
        }
        let was: Vec<bool> = self.entries.iter().map(Entry::is_believed).collect();
        self.us = us;
        self.claims = Claims::default();
        let (mut queue, mut unused) = (Queue::new(), Before::new());
        for slot in 0..self.entries.len() {
            self.judge_alone(slot as Slot, &mut queue);
        }
        self.settle(queue, &mut unused);
        self.believed = self.entries.iter().filter(|entry| entry.is_believed()).count();
        let mut changes = Vec::new();
        for (entry, was) in self.entries.iter().zip(was) {
            let Entry::Read(lease, _) = entry else { continue };
            if entry.is_believed() != was {
                let (id, lease) = (lease.id.clone(), Some(lease.clone()));
                let (before, after) = if was { (lease, None) } else { (None, lease) };
                changes.push(Change { id, before, after });
            }
        }
        in_order(changes)
    }

    /// Adds or replaces a record. A record with our own id causes no change.
    pub fn put(&mut self, record: Record) -> Vec<Change> {
        let Record { id, lease } = record;
        // The id of the record counts, not the one in the lease.
        let lease = lease.map(|lease| Lease { id: id.clone(), subnets: lease.subnets.trunc(), ..lease });
        let (mut queue, mut before) = (Queue::new(), Before::new());
        let slot = match self.slots.get(&id).copied() {
            Some(slot) => {
                let Some(lease) = self.update_in_place(slot, lease, &mut before) else { return self.changes(before) };
                self.withdraw_claim(slot, &mut queue, &mut before);
                self.entries[slot as usize] = Entry::new(lease);
                slot
            }
            None => {
                if let Some(claim) = lease.as_ref().ok().and_then(|lease| self.unclaimed(lease)) {
                    return vec![self.believe(id, lease, &claim)];
                }
                let slot = self.store_entry(Entry::new(lease));
                before.insert(slot, (id.clone(), None));
                self.slots.insert(id, slot);
                slot
            }
        };
        self.judge_alone(slot, &mut queue);
        self.settle(queue, &mut before);
        self.changes(before)
    }

    /// Removes a record. Leases that were set aside because of it may be believed again.
    pub fn remove(&mut self, id: &Id) -> Vec<Change> {
        let Some(slot) = self.slots.remove(id) else { return Vec::new() };
        let (mut queue, mut before) = (Queue::new(), Before::new());
        self.withdraw_claim(slot, &mut queue, &mut before);
        self.entries[slot as usize] = Entry::Free;
        self.settle(queue, &mut before);
        let changes = self.changes(before);
        self.free.push(slot);
        changes
    }

    /// Returns the believed leases, sorted by id.
    pub fn believed(&self) -> impl Iterator<Item = &Arc<Lease>> {
        let mut all: Vec<&Arc<Lease>> = self.entries.iter().filter_map(Entry::believed).collect();
        all.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        all.into_iter()
    }

    /// Returns the records that are set aside, sorted by id: the reason, and the lease if it is readable. Our own record is never among
    /// them.
    pub fn set_aside(&self) -> impl Iterator<Item = (&Id, &str, Option<&Lease>)> {
        let others = self.slots.iter().filter(|(id, _)| self.us.id.as_ref() != Some(*id));
        let aside = others.filter_map(|(id, slot)| {
            let (reason, lease) = self.entries[*slot as usize].set_aside()?;
            Some((id, reason, lease))
        });
        let mut all: Vec<_> = aside.collect();
        all.sort_unstable_by_key(|(id, ..)| *id);
        all.into_iter()
    }

    /// Returns why this record is set aside. Returns `None` if it is not.
    pub fn reason(&self, id: &Id) -> Option<&str> {
        let slot = self.slots.get(id).filter(|_| self.us.id.as_ref() != Some(id))?;
        self.entries[*slot as usize].set_aside().map(|(reason, _)| reason)
    }

    /// Returns the id of the lease because of which this one is set aside.
    pub fn beaten_by(&self, id: &Id) -> Option<&Id> {
        let slot = self.entries[*self.slots.get(id)? as usize].beaten_by()?;
        match &self.entries[slot as usize] {
            Entry::Read(winner, _) => Some(&winner.id),
            Entry::Free | Entry::Unread(_) => None,
        }
    }

    /// Returns a lease if it is believed.
    pub fn get(&self, id: &Id) -> Option<&Arc<Lease>> {
        self.slots.get(id).and_then(|slot| self.entries[*slot as usize].believed())
    }

    /// Returns the ids of all records except our own, in no particular order.
    pub fn ids(&self) -> impl Iterator<Item = &Id> {
        self.slots.keys().filter(|id| self.us.id.as_ref() != Some(id))
    }

    /// Returns the number of believed leases.
    pub fn len(&self) -> usize {
        self.believed
    }

    /// Returns the number of records that are set aside.
    pub fn set_aside_len(&self) -> usize {
        let own = self.us.id.as_ref().is_some_and(|id| self.slots.contains_key(id));
        self.slots.len() - self.believed - usize::from(own)
    }

    /// Returns how many claims have been judged so far. Tests use this to measure the cost of a change.
    #[doc(hidden)]
    pub fn judged(&self) -> u64 {
        self.judged
    }

    /// Returns true if no lease is believed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Stores an entry in a free slot.
    fn store_entry(&mut self, entry: Entry) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            return slot;
        }
        self.entries.push(entry);
        // 2^32 records would not fit into memory.
        (self.entries.len() - 1) as Slot
    }

    /// Returns the claim of a new lease if it is possible and conflicts with no other claim. Then it can be believed at once. Most new
    /// leases are of this kind.
    fn unclaimed(&self, lease: &Lease) -> Option<Claim> {
        let free = self.us.id.as_ref() != Some(&lease.id) && judge::impossible(&self.us, lease).is_none();
        let claim = judge::claim(&self.us, lease);
        (free && self.claims.rivals(&claim).next().is_none()).then_some(claim)
    }

    fn believe(&mut self, id: Id, lease: Result<Lease, Unreadable>, claim: &Claim) -> Change {
        let mut entry = Entry::new(lease);
        if let Entry::Read(_, verdict) = &mut entry {
            *verdict = Verdict::Believed;
        }
        let slot = self.store_entry(entry);
        self.slots.insert(id.clone(), slot);
        self.claims.insert(claim, slot);
        self.believed += 1;
        Change { id, before: None, after: self.entries[slot as usize].believed().cloned() }
    }

    /// Updates a lease whose claim stays the same. Returns `None` if that is done, and the new lease if it must be judged. Most changes of
    /// a lease leave its claim as it is.
    fn update_in_place(
        &mut self,
        slot: Slot,
        new: Result<Lease, Unreadable>,
        before: &mut Before,
    ) -> Option<Result<Lease, Unreadable>> {
        let entry = &mut self.entries[slot as usize];
        match (&mut *entry, &new) {
            (Entry::Unread(old), Err(reason)) if old == reason => return None,
            (Entry::Read(old, _), Ok(lease)) if **old == *lease => return None,
            _ => {}
        }
        let has_claim = entry.has_claim();
        let (Entry::Read(old, verdict), Ok(lease)) = (entry, &new) else { return Some(new) };
        let same_claim = old.age == lease.age && judge::claim(&self.us, old) == judge::claim(&self.us, lease);
        // A family that is not enabled is not part of the claim, but it is shown to users.
        let same_claim = same_claim && old.subnets == lease.subnets;
        if !same_claim || !has_claim || judge::impossible(&self.us, lease).is_some() {
            return Some(new);
        }
        let was = std::mem::replace(old, Arc::new(lease.clone()));
        if *verdict == Verdict::Believed {
            before.insert(slot, (was.id.clone(), Some(was)));
        }
        None
    }

    /// Withdraws the claim of a slot, and queues the claims that were set aside because of it.
    fn withdraw_claim(&mut self, slot: Slot, queue: &mut Queue, before: &mut Before) {
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
            // A claim with its public address in this subnet was set aside, although this claim was not believed.
            self.claims.inside(&claim).for_each(|other| requeue(other, queue));
        }
    }

    /// Judges a lease by itself. If it is possible, it gets a claim, which is queued.
    fn judge_alone(&mut self, slot: Slot, queue: &mut Queue) {
        let Entry::Read(lease, verdict) = &mut self.entries[slot as usize] else { return };
        if self.us.id.as_ref() == Some(&lease.id) {
            *verdict = Verdict::Own;
            return;
        }
        if let Some(reason) = judge::impossible(&self.us, lease) {
            *verdict = Verdict::Impossible(Box::new(Reason(reason.into())));
            return;
        }
        *verdict = Verdict::Beaten(None);
        let claim = judge::claim(&self.us, lease);
        queue.insert((lease.age.clone(), lease.id.clone(), slot));
        let new = self.claims.insert(&claim, slot);
        self.queue_covering(&new, queue);
        if self.us.assigned {
            // The public addresses of these leases now lie in the subnet of another lease. It does not matter whether that is believed.
            for other in self.claims.inside(&claim).filter(|other| *other != slot) {
                self.entries[other as usize].queue(other, queue);
            }
        }
    }

    /// Queues the claims whose subnets contain these public addresses, which are new or have gone. Such a subnet may now contain several
    /// public addresses of others, or no longer.
    fn queue_covering(&self, addresses: &Subnets, queue: &mut Queue) {
        if !self.us.assigned {
            self.claims.covering_any_of(addresses).for_each(|other| self.entries[other as usize].queue(other, queue));
        }
    }

    /// Judges the queued claims, oldest first, and those whose verdict changes because of them. A verdict depends only on older claims, so
    /// no claim is judged twice. (Whether a subnet contains addresses of others depends on claims that have all been added already.)
    fn settle(&mut self, mut queue: Queue, before: &mut Before) {
        while let Some((age, id, slot)) = queue.pop_first() {
            let entry = &self.entries[slot as usize];
            // The lease may have become impossible after it was queued.
            let Entry::Read(lease, old) = entry else { continue };
            if !entry.has_claim() {
                continue;
            }
            let (claim, was) = (judge::claim(&self.us, lease), *old == Verdict::Believed);
            self.judged += 1;
            let covered = if self.us.assigned { None } else { self.claims.covering(&claim) };
            let verdict = match (covered, self.blocker(slot, &claim, (&age, &id))) {
                (Some(net), _) => {
                    let reason = format!("subnet {net} contains the public addresses of two other leases or more");
                    Verdict::Covers(Box::new(Reason(reason.into())))
                }
                (None, None) => Verdict::Believed,
                (None, Some((other, winner))) => {
                    let older = if (&winner.age, &winner.id) < (&age, &id) { "the older " } else { "" };
                    let whose = format!("{older}lease {}", Shown(&winner.id));
                    let reason = claim.gives_way(&judge::claim(&self.us, winner), &whose);
                    Verdict::Beaten(Some(Box::new((other, Reason(reason.into())))))
                }
            };
            let now = verdict == Verdict::Believed;
            before.entry(slot).or_insert_with(|| (id.clone(), was.then(|| lease.clone())));
            if let Entry::Read(_, old) = &mut self.entries[slot as usize] {
                *old = verdict;
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
    /// it is any lease whose subnet contains the public address of this claim.
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

    fn changes(&self, before: Before) -> Vec<Change> {
        let change = |(slot, (id, before)): (Slot, (Id, Option<Arc<Lease>>))| {
            let after = self.entries[slot as usize].believed();
            (before.as_ref() != after).then(|| Change { id, before, after: after.cloned() })
        };
        in_order(before.into_iter().filter_map(change).collect())
    }
}

/// Sorts changes by id. Leases that are no longer believed come first, so that a subnet is given up before another lease takes it.
fn in_order(mut changes: Vec<Change>) -> Vec<Change> {
    changes.sort_by(|a, b| (a.after.is_some(), &a.id).cmp(&(b.after.is_some(), &b.id)));
    changes
}
