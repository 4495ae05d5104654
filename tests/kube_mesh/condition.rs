// SPDX-License-Identifier: Apache-2.0
//! The condition NetworkUnavailable is True only while the node itself has a lasting fault.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use weft::observe::status::{Peer, PeerState};
use weft_lab::BackendKind;

use crate::site::{Site, on_this_thread};

#[test]
fn a_lasting_fault_of_the_node_is_reported() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        site.lab.nodes[0].set_flag("--unwell-after=1s");
        site.lab.nodes[1].set_flag("--unwell-after=1s");
        site.lab.nodes[2].set_flag("--unwell-after=1s");
        site.lab.nodes[2].set_flag("--set-node-network-unavailable=false");
        // A device of another program has our VNI and port.
        let taken = "link add theirs type vxlan id 1 dstport 8472 nolearning";
        for node in &site.lab.nodes {
            node.ns.ip(taken).await?;
            node.ns.ip("link set theirs up").await?;
        }
        site.start_agents()?;
        for number in [1, 2] {
            site.conditioned(number, "True", "WeftIsDown").await?;
        }
        let [_, _, message] = site.condition(1).await.context("no condition")?;
        ensure!(message.contains("flannel.1"), "{message}");
        for node in &site.lab.nodes {
            node.ns.ip("link del theirs").await?;
        }
        site.lab.settle().await?;
        for number in [1, 2] {
            site.conditioned(number, "False", "FlannelIsUp").await?;
        }
        site.reach_all().await?;
        lost_uplink(&mut site).await?;
        ensure!(site.condition(3).await.is_none(), "node 3 has a flag that forbids to set the condition");
        ensure!(
            site.condition(1).await.is_some_and(|it| it[1] == "FlannelIsUp"),
            "the fault of a peer was reported by node 1"
        );
        // The end of an agent is not a fault.
        let before = site.versions().await;
        site.stop_agents(Signal::SIGTERM).await?;
        ensure!(site.versions().await == before, "an agent wrote a Node when it ended");
        Ok(())
    });
}

#[test]
fn a_peers_fault_is_not_reported() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        for node in &mut site.lab.nodes {
            node.set_flag("--unwell-after=1s");
        }
        site.start_agents()?;
        site.lab.settle().await?;
        for number in 1..=3 {
            site.conditioned(number, "False", "FlannelIsUp").await?;
        }
        let before = site.versions().await;
        // The device that one peer needs cannot be created, because another device has its VNI and port. The lease of a second peer cannot be read.
        site.lab.nodes[0].ns.ip("link add theirs type vxlan id 7 dstport 8472 nolearning").await?;
        site.create_peer(100).await;
        site.create_peer(101).await;
        let data = json!(r#"{"VNI":7,"VtepMAC":"0e:00:00:00:00:64"}"#);
        site.cluster.annotate(100, "backend-data", &data).await;
        site.cluster.annotate(101, "backend-data", &json!("no JSON")).await;
        let failing = async |site: &Site| {
            let status = site.lab.nodes[0].status_as::<weft::observe::status::Status>().await;
            let of =
                |peers: &[Peer], subnet: &str, state| peers.iter().any(|it| it.subnet == subnet && it.state == state);
            status.is_ok_and(|status| {
                of(&status.peers, "10.244.100.0/24", PeerState::Pending)
                    && of(&status.peers, &site.cluster.node(101), PeerState::SetAside)
            })
        };
        site.until("both peers to fail", async || failing(&site).await).await?;
        // To show that reports work: a later fault of node 2 is reported.
        lost_uplink(&mut site).await?;
        let node = &site.lab.nodes[0];
        ensure!(node.status_as::<weft::observe::status::Status>().await?.ready, "a peer's fault made the node unready");
        ensure!(failing(&site).await, "the peers no longer have their faults");
        let after = site.versions().await;
        ensure!(
            (&after[0], &after[2]) == (&before[0], &before[2]),
            "nodes 1 and 3 have reported something: {:?}",
            site.condition(1).await
        );
        ensure!(after[1] != before[1], "node 2 has not reported its fault");
        Ok(())
    });
}

/// Removes the address of node 2's uplink for a while. The node keeps its peers and reaches the API by another link.
async fn lost_uplink(site: &mut Site) -> Result<()> {
    let node = &site.lab.nodes[1];
    let fabric = &site.lab.fabric;
    fabric.ip("link add side type veth peer name side0 netns n2").await?;
    fabric.ip("link set side up").await?;
    fabric.ip("addr add 10.9.9.1/24 dev side").await?;
    node.ns.ip("link set side0 up").await?;
    node.ns.ip("addr add 10.9.9.2/24 dev side0").await?;
    node.ns.ip("route add 192.168.77.1/32 via 10.9.9.1").await?;
    node.ns.ip("addr del 192.168.77.12/24 dev eth0").await?;
    site.conditioned(2, "True", "WeftIsDown").await?;
    node.ns.ip("addr add 192.168.77.12/24 dev eth0").await?;
    site.conditioned(2, "False", "FlannelIsUp").await?;
    node.ns.ip("route del 192.168.77.1/32").await.map(drop)
}
