// SPDX-License-Identifier: Apache-2.0
//! A bridge or bond takes packets of a link, ARP is off, or the uplink is the NAT of a hypervisor.

use super::arp_rules;
use crate::facts::NodeFacts;
use crate::facts::path_links::{ALL, ArpOff, IGNORES_ALL, Master, PathLink};
use crate::facts::virtual_nat::VirtualNat;
use crate::finding::{NodeFinding, finding};
use crate::sources::AgentAnswer;

/// The kinds of links that take the packets of the links below them.
const TAKERS: [&str; 4] = ["bridge", "bond", "team", "openvswitch"];

/// A bridge or a bond takes the packets of a link that has an address or routes of its own.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    for link in &facts.path_links.links {
        let Some(Master { name: master, kind }) = &link.master else { continue };
        let name = &link.name;
        let takes = TAKERS.contains(&kind.as_str());
        if link.is_uplink && takes {
            let evidence = format!(
                "{name} has an address or the default route, and is a part of {master} ({kind}), which takes the packets that arrive on {name}"
            );
            let remedy =
                format!("give the address and the routes of {name} to {master}, or `ip link set {name} nomaster`");
            findings.push(finding(evidence, remedy));
        } else if !link.is_uplink && (takes || kind == "vrf") {
            let what = if takes {
                "takes the packets that arrive on it"
            } else {
                "routes its packets by another table than that of weft's routes"
            };
            let evidence = format!("{name} is a part of {master} ({kind}), which {what}");
            findings.push(finding(
                evidence,
                format!("ip link set {name} nomaster; then exclude {name} in the program that did it"),
            ));
        }
    }
    for found in facts.path_links.links.iter().filter_map(|link| no_arp(facts, link)) {
        // The setting for all links is found at each of them.
        if !findings.contains(&found) {
            findings.push(found);
        }
    }
    findings.extend(arp_rules::found(facts));
    findings.extend(virtual_nat(facts));
    findings
}

/// The published address is that of each machine of the hypervisor. A machine without other nodes does not need another one, whatever else
/// is wrong with it.
fn virtual_nat(facts: &NodeFacts) -> Option<NodeFinding> {
    let VirtualNat { addr, link } = facts.virtual_nat.as_ref()?;
    if !facts.has_peers || !matches!(&facts.agent, AgentAnswer::Problems(problems) if !problems.is_empty()) {
        return None;
    }
    let evidence = format!(
        "the published address {addr} of {link} is behind the NAT that a hypervisor makes for one machine (VirtualBox, QEMU): no other \
         node reaches it, and other machines have the same one"
    );
    let remedy = "connect the machines by a second network (private_network of Vagrant), and start each agent with --iface and the name \
        of that link; in Kubernetes, give the kubelet that address, too (--node-ip)";
    Some(finding(evidence, remedy.to_owned()))
}

/// The kernel does not ask for MAC addresses on a link, or does not answer. Permanent neighbours can do the work of ARP on an uplink.
fn no_arp(facts: &NodeFacts, link: &PathLink) -> Option<NodeFinding> {
    let name = &link.name;
    match link.arp.as_ref()? {
        ArpOff::Flag if link.is_uplink && facts.unreachable == 0 => None,
        ArpOff::Flag => {
            let evidence = format!("{name} has the flag NOARP, so this node asks nobody there for a MAC address");
            Some(finding(evidence, format!("ip link set {name} arp on")))
        }
        ArpOff::Ignored(conf) => {
            let extent = if conf == ALL { "on no link" } else { "not on this link" };
            let evidence =
                format!("net/ipv4/conf/{conf}/arp_ignore is {IGNORES_ALL}, so this node answers ARP requests {extent}");
            let remedy = format!("sysctl -w net/ipv4/conf/{conf}/arp_ignore=0; and correct it in /etc/sysctl.d");
            Some(finding(evidence, remedy))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::path_links::PathLinks;

    #[test]
    fn a_vrf_takes_packets_of_weft_and_leaves_those_of_the_uplink() {
        for (is_uplink, kind, words) in [
            (true, "bridge", Some("has an address or the default route")),
            (true, "bond", Some("has an address or the default route")),
            (true, "vrf", None),
            (false, "bridge", Some("takes the packets that arrive on it")),
            (false, "vrf", Some("by another table than that of weft's routes")),
            (false, "macsec", None),
        ] {
            let master = Some(Master { name: "above".to_owned(), kind: kind.to_owned() });
            let link = PathLink { name: "link".to_owned(), master, is_uplink, ..PathLink::default() };
            let path_links = PathLinks { links: vec![link], ..PathLinks::default() };
            let found = check(&NodeFacts { path_links, ..NodeFacts::default() });
            assert_eq!(found.len(), usize::from(words.is_some()), "{is_uplink} {kind}: {found:?}");
            assert!(found.iter().zip(words).all(|(one, words)| one.evidence.contains(words)), "{found:?}");
        }
    }

    #[test]
    fn a_setting_for_all_links_is_one_finding() {
        let link = |name: &str, conf: &str| PathLink {
            name: name.to_owned(),
            is_uplink: true,
            arp: Some(ArpOff::Ignored(conf.to_owned())),
            ..PathLink::default()
        };
        let found = |links| {
            let path_links = PathLinks { links, ..PathLinks::default() };
            check(&NodeFacts { path_links, ..NodeFacts::default() }).len()
        };
        assert_eq!(found(vec![link("eth0", ALL), link("eth1", ALL)]), 1);
        assert_eq!(found(vec![link("eth0", "eth0"), link("eth1", "eth1")]), 2);
    }
}
