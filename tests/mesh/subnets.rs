// SPDX-License-Identifier: Apache-2.0
//! Who gets which subnet when many want one, or two want the same.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Result, ensure};
use weft::lab::node::PodNet;
use weft::lab::{BackendKind, Lab, LabOptions, StoreKind};

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

/// Both were 10.244.77.0/24 before (a cloned disk): one keeps it, the other takes another.
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
        // subnet.env of the loser is rewritten before it is ready: read it now.
        let mut seen = BTreeSet::new();
        for node in &mut lab.nodes {
            seen.insert(node.pod_net().await?.gateways);
            node.add_pods(1).await?;
        }
        ensure!(seen.len() == 2, "both use one subnet: {seen:?}");
        lab.reach_all().await.map(drop)
    });
}

async fn each_its_own(store: StoreKind) -> Result<()> {
    let options = LabOptions { nodes: 50, store, backend: BackendKind::HostGw, ..options() };
    let mut lab = Lab::build(&options).await?;
    let nets = own_subnets(&mut lab).await?;
    let distinct: BTreeSet<_> = nets.iter().map(|net| &net.gateways).collect();
    ensure!(distinct.len() == 50, "50 nodes have {} subnets", distinct.len());
    weft::lab::node::all_know(&lab.nodes, 49).await.map_err(|error| error.context(lab.logs(3)))
}

#[test]
fn fifty_agents_at_once_each_get_their_own_etcd() {
    on_this_thread(each_its_own(StoreKind::Etcd));
}

#[test]
fn fifty_agents_at_once_each_get_their_own_dir() {
    on_this_thread(each_its_own(StoreKind::Dir));
}
