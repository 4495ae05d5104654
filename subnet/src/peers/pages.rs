// SPDX-License-Identifier: Apache-2.0
//! Returns believed leases in parts, for callers that must not block the agent while they read all of them.

use std::sync::Arc;

use super::Peers;
use crate::lease::Lease;

impl Peers {
    /// Returns the believed leases from this place on, each with the next place to continue from. Place 0 is the first. A lease keeps its
    /// place as long as it is in the store. A later lease may get a place that became free.
    pub fn believed_from(&self, place: usize) -> impl Iterator<Item = (usize, &Arc<Lease>)> {
        let places = self.entries.iter().enumerate().skip(place);
        places.filter_map(|(place, entry)| Some((place + 1, entry.believed()?)))
    }
}
