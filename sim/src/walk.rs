// SPDX-License-Identifier: Apache-2.0
//! Walks a packet through the simulated kernels, as Linux would forward it.

use std::cell::Ref;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use weft_backends::ipip::IpipLink;
use weft_backends::link::Link;
use weft_backends::state::{Key, Mac, Name, Observed, Route, Value};
use weft_backends::vxlan::VxlanLink;
use weft_backends::wireguard::WireGuardLink;
use weft_backends::wireguard_key::PublicKey;
use weft_backends::wireguard_peer::WgPeer;

use crate::kernel::SimKernel;
use crate::machine::Machine;

/// More hops than any packet needs.
const MOST_HOPS: usize = 4;

/// The tables of one machine.
struct Tables<'a> {
    kernel: &'a SimKernel,
    entries: Ref<'a, Observed>,
    /// The lengths of the prefixes of routes, the longest first, each with a metric. There are few of them.
    routes: Vec<(u8, u32)>,
    /// The devices of weft.
    devices: Vec<Name>,
    pods: Option<IpNet>,
}

/// The tables of all machines at one moment.
pub struct Fabric<'a> {
    machines: Vec<Tables<'a>>,
    owners: BTreeMap<Ipv4Addr, usize>,
}

/// Why a packet did not arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lost {
    /// The machine has no route.
    NoRoute(usize),
    /// The route leads nowhere, on purpose or because its interface is down.
    Dead(usize, String),
    /// The route leads out of the cluster.
    Left(usize, IpAddr),
    /// An entry that the route needs is missing.
    Missing(usize, String),
    /// Nobody has this address on the LAN.
    NobodyHas(usize, IpAddr),
    /// The machine that got the tunnel packet has no such tunnel.
    NoTunnel(usize, String),
    /// The packet went on and on.
    Loop,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::NoRoute(at) => write!(f, "n{at} has no route"),
            Lost::Dead(at, text) => write!(f, "n{at}: the route {text} leads nowhere"),
            Lost::Left(at, via) => write!(f, "n{at} sends it out of the cluster, to {via}"),
            Lost::Missing(at, text) => write!(f, "n{at} has no {text}"),
            Lost::NobodyHas(at, ip) => write!(f, "n{at} sends it to {ip}, which nobody has"),
            Lost::NoTunnel(at, text) => write!(f, "n{at} got it, but has no {text}"),
            Lost::Loop => f.write_str("it went in a loop"),
        }
    }
}

fn link(entries: &Observed, dev: Name) -> Option<&Link> {
    match entries.get(&Key::Link(dev)).map(|seen| &seen.value) {
        Some(Value::Link(link)) => Some(link),
        _ => None,
    }
}

impl Tables<'_> {
    /// Returns the route that Linux chooses: the longest prefix, and of several the one with the lowest metric.
    fn route(&self, to: IpAddr) -> Option<(IpNet, Route)> {
        let route = |(length, metric): &(u8, u32)| {
            let net = IpNet::new(to, *length).ok()?.trunc();
            match self.entries.get(&Key::Route(net, *metric)).map(|seen| &seen.value) {
                Some(Value::Route(route)) => Some((net, *route)),
                _ => None,
            }
        };
        self.routes.iter().find_map(route)
    }

    fn has_vxlan(&self, wanted: (u32, u16), mac: Mac) -> bool {
        let same = |kind: &VxlanLink| (kind.vni, kind.port) == wanted;
        let is_wanted = |link: &Link| link.kind.of::<VxlanLink>().is_some_and(same) && link.mac == Some(mac);
        let mut devices = self.devices.iter();
        devices
            .any(|dev| link(&self.entries, *dev).is_some_and(is_wanted) && self.kernel.is_usable(*dev, &self.entries))
    }

    fn has_ipip(&self) -> bool {
        let is_ipip = |link: &Link| link.up && link.kind.of::<IpipLink>().is_some();
        self.devices.iter().any(|dev| link(&self.entries, *dev).is_some_and(is_ipip))
    }

    /// Returns the WireGuard device that has this public key and listens on this port.
    fn wireguard(&self, public: PublicKey, port: u16) -> Option<Name> {
        let is_wanted = |dev: &Name| {
            let kind = link(&self.entries, *dev).and_then(|device| device.kind.of::<WireGuardLink>());
            kind.is_some_and(|kind| (kind.public, kind.port) == (Some(public), port))
        };
        let mut devices = self.devices.iter().copied();
        devices.find(|dev| is_wanted(dev) && self.kernel.is_usable(*dev, &self.entries))
    }

    /// Returns the peer of a WireGuard device to which packets for this address go, and from which alone packets with this source are accepted.
    fn allowed(&self, dev: Name, ip: IpAddr) -> Option<&WgPeer> {
        let holding = self.entries.iter().filter_map(|(key, seen)| match (key, &seen.value) {
            (Key::AllowedIp(on, net), Value::AllowedIp(peer)) if *on == dev && net.contains(&ip) => {
                Some((net.prefix_len(), peer.id()))
            }
            _ => None,
        });
        let (_, peer) = holding.max_by_key(|(length, _)| *length)?;
        match self.entries.get(&Key::WgPeer(dev, peer)).map(|seen| &seen.value) {
            Some(Value::WgPeer(peer)) => Some(peer),
            _ => None,
        }
    }
}

impl<'a> Fabric<'a> {
    /// Reads the tables of all machines.
    pub fn new(machines: &'a [Machine]) -> Fabric<'a> {
        let mut owners = BTreeMap::new();
        let mut tables = Vec::new();
        for machine in machines {
            for ip in machine.kernel.addresses() {
                owners.insert(ip, machine.number);
            }
            let pods = machine.pods().and_then(|subnets| subnets.v4).map(|v4| IpNet::V4(v4.trunc()));
            let entries = machine.kernel.borrow_entries();
            let lengths = entries.iter().filter_map(|(key, _)| match key {
                Key::Route(net, metric) => Some((Reverse(net.prefix_len()), *metric)),
                _ => None,
            });
            let lengths: BTreeSet<(Reverse<u8>, u32)> = lengths.collect();
            let routes = lengths.into_iter().map(|(length, metric)| (length.0, metric)).collect();
            let devices = entries.iter().filter_map(|(key, _)| match key {
                Key::Link(name) => Some(*name),
                _ => None,
            });
            let devices = devices.collect();
            tables.push(Tables { kernel: &machine.kernel, entries, routes, devices, pods });
        }
        Fabric { machines: tables, owners }
    }

    /// Sends a packet from a machine to an address of a pod, and returns the machine that gives it to its pods.
    pub fn send(&self, from: usize, to: IpAddr) -> Result<usize, Lost> {
        let mut at = from;
        for _ in 0..MOST_HOPS {
            if at != from && self.machines[at].pods.is_some_and(|pods| pods.contains(&to)) {
                return Ok(at);
            }
            at = self.hop(from, at, to)?;
        }
        Err(Lost::Loop)
    }

    fn hop(&self, from: usize, at: usize, to: IpAddr) -> Result<usize, Lost> {
        let tables = &self.machines[at];
        let (net, route) = tables.route(to).ok_or(Lost::NoRoute(at))?;
        let is_wireguard =
            |dev: Name| link(&tables.entries, dev).is_some_and(|device| device.kind.of::<WireGuardLink>().is_some());
        if let Route::Device { dev } = route
            && is_wireguard(dev)
            && tables.kernel.is_usable(dev, &tables.entries)
        {
            return self.by_wireguard(from, at, (dev, to));
        }
        let Route::Unicast { via, dev, .. } = route else {
            return Err(Lost::Dead(at, format!("{net} {route}")));
        };
        if !tables.kernel.is_usable(dev, &tables.entries) {
            return Err(Lost::Dead(at, format!("{net} {route}")));
        }
        let Some(device) = link(&tables.entries, dev) else {
            if net.prefix_len() == 0 {
                return Err(Lost::Left(at, via));
            }
            return self.on_lan(at, via);
        };
        if let Some(vxlan) = device.kind.of::<VxlanLink>() {
            let mac = match tables.entries.get(&Key::Neigh(dev, via)).map(|seen| &seen.value) {
                Some(Value::Neigh(mac)) => *mac,
                _ => return Err(Lost::Missing(at, format!("neighbour {via} on {dev}"))),
            };
            let outer = match tables.entries.get(&Key::Fdb(dev, mac)).map(|seen| &seen.value) {
                Some(Value::Fdb(outer)) => *outer,
                _ => return Err(Lost::Missing(at, format!("FDB entry {mac} on {dev}"))),
            };
            let next = self.on_lan(at, outer)?;
            let there = self.machines[next].has_vxlan((vxlan.vni, vxlan.port), mac);
            return if there { Ok(next) } else { Err(Lost::NoTunnel(next, format!("vxlan device with {mac}"))) };
        }
        let next = self.on_lan(at, via)?;
        if self.machines[next].has_ipip() { Ok(next) } else { Err(Lost::NoTunnel(next, "ipip device".to_owned())) }
    }

    /// Sends a packet by a WireGuard device. The receiver accepts it if the device there has this one as a peer, and allows it the source.
    fn by_wireguard(&self, from: usize, at: usize, (dev, to): (Name, IpAddr)) -> Result<usize, Lost> {
        let tables = &self.machines[at];
        let own = link(&tables.entries, dev).and_then(|device| device.kind.of::<WireGuardLink>()?.public);
        let Some((own, peer)) = own.zip(tables.allowed(dev, to)) else {
            return Err(Lost::Missing(at, format!("peer for {to} on {dev}")));
        };
        let Some(endpoint) = peer.endpoint else {
            return Err(Lost::Missing(at, format!("endpoint for {to} on {dev}")));
        };
        let next = self.on_lan(at, endpoint.ip())?;
        let (there, source) = (&self.machines[next], self.machines[from].pods.map(|pods| pods.addr()));
        let Some(device) = there.wireguard(peer.key, endpoint.port()) else {
            return Err(Lost::NoTunnel(next, format!("WireGuard device with the key {}", peer.key)));
        };
        let sender = source.and_then(|source| there.allowed(device, source));
        let is_accepted = sender.is_some_and(|sender| sender.key == own);
        if is_accepted { Ok(next) } else { Err(Lost::NoTunnel(next, format!("peer for n{at} on {device}"))) }
    }

    /// Returns the machine that gets a packet for an address of the LAN.
    fn on_lan(&self, at: usize, to: IpAddr) -> Result<usize, Lost> {
        let tables = &self.machines[at];
        let (net, route) = tables.route(to).ok_or(Lost::NoRoute(at))?;
        let usable =
            |dev: &Name| link(&tables.entries, *dev).is_none() && tables.kernel.is_usable(*dev, &tables.entries);
        match route {
            Route::Device { dev } if usable(&dev) => {}
            _ => return Err(Lost::Dead(at, format!("{net} {route} to the machine {to}"))),
        }
        let owner = match to {
            IpAddr::V4(v4) => self.owners.get(&v4),
            IpAddr::V6(_) => None,
        };
        owner.copied().ok_or(Lost::NobodyHas(at, to))
    }
}
