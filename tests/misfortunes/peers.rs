// SPDX-License-Identifier: Apache-2.0
//! Misfortunes between nodes: packets that vanish, addresses that are wrong.

use std::process::Stdio;

use anyhow::ensure;
use nix::sys::signal::Signal;
use weft_lab::netns::checked;
use weft_lab::{BackendKind, Lab, LabOptions};

use crate::{gone, named, on_this_thread, options};

/// 1, 2, 5: three peers of one node, each with a way that is broken in another manner.
#[test]
fn packets_vanish_between_nodes() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { nodes: 4, ..options() }).await?;
        lab.nodes[3].ns.ip("address add 192.168.99.14/32 dev eth0").await?;
        lab.nodes[3].set_flag("--public-ip=192.168.99.14");
        // The end of the uplink in the fabric drops what is larger, as a switch does.
        lab.fabric.ip("link set n3 mtu 1400").await?;
        let rule = "add rule inet test in ip saddr 192.168.77.11 udp dport 8472 drop";
        let chain = "add chain inet test in { type filter hook input priority -300; }";
        for text in ["add table inet test", chain, rule] {
            checked(lab.nodes[1].ns.command("nft").arg(text)).await?;
        }
        for node in &mut lab.nodes {
            node.start()?;
        }
        for node in &mut lab.nodes {
            node.ready().await?;
        }
        let node = &lab.nodes[0];
        named(
            node,
            "agent",
            &["UDP port 8472 from this node to 192.168.77.12", "weft doctor --only firewall on both nodes"],
        )
        .await?;
        named(
            node,
            "agent",
            &["only 1404 bytes", "set the MTU of the uplink eth0 to 1404", "ip link set eth0 mtu 1404"],
        )
        .await?;
        named(node, "agent", &["192.168.99.14 is the address of a wrong interface", "ping -c 3 192.168.99.14"]).await
    });
}

/// 69 to 72: one after the other on a node that is sound before and afterwards.
#[test]
fn packets_do_not_leave_for_a_peer() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        lab.reach_all().await?;
        node.ns.ip("link add tun9 type veth peer name far9").await?;
        node.ns.ip("link set tun9 up").await?;
        node.ns.ip("link set far9 up").await?;
        let peer = "192.168.77.12";
        let faults = [
            (format!("route add blackhole {peer}"), format!("ip route del blackhole {peer}/32")),
            (format!("address add {peer}/32 dev tun9"), format!("ip addr del {peer}/32 dev tun9")),
            (
                format!("neighbour replace {peer} lladdr 02:00:00:00:00:99 nud permanent dev eth0"),
                format!("ip neigh del {peer} dev eth0"),
            ),
            ("route add 192.168.77.0/28 dev tun9".to_owned(), format!("ip route add {peer}/32 dev eth0")),
        ];
        for (fault, remedy) in faults {
            for check in ["underlay", "agent"] {
                gone(node, check).await?;
            }
            node.ns.ip(&fault).await?;
            named(node, "underlay", &[peer, &remedy]).await?;
            node.ns.ip(remedy.trim_start_matches("ip ")).await?;
        }
        for check in ["underlay", "agent"] {
            gone(node, check).await?;
        }
        lab.reach_all().await?;
        Ok(())
    });
}

/// 118: a part of the way to a peer takes smaller packets than the uplink. The probes of the agent see it, too, unless packets may be
/// sent in fragments.
#[test]
fn the_way_to_a_peer_is_too_small_for_the_tunnel() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        lab.reach_all().await?;
        gone(node, "underlay").await?;
        node.ns.ip("route add 192.168.77.12/32 dev eth0 mtu 1400").await?;
        named(node, "underlay", &["192.168.77.12", "takes 1400 bytes", "flannel.1 have 1500 bytes", "MTU"]).await?;
        node.ns.ip("route del 192.168.77.12/32 dev eth0").await?;
        gone(node, "underlay").await
    });
}

/// 119: machines of Vagrant publish the address that the NAT of VirtualBox gives each of them.
#[test]
fn a_node_publishes_the_address_of_the_nat_of_its_hypervisor() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        for words in [
            "link add nat0 type veth peer name nat9",
            "link set nat9 up",
            "link set nat0 up",
            "address add 10.0.2.15/24 dev nat0",
            "route replace default via 10.0.2.2 dev nat0",
            "neighbour add 10.0.2.2 lladdr 52:54:00:12:35:02 nud permanent dev nat0",
        ] {
            lab.nodes[1].ns.ip(words).await?;
        }
        // The flag --iface of the lab comes first.
        lab.nodes[1].set_flag("--public-ip=10.0.2.15");
        for node in &mut lab.nodes {
            node.start()?;
        }
        named(&lab.nodes[1], "uplink", &["10.0.2.15 of nat0", "VirtualBox", "--iface"]).await?;
        gone(&lab.nodes[0], "uplink").await
    });
}

/// 3: an address was copied to a second node.
#[test]
fn two_nodes_publish_one_address() {
    on_this_thread(async {
        let mut lab = Lab::start(&options()).await?;
        lab.nodes[1].set_flag("--public-ip=192.168.77.11");
        lab.nodes[1].stop(Signal::SIGTERM).await?;
        lab.nodes[1].start()?;
        for node in &lab.nodes {
            named(node, "agent", &["two nodes publish 192.168.77.11"]).await?;
        }
        Ok(())
    });
}

/// 3, at the first start of the second node: nothing but the address says whose lease it is, so it is taken over.
#[test]
fn a_first_start_with_the_address_of_another_node() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        lab.nodes[0].start()?;
        lab.nodes[0].ready().await?;
        lab.nodes[1].set_flag("--public-ip=192.168.77.11");
        lab.nodes[1].start()?;
        lab.nodes[1].ready().await?;
        let warning = "the lease of an address that is not on this host is taken over";
        let log = lab.nodes[1].log_tail(100);
        ensure!(log.contains(warning) && log.contains("192.168.77.11"), "{log}");
        ensure!(!lab.nodes[0].log_tail(100).contains(warning), "the first node has its own address");
        Ok(())
    });
}

/// 4: the image of a machine was copied after weft had run on it.
#[test]
fn two_nodes_have_one_vtep_mac() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        lab.nodes[0].start()?;
        lab.nodes[0].ready().await?;
        let link = lab.nodes[0].ns.ip("link show flannel.1").await?;
        let mac = link.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).unwrap_or_default();
        let vxlan = "type vxlan id 1 local 192.168.77.12 dev eth0 dstport 8472 nolearning";
        lab.nodes[1].ns.ip(&format!("link add flannel.1 address {mac} {vxlan}")).await?;
        let mark = format!("weft {}", lab.nodes[1].subnet_file().display());
        checked(lab.nodes[1].ns.command("ip").args(["link", "set", "flannel.1", "alias", &mark])).await?;
        lab.nodes[1].start()?;
        for node in &lab.nodes {
            named(node, "agent", &["two nodes have one VtepMAC"]).await?;
        }
        Ok(())
    });
}

/// 16: a network card of the first node computes wrong checksums. The rule changes the bytes of packets that leave.
#[test]
fn checksums_are_wrong() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        // A node is ready before it knows its peers. Before that, its packets would not go through the tunnel.
        lab.reach_all().await?;
        let chain = "add chain netdev test out { type filter hook egress device eth0 priority 0; }";
        // Behind the headers of UDP and vxlan, the protocol of the inner IP header is at byte 39, and the checksum of the ICMP message at byte 52.
        let rule = "add rule netdev test out udp dport 8472 @th,312,8 1 @th,416,16 set 0x1234";
        for text in ["add table netdev test", chain, rule] {
            checked(lab.nodes[0].ns.command("nft").arg(text)).await?;
        }
        let target = lab.nodes[1].ns.ip("-o -4 address show dev flannel.1").await?;
        let target = target.split_whitespace().nth(3).unwrap_or_default().trim_end_matches("/32").to_owned();
        // It ends with this value.
        let mut ping = lab.nodes[0].ns.command("ping");
        let mut ping = ping.args(["-q", "-i", "0.05", &target]).stdout(Stdio::null()).spawn()?;
        let words = ["ICMP", "wrong checksum", "ethtool -K flannel.1 tx-checksum-ip-generic off"];
        named(&lab.nodes[1], "checksum", &words).await?;
        ping.kill().await?;
        gone(&lab.nodes[1], "checksum").await
    });
}

/// 108: a cloud, or a switch with port security, that passes packets with addresses of nodes alone. The probes of the agent ask those.
#[test]
fn the_network_drops_addresses_of_pods_between_nodes_of_host_gw() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { backend: BackendKind::HostGw, ..options() }).await?;
        lab.reach_all().await?;
        let node = &lab.nodes[0];
        gone(node, "underlay").await?;
        let cloud =
            "table bridge cloud { chain w { type filter hook forward priority 0; ip daddr 10.244.0.0/16 drop; }; }";
        checked(lab.fabric.command("nft").arg(cloud)).await?;
        named(
            node,
            "underlay",
            &["192.168.77.12 answers at the address of the node", "source/destination check", "vxlan"],
        )
        .await?;
        checked(lab.fabric.command("nft").arg("delete table bridge cloud")).await?;
        gone(node, "underlay").await
    });
}
