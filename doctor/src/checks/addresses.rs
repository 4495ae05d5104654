// SPDX-License-Identifier: Apache-2.0
//! Pods share addresses, or nearly all are taken.

use std::net::IpAddr;

use crate::facts::NodeFacts;
use crate::facts::cni_files::{Reserved, is_reserved};
use crate::finding::{NodeFinding, finding, some_of};

/// A network of host-local is reported from this share of its addresses, in percent.
const FULL: usize = 95;

/// Pods share addresses, or host-local has given nearly all addresses of the own subnet to pods.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = shared(facts);
    let Some(subnet) = facts.subnet_file.env().and_then(|env| env.subnets.v4) else { return findings };
    // The network, its broadcast address and the gateway are for no pod.
    let all = (1_usize << (32 - subnet.prefix_len())).saturating_sub(3);
    for Reserved { network, addrs } in &facts.cni.reserved {
        let taken = addrs.iter().filter(|addr| matches!(addr, IpAddr::V4(addr) if subnet.contains(addr))).count();
        if all > 0 && taken * 100 >= all * FULL {
            let evidence = format!(
                "{taken} of the {all} addresses of {} are reserved in network {network}: soon no pod can start",
                subnet.trunc()
            );
            let remedy = "`weft doctor pods` lists those that no pod has, and with --fix gives them back; else run fewer pods on this node, \
                          or give nodes larger subnets (SubnetLen; in Kubernetes --node-cidr-mask-size)";
            findings.push(finding(evidence, remedy.to_owned()));
        }
    }
    findings
}

/// Pods share an address, or have one that host-local will give to another pod.
fn shared(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    for (addr, pods) in facts.pod_addresses.iter().filter(|(_, pods)| *pods > 1) {
        let evidence = format!("{pods} pods have the address {addr}: packets for it reach one or another of them");
        let remedy = format!(
            "delete these pods, so that they get other addresses: `ip netns exec NAME ip addr` shows which have {addr}"
        );
        findings.push(finding(evidence, remedy));
    }
    let pods = &facts.pod_addresses;
    // Where host-local reserved none of these addresses, something else gives them to pods.
    let (kept, lost): (Vec<&IpAddr>, Vec<&IpAddr>) =
        pods.iter().map(|(addr, _)| addr).partition(|addr| is_reserved(**addr, &facts.cni.reserved));
    if !kept.is_empty() && !lost.is_empty() {
        let lost: Vec<String> = lost.into_iter().map(ToString::to_string).collect();
        let evidence = format!(
            "pods have {} addresses that host-local has not reserved ({}), so it gives them to new pods, too: somebody removed its files",
            lost.len(),
            some_of(lost.iter().map(String::as_str))
        );
        findings.push(finding(evidence, "delete these pods, so that they get addresses that are reserved".to_owned()));
    }
    findings
}
