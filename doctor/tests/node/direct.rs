// SPDX-License-Identifier: Apache-2.0
//! Packets with addresses of pods, to a node that is reached without a tunnel.

use std::fs;
use std::path::Path;
use std::process::Command;

use weft_doctor::facts;
use weft_doctor::sources::NodeSources;

use super::{ENV, ENV_V6, OtherNamespace, doctor, in_namespace, ip, only_text, shell, sources, until};

/// Makes this node and another one on one link, both of which forward packets, with routes to the pods of each other. None of them has a
/// bridge yet.
fn two_nodes(file: &Path) -> OtherNamespace {
    fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
    let peer = OtherNamespace::new();
    let sysctls = "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.all.rp_filter=0";
    shell(sysctls);
    peer.run(sysctls);
    ip(&format!("link add eth0 up type veth peer name eth0 netns {}", peer.pid()));
    peer.run("ip link set eth0 up");
    let there = |line: &str| peer.run(&format!("ip {line}"));
    for line in ["addr add 192.0.2.1/24 dev eth0", "addr add fd00:77::1/64 dev eth0 nodad"] {
        ip(line);
    }
    for line in ["addr add 192.0.2.9/24 dev eth0", "addr add fd00:77::9/64 dev eth0 nodad"] {
        there(line);
    }
    for line in ["route add 10.5.9.0/24 via 192.0.2.9 proto 90", "-6 route add fd00:5:0:9::/64 via fd00:77::9 proto 90"]
    {
        ip(line);
    }
    for line in ["route add 10.5.7.0/24 via 192.0.2.1 proto 90", "-6 route add fd00:5:0:7::/64 via fd00:77::1 proto 90"]
    {
        there(line);
    }
    peer
}

/// Returns how many nodes answer packets for their pods.
fn answering(file: &Path) -> usize {
    facts::read(&sources(file)).unwrap().pod_way.answering
}

#[test]
fn a_network_that_drops_addresses_of_pods_between_nodes_is_found_whether_they_have_pods_or_not() {
    in_namespace(|file| {
        let peer = two_nodes(file);
        for with_bridges in [false, true] {
            if with_bridges {
                for line in [
                    "link add cni0 up type bridge",
                    "addr add 10.5.7.1/24 dev cni0",
                    "addr add fd00:5:0:7::1/64 dev cni0 nodad",
                ] {
                    ip(line);
                }
                for line in ["link add cni0 up type bridge", "addr add 10.5.9.1/24 dev cni0"] {
                    peer.run(&format!("ip {line}"));
                }
            }
            // The addresses of a link that has just come up answer after a moment.
            until("both families to answer", || answering(file) == 2);
            // An operator may ask again and again. A kernel without a route to the pods answers few of such questions.
            for _ in 0..if with_bridges { 1 } else { 6 } {
                assert_eq!(doctor(file, "underlay"), [], "{with_bridges}");
            }
            // As a cloud does that does not know these addresses.
            let destination = ("ip daddr 10.5.0.0/16 drop; ip6 daddr fd00:5::/48 drop;", true);
            let source = ("ip saddr 10.5.0.0/16 drop; ip6 saddr fd00:5::/48 drop;", with_bridges);
            for (rules, is_found) in [destination, source] {
                let chain = "type filter hook ingress device eth0 priority 0;";
                peer.run(&format!("nft 'table netdev cloud {{ chain i {{ {chain} {rules} }}; }}'"));
                if is_found {
                    let words = [
                        "192.0.2.9 and 1 more node answer at the address of the node",
                        "10.5.9.0/24",
                        "or choose the backend vxlan without DirectRouting;",
                    ];
                    only_text(&sources(file), "underlay", &words);
                    let vxlan = NodeSources { backend: "vxlan".to_owned(), ..sources(file) };
                    only_text(&vxlan, "underlay", &["or set DirectRouting to false in net-conf;"]);
                } else {
                    assert_eq!(doctor(file, "underlay"), [], "this node has no address of a pod to send from");
                }
                peer.run("nft delete table netdev cloud");
            }
        }
    });
}

#[test]
fn nodes_that_answer_nothing_or_drop_in_silence_are_not_taken_for_a_cloud() {
    in_namespace(|file| {
        let peer = two_nodes(file);
        until("both families to answer", || answering(file) == 2);
        peer.run("sysctl -qw net.ipv4.ip_forward=0");
        only_text(
            &sources(file),
            "underlay",
            &["192.0.2.9 answers", "does not forward packets", "as 1 other node does"],
        );
        // --fail-closed answers, --ip-blackhole-route does not.
        ip("rule add pref 30201 lookup 90001");
        ip("route add unreachable 10.5.0.0/16 table 90001");
        only_text(&sources(file), "underlay", &["192.0.2.9 answers"]);
        ip("route add blackhole 10.5.7.0/24 table 90001");
        assert_eq!(doctor(file, "underlay"), [], "unused addresses are dropped in silence");
        ip("rule del pref 30201");
        peer.run("ip link set eth0 down");
        assert_eq!((doctor(file, "underlay"), answering(file)), (Vec::new(), 0), "this is another fault");
    });
}

/// Returns how many packets of each family the network has dropped before they reach the peer.
fn dropped(peer: &OtherNamespace) -> Vec<u64> {
    let line = format!("-t {} -n nft list chain netdev cloud i", peer.pid());
    let chain = Command::new("nsenter").args(line.split(' ')).output().unwrap();
    let chain = String::from_utf8(chain.stdout).unwrap();
    let counts = chain.split("packets ").skip(1).filter_map(|rest| rest.split(' ').next()?.parse().ok());
    counts.collect()
}

/// The silence of a node takes six seconds in each family. An operator waits for both at once.
#[test]
fn both_families_are_asked_at_once() {
    in_namespace(|file| {
        let peer = two_nodes(file);
        until("both families to answer", || answering(file) == 2);
        let rules = "ip daddr 10.5.0.0/16 counter drop; ip6 daddr fd00:5::/48 counter drop;";
        peer.run(&format!(
            "nft 'table netdev cloud {{ chain i {{ type filter hook ingress device eth0 priority 0; {rules} }}; }}'"
        ));
        // When both families have been asked, both are still being asked. A busy machine may stop one thread until the other one ends.
        let are_asked_at_once = || {
            let before = dropped(&peer);
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| facts::read(&sources(file)).unwrap().pod_way.silent.len());
                until("requests of both families", || {
                    dropped(&peer).iter().zip(&before).all(|(now, before)| now > before)
                });
                let first = dropped(&peer);
                assert_eq!(asking.join().unwrap(), 2);
                dropped(&peer).iter().zip(&first).all(|(all, first)| all > first)
            })
        };
        assert!((0..3).any(|_| are_asked_at_once()), "one family is asked after the other");
    });
}
