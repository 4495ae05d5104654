// SPDX-License-Identifier: Apache-2.0
//! A directory of the agent or of CNI cannot be written.

use crate::facts::NodeFacts;
use crate::facts::limits::UnwritableDir;
use crate::finding::{NodeFinding, finding};

/// A directory that the agent or CNI plugins write is read-only or full.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |UnwritableDir { dir, why }: &UnwritableDir| {
        let evidence = format!(
            "{} cannot be written ({why}): what it keeps over a restart is lost, or no pod can start",
            dir.display()
        );
        let remedy = format!("mount it read-write or make room: `df {0}`, `df -i {0}`", dir.display());
        finding(evidence, remedy)
    };
    facts.limits.unwritable.iter().map(one).collect()
}
