// SPDX-License-Identifier: Apache-2.0
//! Restarts of agents lose no packet, however the agent ended, and what was broken meanwhile is repaired.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::fault::{entries, inject, possible};
use weft_lab::ping::Stream;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind};

use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);

/// Each agent is ended and started in turn, under a ping of 100 packets a second in each direction.
async fn restart_each(options: LabOptions, signal: Signal) -> Result<()> {
    let mut lab = Lab::start(&options).await?;
    lab.reach_all().await?;
    for index in 0..lab.nodes.len() {
        let other = (index + 1) % lab.nodes.len();
        let (here, there) = (lab.nodes[index].pods[0].clone(), lab.nodes[other].pods[0].clone());
        let mut out = Stream::start(&here, there.addrs[0]).await?;
        let mut back = Stream::start(&there, here.addrs[here.addrs.len() - 1]).await?;
        let before = entries(&lab.nodes[index].ns).await?;
        let subnet = std::fs::read_to_string(lab.nodes[index].subnet_file())?;

        let status = lab.nodes[index].stop(signal).await?;
        if signal == Signal::SIGTERM {
            ensure!(status.success(), "SIGTERM ends an agent with 0, not {status}");
        }
        out.answers(20, LIMIT).await?;
        lab.nodes[index].start()?;
        lab.nodes[index].ready().await?;
        out.answers(50, LIMIT).await?;
        back.answers(50, LIMIT).await?;

        for (what, stream) in [("from", out), ("to", back)] {
            let loss = stream.stop().await?;
            ensure!(loss.lost == 0, "{what} {}: {} of {} packets lost", lab.nodes[index].name(), loss.lost, loss.sent);
        }
        ensure!(entries(&lab.nodes[index].ns).await? == before, "a restart changed the entries");
        ensure!(std::fs::read_to_string(lab.nodes[index].subnet_file())? == subnet, "a restart changed subnet.env");
    }
    Ok(())
}

#[test]
fn vxlan_restart_loses_nothing() {
    on_this_thread(restart_each(LabOptions { store: StoreKind::Etcd, ipv6: true, ..options() }, Signal::SIGTERM));
}

#[test]
fn vxlan_kill_loses_nothing() {
    on_this_thread(restart_each(LabOptions { store: StoreKind::Etcd, ..options() }, Signal::SIGKILL));
}

#[test]
fn host_gw_restart_loses_nothing() {
    let backend = BackendKind::HostGw;
    on_this_thread(restart_each(
        LabOptions { backend, store: StoreKind::Etcd, ipv6: true, ..options() },
        Signal::SIGTERM,
    ));
}

#[test]
fn host_gw_kill_loses_nothing() {
    let backend = BackendKind::HostGw;
    on_this_thread(restart_each(LabOptions { backend, ..options() }, Signal::SIGKILL));
}

/// The faults of `weft lab`: each of them heals.
async fn every_fault(options: LabOptions, at_least: usize) -> Result<()> {
    let mut lab = Lab::start(&options).await?;
    lab.reach_all().await?;
    let faults = possible(&lab).await?;
    ensure!(faults.len() >= at_least, "too few faults: {faults:?}");
    for fault in faults {
        let repair = inject(&mut lab, &fault).await?;
        ensure!(repair.healed(), "{fault} did not heal: {repair:?}\n{}", lab.logs(20));
    }
    lab.reach_all().await.map(drop)
}

#[test]
fn vxlan_heals_every_fault() {
    on_this_thread(every_fault(LabOptions { ipv6: true, ..options() }, 8));
}

#[test]
fn udp_heals_every_fault() {
    on_this_thread(every_fault(LabOptions { backend: BackendKind::Udp, ..options() }, 4));
}

#[test]
fn host_gw_heals_every_fault() {
    on_this_thread(every_fault(LabOptions { backend: BackendKind::HostGw, ipv6: true, ..options() }, 4));
}
