// SPDX-License-Identifier: Apache-2.0
//! Sets of addresses of ipset, as rules of iptables test them with `-m set --match-set`. The kernel is asked about single addresses, because
//! blocklists may have a hundred thousand elements (linux/netfilter/ipset/ip_set.h of the kernel).

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_netlink::nftables::{self, NFGENMSG};
use weft_netlink::rt::{PLAIN, family};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{Writer, attr_after, messages, text, u8_at};

/// NFNL_SUBSYS_IPSET, in the upper byte of each kind of message.
const SUBSYSTEM: u16 = 6 << 8;
/// IPSET_CMD_TEST.
const TEST: u16 = SUBSYSTEM | 11;
/// IPSET_CMD_HEADER.
const HEADER: u16 = SUBSYSTEM | 12;
/// The oldest version of the protocol that kernels of today understand.
const VERSION: u8 = 6;

const ATTR_PROTOCOL: u16 = 1;
const ATTR_SETNAME: u16 = 2;
const ATTR_TYPENAME: u16 = 3;
const ATTR_FAMILY: u16 = 5;
const ATTR_DATA: u16 = 7;
/// Attributes of an element: its address, and the length of the prefix if it is a network.
const ELEMENT_IP: u16 = 1;
const ELEMENT_CIDR: u16 = 3;
/// The flag NLA_F_NET_BYTEORDER of the attribute that contains an address. Its number is 1 for IPv4 and 2 for IPv6.
const NET_BYTEORDER: u16 = 0x4000;

/// IPSET_ERR_EXIST: there is no such element.
const NO_ELEMENT: i32 = 4103;
/// IPSET_ERR_BITMAP_RANGE: the set has another range of addresses. Sets of other types mean something else by this number.
const OUT_OF_RANGE: i32 = 4352;

/// The types whose elements are addresses or networks, and nothing else.
const OF_ADDRESSES: [&str; 3] = [NETWORKS, "hash:ip", BITMAP];
const NETWORKS: &str = "hash:net";
const BITMAP: &str = "bitmap:ip";

/// Sets of addresses, as rules of iptables look them up.
pub trait AddressSets: fmt::Debug {
    /// Returns whether a rule that tests this set matches an address. `known_bits` says how many bits of the address are known, if it stands for all
    /// addresses of a network: then all of them match. `None` if that is not known: the kernel does not answer, the set has another type, or it may have
    /// only some of these addresses.
    fn contains(&self, set: &str, address: IpAddr, known_bits: Option<u8>) -> Option<bool>;
}

/// The sets of the kernel. Each question goes to it, which is good enough for the rules that one packet passes.
#[derive(Debug)]
pub struct UncachedSets;

impl AddressSets for UncachedSets {
    fn contains(&self, set: &str, address: IpAddr, known_bits: Option<u8>) -> Option<bool> {
        ask(&mut nftables::open().ok()?, set, address, known_bits)
    }
}

/// The name of a set, an address, and how many bits of it are known.
type Question = (String, IpAddr, Option<u8>);

/// The sets of the kernel, with the answers so far. Network policies may be thousands of rules with sets, which many packets pass.
#[derive(Debug, Default)]
pub struct CachedSets {
    netlink: RefCell<Option<Netlink>>,
    answers: RefCell<HashMap<Question, Option<bool>>>,
}

impl AddressSets for CachedSets {
    fn contains(&self, set: &str, address: IpAddr, known_bits: Option<u8>) -> Option<bool> {
        let question = (set.to_owned(), address, known_bits);
        let answer = || {
            let mut netlink = self.netlink.borrow_mut();
            if netlink.is_none() {
                *netlink = nftables::open().ok();
            }
            ask(netlink.as_mut()?, set, address, known_bits)
        };
        *self.answers.borrow_mut().entry(question).or_insert_with(answer)
    }
}

/// Asks the kernel whether a set contains an address (see [`AddressSets::contains`]).
fn ask(netlink: &mut Netlink, set: &str, address: IpAddr, known_bits: Option<u8>) -> Option<bool> {
    let (kind, of_family) = header(netlink, set)?;
    if !OF_ADDRESSES.contains(&kind.as_str()) {
        return None;
    }
    if of_family != family(address) {
        return Some(false);
    }
    let mut has = |element: IpNet| match test(netlink, set, element)? {
        Ok(()) => Some(true),
        Err(code) if is_absent(code, &kind) => Some(false),
        Err(_) => None,
    };
    let Some(bits) = known_bits else { return has(IpNet::from(address)) };
    let all = IpNet::new(address, bits).ok()?;
    // An exception (`nomatch`) for these addresses or more counts for the first one and the last one, too.
    let has_ends = kind == NETWORKS && has(all.network().into())? && has(all.broadcast().into())?;
    let mut around = (1..=bits).filter_map(|len| IpNet::new(address, len).ok());
    (has_ends && around.any(|net| has(net.trunc()) == Some(true))).then_some(true)
}

/// Returns the type and the family of a set.
fn header(netlink: &mut Netlink, set: &str) -> Option<(String, u8)> {
    let ask = |w: &mut Writer| begin(w, HEADER, set);
    let data = netlink.request(ask).ok()?.ok()?;
    let answer = messages(&data).find(|message| message.kind == HEADER)?;
    let get = |kind: u16| attr_after(answer.payload, NFGENMSG, kind);
    Some((text(get(ATTR_TYPENAME)?).to_owned(), u8_at(get(ATTR_FAMILY)?, 0)))
}

/// Returns true if the kernel refused the test of an element with this error because a set of this type does not have it.
fn is_absent(code: i32, kind: &str) -> bool {
    code == NO_ELEMENT || (code == OUT_OF_RANGE && kind == BITMAP)
}

/// Tests whether a set has an element: if not, the kernel answers with an error number. An address is in each network that has it; a network must be an
/// element itself. `None` if the kernel does not answer.
fn test(netlink: &mut Netlink, set: &str, element: IpNet) -> Option<Result<(), i32>> {
    let ask = |w: &mut Writer| {
        begin(w, TEST, set);
        w.nest(ATTR_DATA, |w| {
            let number = if element.addr().is_ipv4() { 1 } else { 2 };
            w.nest(ELEMENT_IP, |w| w.attr_ip(number | NET_BYTEORDER, element.addr()));
            if element.prefix_len() < element.max_prefix_len() {
                w.attr(ELEMENT_CIDR, &[element.prefix_len()]);
            }
        });
    };
    Some(netlink.request(ask).ok()?.map(|_| ()).map_err(|refusal| refusal.code))
}

fn begin(w: &mut Writer, kind: u16, set: &str) {
    w.begin(kind, PLAIN, &[0; NFGENMSG]);
    w.attr(ATTR_PROTOCOL, &[VERSION]);
    w.attr_str(ATTR_SETNAME, set);
}

#[cfg(test)]
mod tests {
    use nix::libc;

    use super::*;

    /// Behind `!`, an answer that is taken for "not in the set" makes a rule match.
    #[test]
    fn only_two_errors_say_that_a_set_does_not_have_an_element() {
        for (code, kind, absent) in [
            (NO_ELEMENT, NETWORKS, true),
            (NO_ELEMENT, BITMAP, true),
            (OUT_OF_RANGE, BITMAP, true),
            (OUT_OF_RANGE, "hash:ip", false),
            (NO_ELEMENT + 1, NETWORKS, false),
            (libc::ENOENT, NETWORKS, false),
        ] {
            assert_eq!(is_absent(code, kind), absent, "{code} of {kind}");
        }
    }
}
