// SPDX-License-Identifier: Apache-2.0
//! Sudden emptiness is suspicious: removals over a sliding 2 s that exceed half of the peers and are at least 3 are held for a
//! grace time (design.md, "What a node must survive"). Time is an input.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::lease::Id;

/// Removals are counted over this long.
const WINDOW: Duration = Duration::from_secs(2);

/// So few removals within the window are never suspicious.
const FEW: usize = 3;

/// Which removals wait.
#[derive(Debug)]
pub struct Hold {
    grace: Duration,
    /// Removals let through within the window: when, how many.
    passed: VecDeque<(Instant, usize)>,
    /// When a removal was held last.
    alarm: Option<Instant>,
    /// What is held, and when its grace time runs out.
    due: BTreeMap<Id, Instant>,
    /// The same by time.
    queue: BTreeSet<(Instant, Id)>,
}

impl Hold {
    /// `grace` 0 = off.
    pub fn new(grace: Duration) -> Hold {
        Hold { grace, passed: VecDeque::new(), alarm: None, due: BTreeMap::new(), queue: BTreeSet::new() }
    }

    /// Asks for these removals; `peers` = how many peers (ours left out) were known before them, held ones included.
    /// Returns those that may be carried out now; the rest is held. When removals that were let through within the last 2 s
    /// together with these exceed the bound, these are held; so is what follows, until 2 s pass without one being held.
    /// The bound is half of the peers as they were before the first removal in the window. What is held already stays held,
    /// with its time unchanged.
    pub fn remove(&mut self, ids: Vec<Id>, peers: usize, now: Instant) -> Vec<Id> {
        let recent = |at: Instant| now.saturating_duration_since(at) < WINDOW;
        while self.passed.pop_front_if(|(at, _)| !recent(*at)).is_some() {}
        let mut seen = BTreeSet::new();
        let fresh: Vec<Id> =
            ids.into_iter().filter(|id| !self.due.contains_key(id) && seen.insert(id.clone())).collect();
        if fresh.is_empty() {
            return fresh;
        }
        let passed: usize = self.passed.iter().map(|(_, count)| count).sum();
        let total = passed + fresh.len();
        let sudden = total >= FEW && total * 2 > peers + passed;
        if self.grace.is_zero() || !(sudden || self.alarm.is_some_and(recent)) {
            self.passed.push_back((now, fresh.len()));
            return fresh;
        }
        self.alarm = Some(now);
        for id in fresh {
            self.queue.insert((now + self.grace, id.clone()));
            self.due.insert(id, now + self.grace);
        }
        Vec::new()
    }

    /// The store itself is in doubt (it is another one, or our own lease is gone): removals of the next 2 s are held, however few.
    /// In a cluster of three nodes a wiped store takes two peers away, which alone would not be suspicious.
    pub fn suspect(&mut self, now: Instant) {
        self.alarm = Some(now);
    }

    /// This lease is there again: it is no longer held. True when it was.
    pub fn back(&mut self, id: &Id) -> bool {
        match self.due.remove_entry(id) {
            Some((id, at)) => self.queue.remove(&(at, id)),
            None => false,
        }
    }

    /// Held removals whose grace time has run out: carry them out now.
    pub fn due(&mut self, now: Instant) -> Vec<Id> {
        let mut ids = Vec::new();
        while self.queue.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, id)) = self.queue.pop_first() else { break };
            self.due.remove(&id);
            ids.push(id);
        }
        ids
    }

    /// When to ask [`Hold::due`] again.
    pub fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// How many are held.
    pub fn len(&self) -> usize {
        self.due.len()
    }

    /// True when none is held.
    pub fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    /// What is held: for status and log.
    pub fn held(&self) -> impl Iterator<Item = &Id> {
        self.due.keys()
    }
}
