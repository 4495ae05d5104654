// SPDX-License-Identifier: Apache-2.0
//! cni0 or pods do not fit the size of packets in the tunnel.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, counted, finding};
use crate::known_links::BRIDGE;
use crate::remedies::replace_bridge;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let (Some(env), Some(bridge)) = (facts.subnet_file.env(), &facts.bridge) else {
        return large_pods(facts).into_iter().collect();
    };
    // The kernel gives a bridge without ports the MTU 1500, and one with ports the smallest of theirs, unless somebody set it.
    let has_ports = facts.pods.links.iter().any(|link| link.port.is_some());
    if env.mtu == 0 || bridge.mtu <= env.mtu || !has_ports {
        return large_pods(facts).or_else(|| small_bridge(facts, bridge.mtu)).into_iter().collect();
    }
    let evidence = format!("{BRIDGE} has MTU {}, but the way to other nodes has {}", bridge.mtu, env.mtu);
    vec![finding(evidence, replace_bridge())]
}

/// Pods send packets that are larger than what the way to other nodes carries.
fn large_pods(facts: &NodeFacts) -> Option<NodeFinding> {
    let mtu = facts.subnet_file.env()?.mtu;
    let large = || facts.pods.links.iter().filter(|link| mtu > 0 && link.mtu > mtu);
    let first = large().next()?;
    let evidence = format!(
        "{} a larger MTU ({}, such as {}) than the way to other nodes, which has {mtu}, as after a change of the backend or \
         of an MTU: their large packets vanish where ICMP is filtered",
        counted(large().count(), "pod has", "pods have"),
        first.mtu,
        first.name
    );
    Some(finding(evidence, "delete these pods, so that they are made again with the new MTU".to_owned()))
}

/// The bridge carries smaller packets than its pods send and expect. The kernel gives a bridge the smallest MTU of its ports, unless
/// somebody set it.
fn small_bridge(facts: &NodeFacts, bridge: u32) -> Option<NodeFinding> {
    let mtu = facts.subnet_file.env()?.mtu;
    let mut ports = facts.pods.links.iter().filter(|link| link.port.is_some());
    let pod = ports.find(|link| bridge < mtu && link.mtu > bridge)?;
    let evidence = format!(
        "{BRIDGE} has MTU {bridge}, but pods ({} for {}) and the way to other nodes ({mtu}) have larger ones: large packets to pods vanish \
         where ICMP is filtered",
        pod.mtu, pod.name
    );
    Some(finding(evidence, format!("ip link set {BRIDGE} mtu {mtu}")))
}
