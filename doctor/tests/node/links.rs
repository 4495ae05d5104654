// SPDX-License-Identifier: Apache-2.0
//! Faults of links, addresses, routes and sysctls.

use std::fs;
use std::path::Path;

use weft_doctor::explain::facts::{Agent, Packet};
use weft_doctor::explain::{self, State};
use weft_doctor::sources::NodeSources;

use super::{
    ENV, ENV_V6, OtherNamespace, doctor, doctor_with, in_namespace, ip, only_finding, only_text, shell, shell_output,
    sources, until,
};

#[test]
fn a_bridge_or_links_of_pods_that_are_down_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let pods = OtherNamespace::new();
        ip("link add cni0 mtu 1450 type bridge");
        assert_eq!(doctor(file, "bridge"), [], "the bridge plugin sets it up with the first pod");
        ip(&format!("link add veth0a1b2c3d mtu 1450 up type veth peer name eth0 netns {}", pods.pid()));
        ip("link set veth0a1b2c3d master cni0");
        ip("addr add 10.5.7.1/24 dev cni0");
        let remedy = only_finding(file, "bridge", &["cni0 is down", "the 1 pod that it connects has no network"]);
        shell(remedy.split(';').next().unwrap());
        assert_eq!(doctor(file, "bridge"), []);
        ip("link set veth0a1b2c3d down");
        let remedy = only_finding(file, "bridge", &["1 link of a pod is down: veth0a1b2c3d"]);
        shell(remedy.split(',').next().unwrap());
        assert_eq!(doctor(file, "bridge"), []);
        ip("addr flush dev cni0");
        let remedy = only_finding(file, "bridge", &["no address in 10.5.7.0/24", "gateway"]);
        assert_eq!(remedy, "ip addr add 10.5.7.1/24 dev cni0");
        shell(&remedy);
        assert_eq!(doctor(file, "bridge"), []);
    });
}

#[test]
fn pods_that_lost_their_bridge_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let pods = OtherNamespace::new();
        ip("link add cni0 up type bridge");
        ip("addr add 10.5.7.1/24 dev cni0");
        ip(&format!("link add veth0a1b2c3d up type veth peer name eth0 netns {}", pods.pid()));
        ip("link set veth0a1b2c3d master cni0");
        pods.run("ip link set eth0 up");
        // Only a link that is up and is no port of a bridge has it.
        let has_own_route = || !shell_output("ip -6 route show fe80::/64 dev veth0a1b2c3d").is_empty();
        until_it_forwards();
        assert_eq!(doctor(file, "bridge"), []);
        ip("link set veth0a1b2c3d nomaster");
        until("the kernel to give the link a route of its own", has_own_route);
        only_finding(file, "bridge", &["1 veth pair of a pod is", "veth0a1b2c3d", "no bridge"]);
        ip("link set veth0a1b2c3d master cni0");
        until_it_forwards();
        assert_eq!(doctor(file, "bridge"), []);
        ip("link del cni0");
        let remedy = only_finding(file, "bridge", &["1 veth pair of a pod is", "veth0a1b2c3d", "no bridge"]);
        assert!(remedy.contains("delete the pods"), "{remedy}");
        ip("route add 10.5.7.9/32 dev veth0a1b2c3d");
        assert_eq!(doctor(file, "bridge"), [], "a routed pod needs no bridge");
        ip("link del veth0a1b2c3d");
        ip("link add veth7f00aaf type veth peer name eth1");
        assert_eq!(doctor(file, "bridge"), [], "another program made this one");
        ip("link add veth0a1b2c3d type veth peer name eth2");
        assert_eq!(doctor(file, "bridge"), [], "its other end is in no pod");
    });
}

/// Writes the subnet file, and makes cni0 with a pod, whose veth pair is up at both ends. Returns the namespace of the pod.
fn bridge_with_a_pod(file: &Path) -> OtherNamespace {
    fs::write(file, ENV).unwrap();
    let pods = OtherNamespace::new();
    ip("link add cni0 mtu 1450 up type bridge");
    ip("addr add 10.5.7.1/24 dev cni0");
    ip(&format!("link add veth0a1b2c3d mtu 1450 up type veth peer name eth0 netns {}", pods.pid()));
    pods.run("ip link set eth0 up");
    ip("link set veth0a1b2c3d master cni0");
    until_it_forwards();
    pods
}

/// Waits until the bridge forwards packets of the pod, which begins a moment after both ends are up.
fn until_it_forwards() {
    until("the port to forward", || shell_output("bridge link show dev veth0a1b2c3d").contains("state forwarding"));
}

#[test]
fn a_pod_in_another_bridge_is_found_unless_the_other_bridge_is_an_addition() {
    in_namespace(|file| {
        let pods = bridge_with_a_pod(file);
        ip("link add br9 up type bridge");
        ip(&format!("link add veth5e5e5e5e up type veth peer name net1 netns {}", pods.pid()));
        ip("link set veth5e5e5e5e master br9");
        assert_eq!(doctor(file, "bridge"), [], "a second network of the same pod");
        ip("link del veth5e5e5e5e");
        let container = OtherNamespace::new();
        ip("link add podman1 up type bridge");
        ip("addr add 10.88.0.1/16 dev podman1");
        ip(&format!("link add veth5e5e5e5e up type veth peer name eth0 netns {}", container.pid()));
        ip("link set veth5e5e5e5e master podman1");
        assert_eq!(doctor(file, "bridge"), [], "the gateway of a container of another program");
        ip("link set veth0a1b2c3d master br9");
        let remedy = only_finding(file, "bridge", &["veth0a1b2c3d leads to a pod and is in br9"]);
        shell(&remedy);
        assert_eq!(doctor(file, "bridge"), []);
    });
}

#[test]
fn a_port_of_the_bridge_that_passes_no_packets_is_found() {
    in_namespace(|file| {
        let pods = bridge_with_a_pod(file);
        assert_eq!(doctor(file, "bridge"), []);
        pods.run("ip link set eth0 down");
        assert_eq!(doctor(file, "bridge"), [], "the pod does not use its link yet");
        pods.run("ip link set eth0 up");
        until_it_forwards();
        for wrong in ["state 0", "learning off flood off", "locked on"] {
            shell(&format!("bridge link set dev veth0a1b2c3d {wrong}"));
            let remedy = only_finding(file, "bridge", &["veth0a1b2c3d", "cni0"]);
            shell(remedy.split(';').next().unwrap());
            assert_eq!(doctor(file, "bridge"), [], "after {remedy}");
        }
        shell("bridge link set dev veth0a1b2c3d learning off");
        assert_eq!(doctor(file, "bridge"), [], "packets to the pod go to all ports");
        shell("bridge link set dev veth0a1b2c3d learning on");
        ip("link set cni0 type bridge stp_state 1");
        assert_eq!(doctor(file, "bridge"), [], "the port stays as it is");
        pods.run("ip link set eth0 down");
        pods.run("ip link set eth0 up");
        until("STP to stop the port", || !doctor(file, "bridge").is_empty());
        let remedy = only_finding(file, "bridge", &["veth0a1b2c3d", "by STP", "cni0"]);
        shell(remedy.split(';').next().unwrap());
        assert_eq!(doctor(file, "bridge"), []);
    });
}

#[test]
fn a_subnet_to_which_no_route_leads_over_the_bridge_is_found_and_the_remedy_makes_it() {
    in_namespace(|file| {
        let pods = bridge_with_a_pod(file);
        fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
        ip("addr add fd00:5:0:7::1/64 dev cni0 nodad");
        for (route, remedy) in [
            ("route del 10.5.7.0/24 dev cni0", "ip route replace 10.5.7.0/24 dev cni0"),
            ("-6 route del fd00:5:0:7::/64 dev cni0", "ip -6 route replace fd00:5:0:7::/64 dev cni0"),
        ] {
            assert_eq!(doctor(file, "bridge"), []);
            ip(route);
            let found = only_finding(file, "bridge", &["no route leads to ", "over cni0 although it has"]);
            assert!(found.starts_with(remedy), "{found}");
            shell(&found);
        }
        assert_eq!(doctor(file, "bridge"), []);
        // The host's end of a routed pod.
        ip(&format!("link add veth0a1b2c3e up type veth peer name eth1 netns {}", pods.pid()));
        ip("route add 10.5.7.9/32 dev veth0a1b2c3e");
        for check in ["bridge", "network"] {
            assert_eq!(doctor(file, check), [], "{check}");
        }
        ip("route del 10.5.7.0/24 dev cni0");
        shell(&only_finding(file, "bridge", &["no route leads to 10.5.7.0/24 over cni0 although it has 10.5.7.1"]));
        for wrong in ["10.5.7.1/32", "10.5.7.1/25", "10.5.7.1/16"] {
            ip("-4 addr flush dev cni0");
            ip(&format!("addr add {wrong} dev cni0"));
            let remedy = only_finding(file, "bridge", &[wrong, "the subnet of this node is 10.5.7.0/24"]);
            shell(&remedy);
            assert_eq!(doctor(file, "bridge"), [], "after {remedy}");
        }
    });
}

#[test]
fn a_route_that_leads_a_part_of_the_own_subnet_away_is_found() {
    in_namespace(|file| {
        let _pods = bridge_with_a_pod(file);
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "link add eth9 up type bridge",
            "route add 10.5.7.9/32 dev eth0 proto static",
            "route add 10.5.7.10/32 dev eth9 proto static",
        ] {
            ip(line);
        }
        assert_eq!(doctor(file, "network"), [], "these links may lead to pods");
        ip("route add 10.5.7.128/25 via 192.0.2.9 proto static");
        let words = ["10.5.7.128/25 over eth0", "subnet 10.5.7.0/24 of this node", "protocol static"];
        shell(only_finding(file, "network", &words).split(';').next().unwrap());
        assert_eq!(doctor(file, "network"), []);
        ip("route add default via 192.0.2.9");
        shell(only_finding(file, "network", &["10.5.7.9/32 over eth0"]).split(';').next().unwrap());
        assert_eq!(doctor(file, "network"), []);
    });
}

#[test]
fn a_bridge_whose_mtu_is_smaller_than_that_of_its_pods_is_found() {
    in_namespace(|file| {
        let _pods = bridge_with_a_pod(file);
        assert_eq!(doctor(file, "mtu"), []);
        ip("link set cni0 mtu 1300");
        shell(&only_finding(file, "mtu", &["cni0 has MTU 1300", "1450", "veth0a1b2c3d"]));
        assert_eq!(doctor(file, "mtu"), []);
        ip("link set veth0a1b2c3d mtu 1400");
        ip("link set cni0 mtu 1400");
        assert_eq!(doctor(file, "mtu"), [], "the configuration of the bridge plugin has a smaller MTU for all");
    });
}

#[test]
fn arp_that_is_off_is_found() {
    in_namespace(|file| {
        let _pods = bridge_with_a_pod(file);
        for line in [
            "link add eth0.7 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0.7",
            "route add default via 192.0.2.9",
        ] {
            ip(line);
        }
        let sources = sources(file);
        assert_eq!(doctor_with(&sources, "uplink"), []);
        ip("link set cni0 arp off");
        shell(only_text(&sources, "uplink", &["cni0", "NOARP"]).lines().nth(1).unwrap());
        assert_eq!(doctor_with(&sources, "uplink"), []);
        ip("link set eth0.7 arp off");
        assert_eq!(doctor_with(&sources, "uplink"), [], "all peers are reached, by permanent neighbours");
        let sources = NodeSources { unreachable: 1, ..sources };
        shell(only_text(&sources, "uplink", &["eth0.7", "NOARP"]).lines().nth(1).unwrap());
        assert_eq!(doctor_with(&sources, "uplink"), []);
        for link in ["eth0.7", "cni0"] {
            fs::write(format!("/proc/sys/net/ipv4/conf/{link}/arp_ignore"), "8").unwrap();
            let text = only_text(&sources, "uplink", &[link, "arp_ignore"]);
            shell(text.lines().nth(1).unwrap().split(';').next().unwrap());
            assert_eq!(doctor_with(&sources, "uplink"), []);
        }
        fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "1").unwrap();
        assert_eq!(doctor_with(&sources, "uplink"), [], "as for virtual servers");
        fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "8").unwrap();
        only_text(&sources, "uplink", &["all", "arp_ignore"]);
    });
}

#[test]
fn a_chain_that_drops_all_arp_packets_is_found() {
    in_namespace(|file| {
        assert_eq!(doctor(file, "uplink"), []);
        shell("nft 'table arp filter { chain INPUT { type filter hook input priority 0; policy drop; }; }'");
        let words = ["chain arp filter INPUT drops ARP (policy drop)", "gets neither requests nor answers"];
        shell(only_finding(file, "uplink", &words).split("; then").next().unwrap());
        assert_eq!(doctor(file, "uplink"), []);
        shell("nft add rule arp filter INPUT counter drop");
        let remedy = only_finding(file, "uplink", &["chain arp filter INPUT drops ARP (drop)"]);
        assert!(remedy.contains("`nft -a list chain arp filter INPUT`"), "{remedy}");
        shell("nft insert rule arp filter INPUT arp saddr ip 192.0.2.9 accept");
        assert_eq!(doctor(file, "uplink"), [], "somebody chose which hosts may ask");
    });
}

#[test]
fn two_links_with_the_subnet_of_the_node_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add docker0 type bridge");
        ip("addr add 10.5.7.1/24 dev docker0");
        assert_eq!(doctor(file, "bridge"), [], "Docker may have the subnet alone");
        ip("link add cni0 type bridge");
        ip("addr add 10.5.7.1/24 dev cni0");
        only_text(&sources(file), "bridge", &["cni0 and docker0", "10.5.7.0/24", "give docker0 another"]);
        ip("link del docker0");
        let other = OtherNamespace::new();
        ip(&format!("link add eth1 type veth peer name eth0 netns {}", other.pid()));
        ip("addr add 10.5.7.250/24 dev eth1");
        only_text(&sources(file), "bridge", &["cni0 and eth1", "10.5.7.0/24", "give eth1 another"]);
    });
}

/// The CNI plugin ptp gives the host's end of every pod the address of the gateway.
#[test]
fn links_of_pods_that_have_the_address_of_the_gateway_are_no_finding() {
    in_namespace(|file| {
        fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
        let pods = OtherNamespace::new();
        for (number, name) in ["veth0a1b2c3d", "veth0a1b2c3e"].into_iter().enumerate() {
            ip(&format!("link add {name} up type veth peer name a{number} netns {}", pods.pid()));
            ip(&format!("addr add 10.5.7.1/32 dev {name}"));
            ip(&format!("addr add fd00:5:0:7::1/128 dev {name} nodad"));
            ip(&format!("route add 10.5.7.{}/32 dev {name}", number + 2));
        }
        assert_eq!(doctor(file, "bridge"), []);
    });
}

#[test]
fn pods_with_an_earlier_and_larger_mtu_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let pods = OtherNamespace::new();
        ip("link add cni0 mtu 1450 type bridge");
        ip(&format!("link add veth0a1b2c3d mtu 1500 type veth peer name eth0 netns {}", pods.pid()));
        assert_eq!(doctor(file, "mtu"), [], "no pod of ours");
        ip("link set veth0a1b2c3d master cni0");
        ip("link set cni0 mtu 1450");
        only_text(&sources(file), "mtu", &["1 pod has", "1500, such as veth0a1b2c3d", "1450", "delete these pods"]);
        ip("link set veth0a1b2c3d mtu 1450");
        assert_eq!(doctor(file, "mtu"), []);
    });
}

#[test]
fn forwarding_that_is_off_is_found_for_the_node_and_for_single_links() {
    in_namespace(|file| {
        let set = |name: &str, value: &str| fs::write(format!("/proc/sys/net/{name}"), value).unwrap();
        ip("link add cni0 type bridge");
        ip("link add eth7 type bridge");
        set("ipv4/ip_forward", "0");
        assert_eq!(doctor(file, "forwarding"), [], "before the first start");
        fs::write(file, ENV).unwrap();
        let remedy = only_finding(file, "forwarding", &["net.ipv4.ip_forward is 0"]);
        shell(remedy.split(';').next().unwrap());
        assert_eq!(doctor(file, "forwarding"), []);
        set("ipv4/conf/eth7/forwarding", "0");
        assert_eq!(doctor(file, "forwarding"), [], "no packet of a pod arrives by this link");
        set("ipv4/conf/cni0/forwarding", "0");
        let remedy = only_finding(file, "forwarding", &["net/ipv4/conf/cni0/forwarding is 0", "arrive by cni0"]);
        shell(remedy.split(';').next().unwrap());
        set("ipv4/conf/default/forwarding", "0");
        only_finding(file, "forwarding", &["default/forwarding is 0", "links that are made later"]);
        set("ipv4/conf/default/forwarding", "1");
        set("ipv6/conf/all/forwarding", "0");
        fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
        let remedy = only_finding(file, "forwarding", &["net.ipv6.conf.all.forwarding is 0"]);
        assert!(remedy.starts_with("sysctl -w net.ipv6.conf.all.forwarding=1;"), "{remedy}");
        // A router advertisement makes such a route. Forwarding ends it, unless accept_ra is 2.
        ip("link add eth8 up type bridge");
        set("ipv6/conf/eth8/accept_ra", "1");
        ip("-6 route add default via fe80::9 dev eth8 proto ra expires 600");
        let remedy = only_finding(file, "forwarding", &["net.ipv6.conf.all.forwarding is 0"]);
        let command = "sysctl -w net/ipv6/conf/eth8/accept_ra=2 net.ipv6.conf.all.forwarding=1";
        assert_eq!(remedy.split(';').next(), Some(command));
        shell(command);
        assert_eq!(doctor(file, "forwarding"), []);
    });
}

#[test]
fn an_uplink_in_a_bridge_and_a_device_of_weft_in_a_bridge_are_found() {
    in_namespace(|file| {
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "route add default via 192.0.2.9",
            "link add br0 up type bridge",
        ] {
            ip(line);
        }
        assert_eq!(doctor(file, "uplink"), []);
        ip("link set eth0 master br0");
        let remedy = only_finding(file, "uplink", &["eth0 has an address or the default route", "br0 (bridge)"]);
        shell(remedy.split('`').nth(1).unwrap());
        assert_eq!(doctor(file, "uplink"), []);
        ip("link add flannel.1 type vxlan id 1 dstport 8472");
        ip("link set flannel.1 master br0");
        only_text(&sources(file), "uplink", &["flannel.1 is a part of br0", "ip link set flannel.1 nomaster"]);
    });
}

#[test]
fn filters_of_tc_are_found_only_if_peers_are_not_reached() {
    in_namespace(|file| {
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "route add default via 192.0.2.9",
        ] {
            ip(line);
        }
        let sources = sources(file);
        let lossy = NodeSources { unreachable: 2, ..sources.clone() };
        assert_eq!(doctor_with(&lossy, "traffic-control"), []);
        for kind in ["clsact", "ingress"] {
            shell(&format!("tc qdisc add dev eth0 {kind}"));
            assert_eq!(doctor_with(&sources, "traffic-control"), [], "all peers are reached");
            let text = only_text(
                &lossy,
                "traffic-control",
                &["do not reach 2 peers", "filters of tc on eth0", "tc filter show dev eth0 ingress"],
            );
            shell(text.rsplit("some): ").next().unwrap());
            assert_eq!(doctor_with(&lossy, "traffic-control"), [], "after the remedy");
        }
    });
}

#[test]
fn filters_and_rates_on_devices_of_weft_are_found_only_if_peers_are_not_reached() {
    in_namespace(|file| {
        let _pods = bridge_with_a_pod(file);
        ip("link add flannel.1 up type vxlan id 1 dstport 8472");
        let sources = sources(file);
        let lossy = NodeSources { unreachable: 1, ..sources.clone() };
        shell("tc qdisc add dev flannel.1 clsact");
        shell("tc filter add dev flannel.1 ingress protocol all u32 match u32 0 0 flowid 1:1");
        assert_eq!(doctor_with(&sources, "traffic-control"), []);
        let text = only_text(&lossy, "traffic-control", &["filters of tc on flannel.1"]);
        shell(text.rsplit("some): ").next().unwrap());
        // The CNI plugin bandwidth limits the rates of pods so.
        let tbf = "root tbf rate 10kbit burst 2kb latency 1ms";
        shell(&format!("tc qdisc add dev veth0a1b2c3d {tbf}"));
        assert_eq!(doctor_with(&lossy, "traffic-control"), [], "after the remedy, and with a limit for a pod");
        shell(&format!("tc qdisc add dev flannel.1 {tbf}"));
        assert_eq!(doctor_with(&sources, "traffic-control"), []);
        let text = only_text(&lossy, "traffic-control", &["tbf limits the rate of flannel.1 to 10000 bit/s"]);
        shell(text.lines().nth(1).unwrap().split(';').next().unwrap());
        shell("tc qdisc add dev flannel.1 root handle 1: htb");
        only_text(&lossy, "traffic-control", &["htb limits the rate of flannel.1 by classes"]);
        shell("tc qdisc replace dev flannel.1 root bfifo limit 1");
        only_text(&lossy, "traffic-control", &["bfifo limits the queue of flannel.1"]);
        shell("tc qdisc del dev flannel.1 root");
        assert_eq!(doctor_with(&lossy, "traffic-control"), []);
    });
}

#[test]
fn a_program_of_tc_at_a_link_of_pods_is_found_only_if_peers_are_not_reached() {
    in_namespace(|file| {
        let _pods = bridge_with_a_pod(file);
        let sources = sources(file);
        let lossy = NodeSources { unreachable: 1, ..sources.clone() };
        shell("tc qdisc add dev cni0 clsact");
        shell("tc filter add dev cni0 egress protocol all u32 match u32 0 0 flowid 1:1");
        assert_eq!(doctor_with(&lossy, "traffic-control"), [], "this filter drops nothing");
        shell("tc filter add dev cni0 ingress bpf direct-action bytecode '1,6 0 0 0,'");
        assert_eq!(doctor_with(&sources, "traffic-control"), []);
        let text =
            only_text(&lossy, "traffic-control", &["a program of tc", "on cni0", "tc filter show dev cni0 ingress"]);
        shell(text.rsplit("needs it: ").next().unwrap().split(';').next().unwrap());
        assert_eq!(doctor_with(&lossy, "traffic-control"), []);
    });
}

#[test]
fn an_ipv6_address_that_another_host_has_is_found() {
    in_namespace(|file| {
        let other = OtherNamespace::new();
        ip(&format!("link add eth0 up type veth peer name eth0 netns {}", other.pid()));
        other.run("ip link set eth0 up");
        other.run("ip addr add fd00:9::1/64 dev eth0 nodad");
        assert_eq!(doctor(file, "duplicate-address"), []);
        ip("addr add fd00:9::1/64 dev eth0");
        until("the kernel to find the other host", || !doctor(file, "duplicate-address").is_empty());
        only_text(&sources(file), "duplicate-address", &["fd00:9::1 of eth0", "dadfailed", "another address"]);
    });
}

#[test]
fn an_ipv4_address_that_another_host_has_is_found() {
    in_namespace(|file| {
        let other = OtherNamespace::new();
        ip(&format!("link add eth0 up type veth peer name eth0 netns {}", other.pid()));
        other.run("ip link set eth0 up address 02:00:00:00:00:0b");
        other.run("ip addr add 192.0.2.7/24 dev eth0");
        ip("addr add 192.0.2.1/24 dev eth0");
        ip("route add default via 192.0.2.7");
        assert_eq!(doctor(file, "duplicate-address"), []);
        other.run("ip addr add 192.0.2.1/24 dev eth0");
        until("the other host to answer", || !doctor(file, "duplicate-address").is_empty());
        let evidence = ["192.0.2.1, too", "eth0", "02:00:00:00:00:0b", "another address"];
        only_text(&sources(file), "duplicate-address", &evidence);
        other.run("ip addr del 192.0.2.1/24 dev eth0");
        assert_eq!(doctor(file, "duplicate-address"), []);
    });
}

#[test]
fn a_cloned_machine_with_the_mac_address_of_the_uplink_is_found() {
    in_namespace(|file| {
        let clone = OtherNamespace::new();
        ip(&format!("link add eth0 up address 02:00:00:00:00:0a type veth peer name eth0 netns {}", clone.pid()));
        ip("addr add 192.0.2.1/24 dev eth0");
        ip("route add default via 192.0.2.7");
        // An IPv6 address that is made from the MAC address would be a duplicate, too.
        clone.run("ip link set eth0 addrgenmode none");
        clone.run("ip link set eth0 up address 02:00:00:00:00:0b");
        clone.run("ip addr add 192.0.2.7/24 dev eth0");
        let ping = || clone.run("ping -q -c 1 -W 10 192.0.2.1");
        ping();
        assert_eq!(doctor(file, "duplicate-address"), [], "another host with a MAC address of its own");
        ip("addr add 192.0.2.2/24 dev eth0");
        ip("neigh replace 192.0.2.2 lladdr 02:00:00:00:00:0a dev eth0");
        ip("link add mac0 link eth0 up address 02:00:00:00:00:0c type macvlan mode bridge");
        ip("addr add 192.0.2.3/24 dev mac0");
        ip("neigh replace 192.0.2.3 lladdr 02:00:00:00:00:0c dev eth0");
        assert_eq!(doctor(file, "duplicate-address"), [], "a second address of this node, and a macvlan");
        ip("link del mac0");
        clone.run("ip link set eth0 address 02:00:00:00:00:0a");
        ping();
        let words = ["192.0.2.7 has the MAC address of this node's eth0 (02:00:00:00:00:0a)", "cloned machine"];
        let text = only_text(&sources(file), "duplicate-address", &words);
        clone.run("ip link set eth0 address 02:00:00:00:00:0b");
        shell(text.rsplit("then ").next().unwrap());
        assert_eq!(doctor(file, "duplicate-address"), [], "after the remedy of {text}");
    });
}

#[test]
fn a_second_link_of_this_host_on_the_lan_is_no_other_host() {
    in_namespace(|file| {
        let lan = OtherNamespace::new();
        lan.run("ip link add br0 up type bridge");
        for link in ["eth0", "eth1"] {
            ip(&format!("link add {link} up type veth peer name {link} netns {}", lan.pid()));
            lan.run(&format!("ip link set {link} up master br0"));
        }
        ip("addr add 192.0.2.1/24 dev eth0");
        ip("route add default via 192.0.2.7");
        // The kernel answers on each link for all addresses of this host.
        assert_eq!(doctor(file, "duplicate-address"), []);
    });
}

#[test]
fn routes_and_policy_rules_that_refuse_packets_to_pods_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "route add 10.5.9.0/24 via 192.0.2.9 proto 90",
        ] {
            ip(line);
        }
        ip("route add unreachable 10.5.0.0/16 proto 90 metric 900");
        ip("route add blackhole 10.5.0.0/17 proto static");
        ip("route add blackhole 10.5.7.0/24 proto bird");
        assert_eq!(doctor(file, "network"), [], "routes to pods are more specific");
        ip("route add blackhole 10.5.9.128/25 proto bird");
        let text = only_text(&sources(file), "network", &["bird", "10.5.9.128/25", "of another node", "ip route del"]);
        assert!(text.contains("`ip route show 10.5.9.128/25`"), "{text}");
        ip("route del blackhole 10.5.9.128/25");
        // This one refuses packets to the first address of the subnet, too, and no policy rule does that.
        ip("route add blackhole 10.5.9.0/25 proto bird");
        only_text(&sources(file), "network", &["bird", "10.5.9.0/25", "of another node"]);
        ip("route del blackhole 10.5.9.0/25");
        ip("route add prohibit 10.5.7.64/26 proto static");
        only_finding(file, "network", &["10.5.7.64/26", "of this node"]);
        ip("route del prohibit 10.5.7.64/26");
        ip("rule add pref 100 to 10.5.9.0/24 prohibit");
        only_text(&sources(file), "network", &["a policy rule refuses packets", "10.5.9.0/24", "`ip rule`"]);
        ip("rule del pref 100");
        assert_eq!(doctor(file, "network"), []);
    });
}

#[test]
fn a_policy_of_ipsec_that_takes_packets_of_pods_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "route add 10.5.9.0/24 via 192.0.2.9 proto 90",
            "xfrm policy add dir out src 0.0.0.0/0 dst 10.6.0.0/16 action block",
            "xfrm policy add dir out src 192.0.2.1 dst 192.0.2.9 tmpl proto esp mode transport",
            "xfrm policy add dir out src 10.5.0.0/16 dst 10.5.0.0/16 proto udp dport 500 action block",
        ] {
            ip(line);
        }
        assert_eq!(doctor(file, "ipsec"), [], "other destinations, the packets of the tunnel, and one port");
        let vpn = "dir out src 0.0.0.0/0 dst 0.0.0.0/0";
        ip(&format!("xfrm policy add {vpn} priority 9 tmpl src 192.0.2.1 dst 192.0.2.8 proto esp mode tunnel"));
        let evidence = ["to 10.5.9.0/24", "src 0.0.0.0/0 dst 0.0.0.0/0 dir out priority 9", "`ip xfrm policy`"];
        only_text(&sources(file), "ipsec", &evidence);
        ip("xfrm policy add dir out src 10.5.0.0/16 dst 10.5.0.0/16 priority 8");
        assert_eq!(doctor(file, "ipsec"), [], "the packets pass before");
        ip("xfrm policy add dir fwd src 10.5.9.0/24 dst 10.5.0.0/16 action block");
        only_finding(file, "ipsec", &["from 10.5.9.0/24", "dir fwd priority 0"]);
    });
}

/// nm-cloud-setup, a part of images for clouds, makes such a rule.
#[test]
fn a_policy_rule_that_leads_answers_to_pods_of_this_node_away_is_found() {
    in_namespace(|file| {
        fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
        let node = NodeSources {
            published: vec!["192.0.2.1".parse().unwrap(), "fd00:9::1".parse().unwrap()],
            ..sources(file)
        };
        for line in [
            "link add cni0 up type bridge",
            "addr add 10.5.7.1/24 dev cni0",
            "addr add fd00:5:0:7::1/64 dev cni0 nodad",
            "link add port0 up master cni0 type veth peer name pod0",
            "link set pod0 up",
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "addr add fd00:9::1/64 dev eth0 nodad",
        ] {
            ip(line);
        }
        let explained = |from: &str, to: &str| {
            let packet = Packet { from: from.parse().unwrap(), to: to.parse().unwrap(), proto: None, port: None };
            let facts = explain::read(packet, file, Agent::Silent("no agent answers".to_owned())).unwrap();
            explain::decide(&facts, &[], Vec::new())
        };
        for (family, own, pod, subnet, gateway) in [
            ("-4", "192.0.2.1", "10.5.7.2", "10.5.7.0/24", "192.0.2.9"),
            ("-6", "fd00:9::1", "fd00:5:0:7::2", "fd00:5:0:7::/64", "fd00:9::9"),
        ] {
            assert_eq!(doctor_with(&node, "network"), []);
            ip(&format!("{family} route add default via {gateway} table 30401"));
            assert_eq!(doctor_with(&node, "network"), [], "nothing asks this table");
            ip(&format!("{family} rule add pref 30401 from {own} lookup 30401"));
            assert_eq!(doctor(file, "network"), [], "without an agent the address is not known");
            let words = ["table 30401", own, subnet, "over eth0", "`systemctl disable --now nm-cloud-setup.service"];
            let text = only_text(&node, "network", &words);
            let because = format!("a policy rule leads packets from {own} for the pod {pod} of this node away");
            let found = explained(own, pod);
            assert!(found.sentence.contains(&because), "{found:#?}");
            let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
            assert!(found.remedy.as_ref().is_some_and(|of_explain| of_explain.starts_with(remedy)), "{found:#?}");
            shell(remedy);
            assert_eq!(doctor_with(&node, "network"), [], "after the remedy of {text}");
            let route = explained(own, pod).steps.into_iter().find(|step| step.step == "route").unwrap();
            assert!(route.state == State::Ok && route.is.contains("dev cni0"), "{route:#?}");
        }
    });
}

#[test]
fn a_policy_rule_for_packets_of_pods_alone_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        let pods = OtherNamespace::new();
        ip("link add cni0 up type bridge");
        ip("addr add 10.5.7.1/24 dev cni0");
        ip(&format!("link add veth0a1b2c3d up type veth peer name eth0 netns {}", pods.pid()));
        ip("link set veth0a1b2c3d master cni0");
        pods.run("ip link set eth0 up");
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "route add 10.5.9.0/24 via 192.0.2.9 proto 90",
        ] {
            ip(line);
        }
        assert_eq!(doctor(file, "network"), []);
        ip("route add default via 192.0.2.77 table 100");
        ip("rule add pref 100 from 10.5.0.0/16 lookup 100");
        only_text(&sources(file), "network", &["table 100", "packets of pods", "over eth0", "10.5.9.0/24"]);
        ip("rule del pref 100");
        assert_eq!(doctor(file, "network"), []);
    });
}

/// The routes of weft are in the main table, and the kernel does not take them.
#[test]
fn a_missing_rule_and_local_routes_and_marks_that_keep_packets_from_peers_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        for line in [
            "link add eth0 up type veth peer name far0",
            "link set far0 up",
            "addr add 192.0.2.1/24 dev eth0",
            "route add 10.5.9.0/24 via 192.0.2.9 proto 90",
            "route add 10.5.9.0/24 via 192.0.2.9 table 101",
            "rule add pref 101 fwmark 0x7 lookup 101",
        ] {
            ip(line);
        }
        until("the uplink to run", || shell_output("ip link show eth0").contains("state UP"));
        let sources = sources(file);
        let lossy = NodeSources { unreachable: 1, ..sources.clone() };
        assert_eq!(doctor_with(&lossy, "network"), [], "the other table has the same route");
        let healed = |words: &[&str]| {
            let text = only_text(&sources, "network", words);
            shell(text.lines().nth(1).unwrap().split(';').next().unwrap());
            assert_eq!(doctor_with(&sources, "network"), [], "after the remedy of {text}");
        };
        ip("rule del lookup main");
        healed(&["no policy rule asks the main table", "10.5.9.0/24"]);
        ip("rule add pref 100 to 10.5.9.0/24 unreachable");
        only_text(&sources, "network", &["a policy rule refuses packets", "10.5.9.0/24", "`ip rule`"]);
        ip("rule del pref 100");
        ip("route add local 10.5.9.0/24 dev lo");
        healed(&["a local route (10.5.9.0/24, table 255)", "10.5.9.0/24 on this node"]);
        ip("addr add 10.5.9.1/32 dev lo");
        only_text(&sources, "network", &["lo is connected to 10.5.9.1/32"]);
        ip("addr del 10.5.9.1/32 dev lo");
        ip("route add default via 192.0.2.77 table 100");
        ip("rule add pref 100 fwmark 0x7/0xff lookup 100");
        assert_eq!(doctor_with(&sources, "network"), [], "nobody may set the mark");
        only_text(&lossy, "network", &["table 100", "mark 0x7/0xff", "over eth0", "10.5.9.0/24"]);
        ip("rule del pref 100");
        assert_eq!(doctor_with(&lossy, "network"), []);
    });
}
