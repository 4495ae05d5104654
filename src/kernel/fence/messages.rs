// SPDX-License-Identifier: Apache-2.0
//! Messages about the policy rules and the routes of the fence. Rules are typed messages of the crate netlink-packet-route. Routes
//! are written by hand, because an exception to the fence is written in one datagram with the other hot entries.

use ipnet::IpNet;
use netlink_packet_core::Parseable;
use netlink_packet_route::route::RouteProtocol;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleHeader, RuleMessage};
use nix::libc;
use weft_subnet::cidr::Family;

use super::super::rt::{CREATE, PLAIN, REPLACE, family as family_of};
use super::super::typed;
use super::super::wire::Writer;

/// The value of `FRA_SUPPRESS_PREFIXLEN` with which a rule suppresses no route.
pub(super) const SUPPRESS_NOTHING: u32 = u32::MAX;
/// The routing table that holds the routes of the host.
pub(super) const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
/// The input interface of packets that the host itself sends.
const LOOPBACK: &str = "lo";
/// Length of `struct rtmsg` in bytes.
const ROUTE_HEADER: usize = 12;

/// A policy rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rule {
    /// Its preference: the kernel asks the rules in ascending order.
    pub(super) pref: u32,
    /// The destination that it applies to; `None` for all.
    pub(super) to: Option<IpNet>,
    /// It does not apply to packets of the host itself.
    pub(super) not_own: bool,
    /// The table in which it looks up the route.
    pub(super) table: u32,
    /// It ignores routes whose prefix has this length or a shorter one.
    pub(super) suppress: u32,
    /// It tests or does something that the rules of a fence never do.
    pub(super) other: bool,
}

/// A route of one of the fence's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) table: u32,
    pub(super) net: IpNet,
    /// `rtm_type`.
    pub(super) kind: u8,
}

/// Asks for all rules of a family.
pub(super) fn dump_rules(w: &mut Writer, kind: u16, flags: u16, family: Family) {
    typed::begin(w, kind, flags, &message(RuleHeader { family: family.number().into(), ..RuleHeader::default() }));
}

/// Adds a rule that carries this protocol number.
pub(super) fn add_rule(w: &mut Writer, rule: &Rule, family: Family, protocol: u8) {
    let mut message = message(RuleHeader {
        family: family.number().into(),
        dst_len: rule.to.map_or(0, |net| net.prefix_len()),
        action: RuleAction::ToTable,
        flags: if rule.not_own { RuleFlags::Invert } else { RuleFlags::empty() },
        ..RuleHeader::default()
    });
    let attributes = &mut message.attributes;
    attributes.extend(rule.to.map(|net| RuleAttribute::Destination(net.network())));
    attributes.extend(rule.not_own.then(|| RuleAttribute::Iifname(LOOPBACK.to_owned())));
    attributes.extend([RuleAttribute::Priority(rule.pref), RuleAttribute::Table(rule.table)]);
    attributes.extend((rule.suppress != SUPPRESS_NOTHING).then_some(RuleAttribute::SuppressPrefixLen(rule.suppress)));
    attributes.push(RuleAttribute::Protocol(RouteProtocol::from(protocol)));
    typed::begin(w, libc::RTM_NEWRULE, CREATE, &message);
}

/// Deletes the rule that the kernel described with this message.
pub(super) fn delete_rule(w: &mut Writer, message: &[u8]) {
    w.begin(libc::RTM_DELRULE, PLAIN, message);
}

/// Reads RTM_NEWRULE and RTM_DELRULE. Returns `None` for a rule of another family or with an attribute that cannot be parsed:
/// rules of a fence have no such attribute.
pub(super) fn read_rule(payload: &[u8]) -> Option<(Rule, Option<u8>)> {
    let RuleMessage { header, attributes, .. } = RuleMessage::parse(payload).ok()?;
    let (mut pref, mut to, mut iif, mut table) = (0, None, String::new(), u32::from(header.table));
    let (mut suppress, mut protocol) = (SUPPRESS_NOTHING, None);
    let mut other = header.src_len != 0
        || header.tos != 0
        || header.action != RuleAction::ToTable
        || !RuleFlags::Invert.contains(header.flags);
    for attribute in attributes {
        match attribute {
            RuleAttribute::Destination(ip) => to = IpNet::new(ip, header.dst_len).ok(),
            RuleAttribute::Iifname(name) => iif = name,
            RuleAttribute::Priority(number) => pref = number,
            RuleAttribute::SuppressPrefixLen(len) => suppress = len,
            RuleAttribute::Table(number) => table = number,
            RuleAttribute::Protocol(of) => protocol = Some(of.into()),
            _ => other = true,
        }
    }
    let not_own = header.flags.contains(RuleFlags::Invert);
    other |= iif != if not_own { LOOPBACK } else { "" };
    Some((Rule { pref, to, not_own, table, suppress, other }, protocol))
}

/// Adds a route with this protocol number to a table of the fence, or deletes it (`None`).
pub(super) fn put_route(w: &mut Writer, route: &Route, protocol: Option<u8>) {
    let mut h = [0; ROUTE_HEADER];
    h[0] = family_of(route.net.addr());
    h[1] = route.net.prefix_len();
    h[5] = protocol.unwrap_or(0);
    h[6] = if protocol.is_some() { 0 } else { libc::RT_SCOPE_NOWHERE };
    h[7] = route.kind;
    let (kind, flags) = if protocol.is_some() { (libc::RTM_NEWROUTE, REPLACE) } else { (libc::RTM_DELROUTE, PLAIN) };
    w.begin(kind, flags, &h);
    w.attr_ip(libc::RTA_DST, route.net.network());
    w.attr_u32(libc::RTA_TABLE, route.table);
}

fn message(header: RuleHeader) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header = header;
    message
}
