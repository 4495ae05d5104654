// SPDX-License-Identifier: Apache-2.0
//! The kernel does not forward packets of pods.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::remedies::set_sysctl;

/// The kernel drops packets of pods instead of forwarding them.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(env) = facts.subnet_file.env() else { return Vec::new() };
    let found_before = |before: &str, name: &str, what: &str| {
        let evidence = format!("{name} is 0: {what}");
        let lines = if before.is_empty() { "" } else { " (each setting on a line of its own)" };
        let remedy = set_sysctl(&format!("{before}{name}=1"));
        finding(evidence, format!("{remedy}{lines}; then find the file there that sets {name} to 0"))
    };
    let found = |name: &str, what: &str| found_before("", name, what);
    let mut findings = Vec::new();
    let forwarding = &facts.forwarding;
    if env.subnets.v4.is_some() && forwarding.v4 == Some(0) {
        findings.push(found("net.ipv4.ip_forward", "this node forwards no packet of a pod"));
    } else if env.subnets.v4.is_some() {
        findings.extend(forwarding.off.iter().map(|link| {
            let what = match link.as_str() {
                "default" => "links that are made later, such as those of pods, forward no packets".to_owned(),
                link => format!("packets that arrive by {link} are not forwarded, although net.ipv4.ip_forward is 1"),
            };
            // Names of links may contain a dot. With slashes, sysctl keeps it.
            found(&format!("net/ipv4/conf/{link}/forwarding"), &what)
        }));
    }
    if env.subnets.v6.is_some() && forwarding.v6 == Some(0) {
        // Otherwise the node loses its IPv6 routes of router advertisements in that moment, the default route among them.
        let accept = forwarding.advertised.iter().map(|link| format!("net/ipv6/conf/{link}/accept_ra=2 "));
        let what = "this node forwards no IPv6 packet of a pod";
        findings.push(found_before(&accept.collect::<String>(), "net.ipv6.conf.all.forwarding", what));
    }
    findings
}
