// SPDX-License-Identifier: Apache-2.0
//! IPv6 is switched off on a node with an IPv6 subnet.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    if facts.subnet_file.env().is_none_or(|env| env.subnets.v6.is_none()) {
        return Vec::new();
    }
    let one = |name: &String| {
        let evidence = format!("this node has an IPv6 subnet, but net.ipv6.conf.{name}.disable_ipv6 is not 0");
        finding(evidence, format!("sysctl -w net.ipv6.conf.{name}.disable_ipv6=0, and in /etc/sysctl.d"))
    };
    // Names of links may contain a dot, which sysctl writes as a slash.
    facts.ipv6_disabled.iter().map(|name| name.replace('.', "/")).map(|name| one(&name)).collect()
}
