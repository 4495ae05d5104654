// SPDX-License-Identifier: Apache-2.0
//! One of three nodes runs flanneld (the program that `FLANNELD` names). All pods reach each other, each side is restarted, and each is replaced
//! by the other in place, with its lease and its MAC, without a lost packet.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::ping::Stream;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind};

use crate::flanneld::flanneld;
use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);

/// n1 runs flannel, n2 and n3 run weft.
async fn mixed(options: LabOptions, flanneld: &Path) -> Result<()> {
    let mut lab = Lab::build(&options).await?;
    lab.nodes[0].start_other(flanneld)?;
    lab.nodes[1].start()?;
    lab.nodes[2].start()?;
    for node in &mut lab.nodes {
        node.add_pods(1).await?;
    }
    lab.reach_all().await?;
    let leases = lab.store.etcd()?.ctl(&["get", "--prefix", "/coreos.com/network/subnets/"]).await?;

    for step in ["flanneld restarted", "weft in its place", "flanneld back in its place"] {
        let (here, there) = (lab.nodes[0].pods[0].clone(), lab.nodes[1].pods[0].clone());
        let mut stream = Stream::start(&there, here.addrs[0]).await?;
        let mut other = Stream::start(&here, there.addrs[there.addrs.len() - 1]).await?;
        lab.nodes[0].stop(Signal::SIGTERM).await?;
        if step.starts_with("weft") {
            lab.nodes[0].start()?;
            lab.nodes[0].ready().await?;
        } else {
            std::fs::remove_file(lab.nodes[0].subnet_file())?;
            lab.nodes[0].start_other(flanneld)?;
            lab.nodes[0].pod_net().await?;
        }
        for stream in [&mut stream, &mut other] {
            stream.answers(100, LIMIT).await?;
        }
        for (way, stream) in [("to", stream), ("from", other)] {
            let loss = stream.stop().await?;
            ensure!(loss.lost == 0, "{step}: {} of {} packets {way} n1 lost", loss.lost, loss.sent);
        }
        let now = lab.store.etcd()?.ctl(&["get", "--prefix", "/coreos.com/network/subnets/"]).await?;
        ensure!(now == leases, "{step}: leases changed:\n{leases}\n{now}");
        lab.reach_all().await?;
    }
    let (here, there) = (lab.nodes[0].pods[0].clone(), lab.nodes[1].pods[0].clone());
    let mut stream = Stream::start(&here, there.addrs[there.addrs.len() - 1]).await?;
    lab.nodes[1].stop(Signal::SIGTERM).await?;
    lab.nodes[1].start()?;
    lab.nodes[1].ready().await?;
    stream.answers(100, LIMIT).await?;
    let loss = stream.stop().await?;
    ensure!(loss.lost == 0, "weft restarted: {} of {} packets lost", loss.lost, loss.sent);
    lab.reach_all().await.map(drop)
}

fn with_flanneld(backend: BackendKind, ipv6: bool) {
    let flanneld = flanneld();
    on_this_thread(
        async move { mixed(LabOptions { backend, ipv6, store: StoreKind::Etcd, ..options() }, &flanneld).await },
    );
}

#[test]
#[ignore = "needs FLANNELD"]
fn vxlan_with_flanneld() {
    with_flanneld(BackendKind::Vxlan, false);
}

#[test]
#[ignore = "needs FLANNELD"]
fn vxlan_dual_with_flanneld() {
    with_flanneld(BackendKind::Vxlan, true);
}

#[test]
#[ignore = "needs FLANNELD"]
fn host_gw_with_flanneld() {
    with_flanneld(BackendKind::HostGw, false);
}

#[test]
#[ignore = "needs FLANNELD"]
fn host_gw_dual_with_flanneld() {
    with_flanneld(BackendKind::HostGw, true);
}
