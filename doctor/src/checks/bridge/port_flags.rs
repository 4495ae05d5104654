// SPDX-License-Identifier: Apache-2.0
//! Ports of the bridge that keep the pods of this node from each other. They reach this node and other nodes, so nothing else shows it.

use weft_netlink::rtnl::BridgePort;

use crate::facts::NodeFacts;
use crate::facts::pod_links::PodLinks;
use crate::finding::{NodeFinding, finding, some_of};
use crate::known_links::{BRIDGE, ports_that};

/// Pods of this node that do not reach each other.
pub(super) fn port_flags(facts: &NodeFacts) -> Vec<NodeFinding> {
    let is_wanted = facts.cni.confs.iter().any(|conf| conf.isolates);
    let isolated = isolated(&facts.pods).filter(|_| !is_wanted);
    isolated.into_iter().chain(no_broadcasts(&facts.pods)).collect()
}

/// Returns the ports in use that have a flag.
fn with(pods: &PodLinks, has: fn(BridgePort) -> bool) -> impl Iterator<Item = &str> {
    let in_use = pods.links.iter().filter(|link| pods.bridge_up == Some(true) && link.running);
    in_use.filter(move |link| link.port.is_some_and(has)).map(|link| link.name.as_str())
}

/// One isolated port still reaches all others.
fn isolated(pods: &PodLinks) -> Option<NodeFinding> {
    let ports = || with(pods, |port| port.isolated);
    let (first, _) = ports().next().zip(ports().nth(1))?;
    let evidence = format!(
        "{} ports of {BRIDGE} are isolated ({}): these pods of one node do not reach each other, and everything else they reach",
        ports().count(),
        some_of(ports())
    );
    let remedy = format!(
        "bridge link set dev {first} isolated off; and so on for each of these ports; if it is wanted, `\"portIsolation\": true` in the \
         delegate of the CNI configuration says so"
    );
    Some(finding(evidence, remedy))
}

fn no_broadcasts(pods: &PodLinks) -> Option<NodeFinding> {
    let ports = || with(pods, |port| port.no_broadcasts);
    let first = ports().next()?;
    let evidence = format!(
        "{} no broadcasts of other pods ({}): other pods of this node ask in vain for the MAC addresses of these pods",
        ports_that(ports().count(), "gets", "get"),
        some_of(ports())
    );
    Some(finding(evidence, format!("bridge link set dev {first} bcast_flood on; and so on for each of these ports")))
}
