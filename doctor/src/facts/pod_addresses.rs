// SPDX-License-Identifier: Apache-2.0
//! The addresses that pods of this node have.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use weft_netlink::rtnl::Link;

use crate::namespaces;
use crate::processes::{ProcessList, Processes, netns};

/// Returns the addresses in the subnets of this node that pods have, each with the number of pods. A pod is a network namespace at the other end of
/// one of our links.
///
/// # Errors
/// The namespaces cannot be looked for.
pub(super) fn read(
    links: &[Link],
    subnets: &[IpNet],
    processes: &ProcessList,
) -> anyhow::Result<BTreeMap<IpAddr, usize>> {
    let mut found = BTreeMap::new();
    let attached: BTreeSet<i32> = links.iter().filter_map(|link| link.peer_netns).collect();
    if attached.is_empty() || subnets.is_empty() {
        return Ok(found);
    }
    // One that cannot be read may have ended meanwhile. What is known of the others is true without it.
    let processes = Processes { netns: netns(processes.all()), ..Processes::default() };
    let (namespaces, _) = namespaces::read(Path::new(namespaces::NAMES), &processes, &[])?;
    for namespace in namespaces.iter().filter(|one| one.nsid.is_some_and(|nsid| attached.contains(&nsid))) {
        for addr in namespace.addrs.iter().filter(|addr| subnets.iter().any(|subnet| subnet.contains(*addr))) {
            *found.entry(*addr).or_insert(0) += 1;
        }
    }
    Ok(found)
}
