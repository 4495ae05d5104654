// SPDX-License-Identifier: Apache-2.0
//! The connection tracking table is nearly full.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};

/// The table is reported from this share of its limit, in percent. Bursts fill the rest.
const FULL: u64 = 90;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(fill) = facts.conntrack.filter(|fill| fill.entries * 100 >= fill.max * FULL && fill.max > 0) else {
        return Vec::new();
    };
    let evidence = format!(
        "{} of {} connections are tracked; when the table is full, new ones are dropped",
        fill.entries, fill.max
    );
    vec![finding(evidence, format!("sysctl -w net.netfilter.nf_conntrack_max={}, and in /etc/sysctl.d", fill.max * 2))]
}
