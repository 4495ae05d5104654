// SPDX-License-Identifier: Apache-2.0
//! Rules of firewalls that drop packets of the tunnel, and rules of kube-proxy that do not fit.

use std::fs;
use std::path::Path;

use weft_doctor::node::NodeSources;

use super::{ENV, OtherNamespace, doctor, doctor_with, in_namespace, ip, only_finding, only_text, shell, sources};

/// A node with an uplink and a peer.
fn with_peer(file: &Path) -> NodeSources {
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
            (nft, ["inet f in of nftables", "from 192.0.2.9", "policy drop"], "nft delete table inet f"),
            (
                "nft add table ip g && nft 'add chain ip g out { type filter hook output priority 0; }' && nft add rule ip g out ip daddr 192.0.2.9 drop",
                ["ip g out of nftables", "to 192.0.2.9", "drop"],
                "nft delete table ip g",
            ),
        ] {
            shell(provoke);
            let text = only_text(&sources, "firewall", &words);
            let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
            shell(remedy);
            assert_eq!(doctor_with(&sources, "firewall"), [], "after {remedy}");
            shell(end);
            for program in ["iptables-nft", "iptables-legacy"] {
                shell(&format!("{program} -F && {program} -t raw -F"));
            }
        }
    });
}

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
        shell("iptables-nft -P INPUT DROP");
        let other = NodeSources { backend: "host-gw".to_owned(), ..sources.clone() };
        assert_eq!(doctor_with(&other, "firewall"), [], "this backend has no tunnel");
        assert_eq!(doctor_with(&NodeSources { peers: Vec::new(), ..sources }, "firewall"), [], "no peer is known");
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
        only_text(&sources(file), "services", &["1 ports of cni0", "veth0a1b2c3d", "hairpinMode"]);
        ip("link set cni0 promisc on");
        assert_eq!(doctor(file, "services"), [], "this works, too");
        ip("link set cni0 promisc off");
        shell("bridge link set dev veth0a1b2c3d hairpin on");
        assert_eq!(doctor(file, "services"), []);
        process.kill().unwrap();
        process.wait().unwrap();
    });
}
