// SPDX-License-Identifier: Apache-2.0
//! What a check has found.

use std::fmt;

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

/// Maximum number of things of one kind that a finding names.
pub(crate) const MAX_NAMED: usize = 3;

/// Returns a finding. Its check is named when all of them run.
pub(crate) fn finding(evidence: String, remedy: String) -> NodeFinding {
    NodeFinding { check: "", evidence, remedy }
}

/// Returns the first of these names, and how many more there are.
pub(crate) fn some_of<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = names.collect();
    let more = if all.len() > MAX_NAMED { ", ..." } else { "" };
    format!("{}{more}", all[..all.len().min(MAX_NAMED)].join(", "))
}

/// Returns a number with the words for one thing or for several.
pub fn counted<N: fmt::Display + From<u8> + PartialEq>(number: N, one: &str, more: &str) -> String {
    let words = if number == N::from(1) { one } else { more };
    format!("{number} {words}")
}
