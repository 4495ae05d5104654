// SPDX-License-Identifier: Apache-2.0
//! Another backend in net-conf while agents with Node objects run: no packet between any two pods is lost. Each agent reads the file
//! every five seconds, so the nodes begin at different times.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_lab::change::{StreamLoss, Streams, changed, devices, vxlan};
use weft_lab::{BackendKind, LabOptions};

use crate::site::{Site, on_this_thread};

/// Writes net-conf as kubelet writes the file of a ConfigMap: at once.
fn write_net_conf(site: &Site, text: &str) -> Result<()> {
    let aside = site.net_conf().with_extension("aside");
    fs::write(&aside, text)?;
    fs::rename(&aside, site.net_conf()).context("put net-conf in its place")
}

/// Waits until every node has these devices of backends and no other one.
async fn only_devices(site: &Site, wanted: &[&str]) -> Result<()> {
    for node in &site.lab.nodes {
        let are_alone = async || devices(node).await.is_ok_and(|names| names == wanted);
        site.until(&format!("{} to have only the devices {wanted:?}", node.name()), are_alone).await?;
    }
    Ok(())
}

/// Changes to each of these backends in turn under pings, with the devices that every node has afterwards.
async fn walk(dual: bool, steps: &[(Value, &[&str])]) -> Result<()> {
    let mut site = Site::build(BackendKind::Vxlan, dual).await?;
    site.lab.nodes.iter_mut().for_each(|node| node.set_flag("--change-grace=3s"));
    site.start_agents()?;
    site.lab.settle().await?;
    // The first packets between two nodes wait for neighbours, which may take seconds.
    site.reach_all().await?;
    let options = LabOptions { ipv6: dual, ..LabOptions::default() };
    for (backend, wanted) in steps {
        let kind = backend["Type"].as_str().unwrap_or_default();
        let streams = Streams::start(&site.lab.nodes).await?;
        write_net_conf(&site, &options.net_conf_with(backend))?;
        only_devices(&site, wanted).await?;
        changed(&site.lab.nodes, kind).await?;
        let StreamLoss { all: loss, names } = streams.stop().await.with_context(|| site.lab.logs(20))?;
        ensure!(loss.sent > 1000, "{backend}: only {} packets were sent", loss.sent);
        ensure!(loss.lost == 0, "{backend}: {} of {} lost: {names:?}\n{}", loss.lost, loss.sent, site.lab.logs(30));
        // As in flannel, a lease of udp names no type.
        let published = if kind == "udp" { "" } else { kind };
        for node in 1..=3 {
            site.annotated(node, "backend-type", Some(published)).await?;
        }
    }
    site.reach_all().await
}

fn host_gw() -> Value {
    json!({ "Type": "host-gw" })
}

#[test]
fn a_change_of_the_backend_loses_nothing() {
    let steps: [(Value, &[&str]); 4] = [
        (host_gw(), &[]),
        (json!({ "Type": "udp" }), &["flannel0"]),
        (vxlan(7), &["flannel.7"]),
        (vxlan(1), &["flannel.1"]),
    ];
    on_this_thread(async move { walk(false, &steps).await });
}

#[test]
fn a_change_of_the_backend_loses_nothing_dual_stack() {
    let steps: [(Value, &[&str]); 3] =
        [(host_gw(), &[]), (vxlan(7), &["flannel-v6.7", "flannel.7"]), (vxlan(1), &["flannel-v6.1", "flannel.1"])];
    on_this_thread(async move { walk(true, &steps).await });
}
