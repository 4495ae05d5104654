// SPDX-License-Identifier: Apache-2.0
//! Another program uses the UDP port of the tunnel.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let port = facts.port;
    let one = |user: &String| {
        let remedy = format!("stop {user}, or choose another Port in the net-conf of the whole cluster");
        finding(format!("{user} has a socket on UDP port {port}, so a vxlan device cannot use this port"), remedy)
    };
    facts.port_users.iter().map(one).collect()
}
