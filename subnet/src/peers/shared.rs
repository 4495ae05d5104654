// SPDX-License-Identifier: Apache-2.0
//! Finds published addresses that several leases publish. This does no harm to other nodes, but one of the two nodes cannot be reached, so
//! it is reported.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::claims::Slot;
use super::{Peers, judge};
use crate::backend_types::differ;
use crate::lease::Lease;

/// How many leases with the same address are named.
const NAMED: usize = 3;
/// With how many leases with the same address one lease is compared. There may be thousands of them with different ports, as behind one NAT,
/// and [`Peers::sharing`] is called for each. [`Peers::shared`] compares all of them at once.
const COMPARED: usize = 16;

/// A published address that several believed leases publish.
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
    /// Returns another believed lease with the same published address, and not with another port there. Looks at some of the leases
    /// with this address only: there may be thousands. Takes time that grows with the logarithm of the number of peers.
    pub fn sharing(&self, lease: &Lease) -> Option<&Arc<Lease>> {
        let (own, claim) = (self.slots.get(&lease.id), judge::claim(&self.us, lease));
        let mut others = self.claims.sharing(&claim).filter(|slot| Some(slot) != own).take(COMPARED);
        others.find_map(|slot| self.entries[slot as usize].believed().filter(|other| self.clash(lease, other)))
    }

    /// Returns true if two leases name one address of an enabled family, and not two ports there.
    fn clash(&self, one: &Lease, other: &Lease) -> bool {
        let (addresses, others) = (judge::claim(&self.us, one).public, judge::claim(&self.us, other).public);
        let (ports, other_ports) = ((self.ports.0)(&one.attrs), (self.ports.0)(&other.attrs));
        let v4 = addresses.v4.is_some() && addresses.v4 == others.v4 && !differ(ports[0], other_ports[0]);
        v4 || (addresses.v6.is_some() && addresses.v6 == others.v6 && !differ(ports[1], other_ports[1]))
    }

    /// Returns every published address that several believed leases publish. Reads all leases.
    pub fn shared(&self) -> Vec<Shared<'_>> {
        let believed = |slot: Slot| self.entries[slot as usize].believed();
        let all: Vec<(IpAddr, &Lease)> =
            self.claims.publics().filter_map(|(ip, slot)| Some((ip, &**believed(slot)?))).collect();
        let same_address = all.chunk_by(|(one, _), (other, _)| one == other).filter(|group| group.len() > 1);
        same_address.filter_map(|group| self.shared_by(group)).collect()
    }

    /// Returns the leases of this group that share their address, which is that of the whole group. Leases with different ports do not.
    fn shared_by<'a>(&self, group: &[(IpAddr, &'a Lease)]) -> Option<Shared<'a>> {
        let (ip, _) = *group.first()?;
        let port = |lease: &Lease| (self.ports.0)(&lease.attrs)[usize::from(ip.is_ipv6())];
        let ports: Vec<Option<u16>> = group.iter().map(|(_, lease)| port(lease)).collect();
        let mut count: HashMap<Option<u16>, usize> = HashMap::new();
        ports.iter().for_each(|port| *count.entry(*port).or_default() += 1);
        let clashes = |port: &Option<u16>| count.contains_key(&None) || count.get(port).is_some_and(|count| *count > 1);
        let leases: Vec<&Lease> =
            group.iter().zip(&ports).filter(|(_, port)| clashes(port)).map(|((_, lease), _)| *lease).collect();
        let count = leases.len();
        (count > 1).then(|| Shared { ip, count, leases: leases.into_iter().take(NAMED).collect() })
    }

    /// Returns the leases of other nodes that publish one of our published addresses, and not with another port, with that address, sorted by
    /// id. Reads all leases.
    pub fn naming_us(&self) -> impl Iterator<Item = (IpAddr, &Lease)> {
        self.not_believed().filter_map(|(_, _, lease)| {
            let lease = lease?;
            let ours = |ip: &IpAddr| {
                self.us.public.contains(ip) && judge::publishes_our_address(&self.us, self.ports, lease, *ip).is_some()
            };
            Some((judge::claim(&self.us, lease).public.iter().map(|net| net.addr()).find(ours)?, lease))
        })
    }
}
