// SPDX-License-Identifier: Apache-2.0
//! The addresses that pods of this node have. Two pods get the same one when somebody removed the files of host-local while pods run.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use weft_netlink::rtnl::Link;

use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::pods;
use super::processes::{self, Processes};

/// Maximum number of addresses that a finding names.
const MAX_NAMED: usize = 3;

/// Returns the addresses in the subnets of this node that pods have, each with the number of pods. A pod is a network namespace at the other end of
/// one of our links.
///
/// # Errors
/// The namespaces cannot be looked for.
pub fn read(links: &[Link], subnets: &[IpNet]) -> anyhow::Result<BTreeMap<IpAddr, usize>> {
    let mut found = BTreeMap::new();
    let attached: BTreeSet<i32> = links.iter().filter_map(|link| link.peer_netns).collect();
    if attached.is_empty() || subnets.is_empty() {
        return Ok(found);
    }
    // One that cannot be read may have ended meanwhile. What is known of the others is true without it.
    let processes = Processes { netns: processes::netns()?, ..Processes::default() };
    let (namespaces, _) = pods::namespaces::read(Path::new(pods::namespaces::NAMES), &processes, &[])?;
    for namespace in namespaces.iter().filter(|one| one.nsid.is_some_and(|nsid| attached.contains(&nsid))) {
        for addr in namespace.addrs.iter().filter(|addr| subnets.iter().any(|subnet| subnet.contains(*addr))) {
            *found.entry(*addr).or_insert(0) += 1;
        }
    }
    Ok(found)
}

/// Pods share an address, or have one that host-local will give to another pod.
pub(super) fn found(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    for (addr, pods) in facts.pod_addresses.iter().filter(|(_, pods)| **pods > 1) {
        let evidence = format!("{pods} pods have the address {addr}: packets for it reach one or another of them");
        let remedy = format!(
            "delete these pods, so that they get other addresses: `ip netns exec NAME ip addr` shows which have {addr}"
        );
        findings.push(finding(evidence, remedy));
    }
    let is_reserved = |addr: &IpAddr| facts.cni.reserved.iter().any(|(_, reserved)| reserved.contains(addr));
    let pods = &facts.pod_addresses;
    // Where host-local reserved none of these addresses, something else gives them to pods.
    let (kept, lost): (Vec<&IpAddr>, Vec<&IpAddr>) = pods.keys().partition(|addr| is_reserved(addr));
    if !kept.is_empty() && !lost.is_empty() {
        let named: Vec<String> = lost.iter().take(MAX_NAMED).map(ToString::to_string).collect();
        let more = if lost.len() > MAX_NAMED { ", ..." } else { "" };
        let evidence = format!(
            "pods have {} addresses that host-local has not reserved ({}{more}), so it gives them to new pods, too: somebody removed its files",
            lost.len(),
            named.join(", ")
        );
        findings.push(finding(evidence, "delete these pods, so that they get addresses that are reserved".to_owned()));
    }
    findings
}
