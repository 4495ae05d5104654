// SPDX-License-Identifier: Apache-2.0
//! Chooses a free subnet, as described in docs/flannel-formats.md, "Leases in etcd". Random numbers come from the caller.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::{Family, Subnets, address, bits, family, size};
use crate::network::Network;

/// The number of free subnets among which one is chosen at random. It is the same in flannel.
const CANDIDATES: usize = 100;

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

fn spans(network: &Network) -> impl Iterator<Item = Span> {
    let span = |min: IpAddr, max: IpAddr, len| {
        let family = if min.is_ipv4() { Family::V4 } else { Family::V6 };
        Span { family, first: bits(min), last: bits(max), len }
    };
    let v4 = network.v4.as_ref().map(|r| span(r.min.into(), r.max.into(), r.len));
    let v6 = network.v6.as_ref().map(|r| span(r.min.into(), r.max.into(), r.len));
    v4.into_iter().chain(v6)
}

/// Chooses a free subnet of each enabled family, among the first 100 between SubnetMin and SubnetMax. Returns `None` if an enabled family
/// has none left.
///
/// `taken` contains all leased subnets, of any length, and all other networks that the chosen subnet must not overlap. It is copied and
/// sorted. `random` returns any 64 bits, and is called once for each family.
pub fn choose(network: &Network, taken: &[Subnets], random: &mut dyn FnMut() -> u64) -> Option<Subnets> {
    let mut picked = Subnets::default();
    for span in spans(network) {
        let free = candidates(span, taken);
        let choices = u64::try_from(free.len()).ok().filter(|n| *n > 0)?;
        let chosen = free.get(usize::try_from(random() % choices).ok()?)?;
        match address(span.family, *chosen) {
            IpAddr::V4(v4) => picked.v4 = Ipv4Net::new(v4, span.len).ok(),
            IpAddr::V6(v6) => picked.v6 = Ipv6Net::new(v6, span.len).ok(),
        }
    }
    Some(picked)
}

/// Returns the first addresses of free subnets in ascending order.
fn candidates(span: Span, taken: &[Subnets]) -> Vec<u128> {
    let mut used: Vec<(u128, u128)> = taken
        .iter()
        .filter_map(|subnets| subnets.of(span.family))
        .map(|net| (bits(net.network()), bits(net.broadcast())))
        .filter(|(first, last)| *last >= span.first && *first <= span.last + (size(span.family, span.len) - 1))
        .collect();
    used.sort_unstable();
    let step = size(span.family, span.len);
    let mut free = Vec::new();
    let mut at = span.first;
    let mut used = used.into_iter().peekable();
    while at <= span.last && free.len() < CANDIDATES {
        // The list is sorted by the first address, so everything that ends before `at` can be skipped, including nested subnets.
        while used.next_if(|(_, last)| *last < at).is_some() {}
        let next = match used.peek() {
            Some((first, last)) if *first <= at + (step - 1) => (*last - *last % step).checked_add(step),
            _ => {
                free.push(at);
                at.checked_add(step)
            }
        };
        // No subnet follows the last one of the address space.
        let Some(next) = next else { break };
        at = next;
    }
    free
}

/// Returns true if this network has the length of a subnet and lies between SubnetMin and SubnetMax of its family.
pub fn fits(network: &Network, net: IpNet) -> bool {
    spans(network).any(|span| span.family == family(&net) && span.fits(net))
}

/// Returns true if these subnets have exactly the enabled families, and each has the right length and lies between SubnetMin and
/// SubnetMax.
pub fn is_compatible(network: &Network, subnets: &Subnets) -> bool {
    let mut on = 0;
    let all = spans(network).all(|span| {
        on += 1;
        subnets.iter().any(|net| family(&net) == span.family && span.fits(net))
    });
    all && subnets.iter().count() == on
}
