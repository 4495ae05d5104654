// SPDX-License-Identifier: Apache-2.0
//! Another host has an address of this node, or its MAC address.

use weft_netlink::rtnl::mac_text;

use crate::facts::NodeFacts;
use crate::facts::duplicates::{Duplicate, SameMac};
use crate::facts::path_links::DuplicateV6;
use crate::finding::{NodeFinding, finding};
use crate::remedies::ip;

/// Another host has an address of this node, or its MAC address.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let v4 = |Duplicate { addr, link, mac }: &Duplicate| {
        let mac = mac_text(mac);
        let evidence = format!(
            "another host on the LAN of {link}, with the MAC address {mac}, has {addr}, too: packets to this node go to \
             whichever of the two answered last"
        );
        finding(evidence, format!("give one of the two hosts another address; the switch knows the port of {mac}"))
    };
    let v6 = |DuplicateV6 { addr, link }: &DuplicateV6| {
        let evidence = format!(
            "another host has {addr} of {link}, too: the kernel found it (dadfailed) and does not use the address"
        );
        let remedy = format!(
            "find the other host (`ip -6 neigh show {addr}` on a third one) and give one of the two another address; then `ip link set {link} down` and up"
        );
        finding(evidence, remedy)
    };
    let addresses = facts.duplicates.iter().map(v4).chain(facts.path_links.duplicates.iter().map(v6));
    addresses.chain(facts.same_macs.iter().map(cloned)).collect()
}

fn cloned(SameMac { link, mac, addr, more }: &SameMac) -> NodeFinding {
    let mac = mac_text(mac);
    let who = if *more == 0 { format!("{addr} has") } else { format!("{addr} and {more} more addresses have") };
    let evidence = format!(
        "{who} the MAC address of this node's {link} ({mac}): one of the two is a cloned machine, and the switch sends packets for both to one of them"
    );
    let remedy = format!(
        "give one of them another MAC address (in the hypervisor, or `ip link set {link} address` with a free one); then {} neigh del {addr} dev {link}",
        ip(*addr)
    );
    finding(evidence, remedy)
}
