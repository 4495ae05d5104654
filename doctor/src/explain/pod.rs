// SPDX-License-Identifier: Apache-2.0
//! Looks into the network namespace of a pod of this node.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use weft_netlink::rtnl::{Addr, Rtnl, in_netns};

use super::facts::{Device, Lookup, Packet, Pod, PodGateway, RouteKind};
use crate::kernel::Kernel;
use crate::namespaces;
use crate::processes;

/// What came of the search for a pod.
#[derive(Debug, Clone, Default)]
pub struct FoundPod {
    /// What is known inside of the pod. `None` if its namespace is not found, or may not be entered.
    pub pod: Option<Pod>,
    /// True if no pod of this node has the address: that was asked in the namespace of every pod.
    pub is_absent: bool,
}

/// The network namespace of a pod.
#[derive(Debug)]
struct PodNamespace {
    path: PathBuf,
    /// The ID by which the namespace of this host knows it.
    id: i32,
    addrs: Vec<Addr>,
}

/// The network namespaces of the pods of this node.
#[derive(Debug, Default)]
pub struct PodNamespaces {
    namespaces: Vec<PodNamespace>,
    /// True if the addresses of every pod are known.
    has_all: bool,
}

impl PodNamespaces {
    /// Reads the addresses in the namespaces of this machine that a device of this host leads to. `bridge` is that of the pods, if there is one.
    pub fn read(devices: &[Device], bridge: Option<&Device>) -> PodNamespaces {
        // The ID by which this namespace knows that of the pod, which its veth pair reports.
        let Ok(mut host) = Rtnl::open() else { return PodNamespaces::default() };
        let is_of_pod = |device: &&Device| bridge.is_none_or(|bridge| bridge.index == device.master);
        let mut unread: Vec<i32> = devices.iter().filter(is_of_pod).filter_map(|device| device.peer_netns).collect();
        // Other kinds of links to pods do not report their other end.
        let has_known_links = bridge.is_some() || !unread.is_empty();
        let mut namespaces = Vec::new();
        for path in namespaces_of_this_machine() {
            let Ok(netns) = File::open(&path) else { continue };
            let Ok(Some(id)) = host.netns_id(netns.as_fd()) else { continue };
            if !devices.iter().any(|device| device.peer_netns == Some(id)) {
                continue;
            }
            let Ok(addrs) = Rtnl::open_in(netns.as_fd()).and_then(|mut pod| pod.addrs()) else { continue };
            unread.retain(|other| *other != id);
            namespaces.push(PodNamespace { path, id, addrs });
        }
        PodNamespaces { namespaces, has_all: has_known_links && unread.is_empty() }
    }

    /// Finds the pod with this address, and its way to another address. `devices` are those of this host.
    pub fn find(&self, devices: &[Device], address: IpAddr, other: IpAddr) -> FoundPod {
        let mut is_absent = self.has_all;
        for namespace in &self.namespaces {
            let Some(addr) = namespace.addrs.iter().find(|addr| addr.addr == address) else { continue };
            is_absent = false;
            let Ok(netns) = File::open(&namespace.path) else { continue };
            let Some(inside) = look_into(&netns, addr.index, address, other) else { continue };
            let Inside { link, route, other_link, gateway } = inside;
            let is_ours = |device: &&Device| device.peer_netns == Some(namespace.id) && device.index == link.link;
            if let Some(host_link) = devices.iter().find(is_ours).cloned() {
                let other_port = other_port(devices, &link, &host_link);
                let netns = namespace.path.clone();
                let pod = Pod { netns, link, host_link, other_port, route, other_link, gateway };
                return FoundPod { pod: Some(pod), is_absent: false };
            }
        }
        FoundPod { pod: None, is_absent }
    }
}

/// Returns the port that somebody wrote down in the table of the bridge instead of that of the pod.
fn other_port(devices: &[Device], inside: &Device, ours: &Device) -> Option<Device> {
    let port = Kernel::open().ok()?.written_port(ours.master, inside.mac.filter(|_| ours.master != 0)?)?;
    devices.iter().find(|device| device.index == port && port != ours.index).cloned()
}

/// What is known inside of a pod.
struct Inside {
    link: Device,
    route: Lookup,
    other_link: Option<String>,
    gateway: Option<PodGateway>,
}

fn look_into(netns: &File, index: u32, address: IpAddr, other: IpAddr) -> Option<Inside> {
    let mut kernel = in_netns(netns.as_fd(), Kernel::open).ok()?.ok()?;
    let devices = kernel.devices().ok()?;
    let link = devices.iter().find(|device| device.index == index)?.clone();
    let packet = Packet { from: address, to: other, proto: None, port: None };
    let route = kernel.route(&packet, None);
    let taken = match &route {
        Lookup::Route(route) if route.kind == RouteKind::Unicast => Some(route),
        _ => None,
    };
    let other_device = taken.and_then(|route| devices.iter().find(|device| device.index == route.device));
    let other_link = other_device.filter(|device| device.index != index).map(|device| device.name.clone());
    let gateway = taken
        .and_then(|route| route.gateway)
        .map(|address| PodGateway { address, neighbour: kernel.neighbour(index, address) });
    Some(Inside { link, route, other_link, gateway })
}

/// Returns a path for each network namespace that has a name or a process.
fn namespaces_of_this_machine() -> Vec<PathBuf> {
    let mut paths: BTreeMap<processes::Id, PathBuf> = processes::netns(&processes::all().unwrap_or_default());
    paths.extend(namespaces::names(Path::new(namespaces::NAMES)).unwrap_or_default());
    paths.into_values().collect()
}
