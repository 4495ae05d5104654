// SPDX-License-Identifier: Apache-2.0
//! Networks that others made: the NAT of a hypervisor, DHCP clients that take every link, and networks of pods that are not weft's.

use std::fs;
use std::path::Path;

use weft_doctor::sources::{AgentAnswer, AgentProblem, NodeSources};

use super::memory::Group;
use super::{
    ENV, OtherNamespace, doctor, doctor_with, in_namespace, ip, named_process, only_finding, only_text, sources,
    two_pods,
};

/// Returns what an agent says that publishes this address, has a problem, and knows another node.
fn published(file: &Path, address: &str) -> NodeSources {
    let agent = AgentAnswer::Problems(vec![AgentProblem::new("packets do not reach 1 of 1 peers")]);
    NodeSources { published: vec![address.parse().unwrap()], agent, has_peers: true, ..sources(file) }
}

#[test]
fn an_address_behind_the_nat_of_a_hypervisor_is_found_if_the_node_is_not_alone() {
    in_namespace(|file| {
        for line in ["link add eth0 up type veth peer name far0", "link set far0 up", "addr add 10.0.2.15/24 dev eth0"]
        {
            ip(line);
        }
        ip("route add default via 10.0.2.2");
        let sources = published(file, "10.0.2.15");
        assert_eq!(doctor_with(&sources, "uplink"), [], "the gateway is not known");
        ip("neigh replace 10.0.2.2 lladdr 02:00:00:00:00:02 nud permanent dev eth0");
        assert_eq!(doctor_with(&sources, "uplink"), [], "another gateway");
        for mac in ["52:54:00:12:35:02", "52:55:0a:00:02:02"] {
            ip(&format!("neigh replace 10.0.2.2 lladdr {mac} nud permanent dev eth0"));
            only_text(&sources, "uplink", &["10.0.2.15 of eth0", "VirtualBox", "--iface", "private_network"]);
        }
        let alone = NodeSources { has_peers: false, ..sources.clone() };
        assert_eq!(doctor_with(&alone, "uplink"), [], "a single node needs no other address, whatever else is wrong");
        let sound = NodeSources { agent: AgentAnswer::Problems(Vec::new()), ..sources.clone() };
        assert_eq!(doctor_with(&sound, "uplink"), [], "the nodes reach each other");
        assert_eq!(doctor_with(&published(file, "192.168.56.2"), "uplink"), [], "another address is published");
    });
}

#[test]
fn links_of_pods_that_a_dhcp_client_takes_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let _pods = two_pods();
        // As the DNS server of a node has it.
        ip("addr add 169.254.20.10/32 dev cni0");
        assert_eq!(doctor(file, "managed"), []);
        ip("addr add 169.254.33.4/16 dev veth0a1b2c3d");
        let remedy = only_finding(file, "managed", &["another program gave veth0a1b2c3d the address 169.254.33.4"]);
        ip("addr add 169.254.33.5/16 dev veth0a1b2c3e");
        let mut process = named_process(file, "dhcpcd");
        only_finding(file, "managed", &["dhcpcd gave veth0a1b2c3d", "to 1 more link"]);
        process.kill().unwrap();
        process.wait().unwrap();
        for (link, last) in [("veth0a1b2c3d", 4), ("veth0a1b2c3e", 5)] {
            assert!(remedy.contains("ip addr del 169.254.33.4/16 dev veth0a1b2c3d"), "{remedy}");
            ip(&format!("addr del 169.254.33.{last}/16 dev {link}"));
        }
        ip("link add eth0 up type veth peer name far0");
        ip("addr add 169.254.33.6/16 dev eth0");
        assert_eq!(doctor(file, "managed"), [], "the uplink is not ours");
    });
}

#[test]
fn a_pod_of_the_kubelet_in_another_network_is_found_and_a_container_of_another_program_is_not() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let group = Group::new(&format!("kubepods-weft-{}", std::process::id()));
        let _pods = two_pods();
        let other = OtherNamespace::new();
        ip("link add cni-podman0 up type bridge");
        ip("addr add 10.88.0.1/16 dev cni-podman0");
        ip(&format!("link add veth9 up type veth peer name eth0 netns {}", other.pid()));
        ip("link set veth9 master cni-podman0");
        other.run("ip addr add 10.88.0.7/16 dev eth0");
        assert_eq!(doctor(file, "cni"), [], "a container of podman");
        group.add(other.pid());
        let remedy =
            only_finding(file, "cni", &["1 pod is connected to another network", "(10.88.0.7 over cni-podman0)"]);
        assert!(remedy.contains("status.podIP=10.88.0.7,spec.nodeName=NODE"), "{remedy}");
        // A second network of a pod.
        ip(&format!("link add veth0a1b2c3f up type veth peer name net1 netns {}", other.pid()));
        ip("link set veth0a1b2c3f master cni0");
        assert_eq!(doctor(file, "cni"), []);
        ip("link del veth0a1b2c3f");
        assert_eq!(doctor(file, "cni").len(), 1);
        ip("addr add 10.5.7.129/25 dev cni-podman0");
        assert_eq!(doctor(file, "cni"), [], "another name for the bridge of this node");
        drop(other);
    });
}
