// SPDX-License-Identifier: Apache-2.0
//! Looks into the network namespace of a pod of this node.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use weft_netlink::rtnl::{Rtnl, in_netns};

use super::facts::{Device, Lookup, Neighbour, Packet, Pod, Read};
use super::kernel::Kernel;
use crate::pods::namespaces;
use crate::processes;

/// Where programs put the names of network namespaces.
const NAMES: &str = "/run/netns";

/// Returns what is known inside of the pod with this address, about its way to another address. `devices` are those of this host. `None` if the
/// namespace of the pod is not found, or may not be entered.
pub fn look(devices: &[Device], address: IpAddr, other: IpAddr) -> Option<Pod> {
    // The ID by which this namespace knows that of the pod, which its veth pair reports.
    let mut host = Rtnl::open().ok()?;
    for path in namespaces_of_this_machine() {
        let Ok(netns) = File::open(&path) else { continue };
        let Ok(Some(id)) = host.netns_id(netns.as_fd()) else { continue };
        if !devices.iter().any(|device| device.peer_netns == Some(id)) {
            continue;
        }
        let found = look_into(&netns, address, other);
        let Some((link, route, gateway)) = found else { continue };
        let ours = devices.iter().find(|device| device.index == link.link && device.peer_netns == Some(id));
        if let Some(ours) = ours {
            return Some(Pod { netns: path, link, host_link: ours.clone(), route, gateway });
        }
    }
    None
}

type Inside = (Device, Lookup, Option<(IpAddr, Read<Neighbour>)>);

fn look_into(netns: &File, address: IpAddr, other: IpAddr) -> Option<Inside> {
    let addrs = Rtnl::open_in(netns.as_fd()).ok()?.addrs().ok()?;
    let index = addrs.iter().find(|addr| addr.addr == address)?.index;
    let mut kernel = in_netns(netns.as_fd(), Kernel::open).ok()?.ok()?;
    let link = kernel.devices().ok()?.into_iter().find(|device| device.index == index)?;
    let packet = Packet { from: address, to: other, proto: None, port: None };
    let lookup = kernel.route(&packet, None);
    let gateway = match &lookup {
        Lookup::Route(route) => route.gateway,
        _ => None,
    };
    let gateway = gateway.map(|gateway| (gateway, kernel.neighbour(index, gateway)));
    Some((link, lookup, gateway))
}

/// Returns a path for each network namespace that has a name or a process.
fn namespaces_of_this_machine() -> Vec<PathBuf> {
    let mut paths: BTreeMap<processes::Id, PathBuf> = processes::read().unwrap_or_default().netns;
    paths.extend(namespaces::names(Path::new(NAMES)).unwrap_or_default());
    paths.into_values().collect()
}
