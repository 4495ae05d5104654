// SPDX-License-Identifier: Apache-2.0
//! An index of which lease claims which subnets and published addresses. Two prefixes are nested or disjoint. So the prefixes that overlap a
//! given one are its ancestors (one look-up for each length in use) and its descendants (one range).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::net::IpAddr;
use std::ops::Bound;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::Subnets;

/// The place of a record in the set. It has 32 bits to keep the index small.
pub(super) type Slot = u32;

/// What one lease claims, in the enabled families.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    /// Its subnets.
    pub(super) subnets: Subnets,
    /// Its published addresses, as networks of one address.
    pub(super) public: Subnets,
}

impl Claim {
    /// Returns why this lease is set aside because of the other one, which `whose` names.
    pub(super) fn gives_way(&self, other: &Claim, whose: &str) -> String {
        let (mine, theirs) = (&self.subnets, &other.subnets);
        let inside = |subnets: &Subnets, public: &Subnets| {
            public.iter().find(|ip| subnets.iter().any(|net| net.contains(ip))).map(|ip| (member(&ip), ip.addr()))
        };
        if mine.overlaps(theirs) {
            format!("overlaps {theirs} of {whose}")
        } else if let Some((field, ip)) = inside(theirs, &self.public) {
            format!("{field} {ip} lies inside {theirs} of {whose}")
        } else if let Some((field, ip)) = inside(mine, &other.public) {
            format!("subnet {mine} contains {field} {ip} of {whose}")
        } else {
            format!("gives way to {whose}")
        }
    }
}

/// Returns the name of the member of a lease that contains such an address.
fn member(ip: &IpNet) -> &'static str {
    match ip {
        IpNet::V4(_) => "PublicIP",
        IpNet::V6(_) => "PublicIPv6",
    }
}

/// All claims. Two claims conflict if their subnets overlap, or if the subnet of one contains the published address of the other, because
/// then packets for one node would be sent to the other.
#[derive(Debug, Default)]
pub(super) struct Claims {
    subnets: PrefixIndex,
    publics: PrefixIndex,
}

impl Claims {
    /// Adds a claim. Returns its published addresses that no other lease claims.
    pub(super) fn insert(&mut self, claim: &Claim, slot: Slot) -> Subnets {
        let new = self.unclaimed(&claim.public);
        self.subnets.insert(&claim.subnets, slot);
        self.publics.insert(&claim.public, slot);
        new
    }

    /// Removes a claim. Returns its published addresses that no lease claims any more.
    pub(super) fn remove(&mut self, claim: &Claim, slot: Slot) -> Subnets {
        self.subnets.remove(&claim.subnets, slot);
        self.publics.remove(&claim.public, slot);
        self.unclaimed(&claim.public)
    }

    fn unclaimed(&self, public: &Subnets) -> Subnets {
        Subnets {
            v4: public.v4.filter(|ip| self.publics.v4.distinct(*ip).next().is_none()),
            v6: public.v6.filter(|ip| self.publics.v6.distinct(*ip).next().is_none()),
        }
    }

    /// Returns a subnet of this claim that contains two or more published addresses of other leases. The address of this claim itself does not
    /// count.
    pub(super) fn covering(&self, claim: &Claim) -> Option<IpNet> {
        let (subnets, own) = (&claim.subnets, &claim.public);
        let v4 =
            subnets.v4.filter(|net| self.publics.v4.distinct(*net).filter(|ip| Some(*ip) != own.v4).nth(1).is_some());
        let v6 = || {
            subnets.v6.filter(|net| self.publics.v6.distinct(*net).filter(|ip| Some(*ip) != own.v6).nth(1).is_some())
        };
        v4.map(IpNet::V4).or_else(|| v6().map(IpNet::V6))
    }

    /// Returns the leases whose judgement may change because these published addresses were added or removed: their subnets contain one of them,
    /// and only few other published addresses.
    pub(super) fn covering_any_of(&self, addresses: &Subnets) -> impl Iterator<Item = Slot> {
        let v4 = addresses.v4.into_iter().flat_map(|ip| self.subnets.v4.around(ip, &self.publics.v4));
        v4.chain(addresses.v6.into_iter().flat_map(|ip| self.subnets.v6.around(ip, &self.publics.v6)))
    }

    /// Returns the leases whose subnets overlap those of this claim. The result of this and the following functions may include the lease of
    /// the claim itself, and may contain a lease twice.
    pub(super) fn overlapping(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.subnets.overlapping(&claim.subnets)
    }

    /// Returns the leases whose subnets contain the published address of this claim.
    pub(super) fn around(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.subnets.overlapping(&claim.public)
    }

    /// Returns the leases whose published address lies in the subnets of this claim.
    pub(super) fn inside(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.publics.overlapping(&claim.subnets)
    }

    /// Returns the leases whose subnets overlap this network.
    pub(super) fn over(&self, net: IpNet) -> impl Iterator<Item = Slot> {
        self.subnets.overlapping(&net.into())
    }

    /// Returns the leases whose published address lies in this network.
    pub(super) fn published_in(&self, net: IpNet) -> impl Iterator<Item = Slot> {
        self.publics.overlapping(&net.into())
    }

    /// Returns the leases whose claims conflict with this one.
    pub(super) fn rivals(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.overlapping(claim).chain(self.around(claim)).chain(self.inside(claim))
    }

    /// Returns the leases with the same published address.
    pub(super) fn sharing(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.publics.overlapping(&claim.public)
    }

    /// Returns every published address with its lease, sorted by address.
    pub(super) fn publics(&self) -> impl Iterator<Item = (IpAddr, Slot)> {
        let v4 = self.publics.v4.set.iter().map(|(net, slot)| (IpAddr::V4(net.addr()), *slot));
        v4.chain(self.publics.v6.set.iter().map(|(net, slot)| (IpAddr::V6(net.addr()), *slot)))
    }
}

/// Prefixes of both families.
#[derive(Debug, Default)]
struct PrefixIndex {
    v4: Prefixes<Ipv4Net>,
    v6: Prefixes<Ipv6Net>,
}

impl PrefixIndex {
    fn insert(&mut self, nets: &Subnets, slot: Slot) {
        if let Some(v4) = nets.v4 {
            self.v4.insert(v4, slot);
        }
        if let Some(v6) = nets.v6 {
            self.v6.insert(v6, slot);
        }
    }

    fn remove(&mut self, nets: &Subnets, slot: Slot) {
        if let Some(v4) = nets.v4 {
            self.v4.remove(v4, slot);
        }
        if let Some(v6) = nets.v6 {
            self.v6.remove(v6, slot);
        }
    }

    fn overlapping(&self, nets: &Subnets) -> impl Iterator<Item = Slot> + use<'_> {
        let v4 = nets.v4.into_iter().flat_map(|net| self.v4.overlapping(net));
        v4.chain(nets.v6.into_iter().flat_map(|net| self.v6.overlapping(net)))
    }
}

/// A prefix. Prefixes are ordered by address, then by length.
trait Prefix: Copy + Ord + Debug {
    fn len(self) -> u8;
    /// Returns the prefix of this shorter length that contains it.
    fn ancestor(self, len: u8) -> Self;
    /// Returns the last prefix inside it, in the order of prefixes.
    fn last(self) -> Self;
}

impl Prefix for Ipv4Net {
    fn len(self) -> u8 {
        self.prefix_len()
    }
    fn ancestor(self, len: u8) -> Ipv4Net {
        Ipv4Net::new(self.network(), len).map_or(self, |net| net.trunc())
    }
    fn last(self) -> Ipv4Net {
        Ipv4Net::from(self.broadcast())
    }
}

impl Prefix for Ipv6Net {
    fn len(self) -> u8 {
        self.prefix_len()
    }
    fn ancestor(self, len: u8) -> Ipv6Net {
        Ipv6Net::new(self.network(), len).map_or(self, |net| net.trunc())
    }
    fn last(self) -> Ipv6Net {
        Ipv6Net::from(self.broadcast())
    }
}

#[derive(Debug)]
struct Prefixes<P> {
    set: BTreeSet<(P, Slot)>,
    /// The number of claims of each length. A cluster uses one or two of the 33 or 129 lengths.
    lengths: BTreeMap<u8, usize>,
}

impl<P> Default for Prefixes<P> {
    fn default() -> Prefixes<P> {
        Prefixes { set: BTreeSet::new(), lengths: BTreeMap::new() }
    }
}

/// If a subnet contains this many published addresses, one more or less cannot change the judgement: two of other leases, that of the owner,
/// and the one in question.
const DECIDED: usize = 4;

impl<P: Prefix> Prefixes<P> {
    /// Returns every prefix inside this one, each once.
    fn distinct(&self, net: P) -> impl Iterator<Item = P> {
        let next = move |after: Bound<(P, Slot)>| {
            self.set.range((after, Bound::Included((net.last(), Slot::MAX)))).next().map(|(found, _)| *found)
        };
        let first = next(Bound::Included((net, Slot::MIN)));
        std::iter::successors(first, move |found| next(Bound::Excluded((*found, Slot::MAX))))
    }

    /// Returns the leases with a prefix around this address. Prefixes with so many published addresses that this one does not matter are
    /// left out.
    fn around(&self, ip: P, publics: &Prefixes<P>) -> impl Iterator<Item = Slot> {
        let ancestors = self.lengths.keys().map(move |len| ip.ancestor(*len));
        let open = ancestors.filter(|net| publics.distinct(*net).nth(DECIDED - 1).is_none());
        open.flat_map(|net| self.set.range((net, Slot::MIN)..=(net, Slot::MAX)).map(|(_, slot)| *slot))
    }

    fn insert(&mut self, net: P, slot: Slot) {
        if self.set.insert((net, slot)) {
            *self.lengths.entry(net.len()).or_default() += 1;
        }
    }

    fn remove(&mut self, net: P, slot: Slot) {
        if self.set.remove(&(net, slot))
            && let Some(count) = self.lengths.get_mut(&net.len())
        {
            *count -= 1;
            if *count == 0 {
                self.lengths.remove(&net.len());
            }
        }
    }

    fn overlapping(&self, net: P) -> impl Iterator<Item = Slot> {
        let ancestors = self.lengths.range(..net.len()).flat_map(move |(len, _)| {
            let ancestor = net.ancestor(*len);
            self.set.range((ancestor, Slot::MIN)..=(ancestor, Slot::MAX))
        });
        let inside = (Bound::Included((net, Slot::MIN)), Bound::Included((net.last(), Slot::MAX)));
        ancestors.chain(self.set.range(inside)).map(|(_, slot)| *slot)
    }
}
