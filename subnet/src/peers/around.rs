// SPDX-License-Identifier: Apache-2.0
//! Addresses and routes of this host come and go all the time (service addresses, bridges of containers). Only leases that such a
//! change concerns are looked at.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipnet::IpNet;

use super::claims::Slot;
use super::entry::{Entry, Verdict};
use super::{Before, Change, Dirty, Peers, judge};
use crate::connected::Connected;
use crate::lease::Lease;

impl Peers {
    /// The host has other addresses or connected networks now: judges those leases again whose subnets overlap what came or went.
    /// Ends as [`Peers::judge_for`] would.
    pub fn connect(&mut self, connected: Connected) -> Vec<Change> {
        let difference = self.us.connected.difference(&connected);
        if difference.is_empty() {
            return Vec::new();
        }
        let mut concerned: BTreeSet<Slot> = difference.iter().flat_map(|net| self.claims.over(net)).collect();
        for (slot, entry) in self.entries.iter().enumerate() {
            // These have no place among the claims. A glance at each of them is cheap.
            let Entry::Read(lease, Verdict::Impossible(_)) = entry else { continue };
            if judge::enabled(&self.us, &lease.subnets).iter().any(|net| difference.overlapping(net).is_some()) {
                concerned.insert(slot as Slot);
            }
        }
        self.us.connected = connected;
        let (mut dirty, mut before) = (Dirty::new(), Before::new());
        for slot in concerned {
            self.leave(slot, &mut dirty, &mut before);
            self.enter(slot, &mut dirty);
        }
        self.settle(dirty, &mut before);
        self.changes(before)
    }

    /// Believed leases with a public address in this network, in no order; one may come twice.
    pub fn published_in(&self, net: IpNet) -> impl Iterator<Item = &Arc<Lease>> {
        self.claims.published_in(net).filter_map(|slot| self.entries[slot as usize].believed())
    }
}
