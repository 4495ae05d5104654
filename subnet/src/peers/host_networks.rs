// SPDX-License-Identifier: Apache-2.0
//! Judges leases again after the host's addresses or routes have changed. They change often, for example with service addresses and
//! container bridges. So only the leases that overlap a change are judged.

use std::collections::BTreeSet;
use std::sync::Arc;

use ipnet::IpNet;

use super::claims::Slot;
use super::entry::{Entry, Judgement};
use super::{Before, PeerChange, Peers, Queue, judge};
use crate::connected::Connected;
use crate::lease::Lease;

impl Peers {
    /// Sets the host's addresses and connected networks. Judges the leases again whose subnets overlap something that was added or
    /// removed. The result is the same as that of [`Peers::judge_for`].
    pub fn connect(&mut self, connected: Connected) -> Vec<PeerChange> {
        let difference = self.us.connected.difference(&connected);
        if difference.is_empty() {
            return Vec::new();
        }
        let mut concerned: BTreeSet<Slot> = difference.iter().flat_map(|net| self.claims.over(net)).collect();
        for (slot, entry) in self.entries.iter().enumerate() {
            // Impossible leases have no claim by which they could be found. To check each of them is cheap.
            let Entry::Read(lease, Judgement::Impossible(_)) = entry else { continue };
            if judge::enabled(&self.us, &lease.subnets).iter().any(|net| difference.overlapping(net).is_some()) {
                concerned.insert(slot as Slot);
            }
        }
        self.us.connected = connected;
        let (mut queue, mut before) = (Queue::new(), Before::new());
        for slot in concerned {
            self.withdraw_claim(slot, &mut queue, &mut before);
            self.judge_alone(slot, &mut queue);
        }
        self.settle(queue, &mut before);
        self.changes(before)
    }

    /// Returns the believed leases with a published address in this network, in no particular order. A lease may occur twice.
    pub fn published_in(&self, net: IpNet) -> impl Iterator<Item = &Arc<Lease>> {
        self.claims.published_in(net).filter_map(|slot| self.entries[slot as usize].believed())
    }
}
