// SPDX-License-Identifier: Apache-2.0
//! The nodes' public addresses, where they are exceptions from masquerading (`MasqueradeToNodes: false`). Counted as leases come and
//! go, so that one lease costs the logarithm of their number; two leases may name one address.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;

use weft_subnet::lease::Lease;

/// The addresses of all believed leases.
#[derive(Debug, Default)]
pub struct Nodes {
    counts: BTreeMap<IpAddr, u32>,
    version: u64,
}

impl Nodes {
    /// One lease, as it was believed before and is now.
    pub fn follow(&mut self, before: Option<&Lease>, after: Option<&Lease>) {
        // In this order: an address that stays is never gone in between.
        for ip in after.into_iter().flat_map(public) {
            let count = self.counts.entry(ip).or_default();
            *count += 1;
            self.version += u64::from(*count == 1);
        }
        for ip in before.into_iter().flat_map(public) {
            let Entry::Occupied(mut count) = self.counts.entry(ip) else { continue };
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
                self.version += 1;
            }
        }
    }

    /// All leases anew.
    pub fn replace<'a>(&mut self, leases: impl Iterator<Item = &'a Lease>) {
        let mut new = Nodes::default();
        leases.for_each(|lease| new.follow(None, Some(lease)));
        new.version = self.version + u64::from(!new.counts.keys().eq(self.counts.keys()));
        *self = new;
    }

    /// All of them, sorted.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.counts.keys().copied()
    }

    /// Grows with every change of [`Nodes::addresses`].
    pub fn version(&self) -> u64 {
        self.version
    }
}

fn public(lease: &Lease) -> impl Iterator<Item = IpAddr> {
    let attrs = &lease.attrs;
    [attrs.public_ip.map(IpAddr::V4), attrs.public_ipv6.map(IpAddr::V6)].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use weft_subnet::attrs::Attrs;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::lease::Age;

    use super::*;

    fn lease(v4: &str, v6: Option<&str>) -> Lease {
        let (public_ip, public_ipv6) = (v4.parse().ok(), v6.map(|ip| ip.parse().unwrap()));
        let attrs = Attrs { public_ip, public_ipv6, ..Attrs::default() };
        Lease { id: v4.into(), subnets: Subnets::default(), attrs, age: Age::default() }
    }

    #[test]
    fn an_address_is_there_as_long_as_one_lease_names_it() {
        let mut nodes = Nodes::default();
        let all = |nodes: &Nodes| nodes.addresses().map(|ip| ip.to_string()).collect::<Vec<_>>();
        let (one, both) = (lease("10.0.0.1", None), lease("10.0.0.1", Some("fd00::1")));
        nodes.follow(None, Some(&one));
        nodes.follow(None, Some(&both));
        assert_eq!(all(&nodes), ["10.0.0.1", "fd00::1"]);
        let version = nodes.version();
        nodes.follow(Some(&one), None);
        nodes.follow(Some(&both), Some(&both));
        nodes.replace([&both].into_iter());
        assert_eq!(nodes.version(), version, "nothing came and nothing went");
        nodes.follow(Some(&both), Some(&lease("10.0.0.2", Some("fd00::1"))));
        assert_eq!(all(&nodes), ["10.0.0.2", "fd00::1"]);
        nodes.replace(std::iter::empty());
        assert_eq!(all(&nodes), [""; 0]);
        assert!(nodes.version() > version + 1);
    }
}
