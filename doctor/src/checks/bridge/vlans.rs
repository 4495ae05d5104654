// SPDX-License-Identifier: Apache-2.0
//! Pods whose packets the bridge drops, because it filters by VLAN.

use std::net::IpAddr;

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding, some_of};
use crate::known_links::{BRIDGE, ports_that};

/// Ports without a VLAN in common with the bridge. It matters only if the bridge is the gateway of its pods: the CNI plugin makes another one for
/// pods with a VLAN of their own.
pub(super) fn cut_off(facts: &NodeFacts) -> Option<NodeFinding> {
    let (env, vlans) = (facts.subnet_file.env()?, facts.bridge_vlans.as_ref()?);
    let is_of_subnet = |addr: IpAddr| env.subnets.iter().any(|subnet| subnet.trunc().contains(&addr));
    if !facts.pods.addrs.iter().any(|one| one.link == BRIDGE && is_of_subnet(one.addr.addr())) {
        return None;
    }
    let is_pod = |name: &str| facts.pods.links.iter().any(|link| link.name == name && link.running);
    let cut_off = vlans.ports.iter().filter(|(name, port)| is_pod(name) && port.are_cut_off(&vlans.own));
    let ports: Vec<&str> = cut_off.map(|(name, _)| name.as_str()).collect();
    if ports.is_empty() {
        return None;
    }
    let evidence = format!(
        "{BRIDGE} filters by VLAN, and {} no VLAN in common with it ({}): these pods reach neither this node nor what is behind it",
        ports_that(ports.len(), "has", "have"),
        some_of(ports.iter().copied())
    );
    let remedy = format!(
        "ip link set {BRIDGE} type bridge vlan_filtering 0; if VLANs are wanted there, `bridge vlan` shows them: {BRIDGE} and its ports need a \
         common one (`bridge vlan add`)"
    );
    Some(finding(evidence, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::bridge_vlans::{BridgeVlans, Vlans};
    use crate::facts::pod_links::{LinkAddress, PodLink};

    #[test]
    fn pods_without_a_vlan_of_the_bridge_are_found_if_it_is_their_gateway() {
        let vlan_1 = Vlans { all: vec![1..=1], of_untagged: Some(1) };
        let link = |name: &str, running| PodLink { name: name.to_owned(), mtu: 1450, up: true, running, port: None };
        let ports = [("veth1", vlan_1.clone()), ("veth2", Vlans::default()), ("veth3", Vlans::default())];
        let ports = ports.map(|(name, vlans)| (name.to_owned(), vlans)).to_vec();
        let mut facts = NodeFacts::of_a_node();
        facts.pods.links = vec![link("veth1", true), link("veth2", true), link("veth3", false)];
        facts.pods.addrs = vec![LinkAddress { link: BRIDGE.to_owned(), addr: "10.5.7.1/24".parse().unwrap() }];
        assert_eq!(cut_off(&facts), None, "the bridge does not filter");
        facts.bridge_vlans = Some(BridgeVlans { own: vlan_1, ports });
        let found = cut_off(&facts).unwrap();
        assert!(found.evidence.contains("1 port of cni0 has no VLAN in common with it (veth2)"), "{found:?}");
        assert!(found.remedy.starts_with("ip link set cni0 type bridge vlan_filtering 0;"), "{found:?}");
        let other_gateway = vec![LinkAddress { link: BRIDGE.to_owned(), addr: "192.0.2.1/24".parse().unwrap() }];
        facts.pods.addrs = other_gateway;
        assert_eq!(cut_off(&facts), None, "the gateway of these pods is another link");
    }
}
