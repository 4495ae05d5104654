// SPDX-License-Identifier: Apache-2.0
//! The policy rules of the kernel (`ip rule`): they say which routing tables it asks, and for which packets.

use std::io;
use std::ops::Range;

use ipnet::IpNet;
use nix::libc;
use weft_netlink::rtnl;
use weft_netlink::socket::{Netlink, absent};
use weft_netlink::wire::{attrs_after, messages, u8_at, u32_at};

use crate::kernel::Kernel;
use crate::kernel::entries::{MAIN, Route, RouteKind};

/// Size of `struct fib_rule_hdr` in bytes.
const HEADER: usize = 12;
/// Attributes of rules (linux/fib_rules.h).
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_TABLE: u16 = 15;
const FRA_FWMASK: u16 = 16;
const FRA_PAD: u16 = 18;
const FRA_PROTOCOL: u16 = 21;
/// The rule concerns the packets that do not pass its tests.
const FIB_RULE_INVERT: u32 = 2;
/// The rule asks a table.
const FR_ACT_TO_TBL: u8 = 1;
/// The value of FRA_SUPPRESS_PREFIXLEN with which a rule ignores no route.
const SUPPRESS_NOTHING: u32 = u32::MAX;
/// Maximum number of rules with a mark whose tables are read.
const MAX_MARKS: usize = 8;

/// A mark that a policy rule tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mark {
    value: u32,
    /// The bits that count.
    mask: u32,
}

/// A policy rule that asks a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    is_ipv4: bool,
    table: u32,
    /// The mark of the packets that it concerns.
    mark: Option<Mark>,
    /// True if it asks the table for every packet, and ignores none of its routes.
    is_for_all: bool,
}

/// The policy rules that ask a table, of both families.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyRules(Vec<Rule>);

/// A route of weft to pods of a peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct RouteOfWeft<'a> {
    /// Its destination.
    pub dst: IpNet,
    /// The route.
    pub route: &'a rtnl::Route,
}

/// A route to the pods of a peer in a table that the kernel asks for packets with a mark alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// The mark of the packets.
    pub mark: u32,
    /// The bits of the mark that count.
    pub mask: u32,
    /// The table.
    pub table: u32,
    /// Name of the link by which the packets leave, or `None` if they are refused.
    pub link: Option<String>,
    /// The subnet of the peer.
    pub example: IpNet,
}

impl PolicyRules {
    /// Reads the rules. A kernel without policy rules has none.
    ///
    /// # Errors
    /// The dump fails.
    pub(super) fn read() -> io::Result<PolicyRules> {
        let dump = Netlink::open()?.dump(libc::RTM_GETRULE, |w, kind, flags| w.begin(kind, flags, &[0; HEADER]));
        let data = match dump {
            Err(error) if absent(&error) => Vec::new(),
            dump => dump?,
        };
        let rules = messages(&data).filter(|m| m.kind == libc::RTM_NEWRULE);
        Ok(PolicyRules(rules.filter_map(|m| rule(m.payload)).collect()))
    }

    /// Returns true if a rule asks the main table for every packet of a family. A kernel without policy rules always asks it.
    pub(super) fn asks_main(&self, is_ipv4: bool) -> bool {
        let mut of_family = self.0.iter().filter(|rule| rule.is_ipv4 == is_ipv4).peekable();
        of_family.peek().is_none() || of_family.any(|rule| rule.table == MAIN && rule.is_for_all)
    }

    /// Returns those of these tables that rules of a family ask.
    pub(super) fn tables(&self, is_ipv4: bool, among: Range<u32>) -> impl Iterator<Item = u32> {
        self.0.iter().filter(move |rule| rule.is_ipv4 == is_ipv4 && among.contains(&rule.table)).map(|rule| rule.table)
    }

    /// Looks for routes to the subnets of peers in the tables for packets with a mark. One that is the same as that of weft is no other way.
    /// `name` returns the name of a link.
    ///
    /// # Errors
    /// The dump of a table fails.
    pub(super) fn marked(
        &self,
        of_weft: &[RouteOfWeft<'_>],
        name: impl Fn(u32) -> Option<String>,
    ) -> io::Result<Vec<Marked>> {
        let with_mark = self.0.iter().filter_map(|rule| Some((rule, rule.mark?)));
        let mut with_mark = with_mark.filter(|(rule, _)| rule.table != MAIN).take(MAX_MARKS).peekable();
        let mut found = Vec::new();
        if with_mark.peek().is_none() {
            return Ok(found);
        }
        let mut kernel = Kernel::open()?;
        for (rule, Mark { value: mark, mask }) in with_mark {
            let table = kernel.table(rule.is_ipv4, rule.table)?;
            let mut of_family = of_weft.iter().filter(|own| own.dst.addr().is_ipv4() == rule.is_ipv4);
            let other = |own: &RouteOfWeft<'_>| {
                let taken = longest(&table, &own.dst)?;
                let is_other = (taken.device, taken.gateway) != (own.route.index, own.route.gateway);
                let link = name(taken.device).filter(|_| taken.kind == RouteKind::Unicast);
                is_other.then_some(Marked { mark, mask, table: rule.table, link, example: own.dst })
            };
            found.extend(of_family.find_map(other));
        }
        Ok(found)
    }
}

/// Returns the longest route of a table that takes all packets to a subnet from the main table.
fn longest<'a>(table: &'a [Route], dst: &IpNet) -> Option<&'a Route> {
    let takes = |route: &&Route| matches!(route.kind, RouteKind::Unicast | RouteKind::Refuses(_)) && !route.of_weft();
    let covers = |route: &&Route| route.prefix.is_some_and(|prefix| prefix.contains(dst));
    table.iter().filter(takes).filter(covers).max_by_key(|route| route.prefix.map(|prefix| prefix.prefix_len()))
}

/// Reads RTM_NEWRULE. Returns `None` for a rule that asks no table, and for other families than IPv4 and IPv6.
fn rule(payload: &[u8]) -> Option<Rule> {
    let is_ipv4 = match i32::from(u8_at(payload, 0)) {
        libc::AF_INET => true,
        libc::AF_INET6 => false,
        _ => return None,
    };
    if u8_at(payload, 7) != FR_ACT_TO_TBL {
        return None;
    }
    let is_inverted = u32_at(payload, 8) & FIB_RULE_INVERT != 0;
    // The lengths of the two addresses, and the field TOS.
    let has_tests = payload.get(1..4).is_none_or(|tests| tests != [0; 3]);
    let (table, is_for_all) = (u8_at(payload, 4).into(), !is_inverted && !has_tests);
    let mut rule = Rule { is_ipv4, table, mark: None, is_for_all };
    let (mut mark, mut mask) = (None, u32::MAX);
    for (kind, value) in attrs_after(payload, HEADER) {
        match kind {
            FRA_TABLE => rule.table = u32_at(value, 0),
            FRA_FWMARK => mark = Some(u32_at(value, 0)),
            FRA_FWMASK => mask = u32_at(value, 0),
            FRA_PRIORITY | FRA_PROTOCOL | FRA_PAD => {}
            FRA_SUPPRESS_PREFIXLEN if u32_at(value, 0) == SUPPRESS_NOTHING => {}
            _ => rule.is_for_all = false,
        }
    }
    // Without the mark that it tests, `not fwmark` concerns the usual packets.
    rule.mark = mark.filter(|_| !is_inverted).map(|value| Mark { value, mask });
    rule.is_for_all &= mark.is_none() && mask == u32::MAX;
    Some(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: u32) -> Vec<u8> {
        [&8u16.to_ne_bytes()[..], &kind.to_ne_bytes(), &value.to_ne_bytes()].concat()
    }

    /// Returns a rule of IPv4 that asks table 100, with these flags and attributes.
    fn read(flags: u8, attributes: &[(u16, u32)]) -> Rule {
        let header = [2, 0, 0, 0, 100, 0, 0, FR_ACT_TO_TBL, flags, 0, 0, 0];
        let attributes = attributes.iter().flat_map(|(kind, value)| attribute(*kind, *value));
        rule(&header.into_iter().chain(attributes).collect::<Vec<u8>>()).unwrap()
    }

    #[test]
    fn a_rule_is_for_all_packets_only_without_any_test() {
        let usual = [(FRA_PRIORITY, 32766), (FRA_TABLE, MAIN), (FRA_SUPPRESS_PREFIXLEN, SUPPRESS_NOTHING)];
        let main = read(0, &usual);
        assert_eq!((main.table, main.mark, main.is_for_all), (MAIN, None, true));
        // The device by which packets arrive, a mark, routes that are ignored.
        for test in [(3, 0), (FRA_FWMARK, 7), (FRA_FWMASK, 0xff), (FRA_SUPPRESS_PREFIXLEN, 0)] {
            assert!(!read(0, &[(FRA_TABLE, MAIN), test]).is_for_all, "{test:?}");
        }
        let policy = |rules: &[Rule]| PolicyRules(rules.to_vec());
        assert!(policy(&[]).asks_main(true), "a kernel without policy rules");
        let other = read(0, &[]);
        assert!(policy(&[other, main]).asks_main(true));
        assert!(!policy(&[other]).asks_main(true));
        assert!(policy(&[other]).asks_main(false), "the rules of IPv6 are others");
    }

    #[test]
    fn a_mark_has_a_mask_and_a_rule_for_all_other_packets_has_none() {
        assert_eq!(read(0, &[(FRA_FWMARK, 7)]).mark, Some(Mark { value: 7, mask: u32::MAX }));
        assert_eq!(read(0, &[(FRA_FWMARK, 7), (FRA_FWMASK, 0xff)]).mark, Some(Mark { value: 7, mask: 0xff }));
        // As wg-quick writes it.
        let inverted = read(2, &[(FRA_FWMARK, 51820)]);
        assert_eq!((inverted.mark, inverted.is_for_all), (None, false));
    }
}
