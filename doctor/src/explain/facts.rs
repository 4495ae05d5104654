// SPDX-License-Identifier: Apache-2.0
//! What is known about one packet: what the kernel answers, and what the agent says.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use weft_netlink::nftables::Hook;
use weft_netlink::rtnl::Addr;

pub use crate::kernel::ends::Ends;
pub use crate::kernel::entries::{Device, DeviceKind, Lookup, Mac, Neighbour, Packet, Proto, Read, Route, RouteKind};
use crate::kernel::ipset::UncachedSets;
use crate::kernel::rules::{Connection, Tested};
use crate::subnet_file::SubnetFile;

/// One decision of the routing table, and what follows from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hop {
    /// The route.
    pub lookup: Lookup,
    /// The device of the route.
    pub device: Option<Device>,
    /// The address of the next hop, which is the destination itself on the same link.
    pub nexthop: Option<IpAddr>,
    /// The neighbour of the next hop. `None` if the device needs none.
    pub neighbour: Option<Read<Neighbour>>,
}

impl Hop {
    /// Returns the route if the packet is sent or delivered.
    pub fn route(&self) -> Option<&Route> {
        match &self.lookup {
            Lookup::Route(route) => Some(route),
            Lookup::Refused(_) | Lookup::Unreadable(_) => None,
        }
    }
}

/// How a packet leaves through a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tunnel {
    /// Where the FDB of a vxlan device sends the packet; `None` for another device.
    pub fdb: Option<Read<IpAddr>>,
    /// The address of the other end, if it is known.
    pub remote: Option<IpAddr>,
    /// The way of the outer packet to that address.
    pub outer: Option<Hop>,
    /// The addresses of this node in the outer packets, if they are known.
    pub ends: Option<Ends>,
}

/// What the kernel does with a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Way {
    /// The packet.
    pub packet: Packet,
    /// The device by which the packet arrives; `None` if this host itself sends it.
    pub arrives: Option<Device>,
    /// Where it goes.
    pub hop: Hop,
    /// How it goes through a tunnel, if its device is one.
    pub tunnel: Option<Tunnel>,
    /// The longest route of weft in the main table for the destination, if another route was chosen.
    pub route_of_weft: Option<Route>,
    /// What connection tracking says of the packet.
    pub connection: Connection,
    /// The pod of this node that sends it, if one was found.
    pub from_pod: Option<Pod>,
    /// The pod of this node that gets it, if one was found.
    pub to_pod: Option<Pod>,
    /// The queues that programs read, if they are known.
    pub queues: Option<Vec<u16>>,
}

impl Way {
    /// Returns the hook at which rules filter this packet: the one for forwarded packets, for those that this host sends, or for those that it
    /// receives.
    pub fn filter_hook(&self) -> Hook {
        match (&self.arrives, &self.hop.device) {
            (None, _) => Hook::Output,
            (Some(_), Some(_)) => Hook::Forward,
            (Some(_), None) => Hook::Input,
        }
    }

    /// Returns all hooks that this packet passes, in order.
    pub fn hooks(&self) -> &'static [Hook] {
        match self.filter_hook() {
            Hook::Forward => &[Hook::Prerouting, Hook::Forward, Hook::Postrouting],
            Hook::Input => &[Hook::Prerouting, Hook::Input],
            _ => &[Hook::Output, Hook::Postrouting],
        }
    }

    /// Returns what rules can test of the packet.
    pub fn tested(&self) -> Tested<'_> {
        fn name(device: Option<&Device>) -> Option<&str> {
            device.map(|device| device.name.as_str())
        }
        let to_local = self.hop.route().and_then(|route| match route.kind {
            RouteKind::Local => Some(true),
            // The way of a packet for this host may end without a device.
            RouteKind::Unicast => Some(self.hop.device.is_none()),
            _ => None,
        });
        let tested = Tested::new(&self.packet, name(self.arrives.as_ref()), name(self.hop.device.as_ref()));
        let queues = self.queues.as_deref();
        Tested { connection: self.connection, to_local, queues, sets: Some(&UncachedSets), ..tested }
    }
}

/// A pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// A path of its network namespace.
    pub netns: PathBuf,
    /// The link in it that has the address.
    pub link: Device,
    /// The other end of that link, on this host.
    pub host_link: Device,
    /// The port behind which its bridge has the MAC address of the pod, if somebody wrote down another one.
    pub other_port: Option<Device>,
    /// The way of its packets to the other address.
    pub route: Lookup,
    /// The link of the pod by which they leave, if it is not the one that has the address.
    pub other_link: Option<String>,
    /// The gateway of that route.
    pub gateway: Option<PodGateway>,
}

impl Pod {
    /// Returns the beginning of a command that works inside of the pod.
    pub fn enter(&self) -> String {
        format!("nsenter --net={}", self.netns.display())
    }
}

/// The gateway of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodGateway {
    /// Its address.
    pub address: IpAddr,
    /// The neighbour entry for it in the pod.
    pub neighbour: Read<Neighbour>,
}

/// Where an address belongs to, as this host knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// It is an address of this host.
    Host,
    /// It is an address of the own subnet, or one that a device of pods leads to.
    Pod,
    /// It belongs to a peer.
    Peer(Peer),
    /// It is inside Network, and nothing more is known.
    Network,
    /// It is none of these.
    Outside,
}

impl Place {
    /// Returns true if packets from this address begin on this host, and packets to it end here.
    pub fn is_here(&self) -> bool {
        matches!(self, Place::Host | Place::Pod)
    }

    /// Returns true for a pod of another node.
    pub fn is_remote_pod(&self, address: IpAddr) -> bool {
        match self {
            Place::Network => true,
            Place::Peer(peer) => peer.has_pod(address),
            Place::Host | Place::Pod | Place::Outside => false,
        }
    }
}

/// The lease of a peer, as the agent has it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// Its subnets.
    pub subnets: Vec<IpNet>,
    /// Its published addresses.
    pub public: Vec<IpAddr>,
    /// The type of its backend.
    pub backend: String,
    /// How far its entries are, as `weft status` names it.
    pub state: String,
    /// The reason for the state.
    pub reason: Option<String>,
    /// Where WireGuard sends its packets.
    pub endpoint: Option<IpAddr>,
}

impl Peer {
    /// Returns true if this is an address of one of its pods.
    pub fn has_pod(&self, address: IpAddr) -> bool {
        self.subnets.iter().any(|net| net.contains(&address))
    }

    /// Returns the subnet of a family.
    pub fn subnet(&self, v4: bool) -> Option<&IpNet> {
        self.subnets.iter().find(|net| net.addr().is_ipv4() == v4)
    }
}

/// A difference between the plan of the agent and the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The entry, such as `route 10.5.2.0/24`.
    pub entry: String,
    /// What the plan contains; `None` if the entry should not exist.
    pub should_be: Option<String>,
}

/// What the agent knows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AgentFacts {
    /// The type of the own backend.
    pub backend: String,
    /// All peers that have one of the two addresses.
    pub peers: Vec<Peer>,
    /// What its next pass would change; `None` if it was not asked, or has no plan.
    pub differences: Option<Vec<Difference>>,
    /// The UDP port of its tunnel, if the backend is udp or wireguard.
    pub tunnel_port: Option<u16>,
    /// The addresses that this node publishes. Behind a NAT, no link of this node has them.
    pub published: Vec<IpAddr>,
    /// The addresses of the uplink, from which the tunnels of the agent send.
    pub uplink_addrs: Vec<IpAddr>,
}

/// What the agent answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Agent {
    /// It does not answer. The text says on which socket, and why.
    Silent(String),
    /// What it knows.
    Answers(AgentFacts),
}

/// Everything that is known before the rules of the firewall are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The packet.
    pub packet: Packet,
    /// Where its source address belongs to.
    pub from: Place,
    /// Where its destination address belongs to.
    pub to: Place,
    /// The subnet file.
    pub subnet_file: SubnetFile,
    /// The agent.
    pub agent: Agent,
    /// The ways, in order: of the packet, and of the answer if it passes this host. Empty if neither address belongs to this host.
    pub ways: Vec<Way>,
    /// Devices of weft that are down.
    pub down: Vec<Device>,
    /// `net.ipv4.ip_forward`, or `net.ipv6.conf.all.forwarding`.
    pub forwarding: Option<bool>,
    /// The bridge of the pods, if there is one.
    pub bridge: Option<Device>,
    /// The addresses of this host.
    pub addrs: Vec<Addr>,
    /// Those of the two addresses that are in the own subnet, and that no pod of this node has.
    pub absent: Vec<IpAddr>,
}
