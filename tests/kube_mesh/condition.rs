// SPDX-License-Identifier: Apache-2.0
//! The condition NetworkUnavailable: True for a node's own lasting fault alone.

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use weft::lab::BackendKind;

use crate::site::{Site, on_this_thread};

#[test]
fn a_lasting_fault_of_the_node_is_told() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, false).await?;
        site.lab.nodes[0].set_flag("--unwell-after=1s");
        site.lab.nodes[1].set_flag("--unwell-after=1s");
        site.lab.nodes[2].set_flag("--unwell-after=1s");
        site.lab.nodes[2].set_flag("--set-node-network-unavailable=false");
        // A device of others that has our VNI and port.
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
        ensure!(site.condition(3).await.is_none(), "node 3 was told not to set it");
        ensure!(site.condition(1).await.is_some_and(|it| it[1] == "FlannelIsUp"), "no peer's fault counts");
        // The end of an agent is no fault.
        let before = site.versions().await;
        site.stop_agents(Signal::SIGTERM).await?;
        ensure!(site.versions().await == before, "the end writes nothing");
        Ok(())
    });
}

/// The uplink's address goes: peers are kept, but the node is not well. The API is reached by another way.
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
