// SPDX-License-Identifier: Apache-2.0
//! Decides which leases of the store are believed. A lease that is not believed is set aside with a reason. One change takes time that
//! grows with the logarithm of the number of peers.
//!
//! There are two questions. First, is the lease possible at all? The answer (`judge.rs`) depends only on the lease and on this node: our
//! Network, our subnet, our LAN, our addresses. If it is possible, the lease has a claim to its subnets and addresses (`claims.rs`).
//!
//! Second, does the claim hold against other claims (`settle.rs`)? Two claims conflict if their subnets overlap, or if the subnet of one contains the
//! published address of the other. A claim is believed if it conflicts with no older claim that is believed. After a change, the younger
//! claims that conflict with the changed one are judged again, oldest first. If a judgement changes, the claims that conflict with that one
//! follow. After each call every claim is settled, so the result depends only on the set of records, and never on the order in which
//! they came.
//!
//! A lease whose subnet contains the published addresses of two or more other possible leases is set aside, whatever its age. Otherwise one
//! lie, or one mistake, would cut off all of those nodes.
//!
//! If subnets are assigned (Kubernetes), a node chooses its published address but not its subnet. There an old node could push a younger
//! one aside by publishing an address inside its subnet. So in this case age does not count: a lease whose published address lies in the
//! subnet of another lease is set aside.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use crate::attrs::Attrs;
use crate::backend_types::PublicPorts;
use crate::cidr::Subnets;
use crate::connected::Connected;
use crate::lease::{Age, Id, Lease, Record, Unreadable};
use claims::{Claim, Claims, Slot};
use entry::{Entry, Judgement};
use settle::in_order;

mod claims;
mod entry;
mod host_networks;
mod judge;
mod settle;
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
    /// The addresses that we publish. Leases that publish one of them are set aside, unless both leases name a port and the ports differ.
    pub public: Vec<IpAddr>,
    /// The ports that our lease names.
    pub ports: PublicPorts,
    /// The addresses of our uplink, if we publish others. Leases that publish one of them are also set aside.
    pub uplink: Vec<IpAddr>,
    /// Our other addresses, and the networks that we are connected to. Leases that overlap one of them are set aside.
    pub connected: Connected,
    /// True if subnets are assigned, as in Kubernetes, so that a node cannot choose its own.
    pub assigned: bool,
}

/// A lease that is believed from now on, or no longer, or with another content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerChange {
    /// The id of the lease.
    pub id: Id,
    /// The lease that was believed before.
    pub before: Option<Arc<Lease>>,
    /// The lease that is believed now.
    pub after: Option<Arc<Lease>>,
}

/// Reads the ports of a lease ([`BackendTypes::ports`](crate::backend_types::BackendTypes::ports)).
#[derive(Debug, Clone, Copy)]
struct PortsOf(fn(&Attrs) -> PublicPorts);

impl Default for PortsOf {
    fn default() -> PortsOf {
        PortsOf(|_| [None, None])
    }
}

/// All records, believed or not.
#[derive(Debug, Default)]
pub struct Peers {
    us: Us,
    ports: PortsOf,
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

    /// Reads the ports of leases in this way. Without it, an address says which node it is.
    #[must_use]
    pub fn with_ports(self, ports: fn(&Attrs) -> PublicPorts) -> Peers {
        Peers { ports: PortsOf(ports), ..self }
    }

    /// Judges all leases again, because this node has another subnet, address or network. Returns the leases whose judgement has changed.
    pub fn judge_for(&mut self, us: Us) -> Vec<PeerChange> {
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
                changes.push(PeerChange { id, before, after });
            }
        }
        in_order(changes)
    }

    /// Adds or replaces a record. A record with our own id causes no change.
    pub fn put(&mut self, record: Record) -> Vec<PeerChange> {
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
    pub fn remove(&mut self, id: &Id) -> Vec<PeerChange> {
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

    /// Iterates over the believed leases in no particular order. This is faster than [`Peers::believed`].
    pub fn believed_unordered(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.entries.iter().filter_map(Entry::believed)
    }

    /// Returns the records that are not believed, sorted by id: the reason, and the lease if it is readable. Our own record is never among
    /// them.
    pub fn not_believed(&self) -> impl Iterator<Item = (&Id, &str, Option<&Lease>)> {
        let others = self.slots.iter().filter(|(id, _)| self.us.id.as_ref() != Some(*id));
        let reasons = others.filter_map(|(id, slot)| {
            let (reason, lease) = self.entries[*slot as usize].why_not_believed()?;
            Some((id, reason, lease))
        });
        let mut all: Vec<_> = reasons.collect();
        all.sort_unstable_by_key(|(id, ..)| *id);
        all.into_iter()
    }

    /// Returns why this record is not believed. Returns `None` if it is.
    pub fn reason(&self, id: &Id) -> Option<&str> {
        let slot = self.slots.get(id).filter(|_| self.us.id.as_ref() != Some(id))?;
        self.entries[*slot as usize].why_not_believed().map(|(reason, _)| reason)
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

    /// Returns the first believed lease whose place is `from` or later, with its place. A lease keeps its place as long as it has a record,
    /// so a walk over all leases needs no copy of them. Afterwards the place may be given to another lease.
    pub fn believed_from(&self, from: usize) -> Option<(usize, &Arc<Lease>)> {
        let rest = self.entries.iter().enumerate().skip(from);
        rest.filter_map(|(place, entry)| Some((place, entry.believed()?))).next()
    }

    /// Returns the place of a record, as in [`Peers::believed_from`].
    pub fn place(&self, id: &Id) -> Option<usize> {
        self.slots.get(id).map(|slot| *slot as usize)
    }

    /// Returns the ids of all records except our own, in no particular order.
    pub fn ids(&self) -> impl Iterator<Item = &Id> {
        self.slots.keys().filter(|id| self.us.id.as_ref() != Some(id))
    }

    /// Returns the number of believed leases.
    pub fn len(&self) -> usize {
        self.believed
    }

    /// Returns the number of records that are not believed.
    pub fn not_believed_len(&self) -> usize {
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
        let free = self.us.id.as_ref() != Some(&lease.id) && judge::check(&self.us, self.ports, lease).is_ok();
        let claim = judge::claim(&self.us, lease);
        (free && self.claims.rivals(&claim).next().is_none()).then_some(claim)
    }

    fn believe(&mut self, id: Id, lease: Result<Lease, Unreadable>, claim: &Claim) -> PeerChange {
        let mut entry = Entry::new(lease);
        if let Entry::Read(_, judgement) = &mut entry {
            *judgement = Judgement::Believed;
        }
        let slot = self.store_entry(entry);
        self.slots.insert(id.clone(), slot);
        self.claims.insert(claim, slot);
        self.believed += 1;
        PeerChange { id, before: None, after: self.entries[slot as usize].believed().cloned() }
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
        let (Entry::Read(old, judgement), Ok(lease)) = (entry, &new) else { return Some(new) };
        let same_claim = old.age == lease.age && judge::claim(&self.us, old) == judge::claim(&self.us, lease);
        // A family that is not enabled is not part of the claim, but it is shown to users.
        let same_claim = same_claim && old.subnets == lease.subnets;
        if !same_claim || !has_claim || judge::check(&self.us, self.ports, lease).is_err() {
            return Some(new);
        }
        let was = std::mem::replace(old, Arc::new(lease.clone()));
        if *judgement == Judgement::Believed {
            before.insert(slot, (was.id.clone(), Some(was)));
        }
        None
    }
}
