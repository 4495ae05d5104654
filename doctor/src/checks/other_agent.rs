// SPDX-License-Identifier: Apache-2.0
//! flanneld runs beside the agent.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};

/// flanneld works on the same devices and routes as the running agent.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |agent: &String| {
        let evidence = format!(
            "{agent} runs beside the agent of weft with the same subnet file: each of them replaces devices, routes and rules of the other one"
        );
        let remedy = "stop one of them: `systemctl disable --now flanneld`, or remove its DaemonSet (docs/migrate.md)";
        finding(evidence, remedy.to_owned())
    };
    facts.other_agents.iter().map(one).collect()
}
