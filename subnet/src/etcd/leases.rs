// SPDX-License-Identifier: Apache-2.0
//! Which of the leases in the store are ours, whether one of them can be used as it is, and which subnet is free.

use std::collections::HashSet;

use crate::allocate;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::Id;
use crate::source::{Error, LeaseRequest};

use super::keys::{LeaseList, Stored};

/// The leases in the store as one attempt to acquire a subnet sees them.
pub(super) struct Leases<'a> {
    request: &'a LeaseRequest,
    all: &'a LeaseList,
    /// Those that are ours, the one with the best evidence first.
    pub(super) ours: Vec<&'a Stored>,
    our_ids: HashSet<&'a Id>,
}

impl<'a> Leases<'a> {
    pub(super) fn new(request: &'a LeaseRequest, all: &'a LeaseList, evidence: &Evidence) -> Leases<'a> {
        let ours = all.ours(evidence);
        let our_ids = ours.iter().map(|own| &own.record.id).collect();
        Leases { request, all, ours, our_ids }
    }

    fn others(&self) -> impl Iterator<Item = &'a Stored> {
        self.all.stored.iter().filter(|stored| !self.our_ids.contains(&stored.record.id))
    }

    /// Returns true if net-conf allows a lease of these subnets.
    fn is_compatible(&self, stored: &Stored) -> bool {
        stored.subnets.is_some_and(|subnets| allocate::is_compatible(&self.request.net_conf, &subnets))
    }

    /// Returns true if an older lease of another node overlaps this one of ours. Then ours came second in a race, and we ended before
    /// we could delete it.
    fn lost_a_race(&self, own: &Stored) -> bool {
        self.others().any(|other| {
            other.created < own.created && self.is_compatible(other) && other.lease().is_some() && overlap(own, other)
        })
    }

    /// Returns a lease of ours that can be used as it is.
    pub(super) fn usable(&self) -> Option<&'a Stored> {
        self.ours.iter().copied().find(|own| self.is_compatible(own) && !self.lost_a_race(own))
    }

    /// Chooses a free subnet.
    pub(super) fn choose(&self) -> Result<Subnets, Error> {
        let taken = self.others().filter_map(|stored| stored.subnets).collect();
        let nodes = self.others().filter_map(Stored::lease).map(|lease| &lease.attrs);
        let ours = self.ours.iter().filter_map(|own| own.subnets);
        self.request.choose(taken, nodes, ours)
    }
}

fn overlap(one: &Stored, other: &Stored) -> bool {
    matches!((one.subnets, other.subnets), (Some(one), Some(other)) if one.overlaps(&other))
}
