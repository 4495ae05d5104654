// SPDX-License-Identifier: Apache-2.0
//! Who claims which prefix. CIDRs are nested or disjoint, so what overlaps a prefix is its ancestors (one look-up for each
//! length in use) and its descendants (one range).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::ops::Bound;

use ipnet::{Ipv4Net, Ipv6Net};

use crate::cidr::Subnets;

/// Place of a record in the set; 32 bits keep the index small.
pub(super) type Slot = u32;

/// The claims of both families.
#[derive(Debug, Default)]
pub(super) struct Claims {
    v4: Prefixes<Ipv4Net>,
    v6: Prefixes<Ipv6Net>,
}

impl Claims {
    pub(super) fn insert(&mut self, subnets: &Subnets, slot: Slot) {
        if let Some(v4) = subnets.v4 {
            self.v4.insert(v4, slot);
        }
        if let Some(v6) = subnets.v6 {
            self.v6.insert(v6, slot);
        }
    }

    pub(super) fn remove(&mut self, subnets: &Subnets, slot: Slot) {
        if let Some(v4) = subnets.v4 {
            self.v4.remove(v4, slot);
        }
        if let Some(v6) = subnets.v6 {
            self.v6.remove(v6, slot);
        }
    }

    /// Claims that share an address with these subnets, the asking one included; one of both families may come twice.
    pub(super) fn overlapping(&self, subnets: &Subnets) -> impl Iterator<Item = Slot> {
        let v4 = subnets.v4.into_iter().flat_map(|net| self.v4.overlapping(net));
        v4.chain(subnets.v6.into_iter().flat_map(|net| self.v6.overlapping(net)))
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

impl<P: Prefix> Prefixes<P> {
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
