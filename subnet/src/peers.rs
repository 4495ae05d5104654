// SPDX-License-Identifier: Apache-2.0
//! Leases from the store are input, not truth: every record is judged alone, and what may not be believed is set aside with its
//! reason. Incremental: one change costs the logarithm of the number of peers.
//!
//! Two questions decide. Is the lease possible at all (`judge.rs`: our Network, our subnet, our LAN, its addresses)? That depends
//! on the lease and on us. If so, it has a claim (`claims.rs`), and claims are settled by age: a claim is believed when no older
//! claim that is believed stands against it (their subnets overlap, or one has its public address in the other's subnet). A change
//! re-judges younger claims that stand against the changed one, oldest first, and goes on only where a verdict turned.
//! Invariant: between two calls every claim is settled, so the outcome depends on the set of records alone, never on the order
//! in which they came.
//!
//! A subnet that holds the public addresses of two other possible leases or more is set aside whatever its age: one lie, or one
//! mistake, would cut all of them off.
//!
//! Where subnets are assigned (Kubernetes), a node chooses its public address but not its subnet. So that an old node cannot push
//! a younger one aside by publishing an address in its subnet, age does not decide there: who has its public address in the
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

mod around;
mod claims;
mod entry;
mod judge;
mod shared;

pub use shared::Shared;

/// Against what leases are judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Us {
    /// Our Network: leases outside are set aside.
    pub networks: Subnets,
    /// Our own lease's id in the store.
    pub id: Option<Id>,
    /// Our own subnet: leases that overlap it are set aside.
    pub own: Subnets,
    /// The addresses that we publish: leases that carry one are set aside.
    pub public: Vec<IpAddr>,
    /// The addresses of our uplink, as far as we publish others: leases that carry one are set aside, too.
    pub uplink: Vec<IpAddr>,
    /// Our other addresses and the networks that we are connected to: leases that overlap one are set aside.
    pub connected: Connected,
    /// Subnets are assigned by someone else (Kubernetes): a node cannot choose which one it has.
    pub assigned: bool,
}

/// A change of what may be believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Which lease.
    pub id: Id,
    /// Believed before.
    pub before: Option<Arc<Lease>>,
    /// Believed now.
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

/// Claims to be settled, oldest first.
type Dirty = BTreeSet<(Age, Id, Slot)>;

/// What was believed of each touched slot before this call.
type Before = BTreeMap<Slot, (Id, Option<Arc<Lease>>)>;

impl Peers {
    /// An empty set.
    pub fn new(us: Us) -> Peers {
        Peers { us, ..Peers::default() }
    }

    /// We have another subnet, address or network now: judges all again. Changes are only made where a verdict turned.
    pub fn judge_for(&mut self, us: Us) -> Vec<Change> {
        if us == self.us {
            return Vec::new();
        }
        let was: Vec<bool> = self.entries.iter().map(Entry::is_believed).collect();
        self.us = us;
        self.claims = Claims::default();
        let (mut dirty, mut unused) = (Dirty::new(), Before::new());
        for slot in 0..self.entries.len() {
            self.enter(slot as Slot, &mut dirty);
        }
        self.settle(dirty, &mut unused);
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

    /// A record was put. Our own id yields no change.
    pub fn put(&mut self, record: Record) -> Vec<Change> {
        let Record { id, lease } = record;
        // The store's identity counts, whatever the lease says of itself.
        let lease = lease.map(|lease| Lease { id: id.clone(), subnets: lease.subnets.trunc(), ..lease });
        let (mut dirty, mut before) = (Dirty::new(), Before::new());
        let slot = match self.slots.get(&id).copied() {
            Some(slot) => {
                let Some(lease) = self.renewed(slot, lease, &mut before) else { return self.changes(before) };
                self.leave(slot, &mut dirty, &mut before);
                self.entries[slot as usize] = Entry::new(lease);
                slot
            }
            None => {
                if let Some(claim) = lease.as_ref().ok().and_then(|lease| self.unclaimed(lease)) {
                    return vec![self.believe(id, lease, &claim)];
                }
                let slot = self.place(Entry::new(lease));
                before.insert(slot, (id.clone(), None));
                self.slots.insert(id, slot);
                slot
            }
        };
        self.enter(slot, &mut dirty);
        self.settle(dirty, &mut before);
        self.changes(before)
    }

    /// A record is gone. Leases that it had pushed aside may come back.
    pub fn remove(&mut self, id: &Id) -> Vec<Change> {
        let Some(slot) = self.slots.remove(id) else { return Vec::new() };
        let (mut dirty, mut before) = (Dirty::new(), Before::new());
        self.leave(slot, &mut dirty, &mut before);
        self.entries[slot as usize] = Entry::Free;
        self.settle(dirty, &mut before);
        let changes = self.changes(before);
        self.free.push(slot);
        changes
    }

    /// Believed leases, by id.
    pub fn believed(&self) -> impl Iterator<Item = &Arc<Lease>> {
        let mut all: Vec<&Arc<Lease>> = self.entries.iter().filter_map(Entry::believed).collect();
        all.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        all.into_iter()
    }

    /// Iterates over the believed leases in no particular order. This is faster than [`Peers::believed`].
    pub fn believed_unordered(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.entries.iter().filter_map(Entry::believed)
    }

    /// Set aside, with the reason, by id: a lease that parsed is given along. Our own record never is, readable or not.
    pub fn set_aside(&self) -> impl Iterator<Item = (&Id, &str, Option<&Lease>)> {
        let others = self.slots.iter().filter(|(id, _)| self.us.id.as_ref() != Some(*id));
        let aside = others.filter_map(|(id, slot)| {
            let (reason, lease) = self.entries[*slot as usize].aside()?;
            Some((id, reason, lease))
        });
        let mut all: Vec<_> = aside.collect();
        all.sort_unstable_by_key(|(id, ..)| *id);
        all.into_iter()
    }

    /// Why this record is set aside, if it is.
    pub fn reason(&self, id: &Id) -> Option<&str> {
        let slot = self.slots.get(id).filter(|_| self.us.id.as_ref() != Some(id))?;
        self.entries[*slot as usize].aside().map(|(reason, _)| reason)
    }

    /// The older lease that pushes this one aside, if one does.
    pub fn beaten_by(&self, id: &Id) -> Option<&Id> {
        let slot = self.entries[*self.slots.get(id)? as usize].beaten_by()?;
        match &self.entries[slot as usize] {
            Entry::Read(winner, _) => Some(&winner.id),
            Entry::Free | Entry::Unread(_) => None,
        }
    }

    /// One believed lease.
    pub fn get(&self, id: &Id) -> Option<&Arc<Lease>> {
        self.slots.get(id).and_then(|slot| self.entries[*slot as usize].believed())
    }

    /// All ids known, believed or not, our own left out, in no order.
    pub fn ids(&self) -> impl Iterator<Item = &Id> {
        self.slots.keys().filter(|id| self.us.id.as_ref() != Some(id))
    }

    /// How many are believed.
    pub fn len(&self) -> usize {
        self.believed
    }

    /// How many are set aside.
    pub fn set_aside_len(&self) -> usize {
        let own = self.us.id.as_ref().is_some_and(|id| self.slots.contains_key(id));
        self.slots.len() - self.believed - usize::from(own)
    }

    /// How many verdicts were found so far, for tests of what a change costs.
    #[doc(hidden)]
    pub fn judged(&self) -> u64 {
        self.judged
    }

    /// True when none is believed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A free slot for an entry.
    fn place(&mut self, entry: Entry) -> Slot {
        if let Some(slot) = self.free.pop() {
            self.entries[slot as usize] = entry;
            return slot;
        }
        self.entries.push(entry);
        // 2^32 records would not fit into memory.
        (self.entries.len() - 1) as Slot
    }

    /// The short way for the usual new lease: what it claims, when it is possible and nobody else claims any of it.
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
        let slot = self.place(entry);
        self.slots.insert(id.clone(), slot);
        self.claims.insert(claim, slot);
        self.believed += 1;
        Change { id, before: None, after: self.entries[slot as usize].believed().cloned() }
    }

    /// The short way for the usual put: the lease is the same, or only what its owner says of itself changed, and its claim
    /// stays as it is. Gives the record back when the long way is needed, `None` when nothing is left to do.
    fn renewed(
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
        // A family that is off here is no part of the claim, but it is shown.
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

    /// Takes a slot's claim away; those that it had beaten must be settled again.
    fn leave(&mut self, slot: Slot, dirty: &mut Dirty, before: &mut Before) {
        let entry = &self.entries[slot as usize];
        let Entry::Read(lease, _) = entry else { return };
        before.insert(slot, (lease.id.clone(), entry.believed().cloned()));
        if !entry.has_claim() {
            return;
        }
        let (claim, believed) = (judge::claim(&self.us, lease), entry.is_believed());
        let gone = self.claims.remove(&claim, slot);
        self.queue_turned(&gone, dirty);
        let free = |other: Slot, dirty: &mut Dirty| {
            let entry = &self.entries[other as usize];
            if entry.beaten_by() == Some(slot) {
                entry.queue(other, dirty);
            }
        };
        if believed {
            self.believed -= 1;
            self.claims.rivals(&claim).for_each(|other| free(other, dirty));
        } else if self.us.assigned {
            // These it had set aside without being believed itself.
            self.claims.inside(&claim).for_each(|other| free(other, dirty));
        }
    }

    /// First judgement of a slot's entry; a possible lease gets its claim.
    fn enter(&mut self, slot: Slot, dirty: &mut Dirty) {
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
        dirty.insert((lease.age.clone(), lease.id.clone(), slot));
        let new = self.claims.insert(&claim, slot);
        self.queue_turned(&new, dirty);
        if self.us.assigned {
            // Their public addresses lie in a subnet of another lease now, whether this one is believed or not.
            for other in self.claims.inside(&claim).filter(|other| *other != slot) {
                self.entries[other as usize].queue(other, dirty);
            }
        }
    }

    /// These public addresses are new, or gone: subnets around them may cover several now, or no longer.
    fn queue_turned(&self, addresses: &Subnets, dirty: &mut Dirty) {
        if !self.us.assigned {
            self.claims.turned_by(addresses).for_each(|other| self.entries[other as usize].queue(other, dirty));
        }
    }

    /// Judges what is dirty, oldest first, and whatever turns because of it. A verdict depends on older claims alone, so none
    /// is judged twice. (Whether it covers others' addresses depends on claims that are all there already.)
    fn settle(&mut self, mut dirty: Dirty, before: &mut Before) {
        while let Some((age, id, slot)) = dirty.pop_first() {
            let entry = &self.entries[slot as usize];
            // It may have become impossible after it was put on the list.
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
                    entry.queue(other, &mut dirty);
                }
            }
        }
    }

    /// The lease that beats this claim: an older one that is believed, or, where subnets are assigned, any in whose subnet it has
    /// its public address.
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

/// What is believed no longer comes first, so that a subnet is given up before it is taken; by id within.
fn in_order(mut changes: Vec<Change>) -> Vec<Change> {
    changes.sort_by(|a, b| (a.after.is_some(), &a.id).cmp(&(b.after.is_some(), &b.id)));
    changes
}
