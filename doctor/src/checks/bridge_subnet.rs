// SPDX-License-Identifier: Apache-2.0
//! cni0 has an address of an old subnet.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::known_links::BRIDGE;
use crate::remedies::replace_bridge;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let (Some(env), Some(bridge)) = (facts.subnet_file.env(), &facts.bridge) else { return Vec::new() };
    let mut findings = Vec::new();
    for subnet in env.subnets.iter() {
        let same_family = bridge.addrs.iter().filter(|addr| addr.is_ipv4() == subnet.addr().is_ipv4());
        let addrs: Vec<String> = same_family.clone().map(ToString::to_string).collect();
        if !addrs.is_empty() && !same_family.clone().any(|addr| subnet.contains(addr)) {
            let evidence =
                format!("{BRIDGE} has {}, but the subnet of this node is {}", addrs.join(", "), subnet.trunc());
            findings.push(finding(evidence, replace_bridge()));
        }
    }
    findings
}
