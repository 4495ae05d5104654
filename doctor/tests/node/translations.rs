// SPDX-License-Identifier: Apache-2.0
//! Rules of this node that translate addresses of the tunnel's own packets.

use std::fs;
use std::net::UdpSocket;
use std::path::Path;

use weft_doctor::sources::{NodeSources, PeerAddress};

use super::firewall::with_peer;
use super::{doctor_with, in_namespace, ip, only_text, shell, shell_output};

/// Runs the remedy of the only finding.
fn is_found_and_helped(sources: &NodeSources, provoke: &str, words: &[&str]) {
    shell(provoke);
    let text = only_text(sources, "firewall", words);
    // The kernel translates the packets of a connection as it did with the first one, as long as it remembers the connection.
    for ends in ["-s 192.0.2.1 -d 192.0.2.9", "-s 192.0.2.9 -d 192.0.2.1", "-s 192.0.2.1 -d 192.0.2.7"] {
        shell(&format!("conntrack -I {ends} -p udp --sport 1 --dport 8472 -t 600"));
    }
    let commands = text.lines().nth(1).unwrap().split("; then exclude").next().unwrap();
    shell(commands);
    assert_eq!(doctor_with(sources, "firewall"), [], "after the remedy of {text}");
    let is_to = text.contains(" to 192.0.2.9");
    let known = shell_output("conntrack -L -p udp");
    for (ends, is_left) in [
        ("=192.0.2.1 dst=192.0.2.9 sport=1 ", !is_to),
        ("=192.0.2.9 dst=192.0.2.1 sport=1 ", is_to),
        ("dst=192.0.2.7", true),
    ] {
        assert_eq!(known.contains(ends), is_left, "{ends} after {commands}: {known}");
    }
    clean();
}

fn clean() {
    shell("iptables-nft -t nat -F; iptables-legacy -t nat -F; nft flush ruleset; conntrack -F");
}

/// A node with two peers. The second one is reached.
fn with_a_reached_peer(file: &Path) -> NodeSources {
    let addresses = ["192.0.2.9", "192.0.2.8"].map(|addr| addr.parse().unwrap());
    let peer_addresses =
        [false, true].into_iter().zip(addresses).map(|(reached, addr)| PeerAddress { addr, reached, port: None });
    NodeSources {
        unreachable: 1,
        peers: addresses.to_vec(),
        peer_addresses: peer_addresses.collect(),
        ..with_peer(file)
    }
}

/// Sends a packet of the tunnel to each of these peers, while there is this rule. Connection tracking keeps what the rule translates.
fn translate_once(rule: &str, peers: &[&str]) -> UdpSocket {
    shell(&format!("iptables-nft -t nat -A {rule}"));
    // The usual time for UDP without an answer is 30 s.
    fs::write("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", "600").unwrap();
    let tunnel = UdpSocket::bind("192.0.2.1:0").unwrap();
    for peer in peers {
        tunnel.send_to(b"packet", format!("{peer}:8472")).unwrap();
    }
    shell("iptables-nft -t nat -F");
    tunnel
}

/// The usual rule of a VPN or a cloud harms nobody, and another peer is powered off.
#[test]
fn another_source_that_a_reached_peer_accepts_is_not_named() {
    in_namespace(|file| {
        let sources = with_a_reached_peer(file);
        shell("iptables-nft -t nat -A POSTROUTING -o eth0 -j SNAT --to-source 192.0.2.66");
        assert_eq!(doctor_with(&sources, "firewall"), []);
        clean();
        let words = ["to 192.0.2.9 by 192.0.2.66"];
        is_found_and_helped(
            &sources,
            "iptables-nft -t nat -A POSTROUTING -d 192.0.2.9 -j SNAT --to-source 192.0.2.66",
            &words,
        );
    });
}

/// The same, where the rule cannot be decided or is gone: only the entries of connection tracking show what it does.
#[test]
fn a_kept_source_that_a_reached_peer_accepts_is_not_named() {
    in_namespace(|file| {
        let sources = with_a_reached_peer(file);
        translate_once("POSTROUTING -o eth0 -j SNAT --to-source 192.0.2.66", &["192.0.2.9", "192.0.2.8"]);
        assert_eq!(doctor_with(&sources, "firewall"), [], "both peers get packets from the other source");
        shell("conntrack -D -p udp -d 192.0.2.8");
        only_text(&sources, "firewall", &["to 192.0.2.9 by 192.0.2.66"]);
    });
}

#[test]
fn another_source_of_packets_of_the_tunnel_is_named_while_a_peer_is_not_reached() {
    in_namespace(|file| {
        let reached = with_peer(file);
        let sources = NodeSources { unreachable: 1, ..reached.clone() };
        let nft = |rule: &str| {
            format!("nft 'table ip vpn {{ chain p {{ type nat hook postrouting priority srcnat; {rule}; }}; }}'")
        };
        // These keep the address. Another source port harms no tunnel.
        for rule in [
            "iptables-nft -t nat -A POSTROUTING -o eth0 -j MASQUERADE",
            "iptables-legacy -t nat -A POSTROUTING -o eth0 -j MASQUERADE --random-fully",
            "iptables-nft -t nat -A POSTROUTING -p udp -j MASQUERADE --to-ports 4000-5000",
            "iptables-nft -t nat -A POSTROUTING -j SNAT --to-source 192.0.2.1",
            "iptables-nft -t nat -A POSTROUTING -p tcp -j SNAT --to-source 192.0.2.66",
            &nft("oifname eth0 masquerade"),
        ] {
            shell(rule);
            assert_eq!(doctor_with(&sources, "firewall"), [], "{rule}");
            clean();
        }
        let words =
            ["replaces the source 192.0.2.1 of packets of the tunnel (UDP port 8472) to 192.0.2.9 by 192.0.2.66"];
        for provoke in [
            "iptables-nft -t nat -A POSTROUTING -o eth0 -j SNAT --to-source 192.0.2.66",
            "iptables-legacy -t nat -A POSTROUTING -p udp -j SNAT --to-source 192.0.2.66:4000-5000",
            &nft("ip daddr 192.0.2.0/24 snat to 192.0.2.66"),
        ] {
            shell(provoke);
            assert_eq!(doctor_with(&reached, "firewall"), [], "most peers accept this: {provoke}");
            clean();
            is_found_and_helped(&sources, provoke, &words);
        }
        let masquerade = "iptables-nft -t nat -A POSTROUTING -o eth0 -j MASQUERADE";
        // The published address is not that of the uplink, as with a routing daemon on the host. The tunnel sends from the uplink.
        ip("addr add 198.51.100.1/32 dev lo");
        let published = vec!["198.51.100.1".parse().unwrap()];
        let other = NodeSources { published, uplink_addrs: vec!["192.0.2.1".parse().unwrap()], ..sources.clone() };
        shell(masquerade);
        assert_eq!(doctor_with(&other, "firewall"), []);
        clean();
        // A masquerade takes the first address of the link.
        ip("addr add 192.0.2.2/24 dev eth0");
        let second = vec!["192.0.2.2".parse().unwrap()];
        let second = NodeSources { published: second.clone(), uplink_addrs: second, ..sources.clone() };
        let words = ["replaces the source 192.0.2.2 of packets of the tunnel", "by 192.0.2.1: "];
        is_found_and_helped(&second, masquerade, &words);
        let nat = NodeSources { published: vec!["203.0.113.7".parse().unwrap()], ..sources };
        shell("iptables-nft -t nat -A POSTROUTING -o eth0 -j SNAT --to-source 203.0.113.7");
        assert_eq!(doctor_with(&nat, "firewall"), [], "this is the address that the node publishes");
    });
}

#[test]
fn another_destination_of_packets_of_the_tunnel_is_always_found() {
    in_namespace(|file| {
        let sources = with_peer(file);
        for (provoke, chain, whose) in [
            (
                "iptables-nft -t nat -A PREROUTING -p udp --dport 8472 -j REDIRECT --to-ports 9999",
                "PREROUTING of iptables-nft (table nat)",
                "from 192.0.2.9",
            ),
            (
                "iptables-legacy -t nat -A OUTPUT -p udp --dport 8472 -j DNAT --to-destination 192.0.2.8",
                "OUTPUT of iptables-legacy (table nat)",
                "to 192.0.2.9",
            ),
            (
                "nft 'table ip lb { chain p { type nat hook prerouting priority dstnat; udp dport 8472 dnat to 192.0.2.8; }; }'",
                "ip lb p of nftables",
                "from 192.0.2.9",
            ),
        ] {
            is_found_and_helped(&sources, provoke, &[chain, "leads packets of the tunnel (UDP port 8472)", whose]);
        }
        for other in [
            "iptables-nft -t nat -A PREROUTING -p tcp --dport 8472 -j REDIRECT --to-ports 9999",
            "iptables-nft -t nat -A PREROUTING -m recent --name x --rcheck -j REDIRECT",
            "iptables-nft -t nat -A PREROUTING ! -d 192.0.2.1 -p udp -j DNAT --to-destination 192.0.2.8",
        ] {
            shell(other);
            assert_eq!(doctor_with(&sources, "firewall"), [], "{other}");
            clean();
        }
    });
}

/// The tunnel sends all the time, so the entry never ends by itself.
#[test]
fn a_translation_that_outlives_its_rule_is_named_while_a_peer_is_not_reached() {
    in_namespace(|file| {
        let reached = with_peer(file);
        let own = vec!["192.0.2.1".parse().unwrap()];
        let sources = NodeSources { unreachable: 1, published: own, ..reached.clone() };
        let published = NodeSources { published: vec!["192.0.2.66".parse().unwrap()], ..sources.clone() };
        for (rule, words) in [
            (
                "POSTROUTING -o eth0 -j SNAT --to-source 192.0.2.66",
                ["an entry of connection tracking replaces the source 192.0.2.1", "to 192.0.2.9 by 192.0.2.66"],
            ),
            (
                "OUTPUT -p udp --dport 8472 -j DNAT --to-destination 192.0.2.8",
                [
                    "an entry of connection tracking leads packets of the tunnel",
                    "it sends packets for 192.0.2.9 to 192.0.2.8",
                ],
            ),
        ] {
            let tunnel = translate_once(rule, &["192.0.2.9"]);
            assert_eq!(doctor_with(&reached, "firewall"), [], "all peers are reached: {rule}");
            let text = only_text(&sources, "firewall", &words);
            let behind_nat = if rule.contains("SNAT") { 0 } else { 1 };
            assert_eq!(doctor_with(&published, "firewall").len(), behind_nat, "a source that is published: {rule}");
            let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
            shell(remedy);
            assert_eq!(doctor_with(&sources, "firewall"), [], "after {remedy}");
            tunnel.send_to(b"packet", "192.0.2.9:8472").unwrap();
            assert_eq!(doctor_with(&sources, "firewall"), [], "the next packet has its own addresses");
            clean();
        }
    });
}
