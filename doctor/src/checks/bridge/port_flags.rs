// SPDX-License-Identifier: Apache-2.0
//! Ports of the bridge that keep the pods of this node from each other. They reach this node and other nodes, so nothing else shows it.

use weft_netlink::rtnl::BridgePort;

use crate::facts::NodeFacts;
use crate::facts::pod_links::PodLinks;
use crate::finding::{NodeFinding, finding, some_of};
use crate::known_links::{BRIDGE, ports_that};

/// Pods of this node that do not reach each other.
pub(super) fn port_flags(facts: &NodeFacts) -> Vec<NodeFinding> {
    // A configuration that only root may read may want it.
    let may_be_wanted = facts.cni.confs.iter().any(|conf| conf.isolates) || !facts.cni.denied.is_empty();
    let isolated = isolated(&facts.pods).filter(|_| !may_be_wanted);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::pod_links::PodLink;

    #[test]
    fn isolated_ports_may_be_wanted_by_a_configuration_that_only_root_may_read() {
        let port = Some(BridgePort { isolated: true, ..BridgePort::default() });
        let link = |name: &str| PodLink { name: name.to_owned(), mtu: 1450, up: true, running: true, port };
        let links = vec![link("veth1"), link("veth2")];
        let pods = PodLinks { bridge_up: Some(true), links, ..PodLinks::default() };
        let mut facts = NodeFacts { pods, ..NodeFacts::of_a_node() };
        assert_eq!(port_flags(&facts).len(), 1);
        facts.cni.denied = vec!["/etc/cni/net.d/10-flannel.conflist".into()];
        assert_eq!(port_flags(&facts), []);
    }
}
