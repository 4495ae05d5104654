// SPDX-License-Identifier: Apache-2.0
//! What a check has found.

/// Something that is wrong with the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFinding {
    /// The name of the check.
    pub check: &'static str,
    /// What was seen.
    pub evidence: String,
    /// What to do, in one line.
    pub remedy: String,
}

/// Returns a finding. Its check is named when all of them run.
pub(super) fn finding(evidence: String, remedy: String) -> NodeFinding {
    NodeFinding { check: "", evidence, remedy }
}
