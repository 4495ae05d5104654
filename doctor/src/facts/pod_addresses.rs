// SPDX-License-Identifier: Apache-2.0
//! The addresses that pods of this node have.

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use weft_netlink::rtnl::Link;

use super::cni_files::{Reserved, is_reserved};
use crate::namespaces;
use crate::processes::{ProcessList, Processes, netns};

/// Returns the addresses in the subnets of this node that pods have, in order, each with the number of pods. A pod is a network namespace at the other end of
/// one of our links.
///
/// # Errors
/// The namespaces cannot be looked for.
pub(super) fn read(links: &[Link], subnets: &[IpNet], processes: &ProcessList) -> anyhow::Result<Vec<(IpAddr, usize)>> {
    let mut found: Vec<(IpAddr, usize)> = Vec::new();
    let is_attached = |nsid: i32| links.iter().any(|link| link.peer_netns == Some(nsid));
    if subnets.is_empty() || links.iter().all(|link| link.peer_netns.is_none()) {
        return Ok(found);
    }
    // One that cannot be read may have ended meanwhile. What is known of the others is true without it.
    let processes = Processes { netns: netns(processes.all()), ..Processes::default() };
    let (namespaces, _) = namespaces::read(Path::new(namespaces::NAMES), &processes, &[])?;
    for namespace in namespaces.iter().filter(|one| one.nsid.is_some_and(is_attached)) {
        for addr in namespace.addrs.iter().filter(|addr| subnets.iter().any(|subnet| subnet.contains(*addr))) {
            match found.binary_search_by_key(addr, |(known, _)| *known) {
                Ok(at) => found[at].1 += 1,
                Err(at) => found.insert(at, (*addr, 1)),
            }
        }
    }
    Ok(found)
}

/// Leaves out the addresses of pods that were just ending. Such an address was reserved before the pods were looked at, and was released before the
/// reservations were read again.
pub(super) fn without_ending(
    mut pods: Vec<(IpAddr, usize)>,
    before: &[Reserved],
    after: &[Reserved],
) -> Vec<(IpAddr, usize)> {
    pods.retain(|(addr, _)| !is_reserved(*addr, before) || is_reserved(*addr, after));
    pods
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pod_whose_address_was_given_back_meanwhile_is_left_out() {
        let addr = |last: u8| IpAddr::from([10, 5, 7, last]);
        let reserved = |last: &[u8]| {
            let addrs = last.iter().copied().map(addr).collect();
            [Reserved { network: "cbr0".to_owned(), addrs }]
        };
        // The second pod ends, the third one begins, and nobody has reserved the address of the fourth one.
        let pods = (1..=4).map(|last| (addr(last), 1)).collect();
        let left = without_ending(pods, &reserved(&[1, 2]), &reserved(&[1, 3]));
        assert_eq!(left.into_iter().map(|(addr, _)| addr).collect::<Vec<_>>(), [addr(1), addr(3), addr(4)]);
    }
}
