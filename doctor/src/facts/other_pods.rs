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
use crate::processes::{self, Id, Process, ProcessList};

/// The control groups of pods contain this word.
const OF_KUBELET: &str = "kubepods";
/// What the group of a container or of a machine has in its name: such a node in a container (kind, k3d, LXD) has a kubelet and pods of its
/// own.
const OF_OTHERS: [&str; 5] = ["docker", "libpod", "lxc", "machine.slice", "containerd"];

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
pub(super) fn read(tables: &Tables<'_>, subnets: &[IpNet], processes: &ProcessList) -> Vec<OtherPod> {
    let candidates = candidates(tables, subnets);
    let Ok(mut host) = Rtnl::open() else { return Vec::new() };
    if candidates.is_empty() || subnets.is_empty() {
        return Vec::new();
    }
    let mut other_pod = |path: PathBuf| {
        let netns = File::open(path).ok()?;
        let id = host.netns_id(netns.as_fd()).ok()??;
        let (_, bridge) = candidates.iter().find(|(netns, _)| *netns == id)?;
        let addrs = Rtnl::open_in(netns.as_fd()).and_then(|mut pod| pod.addrs()).ok()?;
        let is_inside = |addr: &IpAddr| subnets.iter().any(|subnet| subnet.trunc().contains(addr));
        let addrs = addrs.iter().filter(|addr| addr.global && !addr.addr.is_loopback()).map(|addr| addr.addr);
        let addrs: Vec<IpAddr> = addrs.collect();
        let addr = *addrs.first().filter(|_| !addrs.iter().any(is_inside))?;
        Some(OtherPod { bridge: bridge.clone(), addr })
    };
    namespaces_of_pods(processes).into_values().filter_map(&mut other_pod).collect()
}

/// Returns the namespaces at the other ends of links in bridges of other networks, each with the name of the bridge.
fn candidates(tables: &Tables<'_>, subnets: &[IpNet]) -> Vec<(i32, String)> {
    let bridge = |link: &Link| tables.link(link.master).filter(|above| link.master != 0 && above.kind == "bridge");
    let is_of_weft = |link: &Link| {
        let is_ours = |above: &Link| {
            let mut addrs = tables.addrs.iter().filter(|addr| addr.index == above.index);
            above.name == BRIDGE || addrs.any(|addr| subnets.iter().any(|subnet| subnet.trunc().contains(&addr.addr)))
        };
        is_of_routed_pod(link) || bridge(link).is_some_and(is_ours)
    };
    let of_other = tables.links.iter().filter(|link| !is_of_weft(link));
    let mut found: Vec<(i32, String)> =
        of_other.filter_map(|link| Some((link.peer_netns?, bridge(link)?.name.clone()))).collect();
    // Such a network is a second one of the pod.
    found.retain(|(netns, _)| !tables.links.iter().any(|link| link.peer_netns == Some(*netns) && is_of_weft(link)));
    found
}

/// Returns true for the control groups of a process in a pod of the kubelet of this host.
pub(super) fn is_of_kubelet(groups: &str) -> bool {
    let mut paths = groups.lines().filter_map(|line| line.split_once(OF_KUBELET)).peekable();
    let is_inner = |(before, after): (&str, &str)| {
        // The groups of a pod are `kubepods.slice/kubepods-burstable.slice/...`. One that comes later is that of a pod in a pod.
        let mut later = after.split('/').skip(1).skip_while(|part| part.contains(OF_KUBELET));
        OF_OTHERS.iter().any(|other| before.contains(other)) || later.any(|part| part.contains(OF_KUBELET))
    };
    paths.peek().is_some() && !paths.any(is_inner)
}

/// Returns the network namespaces in which processes of pods are.
fn namespaces_of_pods(processes: &ProcessList) -> BTreeMap<Id, PathBuf> {
    let of_pod = |process: &Process| {
        let groups = fs::read_to_string(process.dir.join("cgroup")).unwrap_or_default();
        let netns = process.dir.join("ns/net");
        is_of_kubelet(&groups).then(|| Some((processes::id(&netns).ok()?, netns)))?
    };
    processes.all().filter_map(of_pod).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_a_node_that_is_a_container_itself_are_not_those_of_this_host() {
        let burstable = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7.slice/cri-containerd-9.scope";
        for (group, is_ours) in [
            (format!("/{burstable}"), true),
            ("/kubepods/besteffort/pod7/9".to_owned(), true),
            (
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod7.slice/cri-containerd-9.scope".to_owned(),
                true,
            ),
            (format!("/system.slice/docker-9.scope/kubelet.slice/kubelet-{burstable}"), false),
            ("/docker/9/kubelet/kubepods/besteffort/pod7/9".to_owned(), false),
            ("/lxc.payload.n1/kubepods/besteffort/pod7/9".to_owned(), false),
            (format!("/machine.slice/libpod-9.scope/container/{burstable}"), false),
            (format!("/{burstable}/kubelet.slice/kubelet-kubepods.slice"), false),
            ("/kubepods/besteffort/pod7/9/kubepods/besteffort/pod8/9".to_owned(), false),
            ("/system.slice/containerd.service".to_owned(), false),
        ] {
            assert_eq!(is_of_kubelet(&format!("0::{group}\n")), is_ours, "{group}");
        }
        let of_two = "12:pids:/docker/9/kubepods/pod7/9\n11:cpu,cpuacct:/kubepods/pod7/9\n1:name=systemd:/user.slice\n";
        assert!(!is_of_kubelet(of_two), "one of its groups is in a container");
        assert!(is_of_kubelet(of_two.split_once('\n').unwrap().1), "version 1 has a line for each controller");
        assert!(!is_of_kubelet(""));
    }
}
