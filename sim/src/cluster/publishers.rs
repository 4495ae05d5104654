// SPDX-License-Identifier: Apache-2.0
//! Nodes that only publish a lease: they make a cluster large for the other nodes, and cost little.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use super::Cluster;
use crate::machine::address;
use crate::store::FalseLease;

/// Number of publishers that publish in one second.
const PER_SECOND: usize = 200;
/// The last subnet that is given to such a node. They are given downwards.
const LAST: Ipv4Addr = Ipv4Addr::new(10, 61, 255, 0);

impl Cluster {
    /// Lets some of the nodes publish that have not published yet.
    pub fn publish(&mut self) {
        let until = self.wanted_publishers.min(self.publishers.len() + PER_SECOND);
        if self.publishers.len() == until {
            return;
        }
        let taken = self.store.leases();
        let last = self.publishers.last().map_or(LAST.to_bits() + 256, |(subnet, _)| subnet.network().to_bits());
        let below = (1u32..).map(|number| Ipv4Net::new_assert((last - number * 256).into(), 24));
        let mut free = below.filter(|net| !taken.contains_key(&net.to_string().replace('/', "-")));
        while self.publishers.len() < until
            && let Some(subnet) = free.next()
        {
            let number = self.machines.len() + self.publishers.len();
            let public = address(self.lan, number);
            let [_, _, c, d] = public.octets();
            let data = format!(r#"{{"VNI":1,"VtepMAC":"0e:77:00:00:{c:02x}:{d:02x}"}}"#);
            self.store.add_lease(&FalseLease { name: format!("p{number}"), subnet, public, data });
            self.publishers.push((subnet, public));
        }
    }

    /// Returns how many nodes that only publish have not done so yet.
    pub(crate) fn unpublished(&self) -> usize {
        self.wanted_publishers - self.publishers.len()
    }
}
