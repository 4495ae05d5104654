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
    // kube-proxy writes the limit at its start, and the files of sysctl.d are read at a boot before the module is loaded.
    let remedy = format!(
        "sysctl -w net.netfilter.nf_conntrack_max={}; for good: raise conntrack.maxPerCore in the configuration of kube-proxy, or, without \
         kube-proxy, write nf_conntrack into a file in /etc/modules-load.d, and the sysctl into one in /etc/sysctl.d",
        fill.max * 2
    );
    vec![finding(evidence, remedy)]
}
