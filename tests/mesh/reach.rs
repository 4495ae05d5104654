// SPDX-License-Identifier: Apache-2.0
//! Three nodes reach each other's pods, for every backend and family.

use anyhow::{Result, ensure};
use weft_lab::fault::entries;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind};

use crate::{on_this_thread, options};

async fn all_to_all(options: LabOptions) -> Result<Lab> {
    let families = if options.ipv6 { 2 } else { 1 };
    let lab = Lab::start(&options).await?;
    let matrix = lab.reach_all().await?;
    ensure!(matrix.len() == 6 * families, "3 pods make 6 pairs of each family: {matrix:?}");
    Ok(lab)
}

#[test]
fn vxlan_v4() {
    on_this_thread(async { all_to_all(LabOptions { store: StoreKind::Etcd, ..options() }).await.map(drop) });
}

#[test]
fn vxlan_dual() {
    on_this_thread(async {
        all_to_all(LabOptions { store: StoreKind::Etcd, ipv6: true, ..options() }).await.map(drop)
    });
}

#[test]
fn vxlan_v6_alone() {
    on_this_thread(async { all_to_all(LabOptions { only_ipv6: true, ..options() }).await.map(drop) });
}

#[test]
fn host_gw_v4() {
    let backend = BackendKind::HostGw;
    on_this_thread(async { all_to_all(LabOptions { backend, store: StoreKind::Etcd, ..options() }).await.map(drop) });
}

#[test]
fn host_gw_dual() {
    let backend = BackendKind::HostGw;
    on_this_thread(async {
        all_to_all(LabOptions { backend, store: StoreKind::Etcd, ipv6: true, ..options() }).await.map(drop)
    });
}

#[test]
fn plain_routes_reach_as_nexthop_objects_do() {
    on_this_thread(async {
        let lab = all_to_all(LabOptions { no_nexthop_objects: true, ..options() }).await?;
        for node in &lab.nodes {
            let objects = node.ns.ip("nexthop show").await?;
            ensure!(objects.trim().is_empty(), "{} has nexthop objects: {objects}", node.name());
        }
        Ok(())
    });
}

/// n1 and n2 are on one link, and n3 is behind the router. n1 reaches n2 without the tunnel, and n3 through it.
#[test]
fn direct_routing_uses_the_tunnel_behind_a_router_only() {
    on_this_thread(async {
        let options =
            LabOptions { store: StoreKind::Etcd, ipv6: true, router: true, direct_routing: true, ..options() };
        let lab = all_to_all(options).await?;
        let node = &lab.nodes[0];
        for (peer, devices) in [(1, ["eth0", "eth0"]), (2, ["flannel.1", "flannel-v6.1"])] {
            for (addr, device) in lab.nodes[peer].pods[0].addrs.iter().zip(devices) {
                let route = node.ns.ip(&format!("route get {addr}")).await?;
                ensure!(route.contains(&format!("dev {device} ")), "n1 to {addr}: not by {device}: {route}");
            }
        }
        let written = entries(&node.ns).await?;
        let near = lab.nodes[1].uplink[0];
        let tunnel = written.iter().find(|entry| entry.starts_with("fdb") && entry.contains(&format!("dst {near} ")));
        ensure!(tunnel.is_none(), "no FDB entry for a peer on the same link: {tunnel:?}");
        Ok(())
    });
}
