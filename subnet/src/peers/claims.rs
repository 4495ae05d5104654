// SPDX-License-Identifier: Apache-2.0
//! Who claims which subnets and public addresses. CIDRs are nested or disjoint, so what overlaps a prefix is its ancestors (one
//! look-up for each length in use) and its descendants (one range).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::net::IpAddr;
use std::ops::Bound;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::Subnets;

/// Place of a record in the set; 32 bits keep the index small.
pub(super) type Slot = u32;

/// What one lease claims, in the families that are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    /// Its subnets.
    pub(super) subnets: Subnets,
    /// Its public addresses, as networks of one address.
    pub(super) public: Subnets,
}

impl Claim {
    /// Why the lease of this claim gives way to the lease of the other one; `whose` names that one.
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

fn alone(net: IpNet) -> Subnets {
    match net {
        IpNet::V4(v4) => Subnets { v4: Some(v4), v6: None },
        IpNet::V6(v6) => Subnets { v4: None, v6: Some(v6) },
    }
}

/// Name of the lease's member that holds such an address.
fn member(ip: &IpNet) -> &'static str {
    match ip {
        IpNet::V4(_) => "PublicIP",
        IpNet::V6(_) => "PublicIPv6",
    }
}

/// All claims. Two of them cannot both hold when their subnets overlap, or when one has its public address in the other's subnet:
/// the packets to that node would be sent to the other one.
#[derive(Debug, Default)]
pub(super) struct Claims {
    subnets: Index,
    publics: Index,
}

impl Claims {
    /// Returns the public addresses that nobody else claims.
    pub(super) fn insert(&mut self, claim: &Claim, slot: Slot) -> Subnets {
        let new = self.unclaimed(&claim.public);
        self.subnets.insert(&claim.subnets, slot);
        self.publics.insert(&claim.public, slot);
        new
    }

    /// Returns the public addresses that nobody claims any more.
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

    /// A subnet of this claim that holds two public addresses of other leases or more. An address that this claim has itself does not
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

    /// Whose subnets may have come to cover others, or ceased to, when these public addresses appeared or went. Where so many others
    /// remain that this one decides nothing, nobody.
    pub(super) fn turned_by(&self, addresses: &Subnets) -> impl Iterator<Item = Slot> {
        let v4 = addresses.v4.into_iter().flat_map(|ip| self.subnets.v4.around(ip, &self.publics.v4));
        v4.chain(addresses.v6.into_iter().flat_map(|ip| self.subnets.v6.around(ip, &self.publics.v6)))
    }

    /// Whose subnets share an address with this claim's. Like all that follow, it may name the asking one, and others twice.
    pub(super) fn overlapping(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.subnets.overlapping(&claim.subnets)
    }

    /// Whose subnets hold this claim's public address.
    pub(super) fn around(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.subnets.overlapping(&claim.public)
    }

    /// Whose public address lies in this claim's subnets.
    pub(super) fn inside(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.publics.overlapping(&claim.subnets)
    }

    /// Whose subnets share an address with this network.
    pub(super) fn over(&self, net: IpNet) -> impl Iterator<Item = Slot> {
        self.subnets.overlapping(&alone(net))
    }

    /// Whose public address lies in this network.
    pub(super) fn published_in(&self, net: IpNet) -> impl Iterator<Item = Slot> {
        self.publics.overlapping(&alone(net))
    }

    /// Whose claim cannot hold together with this one.
    pub(super) fn rivals(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.overlapping(claim).chain(self.around(claim)).chain(self.inside(claim))
    }

    /// Who has the same public address.
    pub(super) fn sharing(&self, claim: &Claim) -> impl Iterator<Item = Slot> {
        self.publics.overlapping(&claim.public)
    }

    /// Every public address with whose it is, by address.
    pub(super) fn publics(&self) -> impl Iterator<Item = (IpAddr, Slot)> {
        let v4 = self.publics.v4.set.iter().map(|(net, slot)| (IpAddr::V4(net.addr()), *slot));
        v4.chain(self.publics.v6.set.iter().map(|(net, slot)| (IpAddr::V6(net.addr()), *slot)))
    }
}

/// Prefixes of both families.
#[derive(Debug, Default)]
struct Index {
    v4: Prefixes<Ipv4Net>,
    v6: Prefixes<Ipv6Net>,
}

impl Index {
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

/// A prefix, ordered by address, then length.
trait Prefix: Copy + Ord + Debug {
    fn len(self) -> u8;
    /// The prefix of this shorter length that holds it.
    fn ancestor(self, len: u8) -> Self;
    /// The greatest prefix inside, in the order of prefixes.
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
    /// How many claims there are of each length: a cluster uses one or two of the 33 or 129.
    lengths: BTreeMap<u8, usize>,
}

impl<P> Default for Prefixes<P> {
    fn default() -> Prefixes<P> {
        Prefixes { set: BTreeSet::new(), lengths: BTreeMap::new() }
    }
}

/// With so many public addresses in a subnet one more or less decides nothing: two of them, the owner's own, and this one.
const DECIDED: usize = 4;

impl<P: Prefix> Prefixes<P> {
    /// Every prefix inside this one, once, however many have it.
    fn distinct(&self, net: P) -> impl Iterator<Item = P> {
        let next = move |after: Bound<(P, Slot)>| {
            self.set.range((after, Bound::Included((net.last(), Slot::MAX)))).next().map(|(found, _)| *found)
        };
        let first = next(Bound::Included((net, Slot::MIN)));
        std::iter::successors(first, move |found| next(Bound::Excluded((*found, Slot::MAX))))
    }

    /// Who has a prefix around this address, unless it holds so many public addresses that this one decides nothing.
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
