// SPDX-License-Identifier: Apache-2.0
//! Saved peers, as the node uses and writes them.
//!
//! If the store is away at the start, the node goes on from the saved peers, as if it had run before the store went away. Nothing is removed
//! until the store answers. Then the node asks for its own lease as at any start. If another node got that lease meanwhile, that node keeps
//! it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use weft_subnet::cache::{Expiry, Head, Saved, Uplink};
use weft_subnet::lease::Record;
use weft_subnet::source::Claim;

use super::Node;
use crate::kernel::Kernel;
use crate::log::text::date;
use crate::saved::SavedFile;
use crate::uplink;

impl<K: Kernel> Node<K> {
    /// Plans with the saved peers.
    pub(super) fn resume(&mut self, saved: Saved) {
        let text = format!("the store is away: the agent uses the peers that were saved on {}", date(saved.head.saved));
        tracing::warn!(subnet = %self.plan.own().subnets, peers = saved.peers.len(), "{text}");
        for lease in saved.peers {
            self.plan.put(Record { id: lease.id.clone(), lease: Ok(lease) });
        }
        self.resumed = Some(text);
        let (network, attrs, previous) = (self.plan.network().clone(), self.wanted(), Some(self.plan.own().subnets));
        self.asked = Some(attrs.clone());
        let (was, connected) = (Some(self.plan.own().attrs.clone()), self.plan.host().connected.clone());
        self.keeper.catch_up(Claim { network, attrs, previous, was, connected });
    }

    /// Returns true if the peers are known, from the store or from the file.
    pub(crate) fn knows_peers(&self) -> bool {
        self.snapshot_applied || self.resumed.is_some()
    }

    /// Takes notice that the store sent a complete list. The saved peers are not needed any more.
    pub(super) fn answered_by_store(&mut self) {
        if self.resumed.take().is_some() {
            tracing::info!("the store answers: peers are compared with its leases");
        }
    }

    /// Takes notice that something changed which is saved. Before the first list there is nothing to save.
    pub(super) fn unsaved(&mut self) {
        if self.snapshot_applied {
            self.world.saver.changed();
        }
    }

    /// Takes notice that the store renewed the own lease for this time. `None` means that the lease does not end. The new end is saved if it
    /// is a quarter of that time later than the saved one.
    pub(super) fn kept(&mut self, ttl: Option<Duration>) {
        let now = Instant::now();
        let ends = ttl.map(|ttl| (now + ttl, ttl));
        let differs = match (self.saved_expiry, ends) {
            (Some(Some(before)), Some((ends, ttl))) => before + ttl / 4 <= ends,
            (Some(None), None) => false,
            _ => true,
        };
        if differs {
            self.saved_expiry = Some(ends.map(|(ends, _)| ends));
            self.unsaved();
        }
        self.ttl = ttl.map(|ttl| (now, ttl));
    }

    /// Returns the time at which [`Node::save`] has something to do.
    pub(super) fn next_saving(&self, now: Instant) -> Option<Instant> {
        self.world.saver.next(now).filter(|_| self.may_save())
    }

    /// Returns true if the file would say truly when the own lease ends. If leases of the store expire, the store must have said when this
    /// one does. Otherwise the lease must not be lost.
    fn may_save(&self) -> bool {
        if self.world.store.capabilities().expires { self.saved_expiry.is_some() } else { self.lost.is_none() }
    }

    /// Takes notice that the own lease belongs to another node. A later start must not use it while the store is away, so the file is
    /// removed first, also if the agent ends next. The file that is written later says that the lease has ended.
    pub(super) async fn not_ours_any_more(&mut self) {
        self.world.saver.forget().await;
        if self.world.store.capabilities().expires {
            let now = Instant::now();
            (self.ttl, self.saved_expiry) = (Some((now, Duration::ZERO)), Some(Some(now)));
            self.unsaved();
        }
    }

    /// Starts to write the file if that is due.
    pub(super) fn save(&mut self, now: Instant) {
        if !self.may_save() {
            return;
        }
        if self.store_trouble.is_none() && self.world.saver.is_old(now) {
            self.unsaved();
        }
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let heard = wall.saturating_sub(now - self.last_word).as_secs();
        let (plan, config, chosen) = (&self.plan, &self.config, self.chosen);
        let expires = match self.ttl {
            Some((at, ttl)) => Expiry::At((wall + ttl).saturating_sub(now - at).as_secs()),
            None => Expiry::Never,
        };
        let (now_used, flags) = (&plan.host().uplink, uplink::flags(&self.world.options.uplink));
        let used = Uplink { name: now_used.name.text().into(), v4: now_used.v4, v6: now_used.v6, flags };
        let head = |saved_file: &SavedFile| Head {
            store: saved_file.store().to_owned(),
            saved: heard,
            expires,
            config: config.clone(),
            own: plan.own().clone(),
            public: (plan.host().public_v4, plan.host().public_v6),
            chosen,
            uplink: Some(used),
        };
        self.world.saver.save(now, plan.peers(), head);
    }
}
