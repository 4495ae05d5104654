// SPDX-License-Identifier: Apache-2.0
//! Which peer has which subnet, and whether a packet may have come from a peer.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;

/// A peer, as a believed lease describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The subnet of the peer's pods. Bits after the prefix do not count.
    pub subnet: Ipv4Net,
    /// The address and the port to which packets for the subnet are sent. The peer sends from this address, and its port may be another one.
    pub address: SocketAddrV4,
    /// Another address from which the peer may send, when its interface has not the address that it publishes.
    pub sends_from: Option<Ipv4Addr>,
}

/// The peers of the tunnel. A table is never changed: [`Tunnel::set_routes`](super::Tunnel::set_routes) replaces it
/// whole. It needs 16 bytes per peer.
#[derive(Debug, Default)]
pub struct Routes {
    /// For each prefix length that occurs, the longest first: networks in order, each with its peer's address and port.
    prefixes: Vec<(u8, Vec<(u32, SocketAddrV4)>)>,
    /// Every address from which a peer may send, in order.
    senders: Vec<Ipv4Addr>,
    /// The peers that have a second address, which are few.
    sends_from: HashMap<Ipv4Net, Ipv4Addr>,
}

impl Routes {
    /// Builds a table. If two peers have the same subnet, the first one counts.
    pub fn new(peers: impl IntoIterator<Item = Peer>) -> Routes {
        let mut by_length: Vec<(u8, Vec<_>)> = (0..=32).map(|length| (length, Vec::new())).collect();
        let mut others = Vec::new();
        for peer in peers {
            let subnet = peer.subnet.trunc();
            by_length[usize::from(subnet.prefix_len())].1.push((u32::from(subnet.addr()), peer.address));
            others.extend(peer.sends_from.map(|other| (subnet, peer.address, other)));
        }
        let mut routes = Routes::default();
        for (length, mut networks) in by_length.into_iter().rev() {
            if networks.is_empty() {
                continue;
            }
            // The sort is stable, so that the first of equal networks stays the first.
            networks.sort_by_key(|(network, _)| *network);
            networks.dedup_by_key(|(network, _)| *network);
            networks.shrink_to_fit();
            routes.senders.extend(networks.iter().map(|(_, address)| *address.ip()));
            routes.prefixes.push((length, networks));
        }
        for (subnet, address, other) in others {
            // Another peer may have been the first with this subnet.
            if routes.find(subnet.addr(), Some(subnet.prefix_len())) == Some((subnet, address)) {
                routes.sends_from.entry(subnet).or_insert(other);
            }
        }
        routes.senders.extend(routes.sends_from.values());
        routes.senders.sort_unstable();
        routes.senders.dedup();
        routes.senders.shrink_to_fit();
        routes
    }

    /// Returns the address and the port of the peer whose subnet contains an address. The longest prefix wins.
    pub fn peer_of(&self, address: Ipv4Addr) -> Option<SocketAddrV4> {
        self.find(address, None).map(|(_, peer)| peer)
    }

    /// Returns true if some peer sends from an address.
    pub fn has_sender(&self, address: Ipv4Addr) -> bool {
        self.senders.binary_search(&address).is_ok()
    }

    /// Returns true if the peer that sends from `sender` owns the subnet of `source`.
    pub fn believes(&self, sender: Ipv4Addr, source: Ipv4Addr) -> bool {
        self.find(source, None).is_some_and(|(subnet, address)| {
            *address.ip() == sender || self.sends_from.get(&subnet).is_some_and(|other| *other == sender)
        })
    }

    fn find(&self, address: Ipv4Addr, only: Option<u8>) -> Option<(Ipv4Net, SocketAddrV4)> {
        self.prefixes.iter().filter(|(length, _)| only.is_none_or(|only| only == *length)).find_map(|(length, list)| {
            let subnet = Ipv4Net::new(address, *length).ok()?.trunc();
            let at = list.binary_search_by_key(&u32::from(subnet.addr()), |(network, _)| *network).ok()?;
            Some((subnet, list[at].1))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peers() -> impl Strategy<Value = Vec<Peer>> {
        // Few distinct addresses, so that prefixes nest and repeat.
        let peer =
            (0u8..4, 0u8..4, 8u8..=32, 1u8..5, prop::option::of(5u8..8)).prop_map(|(b, c, length, host, other)| Peer {
                subnet: Ipv4Net::new(Ipv4Addr::new(10, b, c, 0), length).unwrap(),
                address: SocketAddrV4::new(Ipv4Addr::new(192, 168, 0, host), 8285 + u16::from(host % 2)),
                sends_from: other.map(|other| Ipv4Addr::new(192, 168, 0, other)),
            });
        prop::collection::vec(peer, 0..30)
    }

    /// Returns the peer that a search through the whole list finds.
    fn slow(peers: &[Peer], address: Ipv4Addr) -> Option<Peer> {
        let mut best: Option<Peer> = None;
        for peer in peers.iter().filter(|peer| peer.subnet.contains(&address)) {
            if best.is_none_or(|best| peer.subnet.prefix_len() > best.subnet.prefix_len()) {
                best = Some(*peer);
            }
        }
        best
    }

    proptest! {
        #[test]
        fn the_table_answers_as_a_search_through_the_list(peers in peers(), b in 0u8..4, c in 0u8..4, d: u8, host in 0u8..9) {
            let routes = Routes::new(peers.clone());
            let (address, sender) = (Ipv4Addr::new(10, b, c, d), Ipv4Addr::new(192, 168, 0, host));
            let expected = slow(&peers, address);
            prop_assert_eq!(routes.peer_of(address), expected.map(|peer| peer.address));
            let owner = |peer: Peer| *peer.address.ip() == sender || routes.sends_from.get(&peer.subnet.trunc()) == Some(&sender);
            prop_assert_eq!(routes.believes(sender, address), expected.is_some_and(owner));
            if routes.believes(sender, address) {
                prop_assert!(routes.has_sender(sender));
            }
        }
    }

    #[test]
    fn the_first_peer_with_a_subnet_counts_with_both_its_addresses() {
        let subnet = "10.5.1.0/24".parse().unwrap();
        let peer = |host, other| Peer {
            subnet,
            address: SocketAddrV4::new(Ipv4Addr::new(192, 168, 0, host), 8285),
            sends_from: Some(Ipv4Addr::new(172, 16, 0, other)),
        };
        let routes = Routes::new([peer(1, 1), peer(2, 2)]);
        let source = Ipv4Addr::new(10, 5, 1, 7);
        assert_eq!(routes.peer_of(source), Some(peer(1, 1).address));
        assert!(routes.believes(Ipv4Addr::new(192, 168, 0, 1), source));
        assert!(routes.believes(Ipv4Addr::new(172, 16, 0, 1), source));
        for liar in [Ipv4Addr::new(192, 168, 0, 2), Ipv4Addr::new(172, 16, 0, 2)] {
            assert!(!routes.believes(liar, source) && !routes.has_sender(liar));
        }
    }
}
