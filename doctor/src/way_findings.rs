// SPDX-License-Identifier: Apache-2.0
//! Decides what is wrong with the ways between nodes, without side effects.

use std::collections::BTreeSet;

use ipnet::IpNet;
use nix::libc;
use weft_backends::backend::makes_routes;
use weft_backends::vxlan::USUAL_VNI;

use super::finding::{NodeFinding, finding};
use super::node::{AgentAnswer, NodeFacts};
use super::own_subnet;
use super::policy_rules::Marked;
use super::ways::{Bypass, Instead, OtherRoute};

/// The value of rp_filter with which a packet must come in over the link by which its source is reached.
const STRICT: u64 = 1;
/// Fewer packets with a wrong checksum than this are not reported.
const MIN_WRONG: u64 = 10;
/// Packets with a wrong checksum are reported from one in this many.
const ONE_WRONG_IN: u64 = 1000;

/// Another vxlan device that receives what belongs to ours: the kernel lets no two devices share a VNI and a port.
pub(super) fn device(facts: &NodeFacts) -> Vec<NodeFinding> {
    let devices = &facts.ways.vxlan;
    let mut wanted: BTreeSet<(u32, u16)> =
        devices.iter().filter(|device| device.ours).map(|device| (device.vxlan.vni, device.vxlan.port)).collect();
    if wanted.is_empty() {
        wanted.insert((USUAL_VNI, facts.port));
    }
    let mut findings = Vec::new();
    for other in devices.iter().filter(|device| !device.ours) {
        let (name, vni, port) = (&other.name, other.vxlan.vni, other.vxlan.port);
        let what = if other.vxlan.external { "every VNI".to_owned() } else { format!("VNI {vni}") };
        let collides = |&(our_vni, our_port): &(u32, u16)| our_port == port && (other.vxlan.external || our_vni == vni);
        if wanted.iter().any(collides) {
            let evidence = format!(
                "{name} is another vxlan device, and receives {what} on UDP port {port}: it and weft's device exclude each other"
            );
            let remedy = format!(
                "`ip link del {name}` if nobody needs it; else choose another VNI or Port in the net-conf of the whole cluster"
            );
            findings.push(finding(evidence, remedy));
        }
    }
    findings
}

/// Routes and addresses of other programs in the address range of pods.
pub(super) fn network(facts: &NodeFacts) -> Vec<NodeFinding> {
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
    findings.extend(own_subnet::led_away(facts, &own));
    for network in networks.into_iter().flat_map(|networks| networks.iter()).map(|network| network.trunc()) {
        let refused = facts.ways.refusals.iter().filter(|(dst, _)| network.contains(dst));
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
    let family = if example.addr().is_ipv6() { "-6 " } else { "" };
    let whose = if *of_pods { "packets of pods" } else { "packets" };
    let subnets = format!("{count} of the subnets of peers, such as {example}");
    match instead {
        Instead::Rule => finding(
            format!(
                "a policy rule refuses {whose} to {subnets} (blackhole, prohibit or unreachable), before any route is asked"
            ),
            format!("`ip {family}rule` shows the rule; `ip {family}rule del` with its preference"),
        ),
        Instead::NoRule => finding(
            format!("no policy rule asks the main table, so {whose} to {subnets} find no route"),
            main_rule(family),
        ),
        Instead::Local { table, prefix } => {
            let route = prefix.map_or_else(|| example.to_string(), |prefix| prefix.to_string());
            finding(
                format!("a local route ({route}, table {table}) keeps {whose} to {subnets} on this node"),
                format!("ip {family}route del local {route} table {table}; then find the program that writes it"),
            )
        }
        Instead::Table { table, link } => {
            let way = link.as_ref().map_or_else(|| "refuses them".to_owned(), |link| format!("sends them over {link}"));
            finding(
                format!(
                    "a policy rule asks table {table} before the main table: for {whose} to {subnets}, it {way} instead of to the peer"
                ),
                format!(
                    "exclude Network in the configuration of the program that made the rule (a VPN): `ip {family}rule` shows the rule, \
                     `ip {family}route show table {table}` its routes"
                ),
            )
        }
    }
}

/// Returns the command that adds the rule for the main table as the kernel makes it. `family` is an option of the command, with a space.
pub(super) fn main_rule(family: &str) -> String {
    format!("ip {family}rule add lookup main pref 32766; then find the program that deleted this rule")
}

/// A firewall may give packets to peers a mark with which they are routed elsewhere.
fn marked(Marked { mark, mask, table, link, example }: &Marked) -> NodeFinding {
    let family = if example.addr().is_ipv6() { "-6 " } else { "" };
    let mark = if *mask == u32::MAX { format!("{mark:#x}") } else { format!("{mark:#x}/{mask:#x}") };
    let way = link.as_ref().map_or_else(|| "refuses".to_owned(), |link| format!("sends over {link}"));
    let evidence = format!(
        "packets do not reach a peer, and a policy rule asks table {table} for packets with the mark {mark}: it {way} those to {example} that \
         a rule of a firewall gives this mark"
    );
    let remedy = format!(
        "`ip {family}rule` shows the rule, `ip {family}route show table {table}` its routes; exclude Network in the configuration of the program \
         that made them (a VPN)"
    );
    finding(evidence, remedy)
}

/// A route of another program that refuses packets to some pods. One for a wider range than a subnet concerns no pods that a node has.
fn refusal((dst, protocol): (IpNet, u8), own: &[IpNet]) -> Option<NodeFinding> {
    let subnet = own.iter().find(|subnet| subnet.addr().is_ipv4() == dst.addr().is_ipv4())?;
    if dst.prefix_len() < subnet.prefix_len() || dst == subnet.trunc() {
        return None;
    }
    let whose = if subnet.trunc().contains(&dst) { "of this node" } else { "of another node" };
    let evidence = format!(
        "{} has a route that refuses packets to {dst} (blackhole, unreachable or prohibit), which is inside the subnet {whose}",
        self::protocol(protocol)
    );
    let family = if dst.addr().is_ipv6() { "-6 " } else { "" };
    let remedy = format!(
        "`ip {family}route show {dst}` shows it, `ip {family}route del` with that line removes it; find the program that writes it"
    );
    Some(finding(evidence, remedy))
}

fn is_network_of_link(route: &OtherRoute) -> bool {
    route.protocol == libc::RTPROT_KERNEL && !route.has_gateway
}

/// flannel's host-gw leaves such routes, and the agent removes them at its first start.
pub(super) fn may_be_of_flannel(facts: &NodeFacts, route: &OtherRoute) -> bool {
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
    let family = if dst.addr().is_ipv6() { "-6 " } else { "" };
    let remedy = format!(
        "`ip {family}route del {dst} dev {link}`, and exclude {network} in the configuration of the program (a VPN, a routing daemon)"
    );
    finding(evidence, remedy)
}

/// Returns the program that writes routes with this protocol (/etc/iproute2/rt_protos).
pub(super) fn protocol(number: u8) -> String {
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

/// Peers that are reached over different links answer over another link than the kernel expects. Where both ends choose the same link, as with
/// DirectRouting of vxlan, nothing is lost.
pub(super) fn rp_filter(facts: &NodeFacts) -> Vec<NodeFinding> {
    let paths = &facts.ways.reverse_path;
    if paths.len() < 2 || facts.unreachable == 0 {
        return Vec::new();
    }
    let strict = paths.iter().filter(|path| path.value == STRICT);
    let one = |path: &super::ways::ReversePath| {
        let (link, count) = (&path.link, paths.len());
        let evidence = format!(
            "nodes are reached over {count} links, and rp_filter of {link} is strict: packets from a node that chooses another \
             link than this one are dropped"
        );
        // In the form with dots, a dot in the name of a link would separate words.
        finding(
            evidence,
            format!("sysctl -w net/ipv4/conf/{link}/rp_filter=2 net/ipv4/conf/all/rp_filter=2, and in /etc/sysctl.d"),
        )
    };
    strict.map(one).collect()
}

/// A program that manages the devices of weft removes what it does not know.
pub(super) fn managed(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |(link, program): &(String, &'static str)| {
        let evidence = format!("{program} manages {link}: it may set {link} down and remove its addresses and routes");
        let remedy = match *program {
            "NetworkManager" => format!(
                "put `unmanaged-devices=interface-name:{link}` below [keyfile] of a file in /etc/NetworkManager/conf.d, and `nmcli general reload`"
            ),
            _ => format!(
                "put `[Match] Name={link}` and `[Link] Unmanaged=yes` into /etc/systemd/network/05-weft.network, and `networkctl reload`"
            ),
        };
        finding(evidence, remedy)
    };
    facts.ways.managed.iter().map(one).collect()
}

/// A network card that computes wrong checksums for tunnel packets makes the receiver drop them.
pub(super) fn checksum(facts: &NodeFacts) -> Vec<NodeFinding> {
    let is_bad = |wrong: u64, received: u64| wrong >= MIN_WRONG && wrong * ONE_WRONG_IN >= received;
    let bad = facts.ways.checksums.iter().filter(|errors| is_bad(errors.wrong, errors.received));
    let one = |errors: &super::ways::ChecksumErrors| {
        let (protocol, wrong, received) = (errors.protocol.to_uppercase(), errors.wrong, errors.received);
        let evidence =
            format!("{wrong} of {received} received {protocol} packets had a wrong checksum, and were dropped");
        let remedy = "on the nodes that send them: `ethtool -K flannel.1 tx-checksum-ip-generic off`, or the agent's flag --tx-checksum-off; if this helps, the \
                      network card or its driver computes wrong checksums for tunnel packets";
        finding(evidence, remedy.to_owned())
    };
    bad.map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::base::SubnetFile;
    use super::super::ways::{ChecksumErrors, ReversePath, VxlanDevice};
    use super::*;
    use weft_netlink::rtnl::Vxlan;
    use weft_subnet::env::SubnetEnv;

    fn facts() -> NodeFacts {
        let text = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        NodeFacts { subnet_file: SubnetFile::Good(SubnetEnv::parse(text).unwrap()), port: 8472, ..NodeFacts::default() }
    }

    #[test]
    fn a_vxlan_device_collides_by_vni_and_port_or_by_port_if_it_takes_every_vni() {
        for (vni, port, external, found) in
            [(1, 8472, false, true), (2, 8472, false, false), (1, 4789, false, false), (0, 8472, true, true)]
        {
            let vxlan = Vxlan { vni, port, external };
            let other = VxlanDevice { name: "vx0".to_owned(), vxlan, ours: false };
            let mut facts = facts();
            facts.ways.vxlan.push(other.clone());
            assert_eq!(device(&facts).len(), usize::from(found), "before the first start: {other:?}");
            // With a device of our own, its VNI counts.
            let vxlan = Vxlan { vni: 2, port: 8472, external: false };
            facts.ways.vxlan.push(VxlanDevice { name: "flannel.2".to_owned(), vxlan, ours: true });
            let found = port == 8472 && (vni == 2 || external);
            assert_eq!(device(&facts).len(), usize::from(found), "beside flannel.2: {other:?}");
        }
    }

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
            let mut facts = facts();
            let route = OtherRoute { dst: dst.parse().unwrap(), link: "tun0".to_owned(), has_gateway, protocol };
            facts.ways.other_routes.push(route);
            let findings = network(&facts);
            assert_eq!(findings.len(), usize::from(found), "{dst} {protocol}: {findings:?}");
            assert!(findings.iter().all(|finding| finding.evidence.contains(dst) && finding.evidence.contains("tun0")));
            let is_of_link = protocol == libc::RTPROT_KERNEL && !has_gateway;
            assert!(findings.iter().all(|finding| finding.evidence.contains("is connected to") == is_of_link));
            for backend in ["alloc", "extension"] {
                facts.backend = backend.to_owned();
                assert_eq!(network(&facts), [], "with {backend} the routes of others are those to peers");
            }
        }
    }

    #[test]
    fn a_policy_rule_that_takes_packets_to_peers_is_found() {
        for (link, example, words) in [
            (Some("tun0"), "10.5.9.0/24", ["sends them over tun0", "`ip rule`"]),
            (None, "fd00:5:9::/64", ["refuses them", "`ip -6 rule`"]),
        ] {
            let mut facts = facts();
            let instead = Instead::Table { table: 52, link: link.map(str::to_owned) };
            facts.ways.bypasses = vec![Bypass { instead, of_pods: false, example: example.parse().unwrap(), count: 7 }];
            let finding = network(&facts).pop().unwrap();
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
        let mut facts = facts();
        route(&mut facts);
        assert_eq!(network(&facts), []);
        facts.agent = AgentAnswer::Problems(Vec::new());
        assert_eq!(network(&facts).len(), 1);
    }

    #[test]
    fn a_strict_rp_filter_matters_only_if_nodes_are_reached_over_several_links() {
        let path = |link: &str, value: u64| ReversePath { link: link.to_owned(), value };
        let mut facts = facts();
        facts.ways.reverse_path = vec![path("flannel.1", 1)];
        assert_eq!(rp_filter(&facts), []);
        facts.ways.reverse_path.push(path("eth0", 2));
        assert_eq!(rp_filter(&facts), [], "both ends choose the same link: nothing is lost");
        facts.unreachable = 1;
        assert_eq!(rp_filter(&facts).len(), 1, "only one of the two is strict");
        facts.ways.reverse_path[0].value = 0;
        assert_eq!(rp_filter(&facts), []);
    }

    #[test]
    fn the_remedy_names_the_program_that_manages_a_device() {
        let mut facts = facts();
        facts.ways.managed =
            vec![("flannel.1".to_owned(), "NetworkManager"), ("flannel.1".to_owned(), "systemd-networkd")];
        let findings = managed(&facts);
        assert!(findings[0].remedy.contains("unmanaged-devices=interface-name:flannel.1"), "{findings:?}");
        assert!(findings[1].remedy.contains("Unmanaged=yes"), "{findings:?}");
    }

    #[test]
    fn wrong_checksums_are_found_from_one_in_a_thousand() {
        for (wrong, received, found) in [(9, 9, false), (10, 10_000, true), (10, 10_001, false), (5000, 6000, true)] {
            let mut facts = facts();
            facts.ways.checksums = vec![ChecksumErrors { protocol: "Icmp", wrong, received }];
            assert_eq!(checksum(&facts).len(), usize::from(found), "{wrong} of {received}");
        }
    }
}
