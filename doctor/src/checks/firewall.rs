// SPDX-License-Identifier: Apache-2.0
//! A firewall of this node drops tunnel packets, or forwarded packets of pods.

use crate::facts::NodeFacts;
use crate::facts::tunnel_rules::DroppingRule;
use crate::finding::{NodeFinding, finding};

/// A firewall drops packets of the tunnel, or forwarded packets of pods.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    // Whether packets come faster than a rate is not known, so such a rule matters only while they are lost.
    let are_lost = facts.unreachable > 0 || !facts.lossy.is_empty();
    let matters = |found: &&DroppingRule| !found.beyond_rate || are_lost;
    let one = |found: &DroppingRule| {
        let beyond = if found.beyond_rate { " beyond a rate or at random" } else { "" };
        let DroppingRule { chain, rule, what, remedy, .. } = found;
        finding(format!("chain {chain} drops {what}{beyond}: {rule}"), remedy.clone())
    };
    facts.dropping.iter().filter(matters).map(one).collect()
}
