// SPDX-License-Identifier: Apache-2.0
//! Which subnets nodes get when many start at once, and when two want the same one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use weft_lab::node::PodNet;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind};

use crate::{on_this_thread, options};

async fn own_subnets(lab: &mut Lab) -> Result<Vec<PodNet>> {
    let mut nets = Vec::new();
    for node in &mut lab.nodes {
        node.start()?;
    }
    for node in &mut lab.nodes {
        node.ready().await?;
        nets.push(node.pod_net().await?);
    }
    Ok(nets)
}

/// Two nodes had the subnet 10.244.77.0/24 before, as after a cloned disk. One of them keeps it, and the other one takes another subnet.
#[test]
fn two_nodes_that_want_one_subnet_end_with_two() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { nodes: 2, store: StoreKind::Etcd, ..options() }).await?;
        let before =
            "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.77.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";
        for node in &lab.nodes {
            fs::write(node.subnet_file(), before)?;
        }
        let _ = own_subnets(&mut lab).await?;
        let leases = lab.store.etcd()?.leases().await?;
        ensure!(leases.len() == 2, "two leases: {leases:?}");
        ensure!(leases.contains(&"10.244.77.0-24".to_owned()), "one keeps its old subnet: {leases:?}");
        // The node that gets another subnet rewrites subnet.env before it is ready, so the file is read now.
        let mut seen = BTreeSet::new();
        for node in &mut lab.nodes {
            seen.insert(node.pod_net().await?.gateways);
            node.add_pods(1).await?;
        }
        ensure!(seen.len() == 2, "both use one subnet: {seen:?}");
        lab.reach_all().await.map(drop)
    });
}

/// The most inotify instances that one lab may use. A user has 128 by default, which all tests and all other programs of root share. An agent
/// uses one, and with the directory store a second one.
const INSTANCES: usize = 64;

async fn each_its_own(nodes: u8, store: StoreKind) -> Result<()> {
    let options = LabOptions { nodes, store, backend: BackendKind::HostGw, ..options() };
    let mut lab = Lab::build(&options).await?;
    let nets = own_subnets(&mut lab).await?;
    let distinct: BTreeSet<_> = nets.iter().map(|net| &net.gateways).collect();
    ensure!(distinct.len() == usize::from(nodes), "{nodes} nodes have {} subnets", distinct.len());
    let others = usize::from(nodes) - 1;
    weft_lab::node::all_know(&lab.nodes, others).await.map_err(|error| error.context(lab.logs(3)))?;
    let instances = lab.nodes.iter().map(|node| instances_of(&node.subnet_file())).sum::<Result<usize>>()?;
    ensure!(instances > 0, "no inotify instance was found, so the count below would prove nothing");
    ensure!(instances <= INSTANCES, "{nodes} agents have {instances} inotify instances");
    Ok(())
}

/// Returns the number of inotify instances of the agent with this subnet.env.
fn instances_of(subnet_file: &Path) -> Result<usize> {
    let flag = format!("--subnet-file={}", subnet_file.display());
    for process in fs::read_dir("/proc")?.flatten().map(|entry| entry.path()) {
        // A process may end meanwhile.
        let words = fs::read(process.join("cmdline")).unwrap_or_default();
        if words.split(|byte| *byte == 0).any(|word| word == flag.as_bytes()) {
            let files = fs::read_dir(process.join("fd"))?.flatten();
            let targets = files.filter_map(|file| fs::read_link(file.path()).ok());
            return Ok(targets.filter(|target| target.as_path() == Path::new("anon_inode:inotify")).count());
        }
    }
    bail!("no process has {flag}")
}

/// The labs run one after the other, so that only one of them uses inotify instances.
#[test]
fn fifty_agents_at_once_each_get_their_own() {
    on_this_thread(async {
        each_its_own(50, StoreKind::Etcd).await.context("etcd")?;
        each_its_own(25, StoreKind::Dir).await.context("directory")
    });
}
