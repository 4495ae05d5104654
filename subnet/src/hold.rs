// SPDX-License-Identifier: Apache-2.0
//! Sudden emptiness is suspicious: removals over a sliding 2 s that exceed half of the peers and are at least 3 are held for a
//! grace time (design.md, "What a node must survive"). Time is an input.

use std::time::{Duration, Instant};

use crate::lease::Id;

/// Which removals wait.
#[derive(Debug)]
pub struct Hold {}

impl Hold {
    /// `grace` 0 = off.
    pub fn new(grace: Duration) -> Hold {
        let _ = grace;
        Hold {}
    }

    /// Asks for these removals; `peers` = how many peers (ours left out) were known before them, held ones included.
    /// Returns those that may be carried out now; the rest is held. When removals that were let through within the last 2 s
    /// together with these exceed the bound, these are held.
    pub fn remove(&mut self, ids: Vec<Id>, peers: usize, now: Instant) -> Vec<Id> {
        let _ = (peers, now);
        ids
    }

    /// This lease is there again: it is no longer held. True when it was.
    pub fn back(&mut self, id: &Id) -> bool {
        let _ = id;
        false
    }

    /// Held removals whose grace time has run out: carry them out now.
    pub fn due(&mut self, now: Instant) -> Vec<Id> {
        let _ = now;
        Vec::new()
    }

    /// When to ask [`Hold::due`] again.
    pub fn next(&self) -> Option<Instant> {
        None
    }

    /// What is held: for status and log.
    pub fn held(&self) -> impl Iterator<Item = &Id> {
        std::iter::empty()
    }
}
