// SPDX-License-Identifier: Apache-2.0
//! The API server does not answer: while agents run, and when they start.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::BackendKind;
use weft_lab::node::Node;
use weft_lab::ping::Stream;

use crate::site::{LIMIT, Site, on_this_thread};

#[test]
fn changes_during_an_outage_are_applied_after_it() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::HostGw, true).await?;
        site.create_peer(100).await;
        site.routed(1, 100, "via 192.168.77.100", true).await?;
        let pods = (&site.lab.nodes[0].pods[0], site.lab.nodes[2].pods[0].addrs[0]);
        let mut stream = Stream::start(pods.0, pods.1).await?;
        site.relay.close();
        for node in 1..=3 {
            let silent = async || {
                let status = site.lab.nodes[node - 1].status_as::<weft::observe::status::Status>().await;
                status.is_ok_and(|status| status.ready && status.store_trouble.is_some())
            };
            site.until("the agent to say that the API is away", silent).await?;
        }
        site.cluster.delete(100).await;
        site.create_peer(101).await;
        site.routed(1, 100, "via 192.168.77.100", true).await?;
        site.relay.open()?;
        site.routed(1, 101, "via 192.168.77.101", true).await?;
        site.routed(1, 100, "", false).await?;
        stream.answers(20, LIMIT).await?;
        let loss = stream.stop().await?;
        ensure!(loss.lost == 0, "{} of {} packets lost", loss.lost, loss.sent);
        Ok(())
    });
}

/// Longer than a watch without events is kept, and than the time between two reports of a lasting failure.
const AWAY: Duration = Duration::from_secs(155);

#[test]
fn minutes_without_the_api() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::Vxlan, false).await?;
        site.create_peer(100).await;
        site.routed(1, 100, "", true).await?;
        site.conditions_written().await?;
        let before = site.versions().await;
        let pods = (&site.lab.nodes[0].pods[0], site.lab.nodes[2].pods[0].addrs[0]);
        let mut stream = Stream::start(pods.0, pods.1).await?;
        site.relay.close();
        let began = Instant::now();
        for node in &site.lab.nodes {
            let silent = async || {
                node.status_as::<weft::observe::status::Status>()
                    .await
                    .is_ok_and(|status| status.store_trouble.is_some())
            };
            site.until("the agent to say that the API is away", silent).await?;
        }
        while began.elapsed() < AWAY {
            for node in &site.lab.nodes {
                let status = node.status_as::<weft::observe::status::Status>().await?;
                ensure!(status.ready && status.store_trouble.is_some(), "{}: {status:?}", node.name());
            }
            // The agent still repairs the kernel.
            site.lab.nodes[0].ns.ip("route del 10.244.2.0/24").await?;
            site.routed(1, 2, "dev flannel.1", true).await?;
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        for node in &site.lab.nodes {
            let log = fs::read_to_string(node.log())?;
            let said =
                log.lines().filter(|line| line.contains("WARN store: ") || line.contains("store: watch nodes")).count();
            // One line at once and one each minute, not one for each attempt.
            ensure!((2..=8).contains(&said), "{}: {said} lines in {log}", node.name());
        }
        site.cluster.delete(100).await;
        site.create_peer(101).await;
        site.relay.open()?;
        site.routed(1, 101, "", true).await?;
        site.routed(1, 100, "", false).await?;
        for node in &site.lab.nodes {
            let answers = async || {
                node.status_as::<weft::observe::status::Status>()
                    .await
                    .is_ok_and(|status| status.store_trouble.is_none())
            };
            site.until("the agent to say that the API answers", answers).await?;
        }
        stream.answers(20, LIMIT).await?;
        let loss = stream.stop().await?;
        ensure!(site.versions().await == before, "a Node was written");
        ensure!(loss.lost == 0, "{} of {} packets lost", loss.lost, loss.sent);
        Ok(())
    });
}

/// Returns the file with a node's saved peers, if there is one.
pub fn file(node: &Node) -> Option<std::path::PathBuf> {
    let mut all = fs::read_dir(node.state_dir()).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    all.find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("peers-")))
}

/// Ends the agent of node 1 after it has saved its peers, and removes what a boot removes.
async fn booted(site: &mut Site) -> Result<()> {
    let node = &mut site.lab.nodes[0];
    node.stop(Signal::SIGTERM).await?;
    let _ = fs::remove_dir_all(node.state_dir());
    // The first list of a run is saved at once.
    node.start()?;
    let node = &site.lab.nodes[0];
    let whole = async || {
        let text = file(node).and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        ["192.168.77.12\"", "192.168.77.13\"", "192.168.77.100\""].iter().all(|ip| text.contains(ip))
    };
    site.until("peers to be saved", whole).await?;
    let node = &mut site.lab.nodes[0];
    node.stop(Signal::SIGKILL).await?;
    node.ns.ip("link del flannel.1").await?;
    node.ns.ip("nexthop flush").await?;
    node.ns.ip("route flush proto 90").await?;
    fs::remove_file(node.subnet_file()).context("remove subnet.env")
}

#[test]
fn a_boot_without_the_api() {
    on_this_thread(async {
        let mut site = Site::start(BackendKind::Vxlan, false).await?;
        site.create_peer(100).await;
        site.routed(1, 100, "", true).await?;
        site.conditions_written().await?;
        booted(&mut site).await?;
        site.relay.close();
        site.cluster.delete(100).await;
        site.create_peer(101).await;
        let before = site.versions().await;
        let node = &mut site.lab.nodes[0];
        node.start()?;
        node.ready().await?;
        site.problem(1, "the store is away: the agent uses the peers that were saved on 20", true).await?;
        site.routed(1, 100, "", true).await?;
        site.reach_all().await?;
        site.relay.open()?;
        site.routed(1, 101, "", true).await?;
        site.routed(1, 100, "", false).await?;
        site.problem(1, "the store is away", false).await?;
        site.reach_all().await?;
        ensure!(site.versions().await == before, "a Node was written although nothing of it changed");
        // With another Network, the saved peers cannot be used.
        booted_again(&mut site).await
    });
}

async fn booted_again(site: &mut Site) -> Result<()> {
    site.create_peer(100).await;
    site.routed(1, 100, "", true).await?;
    booted(site).await?;
    site.relay.close();
    let text = fs::read_to_string(site.net_conf())?;
    fs::write(site.net_conf(), text.replace("10.244.0.0/16", "10.200.0.0/16"))?;
    let node = &mut site.lab.nodes[0];
    node.start()?;
    site.problem(1, "waiting: ", true).await?;
    let node = &site.lab.nodes[0];
    let log = fs::read_to_string(node.log())?;
    ensure!(log.contains("saved peers: they are of 10.244.0.0/16 with vxlan, net-conf says 10.200.0.0/16"), "{log}");
    ensure!(!node.subnet_file().exists(), "no subnet.env");
    Ok(())
}
