// SPDX-License-Identifier: Apache-2.0
//! Packets between pods of the bridge bypass the rules.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::known_links::BRIDGE;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let has_v6 = facts.subnet_file.env().is_some_and(|env| env.subnets.v6.is_some());
    let (sysctl, evidence) = match (facts.bridge_calls_iptables, facts.bridge_calls_ip6tables) {
        (None, _) => ("iptables", "the module br_netfilter is not loaded"),
        (Some(0), _) => ("iptables", "net.bridge.bridge-nf-call-iptables is 0"),
        (_, Some(0)) if has_v6 => ("ip6tables", "net.bridge.bridge-nf-call-ip6tables is 0"),
        _ => return Vec::new(),
    };
    if facts.bridge.is_none() {
        return Vec::new();
    }
    let evidence =
        format!("{BRIDGE} exists and {evidence}: a pod may not reach a service whose pod is on the same node");
    let remedy = format!(
        "modprobe br_netfilter && sysctl -w net.bridge.bridge-nf-call-{sysctl}=1; for the next boot, write br_netfilter into a file in \
         /etc/modules-load.d, and the sysctl into one in /etc/sysctl.d"
    );
    vec![finding(evidence, remedy)]
}
