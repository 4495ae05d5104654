// SPDX-License-Identifier: Apache-2.0
//! Believed leases in pages: whoever needs them all, and must not hold the agent up, takes some at a time.

use std::rc::Rc;

use super::Peers;
use crate::lease::Lease;

impl Peers {
    /// Believed leases from this place on (0 = all), each with the place behind it. A lease keeps its place while it is in the
    /// store; one that comes later may take a place that became free.
    pub fn believed_from(&self, place: usize) -> impl Iterator<Item = (usize, &Rc<Lease>)> {
        let places = self.entries.iter().enumerate().skip(place);
        places.filter_map(|(place, entry)| Some((place + 1, entry.believed()?)))
    }
}
