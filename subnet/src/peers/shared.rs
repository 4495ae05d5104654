// SPDX-License-Identifier: Apache-2.0
//! Finds public addresses that several leases publish. This does no harm to other nodes, but one of the two nodes cannot be reached, so
//! it is reported.

use std::net::IpAddr;
use std::sync::Arc;

use super::claims::Slot;
use super::{Peers, judge};
use crate::lease::Lease;

/// How many leases with the same address are named.
const NAMED: usize = 3;

/// A public address that several believed leases publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shared<'a> {
    /// The address.
    pub ip: IpAddr,
    /// The number of leases that publish it.
    pub count: usize,
    /// The first of them.
    pub leases: Vec<&'a Lease>,
}

impl Peers {
    /// Returns another believed lease with the same public address. Takes time that grows with the logarithm of the number of peers.
    pub fn sharing(&self, lease: &Lease) -> Option<&Arc<Lease>> {
        let (own, claim) = (self.slots.get(&lease.id), judge::claim(&self.us, lease));
        let mut others = self.claims.sharing(&claim).filter(|slot| Some(slot) != own);
        others.find_map(|slot| self.entries[slot as usize].believed())
    }

    /// Returns every public address that several believed leases publish. Reads all leases.
    pub fn shared(&self) -> Vec<Shared<'_>> {
        let mut all: Vec<Shared<'_>> = Vec::new();
        let mut last: Option<Shared<'_>> = None;
        let believed = |slot: Slot| self.entries[slot as usize].believed();
        for (ip, lease) in self.claims.publics().filter_map(|(ip, slot)| Some((ip, believed(slot)?))) {
            match &mut last {
                Some(shared) if shared.ip == ip => {
                    shared.count += 1;
                    if shared.leases.len() < NAMED {
                        shared.leases.push(lease);
                    }
                }
                _ => all.extend(last.replace(Shared { ip, count: 1, leases: vec![lease] }).filter(|s| s.count > 1)),
            }
        }
        all.extend(last.filter(|shared| shared.count > 1));
        all
    }

    /// Returns the leases of other nodes that publish one of our public addresses, with that address, sorted by id. Reads all leases.
    pub fn naming_us(&self) -> impl Iterator<Item = (IpAddr, &Lease)> {
        self.set_aside().filter_map(|(_, _, lease)| {
            let mut public = judge::claim(&self.us, lease?).public.iter().map(|net| net.addr());
            Some((public.find(|ip| self.us.public.contains(ip))?, lease?))
        })
    }
}
