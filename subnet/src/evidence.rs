// SPDX-License-Identifier: Apache-2.0
//! Which lease in the store is ours? One pure answer for every store, see docs/adr/004-which-lease-is-ours.md.
//!
//! A store of flannel's does not know nodes, only public addresses, and an address can wander, be copied or be given twice. So a
//! node shows what else it knows: the subnet that its pods use now, and the MAC of its tunnel device. An address alone counts only
//! where nothing contradicts it.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::lease::{Id, Lease};

/// The VTEP MACs of a node, IPv4 and IPv6, where it has them.
pub type Macs = [Option<[u8; 6]>; 2];

/// The public addresses of a node, IPv4 and IPv6.
pub type Public = (Option<Ipv4Addr>, Option<Ipv6Addr>);

/// What this node knows about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// The id of our record, where the store itself knows its nodes (Kubernetes).
    pub identity: Option<Id>,
    /// The subnet that our pods use: that of subnet.env, or of the lease that we hold.
    pub previous: Option<Subnets>,
    /// The MACs of our tunnel devices.
    pub macs: Macs,
    /// The addresses under which we publish ourselves, or did until now.
    pub public: Vec<Public>,
    /// The other addresses of our uplink, which we may have published before. They count together with the subnet only: one of
    /// them may be a VIP.
    pub beside: Vec<Public>,
}

/// Why a lease is ours; the first is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proof {
    /// The store names our node.
    Identity,
    /// It grants the subnet that our pods use and names the MAC of our device. Its address may be an old one.
    SubnetAndMac,
    /// It grants the subnet that our pods use and names an address of ours; its MAC cannot be compared.
    SubnetAndAddress,
    /// It names our address and the MAC of our device.
    AddressAndMac,
    /// It names our address, and no agent has written it: somebody reserves this subnet for us.
    Reservation,
    /// It names our address, and we know nothing else: the machine was booted, or it is new.
    Address,
}

impl Evidence {
    /// What the holder of this lease knows.
    pub fn of(subnets: Subnets, attrs: &Attrs) -> Evidence {
        let (macs, public) = (macs(attrs), vec![public(attrs)]);
        Evidence { identity: None, previous: Some(subnets), macs, public, beside: Vec::new() }
    }

    /// The same after a change of what is published.
    #[must_use]
    pub fn or(mut self, attrs: &Attrs) -> Evidence {
        let new = macs(attrs);
        self.macs = [self.macs[0].or(new[0]), self.macs[1].or(new[1])];
        self.public.push(public(attrs));
        self
    }

    /// Why this lease is ours; `None`: it is not.
    pub fn proof(&self, lease: &Lease) -> Option<Proof> {
        if let Some(id) = &self.identity {
            return (*id == lease.id).then_some(Proof::Identity);
        }
        let names = |ours: &[Public]| ours.iter().any(|ours| same_node(*ours, public(&lease.attrs)));
        let named = names(&self.public);
        let subnet = self.previous.map(|previous| previous == lease.subnets);
        if !named && subnet != Some(true) {
            return None;
        }
        match (subnet, self.mac(lease), named) {
            (_, Some(false), _) => None,
            (Some(true), Some(true), _) => Some(Proof::SubnetAndMac),
            (Some(true), None, named) => (named || names(&self.beside)).then_some(Proof::SubnetAndAddress),
            (_, Some(true), true) => Some(Proof::AddressAndMac),
            // Every agent writes a type.
            (_, None, true) if lease.attrs.backend_type.is_empty() => Some(Proof::Reservation),
            (None, None, true) => Some(Proof::Address),
            (_, _, _) => None,
        }
    }

    /// True when this lease is ours.
    pub fn proves(&self, lease: &Lease) -> bool {
        self.proof(lease).is_some()
    }

    /// Who holds this lease, which is not ours, for people.
    pub fn owner(&self, lease: &Lease) -> String {
        let owner = lease.attrs.owner();
        if self.public.iter().any(|ours| same_node(*ours, public(&lease.attrs))) {
            return format!("another node that publishes our address {owner}, too,");
        }
        owner
    }

    /// Those that are ours, the best proof first, then the oldest. Where nothing but an address speaks for several, at most one of
    /// them can be ours, and nobody knows which: none is.
    pub fn ours<'a>(&self, leases: impl Iterator<Item = &'a Lease>) -> Vec<&'a Lease> {
        let mut ours: Vec<(Proof, &Lease)> = leases.filter_map(|lease| Some((self.proof(lease)?, lease))).collect();
        if ours.iter().filter(|(proof, _)| *proof == Proof::Address).count() > 1 {
            ours.retain(|(proof, _)| *proof != Proof::Address);
        }
        ours.sort_by(|(one, a), (other, b)| (one, &a.age, &a.id).cmp(&(other, &b.age, &b.id)));
        ours.into_iter().map(|(_, lease)| lease).collect()
    }

    /// Whether the lease names the MACs of our devices; `None`: there is nothing to compare.
    fn mac(&self, lease: &Lease) -> Option<bool> {
        let theirs = macs(&lease.attrs);
        let pairs = self.macs.iter().zip(theirs).filter_map(|(ours, theirs)| Some(((*ours)?, theirs?)));
        pairs.map(|(ours, theirs)| ours == theirs).reduce(|one, other| one && other)
    }
}

/// The addresses that a lease names.
pub fn public(attrs: &Attrs) -> Public {
    (attrs.public_ip, attrs.public_ipv6)
}

/// By IPv4 where there is one, else by IPv6.
fn same_node(one: Public, other: Public) -> bool {
    match (one.0, other.0) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.1.is_some() && one.1 == other.1,
        _ => false,
    }
}

/// The VTEP MACs that a lease states; one that no device can have counts as none.
pub fn macs(attrs: &Attrs) -> Macs {
    let mac = |data: &Option<Box<str>>| {
        let data: serde_json::Value = serde_json::from_str(data.as_deref()?).ok()?;
        let mac = parse_mac(data.get("VtepMAC")?.as_str()?)?;
        (mac != [0; 6] && mac[0] & 1 == 0).then_some(mac)
    };
    [mac(&attrs.backend_data), mac(&attrs.backend_v6_data)]
}

/// A MAC in any of the notations that Go reads: `02:00:..`, `02-00-..`, `0200.0000.0001`.
pub fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let separator = text.chars().find(|c| !c.is_ascii_hexdigit())?;
    let width = match separator {
        ':' | '-' => 2,
        '.' => 4,
        _ => return None,
    };
    let groups: Vec<&str> = text.split(separator).collect();
    let whole = |group: &&str| group.len() == width && group.bytes().all(|b| b.is_ascii_hexdigit());
    if groups.len() * width != 12 || !groups.iter().all(whole) {
        return None;
    }
    let number = u64::from_str_radix(&groups.concat(), 16).ok()?;
    let [_, _, mac @ ..] = number.to_be_bytes();
    Some(mac)
}

#[cfg(test)]
#[path = "evidence/tests.rs"]
mod tests;
