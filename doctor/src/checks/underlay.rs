// SPDX-License-Identifier: Apache-2.0
//! Packets to other nodes do not leave, or leave by a wrong way.

use std::net::IpAddr;

use ipnet::IpNet;
use nix::errno::Errno;

use crate::facts::NodeFacts;
use crate::facts::pod_way::PodWay;
use crate::facts::underlay::{Fault, OtherLink, OwnAddress, PeerFault, SmallWay, UplinkWay};
use crate::finding::{NodeFinding, counted, finding};
use crate::kernel::entries::{LocalRoute, MAIN};
use crate::remedies::{ask_main_first, ip, learned_mtu, main_rule, refusing_rule, without_addresses_of_pods};

/// The smallest MTU in bytes that is proposed for all nodes. IPv6 needs it.
const SMALLEST: u32 = 1280;

/// Packets to peers do not leave this node, or leave it by a wrong way.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut groups: Vec<(&Fault, Vec<IpAddr>)> = Vec::new();
    for PeerFault { peer, fault } in &facts.underlay {
        match groups.iter_mut().find(|(known, _)| *known == fault) {
            Some((_, peers)) => peers.push(*peer),
            None => groups.push((fault, vec![*peer])),
        }
    }
    groups.iter().map(|(fault, peers)| describe(fault, peers)).chain(silent_pods(facts)).collect()
}

fn describe(fault: &Fault, peers: &[IpAddr]) -> NodeFinding {
    let peer = peers[0];
    let more = || counted(peers.len() - 1, "more peer", "more peers");
    let who = if peers.len() == 1 { peer.to_string() } else { format!("{peer} and {}", more()) };
    let ip = ip(peer);
    match fault {
        Fault::Own(OwnAddress { link, len }) => finding(
            format!(
                "{who} is the address of another node, and an address of {link} here, too: packets to that node do not leave this one"
            ),
            format!(
                "{ip} addr del {peer}/{len} dev {link}; on kube-ipvs0, take it out of the externalIPs of the services"
            ),
        ),
        Fault::Kept(route) => kept(*route, peer, &who),
        Fault::Refused { errno, route: Some(route) } => {
            let kind = match errno {
                Errno::EACCES => "prohibit",
                Errno::EHOSTUNREACH => "unreachable",
                _ => "blackhole",
            };
            finding(
                format!("the main table has a route that refuses packets to {who}: {kind} {route}"),
                format!("{ip} route del {kind} {route}; then find the program that writes it"),
            )
        }
        Fault::Refused { errno, route: None } => finding(
            format!(
                "the kernel refuses packets to {who} ({}): a policy rule, or a route of another table",
                errno.desc()
            ),
            refusing_rule(peer),
        ),
        Fault::NoRoute(uplink) => finding(
            format!("no route leads to {who}, although the uplink {uplink} is up"),
            no_route(peer, uplink, peers.len()),
        ),
        Fault::NoRule => {
            finding(format!("no policy rule asks the main table, which has a route to {who}"), main_rule(peer))
        }
        Fault::OtherLink(other) => other_link(other, peer, &who, ip),
        Fault::Permanent { nexthop, link, mac } => finding(
            format!(
                "packets do not reach {who}, and the MAC address of {nexthop} on {link} is permanent ({mac}), so nothing corrects it"
            ),
            format!("{ip} neigh del {nexthop} dev {link}; then find the program that writes it"),
        ),
        Fault::SmallWay(small) => small_way(small, peer, &who),
        Fault::NoListener { port, device } => {
            let answer = if peers.len() == 1 { "answers" } else { "answer" };
            no_listener(&format!("{who} {answer}"), *port, device)
        }
    }
}

/// A route of type local keeps packets to a peer on this node. It may lead to more addresses than that one, and a program may need those (AnyIP).
fn kept(LocalRoute { prefix, table }: LocalRoute, peer: IpAddr, who: &str) -> NodeFinding {
    let (ip, host) = (ip(peer), IpNet::from(peer));
    let route = prefix.unwrap_or(host);
    let evidence = format!(
        "{who} is the address of another node, and a local route ({route}, table {table}) keeps packets to it on this one"
    );
    let command = format!("{ip} route del local {route} table {table}");
    let remedy = if route == host {
        format!("{command}; then find the program that writes it")
    } else {
        format!(
            "if a program of this node needs {route}, give it a range without the addresses of nodes, and keep the route until then; if none \
             does: {command}"
        )
    };
    finding(evidence, remedy)
}

/// Returns what to do where no route leads to peers. A default route may be wrong: a node without one had none on purpose, or it leads elsewhere,
/// and then all packets of the node would follow it.
fn no_route(peer: IpAddr, uplink: &str, peers: usize) -> String {
    let (ip, host) = (ip(peer), IpNet::from(peer));
    let others = if peers > 1 { ", and the same for the other peers" } else { "" };
    format!(
        "let the program that manages {uplink} write its routes again (DHCP, NetworkManager, systemd-networkd); until then `{ip} route add {host} via \
         GATEWAY dev {uplink}`{others}, with the router in the network of {uplink} that leads to the other nodes for GATEWAY; add a default route \
         only if this node had one"
    )
}

fn small_way(small: &SmallWay, peer: IpAddr, who: &str) -> NodeFinding {
    let SmallWay { link, mtu, is_learned, device, needed } = small;
    let says = if *is_learned { ", as a router on it has said," } else { "" };
    let evidence = format!(
        "packets to {who} leave over {link}, and that way{says} takes {mtu} bytes; those of full size of {device} have {needed} bytes, so \
         they are sent in fragments or get lost"
    );
    let ip = ip(peer);
    let remedy = if *is_learned {
        learned_mtu(peer, *needed)
    } else if *mtu < SMALLEST {
        format!("`{ip} route get {peer}` shows the way; raise its MTU to {needed}")
    } else {
        format!(
            "`{ip} route get {peer}` shows the way; raise its MTU to {needed}, or let all nodes send smaller packets: `Backend.MTU` {mtu} \
             in net-conf (vxlan, wireguard), or set the MTU of their uplinks to {mtu}"
        )
    };
    finding(evidence, remedy)
}

fn no_listener(who_answers: &str, port: u16, device: &str) -> NodeFinding {
    let evidence = format!(
        "{who_answers} that nothing listens on UDP port {port} there: its {device} is down or gone, its agent uses another Port, or a rule there rejects the packets"
    );
    let remedy = format!(
        "on that node: `ip -d link show {device}` shows the state and the port, `weft status` the problems of its agent; restart the agent, which makes the device again"
    );
    finding(evidence, remedy)
}

fn other_link(other: &OtherLink, peer: IpAddr, who: &str, ip: &str) -> NodeFinding {
    let OtherLink { link, route, table, uplink, way } = other;
    let table = if *table == MAIN { "main".to_owned() } else { table.to_string() };
    let route = route.map(|route| format!("{route}, ")).unwrap_or_default();
    let evidence = format!(
        "packets to {who}, which do not arrive, leave over {link} ({route}table {table}) instead of the uplink {uplink}, as a VPN wants it"
    );
    let host = IpNet::from(peer);
    let command = match way {
        Some(UplinkWay { main_is_right: true, .. }) => ask_main_first(host),
        Some(UplinkWay { gateway: Some(gateway), .. }) => format!("{ip} route add {host} via {gateway} dev {uplink}"),
        Some(UplinkWay { gateway: None, .. }) => format!("{ip} route add {host} dev {uplink}"),
        None => format!("`{ip} route get {peer}` shows the route"),
    };
    finding(
        evidence,
        format!("{command}; then exclude the addresses of nodes in the program that sends packets over {link}"),
    )
}

/// Packets with addresses of pods do not get to a node, although those with its own address do.
fn silent_pods(facts: &NodeFacts) -> Option<NodeFinding> {
    let PodWay { silent, answering } = &facts.pod_way;
    let first = silent.first()?;
    let who = match silent.len() {
        1 => format!("{} answers", first.gateway),
        more => format!("{} and {} answer", first.gateway, counted(more - 1, "more node", "more nodes")),
    };
    let others = match *answering {
        0 => String::new(),
        number => format!(", as {}", counted(number, "other node does", "other nodes do")),
    };
    let evidence = format!(
        "{who} at the address of the node, and none of the packets for pods there ({}){others}: the network between the nodes seems to pass \
         only packets with addresses of nodes (source/destination check of a cloud, port security of a switch), or that node does not forward \
         packets, or ICMP errors are filtered",
        first.subnet
    );
    let remedy = format!(
        "allow Network on the ports of the nodes (OpenStack: allowed address pairs; AWS: source/destination check off; or routes of the cloud \
         for the subnets), or {}; on that node, `weft doctor` shows whether it forwards packets",
        without_addresses_of_pods(&facts.backend)
    );
    Some(finding(evidence, remedy))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(faults: Vec<(u8, Fault)>) -> Vec<NodeFinding> {
        let one = |(last, fault): (u8, Fault)| PeerFault { peer: IpAddr::from([192, 0, 2, last]), fault };
        check(&NodeFacts { underlay: faults.into_iter().map(one).collect(), ..NodeFacts::default() })
    }

    #[test]
    fn peers_with_the_same_fault_are_one_finding() {
        let no_route = || Fault::NoRoute("eth0".to_owned());
        let found = faults(vec![(2, no_route()), (3, Fault::NoRule), (4, no_route()), (5, no_route())]);
        let evidence: Vec<&str> = found.iter().map(|one| one.evidence.as_str()).collect();
        let wanted = [
            "no route leads to 192.0.2.2 and 2 more peers, although the uplink eth0 is up",
            "no policy rule asks the main table, which has a route to 192.0.2.3",
        ];
        assert_eq!(evidence, wanted);
        assert!(found[0].remedy.contains("`, and the same for the other peers, "), "{found:?}");
        assert!(!faults(vec![(2, no_route())])[0].remedy.contains("other peers"));
    }

    #[test]
    fn an_mtu_is_proposed_for_all_nodes_only_if_ipv6_fits_and_no_router_has_said_it() {
        for (mtu, is_learned, is_proposed) in [(1280, false, true), (1279, false, false), (1400, true, false)] {
            let (link, device) = ("eth0".to_owned(), "flannel.1".to_owned());
            let found = faults(vec![(2, Fault::SmallWay(SmallWay { link, mtu, is_learned, device, needed: 1500 }))]);
            assert_eq!(found[0].remedy.contains("`Backend.MTU`"), is_proposed, "{found:?}");
            assert_eq!(found[0].remedy.contains("tracepath"), is_learned, "{found:?}");
        }
    }
}
