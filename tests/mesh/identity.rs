// SPDX-License-Identifier: Apache-2.0
//! An address moves from node to node, or two nodes have one address. Each node keeps its lease, its MAC and its traffic.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::node::Node;
use weft_lab::store::Store;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);
const VIP: &str = "192.168.77.100/32";

/// Returns all leases: the keys and values of the store.
async fn leases(lab: &mut Lab) -> Result<BTreeMap<String, String>> {
    if let Store::Dir(path) = &lab.store {
        let files = fs::read_dir(path.join("subnets"))?.collect::<Result<Vec<_>, _>>()?;
        let files = files.into_iter().filter(|file| !file.file_name().to_string_lossy().starts_with('.'));
        return files
            .map(|file| Ok((file.file_name().to_string_lossy().into(), fs::read_to_string(file.path())?)))
            .collect();
    }
    let etcd = lab.store.etcd()?;
    let mut all = BTreeMap::new();
    for key in etcd.leases().await? {
        let value = etcd.ctl(&["get", "--print-value-only", &format!("/coreos.com/network/subnets/{key}")]).await?;
        all.insert(key, value);
    }
    Ok(all)
}

/// Waits until the agent has read everything that `ip` changed so far. The kernel announces another MTU of the uplink after it.
async fn wait_until_read(node: &Node, mtu: u32) -> Result<()> {
    node.ns.ip(&format!("link set eth0 mtu {mtu}")).await?;
    let seen = async || {
        node.status_as::<weft::observe::status::Status>()
            .await
            .is_ok_and(|status| status.ready && status.mtu == mtu - 50)
    };
    wait_for("the agent to look at its uplink", LIMIT, seen).await.with_context(|| node.log_tail(20))
}

async fn restart(node: &mut Node, signal: Signal) -> Result<()> {
    node.stop(signal).await?;
    node.start()?;
    node.ready().await
}

async fn mac(node: &Node) -> Result<String> {
    let text = node.ns.ip("link show flannel.1").await?;
    let mut words = text.split_whitespace().skip_while(|word| *word != "link/ether");
    words.nth(1).map(str::to_owned).context("a MAC")
}

async fn a_vip_moves(store: StoreKind) -> Result<()> {
    let mut lab = Lab::start(&LabOptions { nodes: 2, store, ..options() }).await?;
    let before = leases(&mut lab).await?;
    lab.nodes[0].ns.ip(&format!("addr add {VIP} dev eth0")).await?;
    wait_until_read(&lab.nodes[0], 1480).await?;
    restart(&mut lab.nodes[0], Signal::SIGTERM).await?;
    lab.nodes[0].ns.ip(&format!("addr del {VIP} dev eth0")).await?;
    lab.nodes[1].ns.ip(&format!("addr add {VIP} dev eth0")).await?;
    // The address of the second node is removed, and added again after the VIP.
    lab.nodes[1].ns.ip("addr del 192.168.77.12/24 dev eth0").await?;
    lab.nodes[1].ns.ip("addr add 192.168.77.12/24 dev eth0").await?;
    wait_until_read(&lab.nodes[0], 1500).await?;
    wait_until_read(&lab.nodes[1], 1480).await?;
    restart(&mut lab.nodes[1], Signal::SIGKILL).await?;
    wait_until_read(&lab.nodes[1], 1500).await?;
    ensure!(leases(&mut lab).await? == before, "each has the lease that it had");
    lab.reach_all().await.map(drop)
}

#[test]
fn a_vip_moves_etcd() {
    on_this_thread(a_vip_moves(StoreKind::Etcd));
}

#[test]
fn a_vip_moves_dir() {
    on_this_thread(a_vip_moves(StoreKind::Dir));
}

async fn one_address(store: StoreKind) -> Result<()> {
    let mut lab = Lab::start(&LabOptions { nodes: 2, store, ..options() }).await?;
    let macs = [mac(&lab.nodes[0]).await?, mac(&lab.nodes[1]).await?];
    let alone = leases(&mut lab).await?;
    // The second node publishes the address of the first one, as if both had been given one address.
    lab.nodes[1].set_flag("--public-ip=192.168.77.11");
    restart(&mut lab.nodes[1], Signal::SIGTERM).await?;
    let both = leases(&mut lab).await?;
    ensure!(both.keys().eq(alone.keys()), "the same subnets: {both:?}");
    ensure!(both.values().all(|value| value.contains("192.168.77.11\"")), "one address: {both:?}");
    for (at, signal) in [(1, Signal::SIGTERM), (0, Signal::SIGKILL), (1, Signal::SIGKILL), (0, Signal::SIGTERM)] {
        restart(&mut lab.nodes[at], signal).await?;
        let now = leases(&mut lab).await?;
        ensure!(now == both, "a restart of n{}: {now:?}\n{}", at + 1, lab.nodes[at].log_tail(20));
        let now = [mac(&lab.nodes[0]).await?, mac(&lab.nodes[1]).await?];
        ensure!(now == macs, "a restart of n{}: {now:?}, not {macs:?}", at + 1);
    }
    // When the node has its own address again, everything is as before.
    lab.nodes[1].remove_flag("--public-ip");
    restart(&mut lab.nodes[1], Signal::SIGTERM).await?;
    ensure!(leases(&mut lab).await? == alone, "each has the lease that it had");
    lab.reach_all().await.map(drop)
}

#[test]
fn two_nodes_with_one_address_etcd() {
    on_this_thread(one_address(StoreKind::Etcd));
}

#[test]
fn two_nodes_with_one_address_dir() {
    on_this_thread(one_address(StoreKind::Dir));
}

/// A boot removes subnet.env and the device. The saved file shows the node which of two leases with its address is its own.
#[test]
fn a_boot_of_two_nodes_with_one_address() {
    on_this_thread(async {
        let mut lab = Lab::start(&LabOptions { nodes: 2, store: StoreKind::Etcd, ..options() }).await?;
        lab.nodes[1].set_flag("--public-ip=192.168.77.11");
        restart(&mut lab.nodes[1], Signal::SIGTERM).await?;
        let both = leases(&mut lab).await?;
        ensure!(both.values().filter(|value| value.contains("192.168.77.11\"")).count() == 2, "one address: {both:?}");
        for node in &lab.nodes {
            let saved = async || {
                fs::read_dir(node.state_dir()).is_ok_and(|mut files| {
                    files.any(|file| {
                        file.is_ok_and(|file| {
                            fs::read_to_string(file.path())
                                .is_ok_and(|text| text.contains(r#""public":["192.168.77.11""#))
                        })
                    })
                })
            };
            wait_for("the node to be saved", LIMIT, saved).await.with_context(|| node.log_tail(20))?;
        }
        for at in [1, 0] {
            let node = &mut lab.nodes[at];
            node.stop(Signal::SIGKILL).await?;
            node.ns.ip("link del flannel.1").await?;
            fs::remove_file(node.subnet_file())?;
            node.start()?;
            node.ready().await?;
            let now = leases(&mut lab).await?;
            ensure!(now == both, "a boot of n{}: {now:?}, not {both:?}\n{}", at + 1, lab.nodes[at].log_tail(20));
        }
        Ok(())
    });
}
