// SPDX-License-Identifier: Apache-2.0
//! The events of the store.

use tokio::time::Instant;
use weft_backends::index::Changed;
use weft_subnet::source::Event;

use super::Node;
use super::event::StoreEvent;
use super::net_conf::NetConfChange;
use crate::kernel::Kernel;
use crate::log::Reminder;
use crate::pass::{Cause, Trigger};

/// Whether the store answers.
#[derive(Debug)]
pub(super) struct StoreState {
    /// When the store last answered.
    pub(super) last_answer: Instant,
    /// The last error, until the store answers again.
    pub(super) error: Option<String>,
    /// Limits how often errors of the store are logged.
    pub(super) log_limit: Reminder,
}

impl StoreState {
    /// Returns the state of a store that has just answered.
    pub(super) fn new(now: Instant) -> StoreState {
        StoreState { last_answer: now, error: None, log_limit: Reminder::default() }
    }
}

/// What events of the store lead to.
enum Needed {
    /// These changes are to be written. The text names the event.
    Writes(Vec<Changed>, String),
    /// Everything is to be compared. The text names the event.
    FullPass(String),
}

impl<K: Kernel> Node<K> {
    /// Runs the first full pass, with what the store has sent so far.
    pub async fn start(&mut self, events: Vec<Event>) {
        // Without a complete list nothing of peers is written, and with one the full pass writes it.
        self.apply_events(events);
        self.full_pass(Cause::Start).await;
        if let Some(text) = self.change.at_start.take()
            && self.apply_net_conf(&text) == NetConfChange::Applied
        {
            self.full_pass(Cause::Start).await;
        }
    }

    /// Handles events of the store.
    pub async fn store_changed(&mut self, events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        let begin = Instant::now();
        let has_changes = match self.apply_events(events) {
            Needed::FullPass(event) => {
                self.full_pass(Trigger::new(Cause::Start, event)).await;
                true
            }
            Needed::Writes(changed, event) => {
                let has_changes = !changed.is_empty();
                self.write(changed, event).await;
                self.update_rules();
                self.continue_change(Instant::now());
                has_changes
            }
        };
        if has_changes {
            self.context.reporter.metrics.converged(begin.elapsed());
        }
    }

    /// Applies events to the plan. Nothing is written to the kernel.
    fn apply_events(&mut self, events: Vec<Event>) -> Needed {
        let (mut changed, mut full_pass) = (Vec::new(), false);
        let mut what = StoreEvent::default();
        let peers_version = self.plan.peers_version();
        let now = Instant::now();
        // Some stores report an unlimited lease without having been asked.
        let is_answer =
            |event: &Event| !matches!(event, Event::Unreachable(_) | Event::NotRenewed(_) | Event::Renewed(None));
        if events.iter().any(is_answer) {
            self.store.last_answer = now;
            self.context.reporter.metrics.store_answered(now);
        }
        for event in events {
            if matches!(event, Event::Config(_)) {
                // It is newer than the net-conf that the start read. The store reports it once.
                self.change.at_start = None;
            }
            // A renewal may be an old answer that came over another connection.
            let is_renewal = matches!(event, Event::Renewed(_) | Event::NotRenewed(_));
            if !is_renewal && !matches!(event, Event::Unreachable(_)) && self.store.error.take().is_some() {
                tracing::info!("the store answers again");
            }
            match event {
                Event::Snapshot { records, reset } => {
                    full_pass |= !self.has_list();
                    what.list(records.len());
                    changed.extend(self.apply_list(records, reset));
                }
                Event::Changes(changes) => {
                    what.changes(&changes);
                    changed.extend(self.apply_changes(changes));
                }
                Event::Config(text) if self.apply_net_conf(&text) == NetConfChange::Applied => {
                    what.net_conf();
                    full_pass = true;
                }
                Event::Config(_) => {}
                Event::Answered => {}
                Event::Unreachable(text) => {
                    if self.store.log_limit.due(&text, now) {
                        tracing::warn!("store: {text}");
                    }
                    self.store.error = Some(text);
                }
                Event::NotRenewed(text) => {
                    if self.store.log_limit.due(&text, now) {
                        tracing::warn!("own lease is not renewed: {text}");
                    }
                    self.own_lease.not_renewed = Some(text);
                }
                Event::Renewed(ttl) => {
                    self.lease_renewed(ttl);
                    self.context.reporter.metrics.lease_kept(now, ttl);
                }
            }
        }
        // A peer of udp or alloc has no entries, but is saved anyway.
        if full_pass || !changed.is_empty() || peers_version != self.plan.peers_version() {
            self.save_later();
        }
        if full_pass { Needed::FullPass(what.to_string()) } else { Needed::Writes(changed, what.to_string()) }
    }
}
