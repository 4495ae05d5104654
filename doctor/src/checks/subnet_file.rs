// SPDX-License-Identifier: Apache-2.0
//! The subnet file cannot be read or written.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::subnet_file::SubnetFile;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let path = facts.path.display();
    let mut findings = Vec::new();
    if let SubnetFile::Bad(why) = &facts.subnet_file {
        let remedy = "remove the file; the agent writes it again at its next start".to_owned();
        findings.push(finding(format!("{path} cannot be used: {why}"), remedy));
    }
    if let Some(why) = &facts.unwritable {
        let remedy =
            "mount the directory read-write, make room on it, or give the agent another --subnet-file".to_owned();
        findings.push(finding(format!("{path} cannot be written: {why}"), remedy));
    }
    findings
}
