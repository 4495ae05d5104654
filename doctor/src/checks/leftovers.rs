// SPDX-License-Identifier: Apache-2.0
//! Rules or links of another network for pods that does not run.

use crate::facts::NodeFacts;
use crate::facts::other_networks::{LeftRules, Leftover};
use crate::finding::{NodeFinding, finding};

/// Rules and links of a network that does not run any more.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    for Leftover { network, rules, links } in &facts.leftovers {
        if let Some(LeftRules { program, rule, prefix }) = rules {
            let evidence = format!(
                "{network} does not run on this node, and {program} still leads packets to its chains (`{rule}`), which may drop those of pods"
            );
            let remedy = format!(
                "{program}-save | grep -v -e {prefix} | {program}-restore; or restart the node, after {network} was removed from the cluster"
            );
            findings.push(finding(evidence, remedy));
        }
        if let Some(first) = links.first() {
            let evidence =
                format!("{network} does not run on this node, and its links are still there: {}", links.join(", "));
            findings.push(finding(evidence, format!("ip link del {first}, and so on; or restart the node")));
        }
    }
    findings
}
