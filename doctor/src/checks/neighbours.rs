// SPDX-License-Identifier: Apache-2.0
//! The neighbour table is nearly full.

use crate::facts::NodeFacts;
use crate::facts::limits::NeighbourTable;
use crate::finding::{NodeFinding, finding};
use crate::remedies::set_sysctl;

/// The table is reported from this share of its limit, in percent. Bursts fill the rest.
const FULL: u64 = 90;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let full = facts.neighbours.iter().filter(|table| table.fill.has_reached(FULL));
    let one = |NeighbourTable { family, fill }: &NeighbourTable| {
        let limit = format!("net.{family}.neigh.default.gc_thresh3");
        let evidence = format!(
            "{} neighbours of this host and its pods count against {limit}, which is {}: at the limit, packets to new ones are dropped",
            fill.entries, fill.max
        );
        finding(evidence, set_sysctl(&format!("{limit}={}", fill.max.max(512) * 2)))
    };
    full.map(one).collect()
}
