// SPDX-License-Identifier: Apache-2.0
//! Another backend in net-conf while agents with Node objects run: no packet between any two pods is lost. Each agent reads the file
//! every five seconds, so the nodes begin at different times.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_lab::change::{StreamLoss, Streams, changed, vxlan};
use weft_lab::{BackendKind, LabOptions};

use crate::site::{Site, on_this_thread};

/// Writes net-conf as kubelet writes the file of a ConfigMap: at once.
fn write_net_conf(site: &Site, text: &str) -> Result<()> {
    let aside = site.net_conf().with_extension("aside");
    fs::write(&aside, text)?;
    fs::rename(&aside, site.net_conf()).context("put net-conf in its place")
}

/// Waits until every node has this device of vxlan, or none, and no other one.
async fn only_device(site: &Site, wanted: Option<&str>) -> Result<()> {
    for node in &site.lab.nodes {
        let is_alone = async || {
            let text = node.ns.ip("-o link show type vxlan").await.unwrap_or_default();
            let v4 = text.lines().filter_map(|line| line.split(": ").nth(1)).filter(|name| !name.contains("-v6"));
            v4.eq(wanted)
        };
        site.until(&format!("{} to have {wanted:?} alone", node.name()), is_alone).await?;
    }
    Ok(())
}

/// Changes to each of these backends in turn under pings, with the device of vxlan that is there afterwards.
async fn walk(dual: bool) -> Result<()> {
    let mut site = Site::build(BackendKind::Vxlan, dual).await?;
    site.lab.nodes.iter_mut().for_each(|node| node.set_flag("--change-grace=3s"));
    site.start_agents()?;
    site.lab.settle().await?;
    // The first packets between two nodes wait for neighbours, which may take seconds.
    site.reach_all().await?;
    let options = LabOptions { ipv6: dual, ..LabOptions::default() };
    let steps: [(Value, Option<&str>); 3] =
        [(json!({ "Type": "host-gw" }), None), (vxlan(7), Some("flannel.7")), (vxlan(1), Some("flannel.1"))];
    for (backend, device) in steps {
        let kind = backend["Type"].as_str().unwrap_or_default();
        let streams = Streams::start(&site.lab.nodes).await?;
        write_net_conf(&site, &options.net_conf_with(&backend))?;
        only_device(&site, device).await?;
        changed(&site.lab.nodes, kind).await?;
        let StreamLoss { all: loss, names } = streams.stop().await.with_context(|| site.lab.logs(20))?;
        ensure!(loss.sent > 1000, "{backend}: only {} packets were sent", loss.sent);
        ensure!(loss.lost == 0, "{backend}: {} of {} lost: {names:?}\n{}", loss.lost, loss.sent, site.lab.logs(30));
        for node in 1..=3 {
            site.annotated(node, "backend-type", Some(kind)).await?;
        }
    }
    site.reach_all().await
}

#[test]
fn a_change_of_the_backend_loses_nothing() {
    on_this_thread(walk(false));
}

#[test]
fn a_change_of_the_backend_loses_nothing_dual_stack() {
    on_this_thread(walk(true));
}
