// SPDX-License-Identifier: Apache-2.0
//! Believed leases in pages: whoever needs them all, and must not hold the agent up, takes some at a time.

use std::ops::Bound;
use std::rc::Rc;

use super::Peers;
use crate::lease::{Id, Lease};

impl Peers {
    /// Believed leases by id, those behind this one.
    pub fn believed_after(&self, id: Option<&Id>) -> impl Iterator<Item = &Rc<Lease>> {
        let from = id.map_or(Bound::Unbounded, |id| Bound::Excluded(id.clone()));
        let slots = self.slots.range((from, Bound::Unbounded));
        slots.filter_map(|(_, slot)| self.entries[*slot as usize].believed())
    }
}
