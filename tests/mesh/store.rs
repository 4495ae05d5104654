// SPDX-License-Identifier: Apache-2.0
//! etcd is killed, stopped, wiped and compacted. No packet is lost, and the agents connect again by themselves.

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;
use weft_lab::ping::Stream;
use weft_lab::store::Etcd;
use weft_lab::{Lab, LabOptions, StoreKind, wait_for};

use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);
/// A lease of a node that has no machine, inside the network of the lab.
const KEY: &str = "/coreos.com/network/subnets/10.244.0.0-24";
const VALUE: &str = r#"{"PublicIP":"192.168.77.250","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"0e:00:00:00:00:fa"}}"#;

async fn started() -> Result<(Lab, Vec<String>)> {
    let mut lab = Lab::start(&LabOptions { store: StoreKind::Etcd, ..options() }).await?;
    lab.reach_all().await?;
    let leases = lab.store.etcd()?.leases().await?;
    ensure!(leases.len() == 3, "three nodes, three leases: {leases:?}");
    Ok((lab, leases))
}

async fn stream(lab: &Lab) -> Result<Stream> {
    Stream::start(&lab.nodes[0].pods[0], lab.nodes[2].pods[0].addrs[0]).await
}

async fn nothing_lost(mut stream: Stream) -> Result<()> {
    stream.answers(20, LIMIT).await?;
    let loss = stream.stop().await?;
    ensure!(loss.lost == 0, "{} of {} packets lost", loss.lost, loss.sent);
    Ok(())
}

/// Checks that every agent follows a lease that is written and deleted now. So all are connected, and watch etcd.
async fn all_follow(lab: &mut Lab) -> Result<()> {
    lab.store.etcd()?.ctl(&["put", KEY, VALUE]).await?;
    routes(lab, true).await?;
    lab.store.etcd()?.ctl(&["del", KEY]).await?;
    routes(lab, false).await
}

/// Checks that every agent follows a lease that is written now. Its removal is not checked, because it would be held together with many others.
async fn all_hear(lab: &mut Lab) -> Result<()> {
    lab.store.etcd()?.ctl(&["put", KEY, VALUE]).await?;
    routes(lab, true).await
}

async fn routes(lab: &Lab, there: bool) -> Result<()> {
    for node in &lab.nodes {
        let what = format!("{}: route to 10.244.0.0/24 to be {}", node.name(), if there { "there" } else { "gone" });
        let seen = async || {
            let out = node.ns.ip("route show 10.244.0.0/24").await;
            out.is_ok_and(|text| text.contains("10.244.0.0/24") == there)
        };
        wait_for(&what, LIMIT, seen).await.map_err(|error| error.context(lab.logs(10)))?;
    }
    Ok(())
}

async fn trouble(lab: &Lab) -> Result<()> {
    let node = &lab.nodes[0];
    let said = async || {
        node.status_as::<weft::observe::status::Status>().await.is_ok_and(|status| status.store_trouble.is_some())
    };
    wait_for("the agent to say that etcd is silent", LIMIT, said).await
}

async fn leases_are(etcd: &Etcd, expected: &[String]) -> Result<()> {
    wait_for("all leases to be in etcd", LIMIT, async || etcd.leases().await.is_ok_and(|now| now == expected)).await
}

#[test]
fn etcd_killed_and_started_again() {
    on_this_thread(async {
        let (mut lab, leases) = started().await?;
        let stream = stream(&lab).await?;
        lab.store.etcd()?.kill().await?;
        trouble(&lab).await?;
        lab.store.etcd()?.start().await?;
        all_follow(&mut lab).await?;
        leases_are(lab.store.etcd()?, &leases).await?;
        nothing_lost(stream).await
    });
}

#[test]
fn etcd_stopped_and_continued() {
    on_this_thread(async {
        let (mut lab, leases) = started().await?;
        let stream = stream(&lab).await?;
        lab.store.etcd()?.signal(Signal::SIGSTOP)?;
        trouble(&lab).await?;
        lab.store.etcd()?.signal(Signal::SIGCONT)?;
        all_follow(&mut lab).await?;
        leases_are(lab.store.etcd()?, &leases).await?;
        nothing_lost(stream).await
    });
}

/// etcd comes back with another cluster id, revision 1 and no lease. Every node writes its own lease again, and no packet is lost meanwhile.
#[test]
fn etcd_wiped_keeps_every_subnet() {
    on_this_thread(async {
        let (mut lab, leases) = started().await?;
        let stream = stream(&lab).await?;
        lab.store.etcd()?.wipe().await?;
        leases_are(lab.store.etcd()?, &leases).await?;
        all_hear(&mut lab).await?;
        nothing_lost(stream).await
    });
}

/// All leases are deleted with `etcdctl del --prefix`. The removals are held while the nodes write their leases again.
#[test]
fn leases_deleted_by_hand_come_back() {
    on_this_thread(async {
        let (mut lab, leases) = started().await?;
        let stream = stream(&lab).await?;
        lab.store.etcd()?.ctl(&["del", "--prefix", "/coreos.com/network/subnets/"]).await?;
        leases_are(lab.store.etcd()?, &leases).await?;
        all_hear(&mut lab).await?;
        nothing_lost(stream).await
    });
}

/// An agent is stopped while etcd compacts its revision. It then lists again, and sees what was added and removed meanwhile.
#[test]
fn compaction_leads_to_a_list() {
    on_this_thread(async {
        let (mut lab, _) = started().await?;
        let stream = stream(&lab).await?;
        lab.store.etcd()?.kill().await?;
        for node in &lab.nodes {
            node.signal(Signal::SIGSTOP)?;
        }
        let etcd = lab.store.etcd()?;
        etcd.start().await?;
        etcd.ctl(&["put", KEY, VALUE]).await?;
        let out = etcd.ctl(&["get", KEY, "-w", "json"]).await?;
        let revision = serde_json::from_str::<serde_json::Value>(&out)?["header"]["revision"].to_string();
        etcd.ctl(&["compact", &revision]).await?;
        for node in &lab.nodes {
            node.signal(Signal::SIGCONT)?;
        }
        routes(&lab, true).await?;
        all_follow(&mut lab).await?;
        nothing_lost(stream).await
    });
}
