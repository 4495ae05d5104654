// SPDX-License-Identifier: Apache-2.0
//! Faults of the way to the addresses that peers publish.

use std::fs;
use std::net::IpAddr;
use std::path::Path;

use weft_doctor::explain::facts::{Agent, AgentFacts, Facts, Packet, Peer};
use weft_doctor::explain::rules::ways_of_tunnel;
use weft_doctor::explain::{self, Explanation, Verdict};
use weft_doctor::sources::{NodeSources, PeerAddress};

use super::{ENV, OtherNamespace, doctor_with, in_namespace, ip, only_text, shell, shell_output, sources, until};

/// On the link of the uplink.
const NEAR: &str = "192.0.2.12";
/// Behind a gateway.
const FAR: &str = "198.51.100.12";
const FAR_V6: &str = "fd00:9:1::12";

/// Makes an uplink and the link of a VPN, and returns what an agent says that reaches no peer.
fn node(file: &Path) -> NodeSources {
    for line in [
        "link add eth0 up type veth peer name far0",
        "link set far0 up",
        "addr add 192.0.2.1/24 dev eth0",
        "addr add fd00:9::1/64 dev eth0 nodad",
        "route add default via 192.0.2.9",
        "route add default via fd00:9::9",
        "link add tun9 up type veth peer name far9",
        "link set far9 up",
        "addr add 10.99.0.2/24 dev tun9",
        "addr add fd00:99::2/64 dev tun9 nodad",
    ] {
        ip(line);
    }
    let addr = |text: &str| text.parse::<IpAddr>().unwrap();
    let peer = |text: &str| PeerAddress { addr: addr(text), reached: false, port: None };
    NodeSources {
        published: vec![addr("192.0.2.1"), addr("fd00:9::1")],
        uplink_addrs: vec![addr("192.0.2.1"), addr("fd00:9::1")],
        uplink: "eth0".to_owned(),
        peer_addresses: vec![peer(NEAR), peer(FAR), peer(FAR_V6)],
        unreachable: 2,
        ..sources(file)
    }
}

/// The same with peers that packets reach.
fn reached(sources: &NodeSources) -> NodeSources {
    let mut sources = sources.clone();
    sources.peer_addresses.iter_mut().for_each(|peer| peer.reached = true);
    sources
}

/// The finding with these words must be gone after its remedy.
fn healed(sources: &NodeSources, words: &[&str]) {
    let text = only_text(sources, "underlay", words);
    shell(text.lines().nth(1).unwrap().split(';').next().unwrap());
    assert_eq!(doctor_with(sources, "underlay"), [], "after the remedy of {text}");
}

#[test]
fn a_vpn_that_takes_the_packets_to_peers_is_found() {
    in_namespace(|file| {
        let sources = node(file);
        assert_eq!(doctor_with(&sources, "underlay"), [], "peers that are down are another matter");
        // A static route for a part of the network.
        ip("route add 192.0.2.0/25 dev tun9");
        assert_eq!(doctor_with(&reached(&sources), "underlay"), [], "a VPN between sites may carry the packets");
        healed(&sources, &[NEAR, "leave over tun9 (192.0.2.0/25, table main) instead of the uplink eth0"]);
        ip("route del 192.0.2.0/25 dev tun9");
        shell(&format!("ip route del {NEAR}"));
        // What OpenVPN writes as its default route.
        ip("route add 0.0.0.0/1 dev tun9");
        ip("route add 128.0.0.0/1 dev tun9");
        healed(&sources, &[FAR, "tun9 (128.0.0.0/1, table main)"]);
        ip("route del 0.0.0.0/1");
        ip("route del 128.0.0.0/1");
        ip(&format!("route del {FAR}"));
        // What wg-quick writes.
        for family in ["-4", "-6"] {
            ip(&format!("{family} route add default dev tun9 table 51820"));
            ip(&format!("{family} rule add not fwmark 51820 table 51820"));
            ip(&format!("{family} rule add table main suppress_prefixlength 0"));
            let far = if family == "-4" { FAR } else { FAR_V6 };
            healed(&sources, &[far, "tun9", "table 51820", &format!("rule add to {far}")]);
        }
    });
}

#[test]
fn a_peer_whose_address_is_here_is_found() {
    in_namespace(|file| {
        let sources = reached(&node(file));
        // As kube-proxy does for an externalIP in the mode ipvs.
        ip("link add kube-ipvs0 up type veth peer name far1");
        ip("link set far1 up");
        for address in [format!("{FAR}/32"), format!("{FAR_V6}/128")] {
            ip(&format!("addr add {address} dev kube-ipvs0 nodad"));
            let command = format!("addr del {address} dev kube-ipvs0");
            healed(&sources, &["is the address of another node", "kube-ipvs0", "externalIPs", &command]);
        }
        // The kernel looks up both tables as one before there is another policy rule, and each for itself after that.
        for is_one in [true, false] {
            for (route, table) in [(FAR, 255), ("198.51.100.0/24", 255), (FAR, 254)] {
                ip(&format!("route add local {route} dev lo table {table}"));
                let of_table = format!("table {table}");
                let words = [FAR, "a local route", route, of_table.as_str()];
                if route == FAR {
                    healed(&sources, &words);
                    continue;
                }
                let text = only_text(&sources, "underlay", &words);
                let (condition, command) = text.lines().nth(1).unwrap().split_once("; if none does: ").unwrap();
                assert!(condition.starts_with(&format!("if a program of this node needs {route}, ")), "{text}");
                shell(command);
                assert_eq!(doctor_with(&sources, "underlay"), [], "after {command}");
            }
            if is_one {
                ip("rule add pref 50 to 203.0.113.0/24 lookup 50");
            }
        }
        let mut same = sources.clone();
        same.published.push(FAR.parse().unwrap());
        ip(&format!("addr add {FAR}/32 dev eth0"));
        assert_eq!(doctor_with(&same, "underlay"), [], "the agent says that two nodes publish one address");
    });
}

#[test]
fn packets_to_peers_that_the_kernel_refuses_are_found() {
    in_namespace(|file| {
        let sources = node(file);
        for kind in ["blackhole", "unreachable", "prohibit"] {
            for address in [FAR, FAR_V6] {
                ip(&format!("route add {kind} {address}"));
                let command = format!("route del {kind} {address}/");
                healed(&reached(&sources), &["refuses packets to", address, &command]);
            }
        }
        ip("route add unreachable default metric 4000");
        assert_eq!(doctor_with(&sources, "underlay"), [], "the other default route is better");
        ip(&format!("rule add pref 50 to {FAR} prohibit"));
        only_text(&sources, "underlay", &["refuses packets to", FAR, "`ip rule`"]);
        ip("rule del pref 50");
        ip("route del unreachable default");
        ip("route del default via 192.0.2.9");
        let command = format!("`ip route add {FAR}/32 via GATEWAY dev eth0`");
        let text = only_text(&sources, "underlay", &["no route leads to", FAR, "eth0", &command]);
        assert!(!text.contains("route add default"), "it would lead all packets of the node there: {text}");
        shell(&text.split('`').nth(1).unwrap().replace("GATEWAY", "192.0.2.9"));
        assert_eq!(doctor_with(&sources, "underlay"), [], "after the remedy of {text}");
        ip(&format!("route del {FAR}"));
        ip("route add default via 192.0.2.9");
        assert_eq!(doctor_with(&sources, "underlay"), []);
    });
}

#[test]
fn a_permanent_neighbour_is_found_only_if_packets_do_not_arrive() {
    in_namespace(|file| {
        let sources = node(file);
        for (peer, nexthop) in [(NEAR, NEAR), (FAR, "192.0.2.9"), (FAR_V6, "fd00:9::9")] {
            ip(&format!("neigh replace {nexthop} lladdr 02:00:00:00:00:99 nud permanent dev eth0"));
            assert_eq!(doctor_with(&reached(&sources), "underlay"), [], "it may be wanted");
            healed(&sources, &[peer, nexthop, "eth0", "permanent (02:00:00:00:00:99)", "neigh del"]);
        }
    });
}

#[test]
fn a_peer_where_nothing_listens_on_the_port_of_the_tunnel_is_found() {
    in_namespace(|file| {
        let peer = OtherNamespace::new();
        ip(&format!("link add eth0 up type veth peer name eth0 netns {}", peer.pid()));
        ip("addr add 192.0.2.1/24 dev eth0");
        peer.run("ip link set eth0 up");
        peer.run(&format!("ip addr add {NEAR}/24 dev eth0"));
        let sources = NodeSources {
            published: vec!["192.0.2.1".parse().unwrap()],
            uplink: "eth0".to_owned(),
            peer_addresses: vec![PeerAddress { addr: NEAR.parse().unwrap(), reached: false, port: None }],
            unreachable: 1,
            ..sources(file)
        };
        let words = [NEAR, "nothing listens on UDP port 8472", "flannel.1 is down or gone", "`weft status`"];
        only_text(&sources, "underlay", &words);
        peer.run("ip link add flannel.1 up type vxlan id 1 dstport 8472");
        assert_eq!(doctor_with(&sources, "underlay"), [], "the device drops the packet, which is too short");
        peer.run("ip link set flannel.1 down");
        only_text(&sources, "underlay", &words);
        assert_eq!(doctor_with(&reached(&sources), "underlay"), [], "it is not asked");
        let other = NodeSources { backend: "host-gw".to_owned(), ..sources.clone() };
        assert_eq!(doctor_with(&other, "underlay"), [], "there is no tunnel");
        peer.run("nft 'table inet f { chain in { type filter hook input priority 0; udp dport 8472 drop; }; }'");
        assert_eq!(doctor_with(&sources, "underlay"), [], "a firewall drops the packet");
    });
}

#[test]
fn a_way_that_is_too_small_for_the_tunnel_is_found_also_while_peers_are_reached() {
    in_namespace(|file| {
        let sources = NodeSources { backend: "vxlan".to_owned(), ..reached(&node(file)) };
        assert_eq!(doctor_with(&sources, "underlay"), [], "there is no device yet");
        ip("link add flannel.1 mtu 1450 up type vxlan id 1 dstport 8472");
        ip("link add flannel-v6.1 mtu 1430 up type vxlan id 1 dstport 8473");
        assert_eq!(doctor_with(&sources, "underlay"), [], "the packets fit");
        // A VPN between sites carries the packets, and adds bytes of its own.
        ip("link set tun9 mtu 1420");
        ip(&format!("route add {NEAR}/32 dev tun9"));
        let words = [NEAR, "leave over tun9", "takes 1420 bytes", "flannel.1 have 1500 bytes", "`Backend.MTU` 1420"];
        only_text(&sources, "underlay", &words);
        ip("route add 10.5.9.0/24 via 192.0.2.12 dev eth0 onlink proto 90");
        assert_eq!(doctor_with(&sources, "underlay"), [], "this node is reached without the tunnel");
        ip("route del 10.5.9.0/24");
        ip("link set tun9 mtu 1500");
        assert_eq!(doctor_with(&sources, "underlay"), []);
        ip(&format!("route add {FAR}/32 via 192.0.2.9 mtu 1499"));
        only_text(&sources, "underlay", &[FAR, "leave over eth0", "takes 1499 bytes"]);
        ip(&format!("route replace {FAR}/32 via 192.0.2.9 mtu 1200"));
        let text = only_text(&sources, "underlay", &[FAR, "takes 1200 bytes", "raise its MTU to 1500"]);
        assert!(!text.contains("Backend.MTU"), "too small for IPv6: {text}");
        ip(&format!("route del {FAR}/32"));
        ip(&format!("-6 route add {FAR_V6}/128 via fd00:9::9 mtu 1400"));
        only_text(&sources, "underlay", &[FAR_V6, "takes 1400 bytes", "flannel-v6.1 have 1500 bytes"]);
        let other = NodeSources { backend: "host-gw".to_owned(), ..sources };
        assert_eq!(doctor_with(&other, "underlay"), [], "there is no tunnel");
    });
}

/// Follows a packet to a pod of a peer at [`FAR`], which needs the entries that an agent would have written.
fn follow_to_pod(file: &Path, agent: Agent) -> Facts {
    fs::write(file, ENV).unwrap();
    ip("addr replace 10.5.7.0/32 dev flannel.1");
    ip("route replace 10.5.9.0/24 via 10.5.9.0 dev flannel.1 onlink proto 90");
    ip("neigh replace 10.5.9.0 lladdr 02:00:00:00:00:09 nud permanent dev flannel.1");
    shell(&format!("bridge fdb replace 02:00:00:00:00:09 dev flannel.1 dst {FAR}"));
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let packet = Packet { from: address("10.5.7.0"), to: address("10.5.9.2"), proto: None, port: None };
    explain::read(packet, file, agent).unwrap()
}

fn explain_to_pod(file: &Path) -> Explanation {
    let facts = follow_to_pod(file, Agent::Silent("no agent answers".to_owned()));
    explain::decide(&facts, &[], Vec::new())
}

#[test]
fn explain_follows_packets_of_the_tunnel_from_the_address_that_the_agent_uses() {
    in_namespace(|file| {
        node(file);
        ip("link add flannel.1 mtu 1450 up type vxlan id 1 dstport 8472");
        ip("addr add 192.0.2.5/24 dev eth0");
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let agent = |uplink: &str, published: &str| {
            let (backend, state) = ("vxlan".to_owned(), "programmed".to_owned());
            let (subnets, public) = (vec!["10.5.9.0/24".parse().unwrap()], vec![address(FAR)]);
            let peers = vec![Peer { subnets, public, backend: backend.clone(), state, ..Peer::default() }];
            let (uplink_addrs, published) = (vec![address(uplink)], vec![address(published)]);
            Agent::Answers(AgentFacts { backend, peers, uplink_addrs, published, ..AgentFacts::default() })
        };
        for (agent, from, at) in [
            (Agent::Silent("no agent answers".to_owned()), "192.0.2.1", "192.0.2.1"),
            (agent("192.0.2.5", "192.0.2.5"), "192.0.2.5", "192.0.2.5"),
            (agent("192.0.2.5", "192.0.2.1"), "192.0.2.5", "192.0.2.1"),
            // It is behind a NAT.
            (agent("192.0.2.5", "203.0.113.9"), "192.0.2.5", "192.0.2.5"),
            (agent("203.0.113.9", "203.0.113.9"), "192.0.2.1", "192.0.2.1"),
        ] {
            let facts = follow_to_pod(file, agent);
            let ways = ways_of_tunnel(&facts.ways[0], None);
            let packets: Vec<_> = ways.iter().map(|way| (way.packet.from, way.packet.to)).collect();
            assert_eq!(packets, [(address(from), address(FAR)), (address(FAR), address(at))], "{:?}", facts.agent);
        }
        // Only packets from this address are refused, and another source would not show it.
        ip("rule add pref 50 from 192.0.2.5 prohibit");
        let refused = explain::decide(&follow_to_pod(file, agent("192.0.2.5", "192.0.2.5")), &[], Vec::new());
        let because = format!("a policy rule or a route of another table refuses packets of this node to {FAR}");
        assert!(refused.sentence.contains(&because), "{refused:#?}");
        assert!(refused.remedy.is_some_and(|remedy| remedy.starts_with("`ip rule` shows")));
        assert_eq!(explain_to_pod(file).verdict, Verdict::Works);
    });
}

/// Such a message may be forged, and its size is forgotten, so the whole cluster must not follow it.
#[test]
fn a_size_that_a_router_has_said_is_found_and_no_reason_to_change_net_conf() {
    in_namespace(|file| {
        let sources = NodeSources { backend: "vxlan".to_owned(), ..reached(&node(file)) };
        ip("link add flannel.1 mtu 1450 up type vxlan id 1 dstport 8472");
        assert_eq!(doctor_with(&sources, "underlay"), []);
        let router = OtherNamespace::new();
        ip(&format!("link set far0 netns {}", router.pid()));
        for line in ["link set far0 up", "addr add 192.0.2.9/24 dev far0", "link add br9 mtu 1400 up type bridge"] {
            router.run(&format!("ip {line}"));
        }
        router.run(&format!("ip route add {FAR} dev br9"));
        router.run("sysctl -qw net.ipv4.ip_forward=1");
        until("the message of the router", || {
            shell(&format!("ping -n -c 1 -W 1 -M do -s 1472 {FAR} || true"));
            shell_output(&format!("ip route get {FAR}")).contains("mtu 1400")
        });
        let words = [FAR, "leave over eth0, and that way, as a router on it has said, takes 1400 bytes", "tracepath"];
        let text = only_text(&sources, "underlay", &words);
        assert!(!text.contains("Backend.MTU"), "{text}");
        let explained = explain_to_pod(file);
        let because = format!("a router has said that the way to {FAR} takes 1400 bytes");
        assert!(explained.verdict == Verdict::Broken && explained.sentence.contains(&because), "{explained:#?}");
        let underlay = explained.steps.iter().find(|step| step.step == "underlay route").unwrap();
        assert!(underlay.mtu == Some(1400) && underlay.is.contains("has learned the MTU"), "{explained:#?}");
        let seconds = underlay.is.rsplit(' ').nth(1).unwrap();
        assert!((1..=600).contains(&seconds.parse::<u64>().unwrap()), "{underlay:#?}");
        shell(text.split('`').nth(3).unwrap());
        assert_eq!(doctor_with(&sources, "underlay"), [], "after the remedy of {text}");
        assert_eq!(explain_to_pod(file).verdict, Verdict::Works);
    });
}

#[test]
fn a_main_table_that_no_policy_rule_asks_is_found() {
    in_namespace(|file| {
        let sources = node(file);
        until("the uplink to run", || shell_output("ip link show eth0").contains("state UP"));
        ip("rule add pref 50 iif lo unreachable");
        only_text(&sources, "underlay", &["the kernel refuses packets to", NEAR, "a policy rule", "`ip rule`"]);
        ip("rule del pref 50");
        // Without a rule of somebody, IPv6 asks the main table whatever its rules are.
        ip("-6 rule add pref 40 to fd00:77::/64 lookup 77");
        for (family, peer) in [("-4", NEAR), ("-6", FAR_V6)] {
            assert_eq!(doctor_with(&sources, "underlay"), []);
            ip(&format!("{family} rule del lookup main"));
            assert_eq!(doctor_with(&reached(&sources), "underlay"), [], "something else may carry the packets");
            healed(&sources, &["no policy rule asks the main table", peer, "rule add lookup main pref 32766"]);
        }
    });
}
