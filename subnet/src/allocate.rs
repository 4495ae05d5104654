// SPDX-License-Identifier: Apache-2.0
//! Choice of a free subnet: pure, chance is an input (docs/flannel-formats.md, "Leases in etcd").

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::{Family, Subnets, address, bits, family, size};
use crate::network::Network;

/// Among how many free subnets chance decides, as in flannel.
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

/// Up to 100 free subnets of each family between SubnetMin and SubnetMax, one of each chosen by `random` (any 64 bits,
/// called once a family). `None` when a family that is on has none left. `taken`: all subnets leased now, of any length, and
/// whatever else must not lie in the chosen one.
/// Costs a sort of `taken`.
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

/// First addresses of free subnets, ascending.
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
        // Sorted by first address: whatever ends before `at` (nested ones too) can be forgotten.
        while used.next_if(|(_, last)| *last < at).is_some() {}
        let next = match used.peek() {
            Some((first, last)) if *first <= at + (step - 1) => (*last - *last % step).checked_add(step),
            _ => {
                free.push(at);
                at.checked_add(step)
            }
        };
        // The last subnet of the address space has none behind it.
        let Some(next) = next else { break };
        at = next;
    }
    free
}

/// True when this network has the length of a subnet and lies between SubnetMin and SubnetMax of its family.
pub fn fits(network: &Network, net: IpNet) -> bool {
    spans(network).any(|span| span.family == family(&net) && span.fits(net))
}

/// True when this subnet has the right length, lies between SubnetMin and SubnetMax and has exactly the families that are on.
pub fn is_compatible(network: &Network, subnets: &Subnets) -> bool {
    let mut on = 0;
    let all = spans(network).all(|span| {
        on += 1;
        subnets.iter().any(|net| family(&net) == span.family && span.fits(net))
    });
    all && subnets.iter().count() == on
}
