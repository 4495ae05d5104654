// SPDX-License-Identifier: Apache-2.0
//! Pods that the CNI plugin connects reach all other pods, with bridges and with routed veths.

use anyhow::{Result, ensure};
use weft_lab::{Lab, LabOptions, Pods, StoreKind, Wiring};

use crate::{on_this_thread, options};

async fn wired(wiring: Wiring, links: &str) -> Result<()> {
    let pods = Pods { count: 2, wiring };
    let lab = Lab::start(&LabOptions { pods, ipv6: true, store: StoreKind::Etcd, ..options() }).await?;
    let matrix = lab.reach_all().await?;
    ensure!(matrix.len() == 6 * 5 * 2, "six pods make thirty pairs of each family: {}", matrix.len());
    for node in &lab.nodes {
        let shown = node.ns.ip(&format!("-o link show type {links}")).await?;
        ensure!(!shown.is_empty(), "{} has no {links}", node.name());
    }
    Ok(())
}

#[test]
fn bridge() {
    on_this_thread(wired(Wiring::Bridge, "bridge"));
}

#[test]
fn routed() {
    on_this_thread(wired(Wiring::Veth, "veth"));
}
