// SPDX-License-Identifier: Apache-2.0
//! Decides which lease in the store is ours. All stores use this one pure function; docs/adr/004-which-lease-is-ours.md has the reasons.
//!
//! A lease in flannel's format does not name its node. It names a published address, and an address can move to another machine, be copied,
//! or be given to two machines. So a node also compares the subnet that its pods use now, and the identity of its tunnel device (with
//! vxlan, the VTEP MAC). The address alone counts only where nothing contradicts it.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::attrs::Attrs;
use crate::backend_types::{BackendTypes, PublicIdentities, PublicPorts, differ};
use crate::cidr::Subnets;
use crate::lease::{Id, Lease};
use crate::old_defects::{Defect, is_back};

/// The published addresses of a node, IPv4 and IPv6.
pub type Public = (Option<Ipv4Addr>, Option<Ipv6Addr>);

/// What this node knows about itself.
#[derive(Debug, Clone)]
pub struct Evidence {
    /// Reads the identities out of leases.
    pub types: BackendTypes,
    /// True if a lease without a type is a reservation that a person wrote. False if the leases of our own backend have no type, either.
    pub reservations: bool,
    /// The id of our record, where the store itself knows its nodes (Kubernetes).
    pub id: Option<Id>,
    /// The subnet that our pods use: the one in subnet.env, or in the lease that we hold.
    pub previous: Option<Subnets>,
    /// The public identities of our tunnel devices.
    pub identities: PublicIdentities,
    /// The public identities that we are about to publish, if they are others. They count, too, because a write of our lease may have been
    /// carried out although its answer was lost.
    pub next_identities: PublicIdentities,
    /// The addresses that we publish, or published until now.
    pub public: Vec<Public>,
    /// The ports at which we are reached there, or were until now. A lease that names our address with another port belongs to another
    /// node behind the same NAT.
    pub ports: Vec<PublicPorts>,
    /// The other addresses of our uplink, which we may have published before. They count only together with the subnet, because one
    /// of them may be a virtual address that other nodes can get, too.
    pub other_uplink: Vec<Public>,
}

/// Why a lease is ours. The first one is the strongest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proof {
    /// The store names our node.
    Id,
    /// It grants the subnet that our pods use and names the identity of our device. Its address may be an old one.
    SubnetAndIdentity,
    /// It grants the subnet that our pods use and names an address of ours. There is no identity to compare.
    SubnetAndAddress,
    /// It names our address and the identity of our device.
    AddressAndIdentity,
    /// It names our address, and no agent has written it: somebody reserves this subnet for us.
    Reservation,
    /// It names our address, and we know nothing else: the machine was booted, or it is new.
    Address,
}

impl Evidence {
    /// Returns the evidence of a node that knows nothing about itself.
    pub fn none(types: BackendTypes) -> Evidence {
        let (id, previous, identities) = (None, None, PublicIdentities::default());
        let (public, ports, other_uplink) = (Vec::new(), Vec::new(), Vec::new());
        let next_identities = PublicIdentities::default();
        Evidence { types, reservations: true, id, previous, identities, next_identities, public, ports, other_uplink }
    }

    /// Returns what the holder of this lease knows.
    pub fn of(types: BackendTypes, subnets: Subnets, attrs: &Attrs) -> Evidence {
        let (identities, public) = ((types.identities)(attrs), vec![public(attrs)]);
        let (reservations, ports) = (!attrs.backend_type.is_empty(), vec![(types.ports)(attrs)]);
        Evidence { reservations, previous: Some(subnets), identities, public, ports, ..Evidence::none(types) }
    }

    /// Adds what this node is about to publish.
    #[must_use]
    pub fn with_next(mut self, attrs: &Attrs) -> Evidence {
        let new = (self.types.identities)(attrs);
        self.identities.iter_mut().zip(&new).for_each(|(known, new)| *known = known.take().or(new.clone()));
        self.next_identities = new;
        self.reservations &= !attrs.backend_type.is_empty();
        self.public.push(public(attrs));
        self.ports.push((self.types.ports)(attrs));
        self
    }

    /// Returns why this lease is ours, and `None` if it is not.
    pub fn proof(&self, lease: &Lease) -> Option<Proof> {
        if let Some(id) = &self.id {
            return (*id == lease.id).then_some(Proof::Id);
        }
        let names = |ours: &[Public]| self.names(ours, &lease.attrs);
        let named = names(&self.public);
        if named && is_back(Defect::VirtualAddressesPublished) {
            return Some(Proof::AddressAndIdentity);
        }
        let subnet = self.previous.map(|previous| previous == lease.subnets);
        if !named && subnet != Some(true) {
            return None;
        }
        match (subnet, self.same_device(lease), named) {
            (_, Some(false), _) => None,
            (Some(true), Some(true), _) => Some(Proof::SubnetAndIdentity),
            (Some(true), None, named) => (named || names(&self.other_uplink)).then_some(Proof::SubnetAndAddress),
            (_, Some(true), true) => Some(Proof::AddressAndIdentity),
            (_, None, true) if self.reservations && lease.attrs.backend_type.is_empty() => Some(Proof::Reservation),
            (None, None, true) => Some(Proof::Address),
            (_, _, _) => None,
        }
    }

    /// Returns true if this lease is ours.
    pub fn proves(&self, lease: &Lease) -> bool {
        self.proof(lease).is_some()
    }

    /// Returns true if this lease of another node keeps us from taking these subnets again: it overlaps them, and its subnets have the same
    /// lengths. A larger subnet does not keep us out, because every node sets such a lease aside.
    pub fn keeps_us_from(&self, subnets: &Subnets, lease: &Lease) -> bool {
        let lengths = |subnets: &Subnets| subnets.iter().map(|net| net.prefix_len()).collect::<Vec<_>>();
        lengths(&lease.subnets) == lengths(subnets) && lease.subnets.overlaps(subnets) && !self.proves(lease)
    }

    /// Returns who holds this lease, which is not ours, as text for people.
    pub fn owner(&self, lease: &Lease) -> String {
        let owner = lease.attrs.owner();
        if self.names(&self.public, &lease.attrs) {
            return format!("another node that publishes our address {owner}, too,");
        }
        owner
    }

    /// Returns the leases that are ours. The one with the strongest proof comes first, and of two with the same proof the older one. If our
    /// address is the only proof for several leases, none of these is returned: at most one of them is ours, and nothing says which.
    pub fn ours<'a>(&self, leases: impl Iterator<Item = &'a Lease>) -> Vec<&'a Lease> {
        let mut ours: Vec<(Proof, &Lease)> = leases.filter_map(|lease| Some((self.proof(lease)?, lease))).collect();
        if ours.iter().filter(|(proof, _)| *proof == Proof::Address).count() > 1 {
            ours.retain(|(proof, _)| *proof != Proof::Address);
        }
        ours.sort_by(|(one, a), (other, b)| (one, &a.age, &a.id).cmp(&(other, &b.age, &b.id)));
        ours.into_iter().map(|(_, lease)| lease).collect()
    }

    /// Returns true if a lease names one of these addresses of ours, and no other port than ours.
    fn names(&self, ours: &[Public], attrs: &Attrs) -> bool {
        let family = usize::from(attrs.public_ip.is_none());
        let theirs = (self.types.ports)(attrs)[family];
        let is_other_port = |ports: &PublicPorts| differ(ports[family], theirs);
        // A port that is not known contradicts nothing.
        let shares = self.ports.is_empty() || !self.ports.iter().all(is_other_port);
        shares && ours.iter().any(|ours| same_node(*ours, public(attrs)))
    }

    /// Returns whether the lease names the identities of our devices. `None` means that there is nothing to compare, for example because the
    /// lease is of another backend type.
    fn same_device(&self, lease: &Lease) -> Option<bool> {
        let theirs = (self.types.identities)(&lease.attrs);
        let same = |ours: &PublicIdentities| {
            let pairs = ours.iter().zip(&theirs).filter_map(|(ours, theirs)| ours.as_ref()?.same(theirs.as_ref()?));
            pairs.reduce(|one, other| one && other)
        };
        let both = [same(&self.identities), same(&self.next_identities)];
        both.into_iter().flatten().reduce(|known, next| known || next)
    }
}

/// Returns the addresses that a lease names.
pub fn public(attrs: &Attrs) -> Public {
    (attrs.public_ip, attrs.public_ipv6)
}

/// Returns true if both are the addresses of one node. The IPv4 addresses decide if either node has one, and otherwise the IPv6 addresses.
fn same_node(one: Public, other: Public) -> bool {
    match (one.0, other.0) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.1.is_some() && one.1 == other.1,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
