// SPDX-License-Identifier: Apache-2.0
//! Probes find ways on which packets are lost although the entries of the kernel are right, and name the cause.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use weft::observe::mesh::{Mesh, Way};
use weft::observe::problem::Problem;
use weft::observe::status::{PeerState, Status};
use weft_lab::netns::{Netns, checked};
use weft_lab::node::Node;
use weft_lab::{BackendKind, Lab, LabOptions, wait_for};

use crate::exe::weft_exe;
use crate::{on_this_thread, options};

/// A fault must be named within 60 s. The machine may be busy, so a test waits longer, and its output says how long it took.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns the answer of `weft mesh -o json`, and its exit code.
async fn mesh(node: &Node) -> Result<(Mesh, Option<i32>)> {
    let mut command = node.ns.command(weft_exe());
    command.arg("mesh").arg(format!("--socket={}", node.socket().display())).args(["-o", "json"]);
    let output = command.output().await?;
    let mesh = serde_json::from_slice(&output.stdout).context("read the answer of weft mesh")?;
    Ok((mesh, output.status.code()))
}

fn way_to<'a>(mesh: &'a Mesh, to: &Node) -> Option<&'a Way> {
    // Of two families, both addresses stand there.
    let is_of_node = |public: &str| to.uplink.iter().any(|address| address.to_string() == public);
    mesh.ways.iter().find(|way| way.public.split([',', ' ']).any(is_of_node))
}

/// Waits until the way between two nodes satisfies this condition, and returns the way that did. The next answer may be another one:
/// whether the packets of the peer arrive, for example, is known only for a few probes.
async fn until(what: &str, nodes: (&Node, &Node), condition: impl Fn(&Way) -> bool) -> Result<Way> {
    let (from, to) = nodes;
    let last = RefCell::new(None);
    let reached = async || {
        let Ok((answer, _)) = mesh(from).await else { return false };
        let way = way_to(&answer, to).cloned();
        let holds = way.as_ref().is_some_and(&condition);
        last.replace(way);
        holds
    };
    let begin = Instant::now();
    let waited = wait_for(what, LIMIT, reached).await;
    let last = last.into_inner();
    waited.with_context(|| format!("{last:#?}\n{}", from.log_tail(20)))?;
    eprintln!("{what}: after {:.1} s", begin.elapsed().as_secs_f64());
    last.context("the way is in the answer")
}

/// Waits until a peer is unreachable for this cause, and returns the reason.
async fn unreachable(nodes: (&Node, &Node), cause: &str) -> Result<String> {
    let what = format!("{} to be unreachable from {}: {cause}", nodes.1.name(), nodes.0.name());
    let has_cause = |way: &Way| way.probe.as_ref().and_then(|probe| probe.cause.as_deref()) == Some(cause);
    let way = until(&what, nodes, |way| way.state == PeerState::Unreachable && has_cause(way)).await?;
    way.reason.context("a reason")
}

/// Waits until packets of full size reach a peer.
async fn reached(nodes: (&Node, &Node), mtu: u16) -> Result<()> {
    let what = format!("{} to be reached from {}", nodes.1.name(), nodes.0.name());
    let has_mtu = |way: &Way| way.probe.as_ref().is_some_and(|probe| probe.mtu == Some(mtu));
    until(&what, nodes, |way| way.state == PeerState::Programmed && has_mtu(way)).await.map(drop)
}

async fn all_reached(lab: &Lab, mtu: u16) -> Result<()> {
    for from in &lab.nodes {
        for to in lab.nodes.iter().filter(|to| to.name() != from.name()) {
            reached((from, to), mtu).await?;
        }
    }
    Ok(())
}

/// Adds a rule to a chain for incoming packets of a node.
async fn drop_incoming(ns: &Netns, rule: &str) -> Result<()> {
    let chain = "add table inet test; add chain inet test in { type filter hook input priority -300; }";
    for text in [chain.to_owned(), format!("add rule inet test in {rule} drop")] {
        checked(ns.command("nft").arg(text)).await?;
    }
    Ok(())
}

/// Checks that probes change nothing: the node is ready, and the entries are still in the kernel.
async fn still_ready(node: &Node) -> Result<Status> {
    let status: Status = node.status_as().await?;
    ensure!(status.ready, "{:?}", status.problems);
    ensure!(node.ns.ip("route show").await?.contains("flannel.1"), "the routes stay");
    Ok(status)
}

#[test]
fn a_port_that_is_dropped_in_one_direction_is_named_and_forgotten_when_it_is_open() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        all_reached(&lab, 1450).await?;
        let (n1, n2) = (&lab.nodes[0], &lab.nodes[1]);
        drop_incoming(&n2.ns, &format!("ip saddr {} udp dport 8472", n1.uplink[0])).await?;
        let reason = unreachable((n1, n2), "one-direction").await?;
        ensure!(reason.contains("drops UDP port 8472 from this node to 192.168.77.12"), "{reason}");
        let reason = unreachable((n2, n1), "tunnel").await?;
        ensure!(reason.contains("its published address 192.168.77.11 answers"), "{reason}");
        ensure!(reason.contains("drops UDP port 8472"), "{reason}");
        let (seen, code) = mesh(n1).await?;
        ensure!(code == Some(2) && seen.ways[0].public == "192.168.77.12", "the worst way is first: {seen:#?}");
        let status = still_ready(n1).await?;
        let says = "packets do not reach 1 of 2 peers: ";
        let named = |problem: &Problem| problem.text.starts_with(says) && problem.text.contains("192.168.77.12");
        ensure!(status.problems.iter().any(named), "{:?}", status.problems);
        checked(n2.ns.command("nft").arg("delete table inet test")).await?;
        all_reached(&lab, 1450).await?;
        ensure!(mesh(n1).await?.1 == Some(0));
        ensure!(n1.log_tail(50).contains("packets reach the peer again"), "{}", n1.log_tail(50));
        Ok(())
    });
}

#[test]
fn a_link_with_a_small_mtu_is_found_with_the_value_to_set() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        all_reached(&lab, 1450).await?;
        // The end of n2's uplink in the fabric drops larger packets, as a switch does. The kernel allows 4 bytes more, for a VLAN tag.
        lab.fabric.ip("link set n2 mtu 1400").await?;
        let (n1, n2, n3) = (&lab.nodes[0], &lab.nodes[1], &lab.nodes[2]);
        let reason = unreachable((n1, n2), "mtu").await?;
        ensure!(reason.contains("packets of 1354 bytes reach it") && reason.contains("eth0 to 1404"), "{reason}");
        reached((n1, n3), 1450).await?;
        still_ready(n1).await?;
        lab.fabric.ip("link set n2 mtu 1500").await?;
        reached((n1, n2), 1450).await
    });
}

#[test]
fn a_published_address_that_is_nobodys_is_named() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        lab.nodes[1].ns.ip("address add 192.168.99.12/32 dev eth0").await?;
        lab.nodes[1].set_flag("--public-ip=192.168.99.12");
        for node in &mut lab.nodes {
            node.start()?;
        }
        for node in &mut lab.nodes {
            node.ready().await?;
        }
        let n1 = &lab.nodes[0];
        reached((n1, &lab.nodes[2]), 1450).await?;
        let broken = async || {
            let ways = mesh(n1).await.map(|(mesh, _)| mesh.ways).unwrap_or_default();
            ways.iter().any(|way| way.public == "192.168.99.12" && way.state == PeerState::Unreachable)
        };
        wait_for("the peer with the wrong address to be unreachable", LIMIT, broken).await?;
        let (mesh, _) = mesh(n1).await?;
        let reason = mesh.ways[0].reason.clone().unwrap_or_default();
        ensure!(reason.contains("192.168.99.12 is the address of a wrong interface"), "{reason}");
        ensure!(reason.contains("neither its tunnel address"), "{reason}");
        still_ready(n1).await.map(drop)
    });
}

#[test]
fn where_icmp_is_filtered_no_peer_is_blamed() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        for node in &mut lab.nodes {
            // Where ICMP alone is filtered, a TCP connection tells that packets arrive.
            drop_incoming(&node.ns, "ip protocol icmp").await?;
            drop_incoming(&node.ns, "tcp dport 10250").await?;
            node.start()?;
        }
        for node in &mut lab.nodes {
            node.ready().await?;
        }
        let n1 = &lab.nodes[0];
        let said = async || {
            let status = n1.status_as::<Status>().await;
            status.is_ok_and(|status| {
                status.problems.iter().any(|problem| problem.text.contains("either ICMP is filtered"))
            })
        };
        wait_for("the likely cause", LIMIT, said).await?;
        let status = still_ready(n1).await?;
        ensure!(status.peers.iter().all(|peer| peer.state == PeerState::Programmed), "{:#?}", status.peers);
        Ok(())
    });
}

async fn probed(backend: BackendKind, mtu: u16) -> Result<()> {
    let lab = Lab::start(&LabOptions { backend, ..options() }).await?;
    all_reached(&lab, mtu).await
}

#[test]
fn peers_of_host_gw_answer_at_their_public_addresses() {
    on_this_thread(probed(BackendKind::HostGw, 1500));
}

#[test]
fn peers_of_udp_answer_at_their_tunnel_addresses() {
    on_this_thread(probed(BackendKind::Udp, 1472));
}

#[test]
fn without_probes_nothing_is_asked() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        lab.nodes[0].set_flag("--probe=off");
        for node in &mut lab.nodes {
            node.start()?;
        }
        lab.settle().await?;
        // A node is ready before it has read the leases that the others have just written.
        let is_known = async || {
            let answer = mesh(&lab.nodes[0]).await;
            answer.is_ok_and(|(mesh, code)| code == Some(0) && mesh.ways.len() == 2)
        };
        wait_for("both peers to be known", LIMIT, is_known).await.with_context(|| lab.logs(20))?;
        // The control: an agent that is started after that has asked its peers, and n1 would have asked earlier.
        lab.nodes[1].stop(Signal::SIGTERM).await?;
        lab.nodes[1].start()?;
        lab.nodes[1].ready().await?;
        for to in [0, 2] {
            reached((&lab.nodes[1], &lab.nodes[to]), 1450).await?;
        }
        let status: Status = lab.nodes[0].status_as().await?;
        ensure!(status.peers.len() == 2 && status.peers.iter().all(|peer| peer.probe.is_none()), "{:#?}", status.peers);
        Ok(())
    });
}

#[test]
fn peers_answer_over_ipv6_alone() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { only_ipv6: true, ..options() }).await?;
        let asked = async || {
            let ways = mesh(&lab.nodes[0]).await.map(|(mesh, _)| mesh.ways).unwrap_or_default();
            let is_reached = |way: &Way| way.probe.as_ref().is_some_and(|probe| probe.mtu == Some(1430));
            ways.len() == 2 && ways.iter().all(is_reached)
        };
        wait_for("both peers to answer", LIMIT, asked).await.with_context(|| lab.logs(20))
    });
}

/// A bridge like that of pods has its address before the tunnel device has one, as after somebody deleted the device. Then the kernel of the peer
/// answers from another address.
#[test]
fn a_peer_whose_device_is_younger_than_its_bridge_is_reached_over_ipv6() {
    on_this_thread(async {
        let mut lab = Lab::start(&LabOptions { nodes: 2, only_ipv6: true, ..options() }).await?;
        all_reached(&lab, 1430).await?;
        let ns = lab.nodes[1].ns.clone();
        let text = std::fs::read_to_string(lab.nodes[1].subnet_file())?;
        let subnet = text.lines().find_map(|line| line.strip_prefix("FLANNEL_IPV6_SUBNET=")).context("a subnet")?;
        for line in [
            "link add br9 type bridge".to_owned(),
            "link add port9 type veth peer name end9".to_owned(),
            "link set port9 master br9 up".to_owned(),
            "link set end9 up".to_owned(),
            format!("address add {subnet} dev br9 nodad"),
            "link set br9 up".to_owned(),
        ] {
            ns.ip(&line).await?;
        }
        let anycast = async |device: &str| {
            let table = ns.ip("-6 route show table local").await.unwrap_or_default();
            table.lines().any(|line| line.starts_with("anycast") && line.contains(&format!("dev {device} ")))
        };
        wait_for("the anycast address", LIMIT, async || anycast("br9").await).await?;
        ns.ip("link del flannel-v6.1").await?;
        let is_back = async || ns.ip("-6 route show dev flannel-v6.1").await.is_ok_and(|text| text.contains("via"));
        wait_for("the device and its route", LIMIT, is_back).await?;
        // What n1 knows of n2 begins again.
        lab.nodes[0].stop(Signal::SIGTERM).await?;
        lab.nodes[0].start()?;
        lab.nodes[0].ready().await?;
        reached((&lab.nodes[0], &lab.nodes[1]), 1430).await
    });
}

/// Firewalls have rules of their own for IPv6, and security groups, too.
#[test]
fn a_tunnel_of_which_one_family_is_dropped_is_named() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { nodes: 2, ipv6: true, ..options() }).await?;
        let (n1, n2) = (&lab.nodes[0], &lab.nodes[1]);
        all_reached(&lab, 1430).await?;
        drop_incoming(&n2.ns, "meta nfproto ipv6 udp dport 8472").await?;
        let reason = unreachable((n1, n2), "one-direction").await?;
        ensure!(reason.contains("drops UDP port 8472 over IPv6 from this node to fd77::12"), "{reason}");
        let reason = unreachable((n2, n1), "tunnel").await?;
        ensure!(reason.contains("drops UDP port 8472 over IPv6"), "{reason}");
        let status = still_ready(n1).await?;
        let named = |problem: &Problem| problem.text.starts_with("packets do not reach 1 of 1 peers: ");
        ensure!(status.problems.iter().any(named), "{:?}", status.problems);
        checked(n2.ns.command("nft").arg("delete table inet test")).await?;
        all_reached(&lab, 1430).await
    });
}

/// A firewall of the other node drops ICMP and nothing else, so all packets of pods arrive.
#[test]
fn a_peer_whose_firewall_drops_icmp_is_not_unreachable() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { nodes: 2, ..options() }).await?;
        lab.reach_all().await?;
        let nodes = (&lab.nodes[0], &lab.nodes[1]);
        all_reached(&lab, 1450).await?;
        let nft = async |text: &str| checked(nodes.1.ns.command("nft").arg(text)).await;
        nft("add table inet test; add chain inet test in { type filter hook input priority -300; }").await?;
        nft("add rule inet test in meta l4proto icmp drop").await?;
        let is_silent = |way: &Way| way.probe.as_ref().is_some_and(|probe| probe.silent && probe.asked == 0);
        let way = until("the peer to answer no echo request", nodes, is_silent).await?;
        ensure!(way.state == PeerState::Programmed, "{way:#?}");
        // The control: the same peer with a real fault, and without it again.
        nft("add rule inet test in udp dport 8472 drop").await?;
        unreachable(nodes, "underlay").await?;
        nft("flush chain inet test in").await?;
        reached(nodes, 1450).await
    });
}
