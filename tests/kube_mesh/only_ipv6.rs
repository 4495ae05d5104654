// SPDX-License-Identifier: Apache-2.0
//! Nodes without any IPv4 address. The pod CIDRs of their Node objects are IPv6.

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::BackendKind;

use crate::site::{Site, on_this_thread};

#[test]
fn vxlan_of_ipv6_only_nodes() {
    on_this_thread(only_ipv6(BackendKind::Vxlan, "dev flannel-v6.1"));
}

#[test]
fn host_gw_of_ipv6_only_nodes() {
    on_this_thread(only_ipv6(BackendKind::HostGw, "via fd77::13 dev eth0"));
}

async fn only_ipv6(backend: BackendKind, way: &str) -> Result<()> {
    let mut site = Site::build_only_ipv6(backend).await?;
    site.start_agents()?;
    site.lab.settle().await?;
    site.reach_all().await?;
    for node in 1..=3 {
        site.conditioned(node, "False", "FlannelIsUp").await?;
        let address = format!("fd77::1{node}");
        ensure!(site.annotation(node, "public-ipv6").await == Some(address), "node {node} publishes another address");
        for end in ["public-ip", "backend-data"] {
            ensure!(site.annotation(node, end).await.is_none(), "node {node} has no IPv4 address, but publishes {end}");
        }
        ensure!(site.annotation(node, "backend-v6-data").await.is_some(), "node {node}: no backend-v6-data");
    }
    site.routed(1, 3, way, true).await?;
    // A restart writes nothing. A Node that is created again with another pod CIDR is followed.
    let before = site.versions().await;
    site.stop_agents(Signal::SIGTERM).await?;
    site.start_agents()?;
    for node in &mut site.lab.nodes {
        node.ready().await?;
    }
    ensure!(site.versions().await == before, "Node objects were written");
    site.cluster.delete(3).await;
    site.routed(1, 3, "", false).await?;
    site.create(3, 33).await;
    site.routed(1, 33, way, true).await?;
    site.routed(2, 3, "", false).await
}
