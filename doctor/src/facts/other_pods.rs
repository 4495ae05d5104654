// SPDX-License-Identifier: Apache-2.0
//! Pods of this node that are connected to another network than that of weft, such as those which the kubelet started while the
//! configuration of another network came first.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;

use ipnet::IpNet;
use weft_netlink::rtnl::{Link, Rtnl};

use super::tables::Tables;
use crate::known_links::{BRIDGE, is_of_routed_pod};
use crate::processes::{self, Id};

/// The control groups of pods contain this word.
const OF_KUBELET: &str = "kubepods";

/// A pod that is connected to the bridge of another network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherPod {
    /// The bridge.
    pub bridge: String,
    /// An address of the pod.
    pub addr: IpAddr,
}

/// Looks for pods of the kubelet that are connected to a bridge of another network, and neither to that of weft nor with an address in
/// the subnets of this node. Containers of other programs are connected to such bridges on purpose. What cannot be read is left out.
pub(super) fn read(tables: &Tables<'_>, subnets: &[IpNet]) -> Vec<OtherPod> {
    let candidates = candidates(tables, subnets);
    let Ok(mut host) = Rtnl::open() else { return Vec::new() };
    if candidates.is_empty() || subnets.is_empty() {
        return Vec::new();
    }
    let mut other_pod = |path: PathBuf| {
        let netns = File::open(path).ok()?;
        let bridge = candidates.get(&host.netns_id(netns.as_fd()).ok()??)?;
        let addrs = Rtnl::open_in(netns.as_fd()).and_then(|mut pod| pod.addrs()).ok()?;
        let is_inside = |addr: &IpAddr| subnets.iter().any(|subnet| subnet.trunc().contains(addr));
        let addrs = addrs.iter().filter(|addr| addr.global && !addr.addr.is_loopback()).map(|addr| addr.addr);
        let addrs: Vec<IpAddr> = addrs.collect();
        let addr = *addrs.first().filter(|_| !addrs.iter().any(is_inside))?;
        Some(OtherPod { bridge: bridge.clone(), addr })
    };
    namespaces_of_pods().into_values().filter_map(&mut other_pod).collect()
}

/// Returns the namespaces at the other ends of links in bridges of other networks, each with the name of the bridge.
fn candidates(tables: &Tables<'_>, subnets: &[IpNet]) -> BTreeMap<i32, String> {
    let bridge = |link: &Link| tables.link(link.master).filter(|above| link.master != 0 && above.kind == "bridge");
    let is_of_weft = |link: &Link| {
        let is_ours = |above: &Link| {
            let mut addrs = tables.addrs.iter().filter(|addr| addr.index == above.index);
            above.name == BRIDGE || addrs.any(|addr| subnets.iter().any(|subnet| subnet.trunc().contains(&addr.addr)))
        };
        is_of_routed_pod(link) || bridge(link).is_some_and(is_ours)
    };
    let of_other = tables.links.iter().filter(|link| !is_of_weft(link));
    let mut found: BTreeMap<i32, String> =
        of_other.filter_map(|link| Some((link.peer_netns?, bridge(link)?.name.clone()))).collect();
    // Such a network is a second one of the pod.
    found.retain(|netns, _| !tables.links.iter().any(|link| link.peer_netns == Some(*netns) && is_of_weft(link)));
    found
}

/// Returns the network namespaces in which processes of pods are.
fn namespaces_of_pods() -> BTreeMap<Id, PathBuf> {
    let of_pod = |process: processes::Process| {
        let groups = fs::read_to_string(process.dir.join("cgroup")).unwrap_or_default();
        let netns = process.dir.join("ns/net");
        groups.contains(OF_KUBELET).then(|| Some((processes::id(&netns).ok()?, netns)))?
    };
    processes::all().unwrap_or_default().into_iter().filter_map(of_pod).collect()
}
