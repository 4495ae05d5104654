// SPDX-License-Identifier: Apache-2.0
//! Holds back removals of leases if many come at once, because a wiped or broken store looks the same as many nodes
//! that leave.
//!
//! Removals are held for a grace time if there are at least 3 within 2 s, and if they are more than half of the peers.
//! The caller passes the time, so that tests need no clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::lease::Id;

/// Removals within this time are counted together.
const WINDOW: Duration = Duration::from_secs(2);

/// Fewer removals than this within the window are never held.
const MIN_SUSPICIOUS: usize = 3;

/// Decides which removals of leases are held back.
#[derive(Debug)]
pub struct Hold {
    grace: Duration,
    /// Time and number of the removals that were not held, within the window.
    recent_removals: VecDeque<(Instant, usize)>,
    /// Time of the last removal that was held, or of the last call of [`Hold::suspect`].
    last_alarm: Option<Instant>,
    /// The held removals, with the time at which each one falls due.
    due: BTreeMap<Id, Instant>,
    /// The same, sorted by time.
    queue: BTreeSet<(Instant, Id)>,
}

impl Hold {
    /// Creates a `Hold` with this grace time. With a grace time of zero nothing is held.
    pub fn new(grace: Duration) -> Hold {
        Hold { grace, recent_removals: VecDeque::new(), last_alarm: None, due: BTreeMap::new(), queue: BTreeSet::new() }
    }

    /// Takes requested removals and returns those to carry out now. The others are held.
    ///
    /// `peers` is the number of peers before these removals, without our own lease and including the peers whose
    /// removals are held.
    ///
    /// These removals are held if they and those of the last 2 s are at least 3, and more than half of the peers before
    /// the first of them. All later removals are then held too, until no removal has been held for 2 s. A removal that
    /// is held already keeps its time.
    pub fn remove(&mut self, ids: Vec<Id>, peers: usize, now: Instant) -> Vec<Id> {
        let recent = |at: Instant| now.saturating_duration_since(at) < WINDOW;
        while self.recent_removals.pop_front_if(|(at, _)| !recent(*at)).is_some() {}
        let mut seen = BTreeSet::new();
        let fresh: Vec<Id> =
            ids.into_iter().filter(|id| !self.due.contains_key(id) && seen.insert(id.clone())).collect();
        if fresh.is_empty() {
            return fresh;
        }
        let recent_count: usize = self.recent_removals.iter().map(|(_, count)| count).sum();
        let total = recent_count + fresh.len();
        let sudden = total >= MIN_SUSPICIOUS && total * 2 > peers + recent_count;
        if self.grace.is_zero() || !(sudden || self.last_alarm.is_some_and(recent)) {
            self.recent_removals.push_back((now, fresh.len()));
            return fresh;
        }
        self.last_alarm = Some(now);
        for id in fresh {
            self.queue.insert((now + self.grace, id.clone()));
            self.due.insert(id, now + self.grace);
        }
        Vec::new()
    }

    /// Holds all removals of the next 2 s, even if they are few. The caller uses this when it doubts the store: it is
    /// another one, or our own lease is gone. In a cluster of three nodes a wiped store removes two peers, which alone
    /// would not be held.
    pub fn suspect(&mut self, now: Instant) {
        self.last_alarm = Some(now);
    }

    /// Cancels the held removal of a lease that has come back. Returns true if it was held.
    pub fn cancel(&mut self, id: &Id) -> bool {
        match self.due.remove_entry(id) {
            Some((id, at)) => self.queue.remove(&(at, id)),
            None => false,
        }
    }

    /// Returns the held removals that are due, to be carried out now.
    pub fn due(&mut self, now: Instant) -> Vec<Id> {
        let mut ids = Vec::new();
        while self.queue.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, id)) = self.queue.pop_first() else { break };
            self.due.remove(&id);
            ids.push(id);
        }
        ids
    }

    /// Returns the time at which to call [`Hold::due`] again.
    pub fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Returns the number of held removals.
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// Returns true if no removal is held.
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    /// Iterates over the leases whose removals are held.
    pub fn held(&self) -> impl Iterator<Item = &Id> {
        self.due.keys()
    }
}
