// SPDX-License-Identifier: Apache-2.0
//! The neighbour table is nearly full.

use crate::facts::NodeFacts;
use crate::facts::limits::Fill;
use crate::finding::{NodeFinding, finding};

/// The table is reported from this share of its limit, in percent. Bursts fill the rest.
const FULL: u64 = 90;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let full = facts.neighbours.iter().filter(|(_, fill)| fill.entries * 100 >= fill.max * FULL);
    let one = |(name, fill): &(&str, Fill)| {
        let limit = format!("net.{name}.neigh.default.gc_thresh3");
        let evidence = format!("{} neighbours count against {limit}, which is {}", fill.entries, fill.max);
        finding(evidence, format!("sysctl -w {limit}={}", fill.max.max(512) * 2))
    };
    full.map(one).collect()
}
