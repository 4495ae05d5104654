// SPDX-License-Identifier: Apache-2.0
//! What is saved for the next start, and a start without the store. Such an agent is in the state of one that ran before
//! the store failed. It removes nothing until the store has answered. It asks for its own lease as at any other start, so
//! that a node that has got this lease meanwhile keeps it.

use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::lease::Record;
use weft_subnet::outside::wall_clock;
use weft_subnet::saved_peers::{Expiry, Head, Saved, Uplink};

use super::Node;
use super::own_lease::SavedEnd;
use crate::kernel::Kernel;
use crate::log::text::date;
use crate::observe::report::PeerList;
use crate::saved::SavedFile;
use crate::uplink;

impl<K: Kernel> Node<K> {
    /// Continues with the saved lease and peers.
    pub(super) fn resume(&mut self, saved: Saved) {
        let text = format!("the store is away: the agent uses the peers that were saved on {}", date(saved.head.saved));
        tracing::warn!(subnet = %self.plan.own().subnets, peers = saved.peers.len(), "{text}");
        for lease in saved.peers {
            self.plan.put(Record { id: lease.id.clone(), lease: Ok(lease) });
        }
        self.peers.list = PeerList::Saved(text);
        let was = self.left_lease().unwrap_or_else(|| self.plan.own().attrs.clone());
        let request = self.request(Some(was));
        self.own_lease.tasks.acquire_after_resume(request);
    }

    /// Takes notice that something that is saved has changed. Before the first list there is nothing to save.
    pub(super) fn save_later(&mut self) {
        if self.has_list() {
            self.context.saver.changed();
        }
    }

    /// Takes notice of a change that the next start must know even if it comes within seconds.
    pub(super) fn save_now(&mut self) {
        if self.has_list() {
            self.context.saver.changed_now();
        }
    }

    /// Takes notice that the store renewed our lease, which now lives for this time, or does not end if there is `None`. The end
    /// is saved only when it has moved by a quarter of that time, because stores that are touched otherwise report a renewal, too.
    pub(super) fn lease_renewed(&mut self, ttl: Option<Duration>) {
        let now = Instant::now();
        self.own_lease.not_renewed = None;
        let must_save = match (self.own_lease.saved_end, ttl) {
            (SavedEnd::At(saved), Some(ttl)) => saved + ttl / 4 <= now + ttl,
            (SavedEnd::Never, None) => false,
            _ => true,
        };
        if must_save {
            self.own_lease.saved_end = ttl.map_or(SavedEnd::Never, |ttl| SavedEnd::At(now + ttl));
            self.save_later();
        }
        self.own_lease.ttl = ttl.map(|ttl| (now, ttl));
    }

    /// Returns when [`Node::save`] has something to do.
    pub(super) fn next_saving(&self, now: Instant) -> Option<Instant> {
        self.context.saver.next(now).filter(|_| self.may_save())
    }

    /// The file says until when the own lease is ours. So nothing is saved before the store has said when the lease ends. If
    /// leases do not end by themselves, nothing is saved while the lease is lost.
    fn may_save(&self) -> bool {
        if self.context.store.capabilities().expires {
            self.own_lease.saved_end != SavedEnd::Unknown
        } else {
            self.own_lease.lost.is_none()
        }
    }

    /// The own lease belongs to another node, so a start without the store must not continue with it. The file is removed
    /// before anything else happens, in particular before the agent ends. It is written again later, and then says that the
    /// lease has ended.
    pub(super) async fn forget_saved_lease(&mut self) {
        self.context.saver.forget().await;
        if self.context.store.capabilities().expires {
            let now = Instant::now();
            self.own_lease.ttl = Some((now, Duration::ZERO));
            self.own_lease.saved_end = SavedEnd::At(now);
            self.save_later();
        }
    }

    /// Starts to write the file if that is due.
    pub(super) fn save(&mut self, now: Instant) {
        if !self.may_save() {
            return;
        }
        if self.store.error.is_none() && self.context.saver.is_old(now) {
            self.save_later();
        }
        if self.next_saving(now).is_none_or(|due| now < due) {
            return;
        }
        let wall = wall_clock();
        let heard = wall.saturating_sub(now - self.store.last_answer).as_secs();
        let (plan, config, chosen) = (&self.plan, &self.net_conf.text, self.net_conf.chosen);
        let expires = match self.own_lease.ttl {
            Some((at, ttl)) => Expiry::At((wall + ttl).saturating_sub(now - at).as_secs()),
            None => Expiry::Never,
        };
        let (now_used, flags) = (&plan.host().uplink, uplink::flags(&self.context.options.uplink));
        let used = Uplink { name: now_used.name.text().into(), v4: now_used.v4, v6: now_used.v6, flags };
        let clear_text = self.saved_clear_text(now);
        let head = |saved_file: &SavedFile| Head {
            store: saved_file.store().to_owned(),
            saved: heard,
            expires,
            config: config.clone(),
            earlier: plan.earlier().map(|(_, text)| text.to_owned()).collect(),
            sends_earlier: plan.sends_earlier(),
            own: plan.own().clone(),
            public: (plan.host().public_v4, plan.host().public_v6),
            chosen,
            uplink: Some(used),
            clear_text,
        };
        self.context.saver.save(now, plan.peers(), head);
    }
}
