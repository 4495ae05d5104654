// SPDX-License-Identifier: Apache-2.0
//! What the store tells, and what follows from it.

use std::time::Instant;

use weft_subnet::source::Event;

use super::Node;
use crate::kernel::Kernel;
use crate::pass::Cause;

impl<K: Kernel> Node<K> {
    /// The first look at everything, with what the store has told so far.
    pub async fn begin(&mut self, events: Vec<Event>) {
        if !self.stored(events).await {
            self.full(Cause::Start).await;
        }
    }

    /// The store told us something. True when that led to a look at everything.
    pub async fn stored(&mut self, events: Vec<Event>) -> bool {
        if events.is_empty() {
            return false;
        }
        let mut changed = Vec::new();
        let mut full = false;
        let now = Instant::now();
        // Not every store is asked for what it says of an unlimited lease.
        if events.iter().any(|event| !matches!(event, Event::Trouble(_) | Event::Kept(None))) {
            self.last_word = now;
            self.world.metrics.store_word(now);
        }
        for event in events {
            if !matches!(event, Event::Trouble(_) | Event::Kept(_)) && self.store_trouble.take().is_some() {
                tracing::info!("the store answers again");
            }
            match event {
                Event::Snapshot { records, reset } => {
                    full |= !self.snapshot_applied;
                    changed.extend(self.snapshot(records, reset));
                }
                Event::Changes(changes) => changed.extend(self.changes(changes)),
                Event::Config(text) => full |= self.configured(&text),
                Event::Word => {}
                Event::Trouble(text) => {
                    if self.trouble_said.due(&text, now) {
                        tracing::warn!("store: {text}");
                    }
                    self.store_trouble = Some(text);
                }
                Event::Kept(ttl) => {
                    self.kept(ttl);
                    self.world.metrics.lease_kept(now, ttl);
                }
            }
        }
        if full || !changed.is_empty() {
            self.unsaved();
        }
        if full {
            self.full(Cause::Start).await;
        } else {
            self.write(changed).await;
            self.want_rules();
        }
        full
    }
}
