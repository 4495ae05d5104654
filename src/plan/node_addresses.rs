// SPDX-License-Identifier: Apache-2.0
//! Collects the nodes' published addresses, which are exceptions from masquerading (`MasqueradeToNodes: false`). Several
//! leases may name the same address, so the addresses are counted. A change of one lease takes logarithmic time.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;

use weft_subnet::lease::Lease;

/// The published addresses of all valid leases.
#[derive(Debug, Default)]
pub struct NodeAddresses {
    /// Number of leases that name each address.
    counts: BTreeMap<IpAddr, u32>,
    version: u64,
}

impl NodeAddresses {
    /// Replaces a lease by its new state. `None` means that there is no valid lease before or after the change.
    pub fn follow(&mut self, before: Option<&Lease>, after: Option<&Lease>) {
        // New addresses come first, so that an address in both states is never removed in between.
        for ip in after.into_iter().flat_map(|lease| lease.attrs.published()) {
            let count = self.counts.entry(ip).or_default();
            *count += 1;
            self.version += u64::from(*count == 1);
        }
        for ip in before.into_iter().flat_map(|lease| lease.attrs.published()) {
            let Entry::Occupied(mut count) = self.counts.entry(ip) else { continue };
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
                self.version += 1;
            }
        }
    }

    /// Replaces all leases.
    pub fn replace<'a>(&mut self, leases: impl Iterator<Item = &'a Lease>) {
        let mut new = NodeAddresses::default();
        leases.for_each(|lease| new.follow(None, Some(lease)));
        new.version = self.version + u64::from(!new.counts.keys().eq(self.counts.keys()));
        *self = new;
    }

    /// Iterates over the addresses, sorted.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.counts.keys().copied()
    }

    /// Returns a number that grows with every change of [`NodeAddresses::addresses`].
    pub fn version(&self) -> u64 {
        self.version
    }
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
    fn an_address_stays_as_long_as_a_lease_names_it() {
        let mut nodes = NodeAddresses::default();
        let all = |nodes: &NodeAddresses| nodes.addresses().map(|ip| ip.to_string()).collect::<Vec<_>>();
        let (one, both) = (lease("10.0.0.1", None), lease("10.0.0.1", Some("fd00::1")));
        nodes.follow(None, Some(&one));
        nodes.follow(None, Some(&both));
        assert_eq!(all(&nodes), ["10.0.0.1", "fd00::1"]);
        let version = nodes.version();
        nodes.follow(Some(&one), None);
        nodes.follow(Some(&both), Some(&both));
        nodes.replace([&both].into_iter());
        assert_eq!(nodes.version(), version, "the version must not change if the addresses do not");
        nodes.follow(Some(&both), Some(&lease("10.0.0.2", Some("fd00::1"))));
        assert_eq!(all(&nodes), ["10.0.0.2", "fd00::1"]);
        let before_list = nodes.version();
        assert!(before_list > version, "one address has left, and one has come");
        nodes.replace(std::iter::empty());
        assert_eq!(all(&nodes), [""; 0]);
        assert!(nodes.version() > before_list, "a list with other addresses is a change, too");
    }
}
