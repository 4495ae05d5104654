// SPDX-License-Identifier: Apache-2.0
//! Policies of IPsec (`ip xfrm policy`) that take or drop packets between pods. They work after routes and rules, and neither shows them.
//! The layout of the messages is that of linux/xfrm.h.

use std::io;

use ipnet::IpNet;
use netlink_sys::protocols::NETLINK_XFRM;
use nix::libc;
use weft_netlink::socket::{Netlink, absent};
use weft_netlink::wire::{attr_after, i32_at, ip, messages, u8_at, u16_at, u32_at};

const XFRM_MSG_NEWPOLICY: u16 = 0x13;
const XFRM_MSG_GETPOLICY: u16 = 0x15;
/// Lengths of `struct xfrm_userpolicy_id` and of `struct xfrm_userpolicy_info`.
const POLICY_ID: usize = 64;
const POLICY_INFO: usize = 168;
/// Offsets in `struct xfrm_userpolicy_info`, which begins with `struct xfrm_selector`.
const SOURCE: usize = 16;
const PORTS: usize = 32;
const FAMILY: usize = 40;
const DESTINATION_LENGTH: usize = 42;
const SOURCE_LENGTH: usize = 43;
const PROTOCOL: usize = 44;
const LINK: usize = 48;
const PRIORITY: usize = 152;
const INDEX: usize = 156;
const DIRECTION: usize = 160;
const ACTION: usize = 161;
/// Attributes: the transformations, the mark, and the ID of an xfrm interface.
const XFRMA_TMPL: u16 = 5;
const XFRMA_MARK: u16 = 21;
const XFRMA_IF_ID: u16 = 31;
const XFRM_POLICY_BLOCK: u8 = 1;

/// When a policy is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The packet leaves.
    Out,
    /// The packet is forwarded.
    Forward,
}

/// The order of policies: by priority, then by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    /// The priority.
    pub priority: u32,
    /// The index.
    pub index: u32,
}

/// A policy that depends on addresses alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// When it is looked up.
    pub direction: Direction,
    /// The source addresses.
    pub from: IpNet,
    /// The destination addresses.
    pub to: IpNet,
    /// The one with the lowest order decides.
    pub order: Order,
    /// True if packets are dropped, or must be transformed, which the packets of pods are not expected to be.
    pub takes: bool,
}

/// A policy that takes packets between pods of this node and pods of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The policy.
    pub policy: Policy,
    /// One of the subnets from which it takes packets.
    pub from: IpNet,
    /// The subnet to which these packets go.
    pub to: IpNet,
}

/// Reads the policies, and returns those that decide about packets from `own` to `peers` or back.
///
/// # Errors
/// The kernel cannot be asked. A kernel without IPsec has no policies.
pub(super) fn read(own: &[IpNet], peers: &[IpNet]) -> io::Result<Vec<Taken>> {
    match dump() {
        Ok(policies) => Ok(taken(&policies, own, peers)),
        Err(error) if absent(&error) || error.raw_os_error() == Some(libc::EPROTONOSUPPORT) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

fn dump() -> io::Result<Vec<Policy>> {
    let mut netlink = Netlink::open_on(NETLINK_XFRM)?;
    let data = netlink.dump(XFRM_MSG_GETPOLICY, |w, kind, flags| w.begin(kind, flags, &[0; POLICY_ID]))?;
    let policies = messages(&data).filter(|message| message.kind == XFRM_MSG_NEWPOLICY);
    Ok(policies.filter_map(|message| policy(message.payload)).collect())
}

/// Reads one policy. Those that depend on more than addresses, or that work elsewhere, are left out.
fn policy(info: &[u8]) -> Option<Policy> {
    let direction = match u8_at(info, DIRECTION) {
        1 => Direction::Out,
        2 => Direction::Forward,
        _ => return None,
    };
    let has = |kind| attr_after(info, POLICY_INFO, kind);
    let is_set = |kind| has(kind).is_some_and(|value| value.iter().any(|byte| *byte != 0));
    let depends_on_more = info.get(PORTS..FAMILY)?.iter().any(|byte| *byte != 0)
        || u8_at(info, PROTOCOL) != 0
        || i32_at(info, LINK) != 0
        || is_set(XFRMA_MARK)
        || is_set(XFRMA_IF_ID);
    let family = i32::from(u16_at(info, FAMILY));
    let net = |at: usize, length: usize| {
        let size = match family {
            libc::AF_INET => 4,
            libc::AF_INET6 => 16,
            _ => return None,
        };
        IpNet::new(ip(info.get(at..at + size)?)?, u8_at(info, length)).ok()
    };
    let takes = u8_at(info, ACTION) == XFRM_POLICY_BLOCK || has(XFRMA_TMPL).is_some();
    let (from, to) = (net(SOURCE, SOURCE_LENGTH)?, net(0, DESTINATION_LENGTH)?);
    let order = Order { priority: u32_at(info, PRIORITY), index: u32_at(info, INDEX) };
    (!depends_on_more).then_some(Policy { direction, from, to, order, takes })
}

/// Returns the policies that decide about packets between these subnets, each once, if they take them.
fn taken(policies: &[Policy], own: &[IpNet], peers: &[IpNet]) -> Vec<Taken> {
    let mut found: Vec<Taken> = Vec::new();
    let there = own.iter().flat_map(|own| peers.iter().map(move |peer| (own, peer)));
    for (own, peer) in there.filter(|(own, peer)| own.addr().is_ipv4() == peer.addr().is_ipv4()) {
        let ways = [(Direction::Out, own, peer), (Direction::Forward, own, peer), (Direction::Forward, peer, own)];
        for (direction, from, to) in ways {
            let fits = |policy: &&Policy| {
                policy.direction == direction && policy.from.contains(from) && policy.to.contains(to)
            };
            let decides = policies.iter().filter(fits).min_by_key(|policy| policy.order);
            let Some(policy) = decides.filter(|policy| policy.takes) else { continue };
            if !found.iter().any(|taken| taken.policy == *policy) {
                found.push(Taken { policy: policy.clone(), from: *from, to: *to });
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(direction: Direction, from: &str, to: &str, priority: u32, takes: bool) -> Policy {
        Policy {
            direction,
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            order: Order { priority, index: 1 },
            takes,
        }
    }

    /// Returns the message about a policy that drops all IPv4 packets that leave, with these attributes.
    fn message(attributes: &[u8]) -> Vec<u8> {
        let mut info = vec![0; POLICY_INFO];
        info[FAMILY..FAMILY + 2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        info[DIRECTION] = 1;
        info[ACTION] = XFRM_POLICY_BLOCK;
        info.extend(attributes);
        info
    }

    #[test]
    fn a_policy_that_depends_on_more_than_addresses_is_left_out() {
        let attribute =
            |kind: u16, value: u32| [&8u16.to_ne_bytes()[..], &kind.to_ne_bytes(), &value.to_ne_bytes()].concat();
        let all = super::policy(&message(&[])).unwrap();
        assert!(all.takes && all.direction == Direction::Out, "{all:?}");
        assert_eq!(super::policy(&message(&attribute(XFRMA_MARK, 0))), Some(all), "this is no mark");
        for kind in [XFRMA_MARK, XFRMA_IF_ID] {
            assert_eq!(super::policy(&message(&attribute(kind, 7))), None, "attribute {kind}");
        }
        // A port, a protocol and a link. The direction 0 is that of packets for this host.
        for (at, value) in [(PORTS, 1), (PROTOCOL, 17), (LINK, 2), (DIRECTION, 0)] {
            let mut other = message(&[]);
            other[at] = value;
            assert_eq!(super::policy(&other), None, "byte {at}");
        }
    }

    #[test]
    fn the_policy_with_the_lowest_priority_decides() {
        let (own, peer): (IpNet, IpNet) = ("10.5.1.0/24".parse().unwrap(), "10.5.2.0/24".parse().unwrap());
        let found = |policies: &[Policy]| taken(policies, &[own], &[peer]).len();
        let all = policy(Direction::Out, "0.0.0.0/0", "0.0.0.0/0", 9, true);
        assert_eq!(found(std::slice::from_ref(&all)), 1);
        let passes = policy(Direction::Out, "10.5.0.0/16", "10.5.0.0/16", 8, false);
        assert_eq!(found(&[all.clone(), passes.clone()]), 0);
        assert_eq!(found(&[all, Policy { order: Order { priority: 10, index: 1 }, ..passes }]), 1);
        let back = policy(Direction::Forward, "10.5.2.0/24", "10.5.1.0/24", 1, true);
        assert_eq!(found(std::slice::from_ref(&back)), 1);
        assert_eq!(found(&[Policy { direction: Direction::Out, ..back }]), 0, "our packets go the other way");
        assert_eq!(found(&[policy(Direction::Out, "10.5.1.0/24", "10.6.0.0/16", 1, true)]), 0);
    }
}
