// SPDX-License-Identifier: Apache-2.0
//! Where the peers are, for probes ([`crate::probe`]).

use weft_backends::backend::{Backend, EchoAddress};
use weft_backends::diff;
use weft_backends::family::public;
use weft_backends::link::Outer;
use weft_backends::state::{Key, Value};
use weft_netlink::hash;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;

use super::Plan;
use crate::probe::Target;

impl Plan {
    /// Returns where this believed peer is in a family. `None` if we or the peer have no subnet of this family, if a family of the peer has
    /// no entries, or if its backend knows no address that answers.
    pub fn probe_target(&self, lease: &Lease, family: Family) -> Option<Target> {
        if self.own().subnets.of(family).is_none() || self.unplanned.contains_key(&lease.id) {
            return None;
        }
        let place = self.peers.place(&lease.id)?;
        let (address, published) = match self.backend_of_peer(lease)?.echo_address(lease, family)? {
            EchoAddress::Published(address) => (address, None),
            EchoAddress::Device { address, outer } => {
                (address, public(&lease.attrs, outer.unwrap_or_else(|| self.outer_family(lease))))
            }
        };
        let identity = format!("{} {address} {published:?}", lease.id);
        let tag = hash::stable(identity.bytes()) as u32;
        let mtu = u16::try_from(self.mtu()).unwrap_or(u16::MAX);
        Some(Target { place, family, tag: tag.max(1), address, published, mtu })
    }

    /// Returns where this believed peer is in each of its families, IPv4 first.
    pub fn probe_targets(&self, lease: &Lease) -> impl Iterator<Item = Target> {
        Family::BOTH.into_iter().filter_map(|family| self.probe_target(lease, family))
    }

    /// Returns what the packets for this family's subnet of a peer look like on the underlay, as text for people: `UDP port 8472`.
    pub fn outer_protocol(&self, lease: &Lease, family: Family) -> String {
        let of_kernel = self.keys(&lease.id).into_iter().find_map(|key| self.outer(&key, family));
        let of_agent = || Some(Outer::Udp(self.backend_of_peer(lease)?.tunnel(&self.host, &self.own)?.port));
        match of_kernel.or_else(of_agent) {
            Some(Outer::Udp(port)) => format!("UDP port {port}"),
            Some(Outer::Ipip) => "IP protocol 4 (ipip)".to_owned(),
            None => "the packets of the tunnel".to_owned(),
        }
    }

    /// Returns what packets for a subnet of this family look like if this entry leads them into a tunnel of the kernel.
    fn outer(&self, key: &Key, family: Family) -> Option<Outer> {
        match (key, self.index.desired(key)?) {
            // Each WireGuard peer has a port of its own, and each device of it may have another one.
            (Key::AllowedIp(device, net), Value::AllowedIp(holder)) if Family::of(net.addr()) == family => {
                match self.index.desired(&Key::WgPeer(*device, holder.id()))? {
                    Value::WgPeer(peer) => Some(Outer::Udp(peer.endpoint?.port())),
                    _ => None,
                }
            }
            // With ipip, the route alone names the device.
            (key, value) => match self.index.desired(&Key::Link(diff::device(key, &value)?))? {
                Value::Link(link) => Some(link.kind.outer()?.1),
                _ => None,
            },
        }
    }

    fn backend_of_peer(&self, lease: &Lease) -> Option<&dyn Backend> {
        match self.other_backend(&lease.id) {
            Some(kind) => self.other_backends.get(kind),
            None => Some(&*self.backend),
        }
    }

    /// Returns the family of the packets to this peer's node, if each node chooses it.
    fn outer_family(&self, lease: &Lease) -> Family {
        match self.host.uplink.v4.is_some() && lease.attrs.public_ip.is_some() {
            true => Family::V4,
            false => Family::V6,
        }
    }
}
