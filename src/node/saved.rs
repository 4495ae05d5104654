// SPDX-License-Identifier: Apache-2.0
//! A start while the store is away goes on from what was saved: the agent is then as one that ran before the store went. Nothing is
//! removed until the store has answered, and our own lease is asked for as at any start, so that whoever got it meanwhile keeps it.

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
    /// Goes on from what was saved.
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

    /// The store renewed our lease, which lives so long now. Saved when that is news: a third of its time is over at each renewal.
    pub(super) fn kept(&mut self, ttl: Option<Duration>) {
        let now = Instant::now();
        let ends = ttl.map(|ttl| (now + ttl, ttl));
        let news = match (self.saved_expiry, ends) {
            (Some(Some(before)), Some((ends, ttl))) => before + ttl / 4 <= ends,
            (Some(None), None) => false,
            _ => true,
        };
        if news {
            self.saved_expiry = Some(ends.map(|(ends, _)| ends));
            self.unsaved();
        }
        self.ttl = ttl.map(|ttl| (now, ttl));
    }

    /// When [`Node::save`] has something to do.
    pub(super) fn next_saving(&self, now: Instant) -> Option<Instant> {
        self.world.saver.next(now).filter(|_| self.may_save())
    }

    /// What is saved says until when our lease is ours. So the store must have said how long it lives; where leases do not end by
    /// themselves, it must not be lost.
    fn may_save(&self) -> bool {
        if self.world.store.capabilities().expires { self.saved_expiry.is_some() } else { self.lost.is_none() }
    }

    /// Our lease is another node's: a start that finds the store away must not go on with it. So the file is removed before
    /// anything else is done, also before the agent ends. It is written again later, and says then that the lease has ended.
    pub(super) async fn not_ours_any_more(&mut self) {
        self.world.saver.forget().await;
        if self.world.store.capabilities().expires {
            let now = Instant::now();
            (self.ttl, self.saved_expiry) = (Some((now, Duration::ZERO)), Some(Some(now)));
            self.unsaved();
        }
    }

    /// Saves a little more, when it is due. Not before it is known when our lease ends: a later start relies on that.
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
        self.world.saver.step(now, plan.peers(), head);
    }
}
