// SPDX-License-Identifier: Apache-2.0
//! A firewall of this node drops tunnel packets, or forwarded packets of pods; or a rule translates addresses of the tunnel's packets.

use crate::facts::NodeFacts;
use crate::facts::tunnel_nat::{Change, Translation};
use crate::facts::tunnel_rules::DroppingRule;
use crate::finding::{NodeFinding, counted, finding};

/// A firewall drops packets of the tunnel, or forwarded packets of pods; or it translates addresses of the tunnel's packets.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    // Whether packets come faster than a rate is not known, so such a rule matters only while they are lost.
    let are_lost = facts.unreachable > 0 || !facts.lossy.is_empty();
    let matters = |found: &&DroppingRule| !found.beyond_rate || are_lost;
    let one = |found: &DroppingRule| {
        let beyond = if found.beyond_rate { " beyond a rate or at random" } else { "" };
        let DroppingRule { chain, rule, what, remedy, .. } = found;
        finding(format!("chain {chain} drops {what}{beyond}: {rule}"), remedy.clone())
    };
    facts.dropping.iter().filter(matters).map(one).chain(translations(facts)).collect()
}

/// A rule, or an entry of connection tracking, loses packets of the tunnel, because it translates one of their addresses.
fn translations(facts: &NodeFacts) -> Vec<NodeFinding> {
    // Most peers accept packets from another address. If one that is reached gets them, the rule is not the reason why others are not.
    let matters = |one: &&Translation| one.change == Change::Destination || (facts.unreachable > 0 && !one.of_reached);
    let one = |one: &Translation| {
        let Translation { place, rule, what, change, remedy, .. } = one;
        let effect = match change {
            Change::Destination => format!("leads {what} to another address"),
            Change::Source { from, to } => {
                let to = to.map_or_else(|| "another one".to_owned(), |to| to.to_string());
                format!(
                    "replaces the source {from} of {what} by {to}: a guard of the peer or a firewall on the way may drop them (packets do not reach \
                     {})",
                    counted(facts.unreachable, "peer", "peers")
                )
            }
        };
        finding(format!("{place} {effect}: {rule}"), remedy.clone())
    };
    facts.translations.iter().filter(matters).map(one).collect()
}
