// SPDX-License-Identifier: Apache-2.0
//! Leases that are released or removed by a command: it removes our annotations of one Node and changes no other Node.

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use weft_lab::{BackendKind, Families};

use crate::site::{Site, on_this_thread};

/// Returns all annotations of a Node.
async fn annotations(site: &Site, node: u8) -> Value {
    site.cluster.read(node).await["metadata"]["annotations"].clone()
}

/// Adds a label and annotations that are not ours to each Node.
async fn mark(site: &Site) {
    for node in 1..=3 {
        let marks = json!({"metadata": {
            "labels": {"theirs": "stays"}, "annotations": {"theirs.test/public-ip": "192.0.2.1"},
        }});
        site.cluster.patch(node, &marks).await;
        site.cluster.annotate(node, "public-ip-overwrite", &json!(format!("192.168.77.1{node}"))).await;
    }
}

/// Checks that a Node has what [`mark`] added and no annotation of ours.
async fn bare(site: &Site, node: u8) -> Result<()> {
    let wanted = json!({
        "theirs.test/public-ip": "192.0.2.1",
        site.cluster.annotation("public-ip-overwrite"): format!("192.168.77.1{node}"),
    });
    let there = annotations(site, node).await;
    ensure!(there == wanted, "node {node} has {there}");
    let labels = site.cluster.read(node).await["metadata"]["labels"].clone();
    ensure!(labels == json!({"theirs": "stays"}), "node {node} has the labels {labels}");
    Ok(())
}

#[test]
fn leases_are_released_removed_and_acquired_again() {
    on_this_thread(async {
        // The Nodes have pod CIDRs of both families; net-conf enables one of them.
        let mut site = Site::build(BackendKind::HostGw, false).await?;
        site.families = Families::Dual;
        for node in 1..=3 {
            site.cluster.delete(node).await;
            site.create(node, node).await;
        }
        mark(&site).await;
        site.start_agents()?;
        site.families = Families::V4;
        site.lab.settle().await?;
        site.reach_all().await?;
        // An agent writes the condition of its Node a moment after it is ready. That changes the version of the Node, too.
        for node in 1..=3 {
            site.conditioned(node, "False", "FlannelIsUp").await?;
        }
        let file = format!("--subnet-file={}", site.lab.nodes[0].subnet_file().display());
        let state = format!("--state-dir={}", site.lab.nodes[0].state_dir().display());
        site.lab.nodes[0].stop(Signal::SIGTERM).await?;
        let others = site.versions().await[1..].to_vec();
        // Neither the end of an agent nor `weft cleanup` changes the Node.
        let before = annotations(&site, 1).await;
        site.cleanup(1, &[&file, &state]).await?;
        ensure!(annotations(&site, 1).await == before, "weft cleanup has written to the Node");
        // It leaves subnet.env, by which a release finds our lease. So operators may call the two commands in either order.
        let said = site.command(1, &["release", &file, &state]).await?;
        ensure!(said.contains("released 10.244.1.0/24"), "{said}");
        bare(&site, 1).await?;
        site.routed(2, 1, "", false).await?;
        let again = site.command(1, &["release", &file, &state]).await.unwrap_err();
        ensure!(format!("{again:#}").contains("no lease of 10.244.1.0/24"), "{again:#}");
        // The lease of another node can be removed by its name on any node.
        ensure!(site.versions().await[1..] == others, "a release has written another Node");
        site.lab.nodes[2].stop(Signal::SIGTERM).await?;
        let listed = site.command(1, &["lease", "ls"]).await?;
        ensure!(!listed.contains(&site.cluster.node(1)) && listed.contains(&site.cluster.node(3)), "{listed}");
        site.command(1, &["lease", "rm", &site.cluster.node(3)]).await?;
        bare(&site, 3).await?;
        site.routed(2, 3, "", false).await?;
        ensure!(site.versions().await[1] == others[0], "node 2 was written");
        for node in [0, 2] {
            site.lab.nodes[node].start()?;
            site.lab.nodes[node].ready().await?;
        }
        site.routed(2, 1, "via 192.168.77.11", true).await?;
        site.reach_all().await
    });
}
