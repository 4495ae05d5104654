// SPDX-License-Identifier: Apache-2.0
//! Leases from the store are input, not truth: every record is judged alone, and what may not be believed is set aside with its
//! reason. Incremental: one change costs the logarithm of the number of peers.

use std::net::IpAddr;

use crate::cidr::Subnets;
use crate::lease::{Id, Lease, Record};

/// Against what leases are judged.
#[derive(Debug, Clone, Default)]
pub struct Us {
    /// Our Network: leases outside are set aside.
    pub networks: Subnets,
    /// Our own lease's id in the store.
    pub id: Option<Id>,
    /// Our own subnet: leases that overlap it are set aside.
    pub own: Subnets,
    /// Our public addresses: leases that carry one are set aside.
    pub public: Vec<IpAddr>,
}

/// A change of what may be believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Which lease.
    pub id: Id,
    /// Believed before.
    pub before: Option<Lease>,
    /// Believed now.
    pub after: Option<Lease>,
}

/// All records, believed or set aside.
#[derive(Debug, Default)]
pub struct Peers {}

impl Peers {
    /// An empty set.
    pub fn new(us: Us) -> Peers {
        let _ = us;
        Peers {}
    }

    /// We have another subnet, address or network now: judges all again.
    pub fn judge_for(&mut self, us: Us) -> Vec<Change> {
        let _ = us;
        Vec::new()
    }

    /// A record was put. Our own id yields no change.
    pub fn put(&mut self, record: Record) -> Vec<Change> {
        let _ = record;
        Vec::new()
    }

    /// A record is gone. Leases that it had pushed aside may come back.
    pub fn remove(&mut self, id: &Id) -> Vec<Change> {
        let _ = id;
        Vec::new()
    }

    /// Believed leases, by id.
    pub fn believed(&self) -> impl Iterator<Item = &Lease> {
        std::iter::empty()
    }

    /// Set aside, with the reason, by id: a lease that parsed is given along.
    pub fn set_aside(&self) -> impl Iterator<Item = (&Id, &str, Option<&Lease>)> {
        std::iter::empty()
    }

    /// One believed lease.
    pub fn get(&self, id: &Id) -> Option<&Lease> {
        let _ = id;
        None
    }

    /// All ids known, believed or not, our own left out.
    pub fn ids(&self) -> impl Iterator<Item = &Id> {
        std::iter::empty()
    }

    /// How many are believed.
    pub fn len(&self) -> usize {
        0
    }

    /// True when none is believed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
