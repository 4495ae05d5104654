// SPDX-License-Identifier: Apache-2.0
//! Chooses a free subnet, as described in docs/flannel-formats.md, "Leases in etcd". Random numbers come from the caller.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::{Family, Subnets, address, bits, family, size};
use crate::net_conf::NetConf;

/// One family's `SubnetMin`, `SubnetMax` and `SubnetLen`.
#[derive(Clone, Copy)]
struct Span {
    family: Family,
    first: u128,
    last: u128,
    len: u8,
}

impl Span {
    fn fits(&self, net: IpNet) -> bool {
        let first = bits(net.addr());
        net == net.trunc() && net.prefix_len() == self.len && self.first <= first && first <= self.last
    }
}

fn spans(net_conf: &NetConf) -> impl Iterator<Item = Span> {
    let span = |min: IpAddr, max: IpAddr, len| Span { family: Family::of(min), first: bits(min), last: bits(max), len };
    let v4 = net_conf.v4.as_ref().map(|r| span(r.min.into(), r.max.into(), r.len));
    let v6 = net_conf.v6.as_ref().map(|r| span(r.min.into(), r.max.into(), r.len));
    v4.into_iter().chain(v6)
}

/// The addresses that other nodes and this host have in one family. A look-up takes logarithmic time.
pub(crate) struct Taken(Vec<(u128, u128)>);

impl Taken {
    pub(crate) fn of(family: Family, networks: &[Subnets]) -> Taken {
        let networks = networks.iter().filter_map(|subnets| subnets.of(family));
        let mut ranges: Vec<(u128, u128)> = networks.map(|net| (bits(net.network()), bits(net.broadcast()))).collect();
        ranges.sort_unstable();
        // Networks may be nested. Without those inside the one before, the last addresses are sorted, too.
        ranges.dedup_by(|next, kept| next.1 <= kept.1);
        Taken(ranges)
    }

    /// Returns true if a network of the same family has one of these addresses.
    #[cfg(feature = "source")]
    pub(crate) fn overlaps(&self, net: IpNet) -> bool {
        let (first, last) = (bits(net.network()), bits(net.broadcast()));
        let after = self.0.partition_point(|(begin, _)| *begin <= last);
        self.0[..after].last().is_some_and(|(_, end)| *end >= first)
    }
}

/// Chooses one of all free subnets between SubnetMin and SubnetMax, of each enabled family that `kept` lacks, and returns it with those of
/// `kept`. These must be free, and fit net-conf. Returns `None` if an enabled family has none left. (flannel chooses among the first 100 free
/// ones. When a thousand nodes start together, nine of ten of them then lose a race.)
///
/// `taken` contains all leased subnets, of any length, and all other networks that the chosen subnet must not overlap. It is copied and
/// sorted. `random` returns any 64 bits, and is called once for each family.
pub fn complete(
    net_conf: &NetConf,
    kept: &Subnets,
    taken: &[Subnets],
    random: &mut dyn FnMut() -> u64,
) -> Option<Subnets> {
    let mut picked = *kept;
    for span in spans(net_conf).filter(|span| kept.of(span.family).is_none()) {
        match address(span.family, span.free(taken, random)?) {
            IpAddr::V4(v4) => picked.v4 = Ipv4Net::new(v4, span.len).ok(),
            IpAddr::V6(v6) => picked.v6 = Ipv6Net::new(v6, span.len).ok(),
        }
    }
    Some(picked)
}

impl Span {
    /// Returns the first address of a free subnet.
    fn free(self, taken: &[Subnets], random: &mut dyn FnMut() -> u64) -> Option<u128> {
        let step = size(self.family, self.len);
        let gaps = self.gaps(taken, step);
        let count: u128 = gaps.iter().map(|(_, count)| count).sum();
        let mut chosen = u128::from(random()).checked_rem(count)?;
        for (first, count) in gaps {
            if chosen < count {
                return Some(first + chosen * step);
            }
            chosen -= count;
        }
        None
    }

    /// Returns the gaps between taken subnets: the first address of each, and how many free subnets of `step` addresses it has.
    fn gaps(self, taken: &[Subnets], step: u128) -> Vec<(u128, u128)> {
        let used = Taken::of(self.family, taken).0.into_iter();
        let mut gaps = Vec::new();
        let mut at = self.first;
        for (first, last) in used.filter(|(first, last)| *last >= self.first && *first <= self.last + (step - 1)) {
            if first > at {
                gaps.push((at, (first - at) / step));
            }
            // No subnet follows the last one of the address space.
            let Some(next) = (last - last % step).checked_add(step) else { return gaps };
            at = at.max(next);
        }
        if at <= self.last {
            gaps.push((at, (self.last - at) / step + 1));
        }
        gaps
    }
}

/// Returns true if this network has the length of a subnet and lies between SubnetMin and SubnetMax of its family.
pub fn fits(net_conf: &NetConf, net: IpNet) -> bool {
    spans(net_conf).any(|span| span.family == family(&net) && span.fits(net))
}

/// Returns true if these subnets have exactly the enabled families, and each has the right length and lies between SubnetMin and
/// SubnetMax.
pub fn is_compatible(net_conf: &NetConf, subnets: &Subnets) -> bool {
    let mut on = 0;
    let all = spans(net_conf).all(|span| {
        on += 1;
        subnets.iter().any(|net| family(&net) == span.family && span.fits(net))
    });
    all && subnets.iter().count() == on
}
