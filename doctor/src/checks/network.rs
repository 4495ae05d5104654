// SPDX-License-Identifier: Apache-2.0
//! Another program's route or network is inside Network, or takes the packets to pods there.

use std::ops::Range;

use ipnet::IpNet;
use nix::libc;
use weft_backends::register::makes_routes;

use crate::facts::NodeFacts;
use crate::facts::own_pods::LedAway;
use crate::facts::policy_rules::Marked;
use crate::facts::ways::{Bypass, Instead, OtherRoute, RefusingRoute};
use crate::finding::{NodeFinding, finding};
use crate::kernel::entries::LocalRoute;
use crate::remedies::{ask_main_first, ip, main_rule};
use crate::sources::AgentAnswer;

/// The routing tables of nm-cloud-setup. This program is a part of images for clouds, and gives each network card a table of its own.
const CLOUD_SETUP: Range<u32> = 30400..30500;

/// Routes and addresses of other programs in the address range of pods.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    if !makes_routes(&facts.backend) {
        return Vec::new();
    }
    // Before the first start, net-conf has the networks.
    let net_conf = facts.store.net_conf.as_ref().and_then(|net_conf| net_conf.as_ref().ok());
    let networks =
        facts.subnet_file.env().map(|env| &env.networks).or_else(|| net_conf.map(|net_conf| &net_conf.networks));
    let own: Vec<IpNet> = facts.subnet_file.env().map(|env| env.subnets.iter().collect()).unwrap_or_default();
    let in_own = |dst: &IpNet| own.iter().any(|subnet| subnet.trunc().contains(dst));
    let mut findings: Vec<NodeFinding> = facts.ways.bypasses.iter().map(bypass).collect();
    // Which packets get a mark is not known, so such a rule matters only while some are lost.
    findings.extend(facts.ways.marked.iter().filter(|_| facts.unreachable > 0).map(marked));
    findings.extend(led_away(facts, &own));
    findings.extend(facts.own_pods.iter().map(no_answer));
    for network in networks.into_iter().flat_map(|networks| networks.iter()).map(|network| network.trunc()) {
        let refused = facts.ways.refusals.iter().filter(|route| network.contains(&route.dst));
        findings.extend(refused.filter_map(|route| refusal(*route, &own)));
        for route in facts.ways.other_routes.iter().filter(|route| !in_own(&route.dst)) {
            let is_inside = network.contains(&route.dst) && !may_be_of_flannel(facts, route);
            // A wider route of a program takes no packets from the routes to peers. A wider network of a link does: its hosts
            // have addresses in Network.
            let surrounds = is_network_of_link(route) && route.dst.contains(&network);
            if is_inside || surrounds {
                findings.push(other_route(route, network));
            }
        }
    }
    findings
}

/// A policy rule comes before all routes of the main table, however specific they are.
fn bypass(bypass: &Bypass) -> NodeFinding {
    let Bypass { instead, of_pods, example, count } = bypass;
    let ip = ip(example.addr());
    let whose = if *of_pods { "packets of pods" } else { "packets" };
    let subnets = format!("{count} of the subnets of peers, such as {example}");
    match instead {
        Instead::Rule => finding(
            format!(
                "a policy rule refuses {whose} to {subnets} (blackhole, prohibit or unreachable), before any route is asked"
            ),
            format!("`{ip} rule` shows the rule; `{ip} rule del` with its preference"),
        ),
        Instead::NoRule => finding(
            format!("no policy rule asks the main table, so {whose} to {subnets} find no route"),
            main_rule(example.addr()),
        ),
        Instead::Local(LocalRoute { table, prefix }) => {
            let route = prefix.map_or_else(|| example.to_string(), |prefix| prefix.to_string());
            finding(
                format!("a local route ({route}, table {table}) keeps {whose} to {subnets} on this node"),
                format!("{ip} route del local {route} table {table}; then find the program that writes it"),
            )
        }
        Instead::Table { table, link } => {
            let way = link.as_ref().map_or_else(|| "refuses them".to_owned(), |link| format!("sends them over {link}"));
            finding(
                format!(
                    "a policy rule asks table {table} before the main table: for {whose} to {subnets}, it {way} instead of to the peer"
                ),
                format!(
                    "exclude Network in the configuration of the program that made the rule (a VPN): `{ip} rule` shows the rule, \
                     `{ip} route show table {table}` its routes"
                ),
            )
        }
    }
}

/// The answers of this node to its own pods do not get to them.
fn no_answer(LedAway { from, subnet, table, link }: &LedAway) -> NodeFinding {
    let evidence = format!(
        "a policy rule asks table {table} for packets from {from}, an address of this node, and this table sends packets for the pods of this \
         node ({subnet}) over {link}: the pods get no answers from {from} (API server, kubelet, ports of the host)"
    );
    let writer = if CLOUD_SETUP.contains(table) {
        "stop the program that makes the rule (the number of the table is one of nm-cloud-setup, a part of NetworkManager): `systemctl disable \
         --now nm-cloud-setup.service nm-cloud-setup.timer`, and restart the machine; not if other addresses or network cards of this machine \
         need that program"
            .to_owned()
    } else {
        format!(
            "exclude {subnet} in the configuration of the program that makes the rule, which `{} rule` shows",
            ip(*from)
        )
    };
    finding(evidence, format!("{}; then {writer}", ask_main_first(*subnet)))
}

/// A firewall may give packets to peers a mark with which they are routed elsewhere.
fn marked(Marked { mark, mask, table, link, example }: &Marked) -> NodeFinding {
    let ip = ip(example.addr());
    let mark = if *mask == u32::MAX { format!("{mark:#x}") } else { format!("{mark:#x}/{mask:#x}") };
    let way = link.as_ref().map_or_else(|| "refuses".to_owned(), |link| format!("sends over {link}"));
    let evidence = format!(
        "packets do not reach a peer, and a policy rule asks table {table} for packets with the mark {mark}: it {way} those to {example} that \
         a rule of a firewall gives this mark"
    );
    let remedy = format!(
        "`{ip} rule` shows the rule, `{ip} route show table {table}` its routes; exclude Network in the configuration of the program \
         that made them (a VPN)"
    );
    finding(evidence, remedy)
}

/// A route of another program that refuses packets to some pods. One for a wider range than a subnet concerns no pods that a node has.
fn refusal(RefusingRoute { dst, protocol }: RefusingRoute, own: &[IpNet]) -> Option<NodeFinding> {
    let subnet = own.iter().find(|subnet| subnet.addr().is_ipv4() == dst.addr().is_ipv4())?;
    if dst.prefix_len() < subnet.prefix_len() || dst == subnet.trunc() {
        return None;
    }
    let whose = if subnet.trunc().contains(&dst) { "of this node" } else { "of another node" };
    let evidence = format!(
        "{} has a route that refuses packets to {dst} (blackhole, unreachable or prohibit), which is inside the subnet {whose}",
        self::protocol(protocol)
    );
    let ip = ip(dst.addr());
    let remedy = format!(
        "`{ip} route show {dst}` shows it, `{ip} route del` with that line removes it; find the program that writes it"
    );
    Some(finding(evidence, remedy))
}

fn is_network_of_link(route: &OtherRoute) -> bool {
    route.protocol == libc::RTPROT_KERNEL && !route.has_gateway
}

/// flannel's host-gw leaves such routes, and the agent removes them at its first start.
fn may_be_of_flannel(facts: &NodeFacts, route: &OtherRoute) -> bool {
    facts.agent == AgentAnswer::None && route.has_gateway && route.protocol == libc::RTPROT_BOOT
}

fn other_route(route: &OtherRoute, network: IpNet) -> NodeFinding {
    let (dst, link) = (route.dst, &route.link);
    if is_network_of_link(route) {
        let evidence = format!(
            "{link} is connected to {dst}, which overlaps Network {network}: its hosts and pods share addresses"
        );
        return finding(evidence, format!("give {link} addresses outside {network}, or the cluster another Network"));
    }
    let writer = protocol(route.protocol);
    let evidence = format!(
        "{writer} has a route to {dst} over {link}, inside Network {network}: packets to pods there leave the cluster"
    );
    let ip = ip(dst.addr());
    let remedy = format!(
        "`{ip} route del {dst} dev {link}`, and exclude {network} in the configuration of the program (a VPN, a routing daemon)"
    );
    finding(evidence, remedy)
}

/// Routes of other programs inside the subnet of this node that lead to other hosts. A route over the link of a pod does not.
fn led_away(facts: &NodeFacts, own: &[IpNet]) -> Vec<NodeFinding> {
    // The networks of links are findings of the check `bridge`.
    let is_by_uplink =
        |route: &OtherRoute| route.protocol != libc::RTPROT_KERNEL && facts.path_links.is_uplink(&route.link);
    let leads_away = |route: &&OtherRoute| route.has_gateway || is_by_uplink(route);
    let one = |route: &OtherRoute| {
        let subnet = own.iter().map(IpNet::trunc).find(|subnet| subnet.contains(&route.dst))?;
        let (dst, link, writer) = (route.dst, &route.link, protocol(route.protocol));
        let evidence = format!(
            "{writer} has a route to {dst} over {link}, inside the subnet {subnet} of this node: packets to its pods there leave this node"
        );
        let ip = ip(dst.addr());
        Some(finding(evidence, format!("{ip} route del {dst} dev {link}; then find the program that writes it")))
    };
    let away = facts.ways.other_routes.iter().filter(leads_away).filter(|route| !may_be_of_flannel(facts, route));
    away.filter_map(one).collect()
}

/// Returns the program that writes routes with this protocol (/etc/iproute2/rt_protos).
fn protocol(number: u8) -> String {
    let name = match number {
        3 => "another program (protocol boot, as `ip route` writes)",
        4 => "another program (protocol static)",
        9 => "a router advertisement",
        11 => "zebra (protocol zebra)",
        12 => "bird (protocol bird)",
        16 => "DHCP (protocol dhcp)",
        186 => "BGP (protocol bgp)",
        188 => "OSPF (protocol ospf)",
        _ => return format!("another program (protocol {number})"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_of_another_program_is_found_only_inside_network_and_outside_our_subnet() {
        for (dst, protocol, has_gateway, found) in [
            ("10.5.0.0/17", libc::RTPROT_STATIC, true, true),
            ("10.5.9.0/24", 12, true, true),
            ("10.5.7.9/32", libc::RTPROT_STATIC, false, false),
            ("10.0.0.0/8", libc::RTPROT_STATIC, true, false),
            ("10.0.0.0/8", libc::RTPROT_KERNEL, false, true),
            ("10.5.0.0/20", libc::RTPROT_KERNEL, false, true),
            // Programs write such routes, too. The hosts behind the gateway are none of the link's.
            ("10.0.0.0/8", libc::RTPROT_KERNEL, true, false),
            ("10.5.0.0/20", libc::RTPROT_KERNEL, true, true),
            ("192.168.0.0/16", libc::RTPROT_KERNEL, false, false),
            ("10.5.9.0/24", libc::RTPROT_BOOT, true, false),
        ] {
            let mut facts = NodeFacts::of_a_node();
            let route = OtherRoute { dst: dst.parse().unwrap(), link: "tun0".to_owned(), has_gateway, protocol };
            facts.ways.other_routes.push(route);
            let findings = check(&facts);
            assert_eq!(findings.len(), usize::from(found), "{dst} {protocol}: {findings:?}");
            assert!(findings.iter().all(|finding| finding.evidence.contains(dst) && finding.evidence.contains("tun0")));
            let is_of_link = protocol == libc::RTPROT_KERNEL && !has_gateway;
            assert!(findings.iter().all(|finding| finding.evidence.contains("is connected to") == is_of_link));
            for backend in ["alloc", "extension"] {
                facts.backend = backend.to_owned();
                assert_eq!(check(&facts), [], "with {backend} the routes of others are those to peers");
            }
        }
    }

    #[test]
    fn a_policy_rule_that_takes_packets_to_peers_is_found() {
        for (link, example, words) in [
            (Some("tun0"), "10.5.9.0/24", ["sends them over tun0", "`ip rule`"]),
            (None, "fd00:5:9::/64", ["refuses them", "`ip -6 rule`"]),
        ] {
            let mut facts = NodeFacts::of_a_node();
            let instead = Instead::Table { table: 52, link: link.map(str::to_owned) };
            facts.ways.bypasses = vec![Bypass { instead, of_pods: false, example: example.parse().unwrap(), count: 7 }];
            let finding = check(&facts).pop().unwrap();
            let text = finding.evidence + &finding.remedy;
            for word in words.into_iter().chain(["table 52", "7 of the subnets", example]) {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
    }

    #[test]
    fn a_route_like_flannels_is_found_once_the_agent_runs() {
        let route = |facts: &mut NodeFacts| {
            let dst = "10.5.9.0/24".parse().unwrap();
            let protocol = libc::RTPROT_BOOT;
            facts.ways.other_routes.push(OtherRoute { dst, link: "eth0".to_owned(), has_gateway: true, protocol });
        };
        let mut facts = NodeFacts::of_a_node();
        route(&mut facts);
        assert_eq!(check(&facts), []);
        facts.agent = AgentAnswer::Problems(Vec::new());
        assert_eq!(check(&facts).len(), 1);
    }
}
