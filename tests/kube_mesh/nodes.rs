// SPDX-License-Identifier: Apache-2.0
//! Changes of Node objects: by agents, by admins, and by mistake.

use std::fs;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::json;
use weft_lab::BackendKind;

use crate::site::{Site, on_this_thread};

#[test]
fn vxlan_over_node_objects() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::Vxlan, false).await?;
        site.reach_all().await?;
        for node in 1..=3 {
            site.conditioned(node, "False", "FlannelIsUp").await?;
        }
        restart_writes_nothing(&mut site).await?;
        broken_by_hand(&site).await?;
        net_conf_changes(&site).await?;
        site.reach_all().await
    });
}

async fn restart_writes_nothing(site: &mut Site) -> Result<()> {
    let before = site.versions().await;
    site.stop_agents(Signal::SIGTERM).await?;
    site.start_agents()?;
    for node in &mut site.lab.nodes {
        node.ready().await?;
    }
    site.reach_all().await?;
    ensure!(site.versions().await == before, "Node objects were written");
    Ok(())
}

/// The agent publishes its annotations again if they are changed. If the changed annotation has another MAC, the agent uses that.
async fn broken_by_hand(site: &Site) -> Result<()> {
    let data = site.annotation(2, "backend-data").await.context("backend-data")?;
    for (end, broken) in [
        ("backend-data", json!("not JSON")),
        ("public-ip", json!(null)),
        ("public-ip", json!("192.168.77.99")),
        ("kube-subnet-manager", json!("false")),
        ("backend-type", json!("host-gw")),
    ] {
        let before = site.annotation(2, end).await;
        site.cluster.annotate(2, end, &broken).await;
        site.annotated(2, end, before.as_deref()).await?;
    }
    ensure!(site.annotation(2, "backend-data").await == Some(data), "node 2 has another MAC than before");
    let other = r#"{"VNI":1,"VtepMAC":"0e:11:22:33:44:55"}"#;
    site.cluster.annotate(2, "backend-data", &json!(other)).await;
    let node = &site.lab.nodes[1];
    let followed =
        async || node.ns.ip("link show flannel.1").await.is_ok_and(|text| text.contains("0e:11:22:33:44:55"));
    site.until("the device to have the MAC of the annotation", followed).await?;
    site.reach_all().await
}

/// In a cluster, the file is mounted from a ConfigMap.
async fn net_conf_changes(site: &Site) -> Result<()> {
    site.routed(1, 2, "dev flannel.1", true).await?;
    let text = fs::read_to_string(site.net_conf())?;
    let direct = text.replace(r#""Type":"vxlan""#, r#""DirectRouting":true,"Type":"vxlan""#);
    ensure!(direct != text, "{text}");
    fs::write(site.net_conf(), direct)?;
    site.routed(1, 2, "via 192.168.77.12 dev eth0", true).await
}

#[test]
fn annotations_of_an_admin_choose_the_address() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::Vxlan, false).await?;
        let destination = async |site: &Site, ip: &str| {
            let node = &site.lab.nodes[0];
            let seen = async || node.ns.bridge("fdb show dev flannel.1").await.is_ok_and(|text| text.contains(ip));
            site.until(&format!("tunnel packets to go to {ip}"), seen).await
        };
        site.lab.nodes[2].ns.ip("addr add 192.168.77.113/24 dev eth0").await?;
        site.cluster.annotate(3, "public-ip-overwrite", &json!("192.168.77.200")).await;
        site.annotated(3, "public-ip", Some("192.168.77.200")).await?;
        destination(&site, "dst 192.168.77.200 ").await?;
        site.cluster.annotate(3, "public-ip-overwrite", &json!(null)).await;
        site.annotated(3, "public-ip", Some("192.168.77.13")).await?;
        destination(&site, "dst 192.168.77.13 ").await?;
        site.cluster.annotate(3, "node-public-ip", &json!("192.168.77.113")).await;
        site.lab.nodes[2].stop(Signal::SIGTERM).await?;
        site.lab.nodes[2].start()?;
        site.annotated(3, "public-ip", Some("192.168.77.113")).await?;
        destination(&site, "dst 192.168.77.113 ").await?;
        site.reach_all().await
    });
}

#[test]
fn deleted_and_created_nodes_are_followed() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::HostGw, true).await?;
        site.reach_all().await?;
        site.cluster.delete(3).await;
        site.routed(1, 3, "", false).await?;
        site.routed(3, 1, "", true).await?;
        site.create(3, 3).await;
        site.routed(1, 3, "via 192.168.77.13", true).await?;
        site.conditioned(3, "False", "FlannelIsUp").await?;
        site.reach_all().await?;
        // Now the Node has another pod CIDR.
        site.cluster.delete(3).await;
        site.create(3, 33).await;
        site.routed(1, 33, "via 192.168.77.13", true).await?;
        site.routed(1, 3, "", false).await?;
        let file = site.lab.nodes[2].subnet_file();
        let moved = async || fs::read_to_string(&file).is_ok_and(|text| text.contains("FLANNEL_SUBNET=10.244.33.1/24"));
        site.until("subnet.env to follow", moved).await?;
        site.stop_agents(Signal::SIGTERM).await
    });
}
