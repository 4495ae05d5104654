// SPDX-License-Identifier: Apache-2.0
//! A start while the store is away goes on from what was saved: the agent is then as one that ran before the store went. Nothing is
//! removed until the store has answered, and our own lease is asked for as at any start, so that whoever got it meanwhile keeps it.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use weft_subnet::cache::{Head, Saved};
use weft_subnet::lease::Record;
use weft_subnet::source::Claim;

use super::Node;
use crate::kernel::Kernel;
use crate::saved::Shelf;
use crate::say::date;

impl<K: Kernel> Node<K> {
    /// Goes on from what was saved.
    pub(super) fn resume(&mut self, saved: Saved) {
        let text = format!("the store is away: peers as saved on {} are held", date(saved.head.saved));
        tracing::warn!(subnet = %self.plan.own().subnets, peers = saved.peers.len(), "{text}");
        for lease in saved.peers {
            self.plan.put(Record { id: lease.id.clone(), lease: Ok(lease) });
        }
        self.resumed = Some(text);
        let (network, attrs, previous) = (self.plan.network().clone(), self.wanted(), Some(self.plan.own().subnets));
        self.asked = Some(attrs.clone());
        self.keeper.catch_up(Claim { network, attrs, previous });
    }

    /// The peers are known, by the store or by what was saved.
    pub(crate) fn knows_peers(&self) -> bool {
        self.snapshot_applied || self.resumed.is_some()
    }

    /// The store gave a whole list: what was saved has done its service.
    pub(super) fn answered_by_store(&mut self) {
        if self.resumed.take().is_some() {
            tracing::info!("the store answers: peers are compared with its leases");
        }
    }

    /// Something that is saved is another now. Before the first list there is nothing to save.
    pub(super) fn unsaved(&mut self) {
        if self.snapshot_applied {
            self.world.saver.changed();
        }
    }

    /// Saves a little more, when it is due.
    pub(super) fn save(&mut self, now: Instant) {
        let (plan, config, chosen) = (&self.plan, &self.config, self.chosen);
        let head = |shelf: &Shelf| Head {
            store: shelf.store().to_owned(),
            saved: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            config: config.clone(),
            own: plan.own().clone(),
            public: (plan.host().public_v4, plan.host().public_v6),
            chosen,
        };
        self.world.saver.step(now, plan.peers(), head);
    }
}
