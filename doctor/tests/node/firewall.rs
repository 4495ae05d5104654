// SPDX-License-Identifier: Apache-2.0
//! Rules of firewalls that drop packets of the tunnel, and rules of kube-proxy that do not fit.

use std::fs;
use std::path::Path;

use nix::sched::{CloneFlags, unshare};
use weft_doctor::examine_node;
use weft_doctor::sources::{LossyPeer, NodeSources};

use super::{
    ENV, OtherNamespace, doctor, doctor_with, in_namespace, ip, only_finding, only_text, shell, sources, two_pods,
};

/// A node with an uplink and a peer.
pub(super) fn with_peer(file: &Path) -> NodeSources {
    ip("link add eth0 up type veth peer name far0");
    ip("link set far0 up");
    ip("addr add 192.0.2.1/24 dev eth0");
    NodeSources { peers: vec!["192.0.2.9".parse().unwrap()], ..sources(file) }
}

#[test]
fn the_rule_that_drops_packets_of_the_tunnel_is_quoted_and_the_remedy_lets_them_pass() {
    in_namespace(|file| {
        let sources = with_peer(file);
        assert_eq!(doctor_with(&sources, "firewall"), []);
        let nft = "nft add table inet f && nft 'add chain inet f in { type filter hook input priority 0; policy drop; }' && \
                   nft add rule inet f in tcp dport 22 accept";
        for (provoke, words, end) in [
            (
                "iptables-nft -P INPUT DROP",
                ["INPUT of iptables-nft", "from 192.0.2.9", "policy DROP"],
                "iptables-nft -P INPUT ACCEPT",
            ),
            (
                "iptables-nft -P OUTPUT DROP",
                ["OUTPUT of iptables-nft", "to 192.0.2.9", "policy DROP"],
                "iptables-nft -P OUTPUT ACCEPT",
            ),
            // As images of Oracle Cloud and of RHEL have it.
            (
                "iptables-nft -A INPUT -p tcp --dport 22 -j ACCEPT && iptables-nft -A INPUT -j REJECT --reject-with icmp-host-prohibited",
                ["INPUT of iptables-nft", "UDP port 8472", "-A INPUT -j REJECT"],
                "true",
            ),
            (
                "iptables-legacy -A INPUT -p udp -s 192.0.2.0/24 -j DROP",
                ["INPUT of iptables-legacy", "from 192.0.2.9", "-s 192.0.2.0/24"],
                "true",
            ),
            (
                "iptables-nft -t raw -A PREROUTING -p udp --dport 8472 -j DROP",
                ["ip raw PREROUTING of nftables", "8472", "drop"],
                "true",
            ),
            (
                "iptables-legacy -t raw -A PREROUTING -p udp --dport 8472 -j DROP",
                ["PREROUTING of iptables-legacy (table raw)", "8472", "-j DROP"],
                "true",
            ),
            (
                "iptables-legacy -t mangle -A POSTROUTING -d 192.0.2.9 -o eth0 -j DROP",
                ["POSTROUTING of iptables-legacy (table mangle)", "to 192.0.2.9", "-j DROP"],
                "iptables-legacy -t mangle -F",
            ),
            (nft, ["inet f in of nftables", "from 192.0.2.9", "policy drop"], "nft delete table inet f"),
            (
                "nft add table ip g && nft 'add chain ip g out { type filter hook output priority 0; }' && nft add rule ip g out ip daddr 192.0.2.9 drop",
                ["ip g out of nftables", "to 192.0.2.9", "drop"],
                "nft delete table ip g",
            ),
        ] {
            is_found_and_helped(&sources, provoke, &words, end);
        }
    });
}

/// Makes a rule that drops packets of the tunnel, and runs the remedy. `end` removes what the flavours of iptables do not.
fn is_found_and_helped(sources: &NodeSources, provoke: &str, words: &[&str], end: &str) {
    shell(provoke);
    let text = only_text(sources, "firewall", words);
    let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
    assert!(remedy.contains("192.0.2.9"), "only nodes may send such packets: {remedy}");
    shell(remedy);
    assert_eq!(doctor_with(sources, "firewall"), [], "after {remedy}");
    shell(end);
    for program in ["iptables-nft", "iptables-legacy"] {
        shell(&format!("{program} -F && {program} -t raw -F"));
    }
}

#[test]
fn a_rule_for_this_host_and_a_policy_behind_a_doubtful_drop_are_certain() {
    in_namespace(|file| {
        let sources = with_peer(file);
        for (provoke, words, end) in [
            (
                "iptables-nft -A INPUT -m addrtype --dst-type LOCAL -j DROP",
                ["INPUT of iptables-nft", "from 192.0.2.9", "--dst-type LOCAL"],
                "true",
            ),
            (
                "nft 'table inet f { chain in { type filter hook input priority 0; fib daddr type local drop; }; }'",
                ["inet f in of nftables", "from 192.0.2.9", "fib daddr type local drop"],
                "nft delete table inet f",
            ),
            // As the examples of Debian and Arch Linux have it.
            (
                "nft 'table inet f { chain in { type filter hook input priority 0; policy drop; iif lo accept; ct state established,related accept; }; }'",
                ["inet f in of nftables", "from 192.0.2.9", "policy drop"],
                "nft delete table inet f",
            ),
            (
                "nft 'table inet f { chain in { type filter hook input priority 0; ip saddr 192.0.2.9 ip daddr 192.0.2.1 drop; }; }'",
                ["inet f in of nftables", "from 192.0.2.9", "ip saddr 192.0.2.9 ip daddr 192.0.2.1 drop"],
                "nft delete table inet f",
            ),
            // As firewalld writes them with iptables.
            (
                "iptables-nft -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT && iptables-nft -A INPUT -j REJECT",
                ["INPUT of iptables-nft", "from 192.0.2.9", "-A INPUT -j REJECT"],
                "true",
            ),
            // A rule that may drop the packet leaves no doubt about the policy.
            (
                "iptables-nft -A INPUT -m recent --name bad --rcheck -j DROP && iptables-nft -P INPUT DROP",
                ["INPUT of iptables-nft", "from 192.0.2.9", "policy DROP"],
                "iptables-nft -P INPUT ACCEPT",
            ),
        ] {
            is_found_and_helped(&sources, provoke, &words, end);
        }
    });
}

/// Peers send to the published address, and the tunnel sends from that of the uplink.
#[test]
fn rules_are_asked_about_the_published_address_for_packets_of_peers_and_about_the_uplink_for_our_own() {
    in_namespace(|file| {
        let unknown = with_peer(file);
        ip("addr add 198.51.100.1/32 dev lo");
        ip("addr add 192.0.2.2/24 dev eth0");
        let addrs = |text: &str| vec![text.parse().unwrap()];
        let published = NodeSources {
            backend: "vxlan".to_owned(),
            published: addrs("198.51.100.1"),
            uplink_addrs: addrs("192.0.2.2"),
            ..unknown.clone()
        };
        // As the tunnel of WireGuard sends, whose port only the agent knows.
        let wireguard = NodeSources { backend: "wireguard".to_owned(), tunnel_port: Some(51820), ..published.clone() };
        let same = NodeSources { published: addrs("192.0.2.1"), ..wireguard.clone() };
        for (rule, found) in [
            ("INPUT -d 198.51.100.1 -p udp -j DROP", vec![&published]),
            ("INPUT -d 192.0.2.1 -p udp -j DROP", vec![&unknown, &same]),
            ("INPUT -d 192.0.2.2 -p udp -j DROP", vec![]),
            ("OUTPUT -s 198.51.100.1 -p udp -j DROP", vec![]),
            ("OUTPUT -s 192.0.2.1 -p udp -j DROP", vec![&unknown, &same]),
            ("OUTPUT -s 192.0.2.2 -p udp -j DROP", vec![&published]),
        ] {
            shell(&format!("iptables-nft -A {rule}"));
            for sources in [&unknown, &published, &wireguard, &same] {
                let is_expected = found.iter().any(|one| std::ptr::eq(*one, sources));
                let findings = doctor_with(sources, "firewall");
                assert_eq!(findings.len(), usize::from(is_expected), "{rule}: {sources:?}: {findings:?}");
            }
            shell("iptables-nft -F");
        }
    });
}

/// `ufw allow from 192.0.2.0/24 to any port 8472 proto udp`, with the chains that matter here.
const UFW: [&str; 14] = [
    "-N ufw-before-input",
    "-N ufw-not-local",
    "-N ufw-user-input",
    "-A INPUT -j ufw-before-input",
    "-A ufw-before-input -i lo -j ACCEPT",
    "-A ufw-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
    "-A ufw-before-input -j ufw-not-local",
    "-A ufw-before-input -j ufw-user-input",
    "-A ufw-not-local -m addrtype --dst-type LOCAL -j RETURN",
    "-A ufw-not-local -m addrtype --dst-type MULTICAST -j RETURN",
    "-A ufw-not-local -m addrtype --dst-type BROADCAST -j RETURN",
    "-A ufw-not-local -j DROP",
    "-A ufw-user-input -s 192.0.2.0/24 -p udp -m udp --dport 8472 -j ACCEPT",
    "-P INPUT DROP",
];

#[test]
fn rules_that_may_accept_packets_of_the_tunnel_are_no_finding() {
    in_namespace(|file| {
        let sources = with_peer(file);
        for rule in [
            "-p udp --dport 8472 -j ACCEPT",
            "-s 192.0.2.0/24 -j ACCEPT",
            "-p udp -m multiport --dports 500,8472 -j ACCEPT",
            "-i eth0 -j ACCEPT",
            "-m limit --limit 5/s -j ACCEPT",
            "-m recent --name nodes --rcheck -j ACCEPT",
        ] {
            shell(&format!("iptables-nft -A INPUT {rule} && iptables-nft -A INPUT -j DROP"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "{rule}");
            shell("iptables-nft -F");
        }
        for program in ["iptables-nft", "iptables-legacy"] {
            for rule in UFW {
                shell(&format!("{program} {rule}"));
            }
            assert_eq!(doctor_with(&sources, "firewall"), [], "{program}, as ufw writes them");
            shell(&format!("{program} -F && {program} -X && {program} -P INPUT ACCEPT"));
        }
        // Without a rule that tests the kind of the address, it is not known whether the last rule is reached.
        shell(
            "iptables-nft -N X && iptables-nft -A X -m recent --name nodes --rcheck -j RETURN && iptables-nft -A X -j DROP",
        );
        shell("iptables-nft -A INPUT -j X");
        assert_eq!(doctor_with(&sources, "firewall"), [], "the packet may have left the chain X");
        shell("iptables-nft -F && iptables-nft -X");
        for rules in [
            "fib daddr type local return; fib daddr type multicast return; drop;",
            "fib saddr type unicast return; drop;",
        ] {
            let base = "chain in { type filter hook input priority 0; jump not-local; }";
            shell(&format!("nft 'table inet f {{ chain not-local {{ {rules} }}; {base}; }}'"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "{rules}");
            shell("nft delete table inet f");
        }
        shell("iptables-nft -P INPUT DROP");
        let other = NodeSources { backend: "host-gw".to_owned(), ..sources.clone() };
        assert_eq!(doctor_with(&other, "firewall"), [], "this backend has no tunnel");
        assert_eq!(doctor_with(&NodeSources { peers: Vec::new(), ..sources }, "firewall"), [], "no peer is known");
    });
}

#[test]
fn a_mark_that_a_rule_of_another_chain_may_set_leaves_it_open_whether_packets_are_accepted() {
    in_namespace(|file| {
        let sources = with_peer(file);
        let input = "chain in { type filter hook input priority 0; policy drop; meta mark 7 accept; };";
        let before = "chain pre { type filter hook prerouting priority -150; udp dport 8472 meta mark set 7; };";
        for (before, is_found) in [("", true), (before, false)] {
            shell(&format!("nft 'table inet f {{ {before} {input} }}'"));
            assert_eq!(doctor_with(&sources, "firewall").len(), usize::from(is_found), "{before}");
            shell("nft delete table inet f");
        }
        shell("iptables-legacy -A INPUT -m mark --mark 7 -j ACCEPT && iptables-legacy -P INPUT DROP");
        only_text(&sources, "firewall", &["INPUT of iptables-legacy", "policy DROP"]);
        shell("iptables-legacy -t mangle -A PREROUTING -p udp --dport 8472 -j MARK --set-mark 7");
        assert_eq!(doctor_with(&sources, "firewall"), []);
    });
}

/// Hides the programs of this directory from this thread, apart from one of these that list rules, which gets plain names.
fn hide_programs(plain: Option<&str>) {
    unshare(CloneFlags::CLONE_NEWNS).unwrap();
    let keep = plain.map(|multi| format!("cp /usr/sbin/{multi} $D/iptables && ln -s iptables $D/ip6tables && ln -s iptables $D/iptables-save && ln -s iptables $D/ip6tables-save;"));
    shell(&format!(
        "mount --make-rprivate /; D=$(mktemp -d); mount -t tmpfs none $D; {} for place in /usr/sbin /sbin /usr/local/sbin; do \
         if [ -d $place ]; then mount --bind $D $place; fi; done; umount $D; rmdir $D",
        keep.unwrap_or_default()
    ));
}

#[test]
fn tables_of_iptables_are_examined_without_its_programs_too() {
    in_namespace(|file| {
        let sources = with_peer(file);
        fs::write(file, ENV).unwrap();
        ip("link add flannel.1 up type vxlan id 1 dstport 8472");
        ip("route add 10.5.9.0/24 dev flannel.1 proto 90");
        shell(
            "iptables-nft -A INPUT -p udp -j REJECT && iptables-nft -t nat -A POSTROUTING -o flannel.1 -j MASQUERADE",
        );
        hide_programs(None);
        only_text(&sources, "firewall", &["ip filter INPUT of nftables", "from 192.0.2.9", "reject"]);
        only_text(&sources, "masquerade", &["ip nat POSTROUTING of nftables", "masquerade"]);
        let said = examine_node(&sources, &["firewall".to_owned()]).unwrap().not_examined;
        assert!(said.iter().any(|text| text.contains("is not installed")), "{said:?}");
    });
}

#[test]
fn the_plain_program_of_iptables_is_asked_where_the_others_are_missing() {
    for (multi, named) in [("xtables-nft-multi", "iptables-nft"), ("xtables-legacy-multi", "iptables-legacy")] {
        in_namespace(move |file| {
            let sources = with_peer(file);
            shell(&format!("{named} -A INPUT -p udp -j DROP"));
            hide_programs(Some(multi));
            only_text(
                &sources,
                "firewall",
                &["INPUT of iptables drops", "-A INPUT -p udp -j DROP", "iptables -I INPUT"],
            );
            shell("iptables -F INPUT");
            assert_eq!(doctor_with(&sources, "firewall"), []);
        });
    }
}

/// The chains of firewalld for packets to this host. The zone public lets in ssh alone.
const FIREWALLD: &str = "table inet firewalld {
    chain filter_IN_public { tcp dport 22 accept; MORE; }
    chain filter_IN_trusted { accept; }
    chain filter_INPUT_ZONES { FIRST; goto filter_IN_public; }
    chain filter_INPUT {
        type filter hook input priority 10;
        ct state { established, related } accept;
        ct status dnat accept;
        iifname lo accept;
        jump filter_INPUT_ZONES;
        ct state invalid drop;
        reject;
    }
}";

#[test]
fn ufw_and_firewalld_are_found_before_a_peer_is_known_and_by_the_packets_of_peers() {
    in_namespace(|file| {
        let peers = with_peer(file);
        let before = NodeSources { peers: Vec::new(), ..peers.clone() };
        assert_eq!(doctor_with(&before, "firewall"), []);
        for rule in UFW {
            shell(&format!("iptables-nft {rule}"));
        }
        assert_eq!(doctor_with(&before, "firewall"), [], "there is no default route, so no uplink is known");
        ip("route add default via 192.0.2.9");
        assert_eq!(doctor_with(&before, "firewall"), [], "some hosts may send such packets");
        shell("iptables-nft -F ufw-user-input");
        only_text(&before, "firewall", &["ufw", "UDP port 8472", "from other nodes", "ufw allow proto udp from NODES"]);
        only_text(
            &peers,
            "firewall",
            &["ufw", "from 192.0.2.9", "ufw allow proto udp from 192.0.2.9 to any port 8472;"],
        );
        shell("iptables-nft -A ufw-user-input -p udp -m udp --dport 8000:9000 -j ACCEPT");
        assert_eq!(doctor_with(&before, "firewall"), []);
        shell("iptables-nft -P INPUT ACCEPT && iptables-nft -F && iptables-nft -X");
        for (public, zones, found) in [
            ("udp dport 53 accept", "iifname eth9 goto filter_IN_trusted", true),
            ("udp dport 8472 ct state { new, untracked } accept", "iifname eth9 goto filter_IN_trusted", false),
            ("udp dport 8000-9000 accept", "iifname eth9 goto filter_IN_public", false),
            ("ip saddr 192.0.2.0/24 accept", "iifname eth9 goto filter_IN_public", false),
            ("udp dport 53 accept", "iifname eth0 goto filter_IN_trusted", false),
            ("udp dport 53 accept", "ip saddr 192.0.2.0/24 goto filter_IN_trusted", false),
        ] {
            let table = FIREWALLD.replace("MORE", public).replace("FIRST", zones);
            shell(&format!("nft '{table}'"));
            for sources in [&before, &peers] {
                if found {
                    only_text(
                        sources,
                        "firewall",
                        &["inet firewalld filter_INPUT", "UDP port 8472", "--add-port=8472/udp"],
                    );
                } else {
                    assert_eq!(doctor_with(sources, "firewall"), [], "{public}, {zones}");
                }
            }
            shell("nft delete table inet firewalld");
        }
        let table = FIREWALLD.replace("MORE", "udp dport 53 accept").replace("FIRST", "iifname eth9 accept");
        shell(&format!("nft '{table}'"));
        ip("route del default");
        ip("-6 address add fd00:77::1/64 dev eth0 nodad");
        assert_eq!(doctor_with(&before, "firewall"), [], "there is no default route");
        ip("-6 route add default via fd00:77::9");
        only_text(&before, "firewall", &["inet firewalld filter_INPUT", "UDP port 8472", "--add-port=8472/udp"]);
    });
}

#[test]
fn a_kube_proxy_with_another_range_for_pods_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        shell("iptables-nft -t nat -N KUBE-MARK-MASQ && iptables-nft -t nat -N KUBE-SVC-A");
        let rule = |range: &str| {
            format!(
                "iptables-nft -t nat -A KUBE-SVC-A ! -s {range} -d 10.96.0.1/32 -p tcp -m tcp --dport 443 -j KUBE-MARK-MASQ"
            )
        };
        for sound in ["10.5.0.0/16", "10.5.7.0/24"] {
            shell(&rule(sound));
            assert_eq!(doctor(file, "services"), [], "{sound}");
            shell("iptables-nft -t nat -F KUBE-SVC-A");
        }
        shell(&rule("10.42.0.0/16"));
        only_text(
            &sources(file),
            "services",
            &["10.42.0.0/16", "Network is 10.5.0.0/16", "`clusterCIDR: 10.5.0.0/16`"],
        );
        shell("iptables-nft -t nat -F KUBE-SVC-A");
        shell(
            "nft add table ip kube-proxy && nft add chain ip kube-proxy service-A && nft add rule ip kube-proxy service-A ip daddr 10.96.0.1 ip saddr != 10.42.0.0/16 counter",
        );
        only_finding(file, "services", &["10.42.0.0/16"]);
    });
}

#[test]
fn a_service_inside_network_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        shell("iptables-nft -t nat -N KUBE-SERVICES && iptables-nft -t nat -N KUBE-SVC-A");
        let rule = |addr: &str| {
            format!(
                "iptables-nft -t nat -A KUBE-SERVICES -d {addr}/32 -p tcp -m comment --comment 'default/kubernetes:https cluster IP' -m tcp --dport 443 -j KUBE-SVC-A"
            )
        };
        shell(&rule("10.96.0.1"));
        assert_eq!(doctor(file, "services"), []);
        shell(&rule("10.5.200.1"));
        only_text(
            &sources(file),
            "services",
            &["10.5.200.1 is inside Network 10.5.0.0/16", "--service-cluster-ip-range"],
        );
        shell("iptables-nft -t nat -F KUBE-SERVICES");
        shell("nft add table ip kube-proxy && nft add chain ip kube-proxy service-A");
        shell("nft 'add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict; }'");
        shell("nft 'add element ip kube-proxy service-ips { 10.5.200.2 . tcp . 443 : goto service-A }'");
        only_finding(file, "services", &["10.5.200.2 is inside Network"]);
    });
}

#[test]
fn a_port_without_hairpin_mode_is_found_only_beside_kube_proxy() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let pods = OtherNamespace::new();
        ip("link add cni0 up type bridge");
        ip(&format!("link add veth0a1b2c3d up type veth peer name eth0 netns {}", pods.pid()));
        ip("link set veth0a1b2c3d master cni0");
        shell("iptables-nft -t nat -N KUBE-SERVICES && iptables-nft -t nat -A PREROUTING -j KUBE-SERVICES");
        assert_eq!(doctor(file, "services"), [], "nobody carries services");
        let mut process = super::kube_proxy(file);
        only_text(&sources(file), "services", &["1 port of cni0 has no hairpin mode", "veth0a1b2c3d", "hairpinMode"]);
        ip("link set cni0 promisc on");
        assert_eq!(doctor(file, "services"), [], "this works, too");
        ip("link set cni0 promisc off");
        shell("bridge link set dev veth0a1b2c3d hairpin on");
        assert_eq!(doctor(file, "services"), []);
        process.kill().unwrap();
        process.wait().unwrap();
    });
}

/// A node with an uplink, a peer, a bridge with two pods, and a vxlan device with a route to the pods of the peer.
pub(super) fn with_pods(file: &Path) -> (NodeSources, OtherNamespace) {
    let sources = with_peer(file);
    fs::write(file, ENV).unwrap();
    let pods = two_pods();
    ip("link add flannel.1 up type vxlan id 1 dstport 8472");
    ip("route add 10.5.9.0/24 dev flannel.1 proto 90");
    (sources, pods)
}

#[test]
fn chains_at_a_link_or_a_bridge_that_drop_are_found_and_the_remedy_lets_packets_pass() {
    in_namespace(|file| {
        let (sources, _pods) = with_pods(file);
        assert_eq!(doctor_with(&sources, "firewall"), []);
        for (chain, words) in [
            (
                "netdev f { chain i { type filter hook ingress device flannel.1 priority 0; policy drop; }; }",
                ["chain netdev f i of nftables drops", "pods of 10.5.9.0/24", "arrive on flannel.1: policy drop"],
            ),
            (
                "netdev f { chain i { type filter hook ingress device eth0 priority 0; udp dport 8472 drop; }; }",
                ["chain netdev f i of nftables drops", "UDP port 8472) from 192.0.2.9", "arrive on eth0: "],
            ),
            (
                "netdev f { chain i { type filter hook ingress device veth0a1b2c3e priority 0; policy drop; }; }",
                ["chain netdev f i of nftables drops", "to pods of 10.5.9.0/24", "arrive on veth0a1b2c3e: policy drop"],
            ),
            (
                "netdev f { chain e { type filter hook egress device eth0 priority 0; ip daddr 192.0.2.9 drop; }; }",
                ["chain netdev f e of nftables drops", "UDP port 8472) to 192.0.2.9", "leave by eth0: "],
            ),
            (
                "bridge f { chain i { type filter hook input priority 0; policy drop; }; }",
                ["chain bridge f i of nftables drops", "to pods of 10.5.9.0/24", "in the bridge cni0: policy drop"],
            ),
            (
                "bridge f { chain w { type filter hook forward priority 0; ether type ip drop; }; }",
                ["chain bridge f w of nftables drops", "between pods of this node", "in the bridge cni0: "],
            ),
        ] {
            shell(&format!("nft 'table {chain}'"));
            let text = only_text(&sources, "firewall", &words);
            let remedy = text.lines().nth(1).unwrap();
            let family = chain.split(' ').next().unwrap();
            if chain.contains("policy drop") {
                shell(policy(remedy));
            } else {
                assert!(remedy.contains("nft delete rule"), "{remedy}");
                shell(&format!("nft flush chain {family} f {}", chain.split(' ').nth(4).unwrap()));
            }
            assert_eq!(doctor_with(&sources, "firewall"), [], "after {remedy}");
            shell(&format!("nft delete table {family} f"));
        }
    });
}

/// Returns the command of a remedy that changes a policy, which contains a semicolon itself.
fn policy(remedy: &str) -> &str {
    let end = remedy.find("}'").unwrap() + 2;
    &remedy[..end]
}

#[test]
fn chains_at_a_link_or_a_bridge_that_may_let_packets_pass_are_no_finding() {
    in_namespace(|file| {
        let (sources, _pods) = with_pods(file);
        for chain in [
            // Such a chain keeps a pod from sending with another address than its own.
            "netdev f { chain i { type filter hook ingress device veth0a1b2c3d priority 0; ip saddr != 10.5.7.2 drop; }; }",
            "netdev f { chain i { type filter hook ingress device veth0a1b2c3d priority 0; policy drop; ip saddr 10.5.7.2 accept; ether type arp accept; }; }",
            "netdev f { chain i { type filter hook ingress device eth0 priority 0; ip saddr 10.0.0.0/8 drop; udp dport 53 drop; tcp flags syn drop; }; }",
            "netdev f { chain i { type filter hook ingress device lo priority 0; policy drop; }; }",
            "netdev f { chain i { type filter hook ingress device eth0 priority 0; policy drop; udp dport 8472 accept; }; }",
            "bridge f { chain i { type filter hook input priority 0; iifname veth9 drop; ether type ip6 drop; }; }",
            "bridge f { chain w { type filter hook forward priority 0; ether saddr 02:00:00:00:00:01 drop; }; }",
        ] {
            shell(&format!("nft 'table {chain}'"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "{chain}");
            shell(&format!("nft delete table {} f", chain.split(' ').next().unwrap()));
        }
    });
}

#[test]
fn a_rule_that_drops_forwarded_packets_from_or_to_pods_of_a_peer_is_found() {
    in_namespace(|file| {
        let (sources, _pods) = with_pods(file);
        let set = "nft 'table ip c { set bl { type ipv4_addr; flags interval; elements = { 10.5.9.0/24 }; }; \
                   chain fw { type filter hook forward priority -10; ip saddr @bl drop; }; }'";
        for (provoke, words, end) in [
            (
                set,
                ["chain ip c fw of nftables drops", "from pods of 10.5.9.0/24 to pods of 10.5.7.0/24", "ip saddr @bl"],
                "nft delete table ip c",
            ),
            (
                "iptables-nft -A FORWARD -s 10.5.7.0/24 -d 10.5.0.0/16 -j DROP",
                ["chain FORWARD of iptables-nft drops", "from pods of 10.5.7.0/24 to pods of 10.5.9.0/24", "-j DROP"],
                "iptables-nft -F",
            ),
            (
                "nft 'table ip c { chain pre { type filter hook prerouting priority raw; iifname cni0 notrack; }; \
                 chain fw { type filter hook forward priority -10; ct state untracked drop; }; }'",
                ["chain ip c fw of nftables drops", "from pods of 10.5.7.0/24 to pods of 10.5.9.0/24", "ct state"],
                "nft delete table ip c",
            ),
            (
                "iptables-nft -t raw -A PREROUTING -i flannel.1 -j DROP",
                ["chain ip raw PREROUTING of nftables drops", "from pods of 10.5.9.0/24", "iifname flannel.1"],
                "iptables-nft -t raw -F",
            ),
        ] {
            shell(provoke);
            let text = only_text(&sources, "firewall", &words);
            let other = NodeSources { backend: "host-gw".to_owned(), peers: Vec::new(), ..sources.clone() };
            only_text(&other, "firewall", &words);
            let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
            shell(remedy);
            assert_eq!(doctor_with(&sources, "firewall"), [], "after {remedy}");
            shell(end);
            shell("iptables-nft -F; nft flush ruleset");
        }
    });
}

#[test]
fn rules_that_drop_forwarded_packets_of_some_pods_only_are_no_finding() {
    in_namespace(|file| {
        let (sources, _pods) = with_pods(file);
        let fw = "chain fw { type filter hook forward priority -10;";
        for chain in [
            format!("set bl {{ type ipv4_addr; elements = {{ 10.5.9.7, 10.5.7.254 }}; }}; {fw} ip saddr @bl drop; }};"),
            format!(
                "set bl {{ type ipv4_addr; flags interval; elements = {{ 10.5.9.0/25 }}; }}; {fw} ip saddr @bl drop; }};"
            ),
            format!("{fw} ip daddr 10.5.9.254 drop; ip saddr 10.5.7.1 drop; ip saddr 10.5.9.1-10.5.9.9 drop; }};"),
            format!("{fw} policy drop; ip saddr 10.5.0.0/16 accept; }};"),
            format!("{fw} policy drop; ip saddr 10.5.9.3 accept; ip daddr 10.5.9.3 accept; }};"),
            format!("{fw} tcp dport 22 drop; ct state invalid drop; }};"),
        ] {
            shell(&format!("nft 'table ip c {{ {chain} }}'"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "{chain}");
            shell("nft delete table ip c");
        }
        for rule in ["-s 10.5.9.3 -j DROP", "-d 10.5.7.0/25 -j DROP", "-p tcp -j DROP", "! -s 10.5.0.0/16 -j DROP"] {
            shell(&format!("iptables-nft -A FORWARD {rule}"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "{rule}");
            shell("iptables-nft -F");
        }
    });
}

#[test]
fn a_rate_limit_that_drops_packets_of_the_tunnel_is_named_while_a_peer_is_not_reached() {
    in_namespace(|file| {
        let sources = with_peer(file);
        let unreachable = NodeSources { unreachable: 1, ..sources.clone() };
        for rule in [
            "udp dport 8472 limit rate over 2/second burst 2 packets drop",
            "meter m { ip saddr limit rate over 2/second } drop",
        ] {
            shell(&format!("nft 'table inet f {{ chain in {{ type filter hook input priority 0; {rule}; }}; }}'"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "such a rule may be wanted");
            only_text(&unreachable, "firewall", &["chain inet f in of nftables", "beyond a rate", "from 192.0.2.9"]);
            shell("nft delete table inet f");
        }
        // Only some of the packets are meant, which is not known.
        shell(
            "nft 'table inet f { chain in { type filter hook input priority 0; udp sport 53 limit rate over 2/second drop; }; }'",
        );
        assert_eq!(doctor_with(&unreachable, "firewall"), []);
    });
}

#[test]
fn rules_that_drop_packets_of_the_tunnel_at_random_are_named_while_packets_are_lost() {
    in_namespace(|file| {
        let sources = with_peer(file);
        let peer = LossyPeer { name: "10.5.9.0/24 (192.0.2.9)".to_owned(), lost: 3, asked: 8 };
        let lossy = NodeSources { lossy: vec![peer], ..sources.clone() };
        let clean = "iptables-nft -F; iptables-nft -t raw -F; iptables-legacy -F; nft flush ruleset";
        for (provoke, chain) in [
            (
                "nft 'table inet f { chain in { type filter hook input priority 0; udp dport 8472 numgen random mod 10 < 3 drop; }; }'",
                "inet f in of nftables",
            ),
            (
                "iptables-nft -A INPUT -p udp --dport 8472 -m statistic --mode random --probability 0.3 -j DROP",
                "INPUT of iptables-nft",
            ),
            (
                "iptables-legacy -A OUTPUT -p udp --dport 8472 -m hashlimit --hashlimit-above 9/sec --hashlimit-name a -j DROP",
                "OUTPUT of iptables-legacy",
            ),
            ("iptables-nft -A INPUT -d 192.0.2.1 -m limit --limit 9/sec -j DROP", "INPUT of iptables-nft"),
            // Up to a rate they are accepted, and then dropped.
            (
                "iptables-nft -A INPUT -p udp -m limit --limit 9/sec -j ACCEPT && iptables-nft -A INPUT -p udp --dport 8472 -j DROP",
                "INPUT of iptables-nft",
            ),
            (
                "nft 'table inet f { chain in { type filter hook input priority 0; udp dport 8472 limit rate 9/second accept; udp dport 8472 drop; }; }'",
                "inet f in of nftables",
            ),
            (
                "iptables-nft -t raw -A PREROUTING -p udp --dport 8472 -m statistic --mode nth --every 3 --packet 0 -j DROP",
                "ip raw PREROUTING of nftables",
            ),
        ] {
            shell(provoke);
            assert_eq!(doctor_with(&sources, "firewall"), [], "all packets arrive: {provoke}");
            only_text(&lossy, "firewall", &["UDP port 8472", &format!("chain {chain} drops"), "or at random"]);
            shell(clean);
        }
        // Only some of the packets are meant, or others, or all of them pass.
        for provoke in [
            "iptables-nft -A INPUT -p udp -m limit --limit 9/sec -j ACCEPT",
            "nft 'table inet f { chain in { type filter hook input priority 0; udp sport 53 numgen random mod 10 < 3 drop; }; }'",
            "nft 'table inet f { chain in { type filter hook input priority 0; numgen random mod 10 < 3 udp dport 53 drop; }; }'",
            "iptables-nft -A INPUT -p udp --dport 53 -m statistic --mode random --probability 0.3 -j DROP",
        ] {
            shell(provoke);
            assert_eq!(doctor_with(&lossy, "firewall"), [], "{provoke}");
            shell(clean);
        }
    });
}

#[test]
fn rules_that_drop_packets_of_other_tunnels_than_vxlan_are_found() {
    in_namespace(|file| {
        let sources = with_peer(file);
        let with = |backend: &str, tunnel_port| {
            let backend = backend.to_owned();
            NodeSources { backend, tunnel_port, ..sources.clone() }
        };
        let (udp, wireguard, ipip) = (with("udp", Some(8285)), with("wireguard", Some(51820)), with("ipip", None));
        for (node, iptables, nft, packets) in [
            (&udp, "-p udp --dport 8285", "udp dport 8285", "UDP port 8285"),
            (&wireguard, "-p udp --dport 51820", "udp dport 51820", "UDP port 51820"),
            (&ipip, "-p 4", "ip protocol 4", "IP protocol 4"),
        ] {
            for (program, chain, whose) in
                [("iptables-nft", "INPUT", "from 192.0.2.9"), ("iptables-legacy", "OUTPUT", "to 192.0.2.9")]
            {
                let provoke = format!("{program} -A {chain} {iptables} -j DROP");
                is_found_and_helped(node, &provoke, &[whose, packets, &format!("{chain} of {program}")], "true");
            }
            let chain = format!("chain in {{ type filter hook input priority 0; {nft} drop; }};");
            let provoke = format!("nft 'table ip g {{ {chain} }}'");
            is_found_and_helped(node, &provoke, &["from 192.0.2.9", packets, "ip g in of"], "nft delete table ip g");
        }
        // Protocol 94 is what /etc/protocols calls ipip.
        shell("iptables-nft -A INPUT -p udp --dport 8472 -j DROP && iptables-nft -A INPUT -p 94 -j DROP");
        for node in [&udp, &wireguard, &ipip] {
            assert_eq!(doctor_with(node, "firewall"), [], "{}: packets of others", node.backend);
        }
        shell("iptables-nft -P INPUT DROP");
        assert_eq!(doctor_with(&with("udp", None), "firewall"), [], "its tunnel does not run");
    });
}
