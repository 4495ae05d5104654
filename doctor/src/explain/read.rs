// SPDX-License-Identifier: Apache-2.0
//! Follows a packet from one table of the kernel to the next.

use std::cell::OnceCell;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use weft_netlink::rtnl::{Addr, Rtnl};

use super::facts::{
    Agent, Device, DeviceKind, Ends, Facts, Hop, Lookup, Packet, Peer, Place, Pod, Read, Route, RouteKind, Tunnel, Way,
};
use super::pod::{FoundPod, PodNamespaces};
use crate::kernel::Kernel;
use crate::kernel::ends::first_here;
use crate::kernel::entries::unspecified;
use crate::kernel::queues::readers;
use crate::kernel::rules::Connection;
use crate::known_links::BRIDGE;
use crate::subnet_file::{self, SubnetFile};
use crate::sysctl;

/// Reads everything about a packet.
///
/// # Errors
/// The kernel's links cannot be read.
pub fn read(packet: Packet, subnet_file: &Path, agent: Agent) -> io::Result<Facts> {
    let mut kernel = Kernel::open()?;
    let devices = kernel.devices()?;
    let subnet_file = subnet_file::read(subnet_file);
    let bridge = devices.iter().find(|device| device.name == BRIDGE && device.kind == DeviceKind::Bridge).cloned();
    let addrs = Rtnl::open().and_then(|mut host| host.addrs()).unwrap_or_default();
    let (pod_namespaces, pods) = (OnceCell::new(), Vec::new());
    let mut walk = Walk { kernel, devices, addrs, bridge, subnet_file, agent, pod_namespaces, pods };
    let (from, to) = (walk.place(packet.from), walk.place(packet.to));
    let mut ways = Vec::new();
    if from.is_here() || to.is_here() {
        ways.push(walk.way(packet, &from, &to));
    }
    let is_of_cluster = |place: &Place| matches!(place, Place::Peer(_) | Place::Network);
    // Answers from outside come to another address, if the source address is translated.
    let has_answer = if from.is_here() { is_of_cluster(&to) } else { to.is_here() };
    if has_answer {
        ways.push(Way { connection: Connection::Established, ..walk.way(packet.answer(), &to, &from) });
    }
    let down = walk.devices.into_iter().filter(|device| device.of_weft && !device.up).collect();
    Ok(Facts {
        packet,
        from,
        to,
        subnet_file: walk.subnet_file,
        agent: walk.agent,
        ways,
        down,
        forwarding: sysctl::forwarding(packet.to.is_ipv4()).map(|value| value != 0),
        bridge: walk.bridge,
        addrs: walk.addrs,
        absent: walk.pods.into_iter().filter(|(_, found)| found.is_absent).map(|(address, _)| address).collect(),
    })
}

struct Walk {
    kernel: Kernel,
    devices: Vec<Device>,
    addrs: Vec<Addr>,
    bridge: Option<Device>,
    subnet_file: SubnetFile,
    agent: Agent,
    /// Where pods are looked for, once one of them is needed.
    pod_namespaces: OnceCell<PodNamespaces>,
    /// The pods that were looked for. Both ways are those between the same two addresses.
    pods: Vec<(IpAddr, FoundPod)>,
}

impl Walk {
    fn place(&mut self, address: IpAddr) -> Place {
        let to_it = Packet { from: unspecified(address.is_ipv4()), to: address, proto: None, port: None };
        let found = self.kernel.route(&to_it, None);
        if let Lookup::Route(route) = &found
            && route.kind == RouteKind::Local
        {
            return Place::Host;
        }
        if let SubnetFile::Good(env) = &self.subnet_file
            && env.subnets.iter().any(|net| net.contains(&address))
        {
            return Place::Pod;
        }
        if let Agent::Answers(agent) = &self.agent
            && let Some(peer) = agent.peers.iter().find(|peer| peer.has_pod(address) || peer.public.contains(&address))
        {
            return Place::Peer(peer.clone());
        }
        match &self.subnet_file {
            SubnetFile::Good(env) if env.networks.iter().any(|net| net.contains(&address)) => Place::Network,
            _ => Place::Outside,
        }
    }

    fn device(&self, index: u32) -> Option<Device> {
        self.devices.iter().find(|device| device.index == index).cloned()
    }

    /// Returns the device by which packets from this address arrive: the one that packets to it use.
    fn arrives(&mut self, from: IpAddr, place: &Place) -> Option<Device> {
        if *place == Place::Host {
            return None;
        }
        let back = Packet { from: unspecified(from.is_ipv4()), to: from, proto: None, port: None };
        match self.kernel.route(&back, None) {
            // A pod whose device is gone is not behind the device of the default route.
            Lookup::Route(route)
                if *place == Place::Pod && !leads_to_pods(&route, &self.subnet_file, self.bridge.as_ref()) =>
            {
                None
            }
            Lookup::Route(route) if route.kind == RouteKind::Unicast => self.device(route.device),
            _ => None,
        }
    }

    fn way(&mut self, packet: Packet, from: &Place, to: &Place) -> Way {
        let arrives = self.arrives(packet.from, from);
        let hop = self.hop(&packet, arrives.as_ref());
        let tunnel = match &hop.device {
            Some(device) if device.kind.is_tunnel() => Some(self.tunnel(device.clone(), &hop, to)),
            _ => None,
        };
        let is_foreign = hop.route().is_some_and(|route| route.kind == RouteKind::Unicast && !route.of_weft());
        let route_of_weft = if is_foreign && to.is_remote_pod(packet.to) {
            self.kernel.route_of_weft(packet.to).ok().flatten()
        } else {
            None
        };
        let from_pod = self.pod(from, packet.from, packet.to);
        let to_pod = self.pod(to, packet.to, packet.from);
        Way {
            packet,
            arrives,
            hop,
            tunnel,
            route_of_weft,
            connection: Connection::New,
            from_pod,
            to_pod,
            queues: readers(),
        }
    }

    /// Finds the pod of this node with the address `own`, and its way to the other address.
    fn pod(&mut self, place: &Place, own: IpAddr, other: IpAddr) -> Option<Pod> {
        if *place != Place::Pod {
            return None;
        }
        if let Some((_, known)) = self.pods.iter().find(|(address, _)| *address == own) {
            return known.pod.clone();
        }
        let (devices, bridge) = (&self.devices, self.bridge.as_ref());
        let namespaces = self.pod_namespaces.get_or_init(|| PodNamespaces::read(devices, bridge));
        let found = namespaces.find(devices, own, other);
        let pod = found.pod.clone();
        self.pods.push((own, found));
        pod
    }

    fn hop(&mut self, packet: &Packet, arrives: Option<&Device>) -> Hop {
        let lookup = self.kernel.route(packet, arrives.map(|device| device.index));
        let unicast = match &lookup {
            Lookup::Route(route) if route.kind == RouteKind::Unicast => Some(route),
            _ => None,
        };
        let device = unicast.and_then(|route| self.device(route.device));
        let nexthop = unicast.map(|route| route.gateway.unwrap_or(packet.to));
        let has_neighbours = |device: &&Device| {
            matches!(device.kind, DeviceKind::Ethernet | DeviceKind::Bridge | DeviceKind::Vxlan { .. })
        };
        let neighbour = match (device.as_ref().filter(has_neighbours), nexthop) {
            (Some(device), Some(nexthop)) => Some(self.kernel.neighbour(device.index, nexthop)),
            _ => None,
        };
        Hop { lookup, device, nexthop, neighbour }
    }

    fn tunnel(&mut self, device: Device, hop: &Hop, to: &Place) -> Tunnel {
        let peer = match to {
            Place::Peer(peer) => Some(peer),
            _ => None,
        };
        let fdb = match (&device.kind, &hop.neighbour) {
            (DeviceKind::Vxlan { .. }, Some(Read::Found(neighbour))) => {
                neighbour.mac.map(|mac| self.kernel.fdb(device.index, mac))
            }
            _ => None,
        };
        let remote = match (&device.kind, &fdb) {
            (DeviceKind::Vxlan { .. }, Some(Read::Found(remote))) => Some(*remote),
            (DeviceKind::Vxlan { .. }, _) => None,
            (DeviceKind::Ipip, _) => hop.route().and_then(|route| route.gateway),
            _ => peer.and_then(|peer: &Peer| peer.endpoint.or_else(|| peer.public.first().copied())),
        };
        let is_wireguard = device.kind == DeviceKind::WireGuard;
        let (outer, ends) = remote.map_or((None, None), |remote| {
            let (hop, ends) = self.outer(remote, is_wireguard);
            (Some(hop), ends)
        });
        Tunnel { fdb, remote, outer, ends }
    }

    /// Follows the outer packet of a tunnel. Its source address decides, too, which routes the kernel takes.
    fn outer(&mut self, remote: IpAddr, is_wireguard: bool) -> (Hop, Option<Ends>) {
        let own = |own: &[IpAddr]| first_here(&self.addrs, own, remote);
        let (uplink, published) = match &self.agent {
            Agent::Answers(agent) => (own(&agent.uplink_addrs), own(&agent.published)),
            Agent::Silent(_) => (None, None),
        };
        let local = uplink.filter(|_| !is_wireguard);
        let from = local.unwrap_or_else(|| unspecified(remote.is_ipv4()));
        let hop = self.hop(&Packet { from, to: remote, proto: None, port: None }, None);
        let ends = Ends::new(is_wireguard, uplink, published, hop.route().and_then(|route| route.source));
        // The kernel does not say which route refuses a packet of this host.
        let refusing = match &hop.lookup {
            Lookup::Refused(_) => self.kernel.route_of_main(remote).ok().flatten(),
            _ => None,
        };
        let lookup = match refusing.filter(|route| matches!(route.kind, RouteKind::Refuses(_))) {
            Some(route) => Lookup::Route(route),
            None => hop.lookup,
        };
        (Hop { lookup, ..hop }, ends)
    }
}

/// Returns true if this route leads to the pods of this node: over their bridge, to the whole own subnet, or to a part of it.
pub(super) fn leads_to_pods(route: &Route, subnet_file: &SubnetFile, bridge: Option<&Device>) -> bool {
    let SubnetFile::Good(env) = subnet_file else { return true };
    if bridge.is_some_and(|bridge| bridge.index == route.device) {
        return true;
    }
    let own = |net: ipnet::IpNet| route.prefix.is_some_and(|prefix| net.contains(&prefix));
    env.subnets.iter().any(|net| own(net.trunc()))
}
