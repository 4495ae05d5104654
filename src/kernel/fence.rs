// SPDX-License-Identifier: Apache-2.0
//! The fence in the kernel: policy rules and routing tables of our own, which the kernel asks before it asks the main table for
//! packets that this host forwards. Why it is made so: docs/adr/005-fail-closed-after-dnat.md.
//!
//! For each fenced prefix there are two rules and one route:
//!
//! ```text
//! PREF    from all to PREFIX lookup main suppress_prefixlength LENGTH-1
//! PREF+1  not from all iif lo lookup TABLE
//! table TABLE:  unreachable PREFIX  (or blackhole PREFIX)
//! ```
//!
//! The first rule gives every packet the route of the main table if that route is at least as long as the prefix. The second one
//! catches the rest, unless the packet is the host's own (`iif lo`). An exception is a `throw` route in TABLE: the kernel goes on
//! to the main table.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::diff::Op;
use weft_backends::state::{Fence, Key, Seen, Value};
use weft_subnet::cidr::Family;

use super::encode::dump;
use super::rt::{CREATE, PLAIN, REPLACE};
use super::socket::{Netlink, Refusal, absent};
use super::wire::{Message, Writer, attrs_after, ip, messages, text, u8_at, u32_at};
use super::{Outcome, decode, errno};

const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;
const FRA_DST: u16 = 1;
const FRA_IIFNAME: u16 = 3;
const FRA_PRIORITY: u16 = 6;
const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
const FRA_TABLE: u16 = 15;
const FRA_PAD: u16 = 18;
const FRA_PROTOCOL: u16 = 21;
const FR_ACT_TO_TBL: u8 = 1;
const FIB_RULE_INVERT: u32 = 2;
const NOT_SUPPRESSED: u32 = u32::MAX;
/// Length of `struct fib_rule_hdr`, and of `struct rtmsg`.
const HEADER: usize = 12;
const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
/// Packets that the host itself sends count as arrived here.
const LOOPBACK: &str = "lo";

/// The first preference. All of ours are below that of the main table (32766), with room for 640 agents on one host.
const FIRST_PREF: u32 = 30_200;
const AGENTS: u64 = 640;
/// The first table.
const FIRST_TABLE: u32 = 90_000;
const TABLES: u64 = 1_000_000;

/// Preferences and tables of one agent. Two agents of one host have others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    pref: u32,
    table: u32,
}

/// What a fence encloses: each has two preferences and a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zone {
    /// Our own subnet: comes first, since it lies inside Network.
    Own,
    Network,
}

impl Numbers {
    /// Of the agent whose links bear this alias, `weft FILE`: the lowest ones for flannel's usual file.
    pub fn of_alias(alias: &str) -> Numbers {
        let file = Path::new(alias.strip_prefix("weft ").unwrap_or(alias));
        let hash = crate::instance::hash(file);
        let usual = file == Path::new(weft_subnet::env::USUAL_FILE);
        let number = |below: u64, hash: u64| if usual { 0 } else { 1 + u32::try_from(hash % (below - 1)).unwrap_or(0) };
        Numbers {
            pref: FIRST_PREF + 4 * number(AGENTS, hash),
            table: FIRST_TABLE + 2 * number(TABLES, hash.rotate_left(32)),
        }
    }

    /// Whether a message of the kernel is about a rule with a preference of this agent's.
    pub fn has_rule(&self, m: &Message<'_>) -> bool {
        matches!(m.kind, RTM_NEWRULE | RTM_DELRULE) && rule(m.payload).is_some_and(|rule| self.has_pref(rule.pref))
    }

    fn has_pref(&self, pref: u32) -> bool {
        (self.pref..self.pref + 4).contains(&pref)
    }

    /// Whether a table is this agent's.
    pub fn has_table(&self, table: u32) -> bool {
        (self.table..self.table + 2).contains(&table)
    }

    fn table(&self, zone: Zone) -> u32 {
        match zone {
            Zone::Own => self.table + 1,
            Zone::Network => self.table,
        }
    }

    /// The two rules that enclose this prefix.
    fn rules(&self, zone: Zone, net: IpNet) -> [Rule; 2] {
        let pref = match zone {
            Zone::Own => self.pref,
            Zone::Network => self.pref + 2,
        };
        let (table, suppress) = (self.table(zone), u32::from(net.prefix_len().saturating_sub(1)));
        [
            Rule { pref, to: Some(net), not_own: false, table: MAIN, suppress, strange: false },
            Rule { pref: pref + 1, to: None, not_own: true, table, suppress: NOT_SUPPRESSED, strange: false },
        ]
    }
}

/// A policy rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    pref: u32,
    to: Option<IpNet>,
    /// Not for packets of the host itself.
    not_own: bool,
    table: u32,
    /// Routes with a prefix of this length or shorter do not count.
    suppress: u32,
    /// It tests or does something else that ours never do.
    strange: bool,
}

/// A route of a table of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Route {
    table: u32,
    net: IpNet,
    kind: u8,
}

/// What is in the kernel of one family.
#[derive(Debug, Default)]
struct There {
    /// With their messages, by which the kernel deletes them.
    rules: Vec<(Rule, Vec<u8>)>,
    routes: Vec<Route>,
    open: Vec<IpAddr>,
}

/// The fence of one agent.
#[derive(Debug)]
pub struct FenceTable {
    numbers: Numbers,
    protocol: u8,
}

impl FenceTable {
    /// Of the agent whose links bear this alias. `protocol`: what its rules and routes carry.
    pub fn new(alias: &str, protocol: u8) -> FenceTable {
        FenceTable { numbers: Numbers::of_alias(alias), protocol }
    }

    /// What is there. A kernel without policy routing has nothing.
    ///
    /// # Errors
    /// A dump failed: what it would have shown is not taken for gone.
    pub fn observe(&self, netlink: &mut Netlink) -> io::Result<Vec<(Key, Seen)>> {
        let seen = |value| Seen { value, protocol: 0, mark: false };
        let mut found = Vec::new();
        for family in [Family::V4, Family::V6] {
            let there = self.look(netlink, family)?;
            found.extend(there.open.iter().map(|ip| (Key::Open(*ip), seen(Value::Open))));
            if !there.rules.is_empty() || !there.routes.is_empty() {
                found.push((Key::Fence(family), seen(Value::fence(self.value(&there)))));
            }
        }
        Ok(found)
    }

    fn look(&self, netlink: &mut Netlink, family: Family) -> io::Result<There> {
        let number = if family == Family::V4 { 2 } else { 10 };
        let mut there = There::default();
        let data = empty_if_absent(netlink.dump(RTM_GETRULE, |w, kind, flags| {
            w.begin(kind, flags, &[number, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        }))?;
        for m in messages(&data).filter(|m| m.kind == RTM_NEWRULE && m.payload.first() == Some(&number)) {
            // A preference that another program uses, too, is no reason to delete its rule.
            let ours = |rule: &Rule| self.numbers.has_pref(rule.pref) && is_of(m.payload, self.protocol);
            there.rules.extend(rule(m.payload).filter(ours).map(|rule| (rule, m.payload.to_vec())));
        }
        for zone in [Zone::Own, Zone::Network] {
            let table = self.numbers.table(zone);
            let dump = netlink.dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes_of_table(w, flags, number, table));
            let data = empty_if_absent(dump)?;
            let routes = messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE);
            for (_, route) in routes.filter_map(|m| decode::route_of_any_table(m.payload)).filter(|(t, _)| *t == table)
            {
                let host = route.net.prefix_len() == route.net.max_prefix_len();
                if route.kind == libc::RTN_THROW && host && zone == Zone::Network {
                    there.open.push(route.net.addr());
                } else {
                    there.routes.push(Route { table, net: route.net, kind: route.kind });
                }
            }
        }
        Ok(there)
    }

    /// What is there, as far as it is a fence.
    fn value(&self, there: &There) -> Fence {
        let route = |zone| {
            let found = |route: &&Route| route.table == self.numbers.table(zone) && route.kind == kind(zone);
            there.routes.iter().find(found).map(|route| route.net)
        };
        let mut fence = Fence { unreachable: route(Zone::Network), blackhole: route(Zone::Own), whole: true };
        let (rules, routes) = self.wanted(&fence);
        let same_rules = rules.len() == there.rules.len() && there.rules.iter().all(|(rule, _)| rules.contains(rule));
        fence.whole = same_rules && routes.len() == there.routes.len();
        fence
    }

    fn wanted(&self, fence: &Fence) -> (Vec<Rule>, Vec<Route>) {
        let zones = [(Zone::Own, fence.blackhole), (Zone::Network, fence.unreachable)];
        let zones = zones.into_iter().filter_map(|(zone, net)| Some((zone, net?)));
        let route = |(zone, net)| Route { table: self.numbers.table(zone), net, kind: kind(zone) };
        (zones.clone().flat_map(|(zone, net)| self.numbers.rules(zone, net)).collect(), zones.map(route).collect())
    }

    /// Appends the message that makes an exception, or takes it back.
    pub fn open(&self, w: &mut Writer, ip: IpAddr, add: bool) {
        let (net, table) = (IpNet::from(ip), self.numbers.table(Zone::Network));
        put_route(w, &Route { table, net, kind: libc::RTN_THROW }, add.then_some(self.protocol));
    }

    /// Writes an operation on the fence.
    pub fn apply(&self, netlink: &mut Netlink, op: &Op) -> Outcome {
        let (Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value)) = op;
        let (Key::Fence(family), Value::Fence(fence)) = (key, value) else {
            return errno::fatal(op, "the value does not fit the key");
        };
        let wanted = if matches!(op, Op::Remove(..)) { Fence::default() } else { **fence };
        match self.bring(netlink, *family, &wanted) {
            Ok(Ok(())) => Outcome::Done,
            Ok(Err(refusal)) => errno::outcome(op, &refusal),
            Err(error) => errno::retry(op, &error.to_string()),
        }
    }

    fn bring(&self, netlink: &mut Netlink, family: Family, wanted: &Fence) -> io::Result<Result<(), Refusal>> {
        let there = self.look(netlink, family)?;
        in_order(self.steps(&there, wanted), |steps| self.send(netlink, family, steps))
    }

    /// What to add, and then what to remove, so that at every moment one of the two fences is whole and no packet that has a route is
    /// lost. A route of a table catches packets only behind the first rule that lets those with a route pass; so that rule comes before
    /// the route and goes after it. The rule that asks the table comes last and goes first.
    fn steps<'a>(&self, there: &'a There, wanted: &Fence) -> [Vec<Step<'a>>; 2] {
        let (rules, routes) = self.wanted(wanted);
        let missing = rules.iter().filter(|rule| !there.rules.iter().any(|(other, _)| other == *rule));
        let missing = missing.map(|rule| Step::AddRule(*rule));
        let mut add: Vec<Step<'_>> = missing.collect();
        add.extend(routes.iter().filter(|route| !there.routes.contains(route)).map(|route| Step::AddRoute(*route)));
        let surplus = there.rules.iter().filter(|(rule, _)| !rules.contains(rule));
        let mut remove: Vec<Step<'_>> = surplus.map(|(rule, message)| Step::RemoveRule(*rule, message)).collect();
        let routes = there.routes.iter().filter(|route| !routes.contains(route));
        remove.extend(routes.map(|route| Step::RemoveRoute(*route)));
        add.sort_by_key(Step::place);
        remove.sort_by_key(|step| std::cmp::Reverse(step.place()));
        [add, remove]
    }

    /// Sends these in one go. What is gone already needs no removal.
    fn send(&self, netlink: &mut Netlink, family: Family, steps: &[Step<'_>]) -> io::Result<Result<(), Refusal>> {
        let (mut w, mut last, mut removals) = (Writer::default(), 0, Vec::new());
        for step in steps {
            match step {
                Step::AddRule(rule) => put_rule(&mut w, rule, family, self.protocol),
                Step::AddRoute(route) => put_route(&mut w, route, Some(self.protocol)),
                Step::RemoveRule(_, message) => w.begin(RTM_DELRULE, PLAIN, message),
                Step::RemoveRoute(route) => put_route(&mut w, route, None),
            }
            last = netlink.next_seq();
            w.end(last);
            if matches!(step, Step::RemoveRule(..) | Step::RemoveRoute(_)) {
                removals.push(last);
            }
        }
        w.flag_last(super::socket::NLM_F_ACK);
        let replies = netlink.exchange(w.bytes(), last)?;
        let gone = |refusal: &Refusal| {
            removals.contains(&refusal.seq) && matches!(refusal.errno, Errno::ENOENT | Errno::ESRCH)
        };
        match replies.refused.into_iter().find(|refusal| !gone(refusal)) {
            Some(refusal) => Ok(Err(refusal)),
            None if replies.complete => Ok(Ok(())),
            None => Err(io::Error::new(io::ErrorKind::WouldBlock, "acknowledgement lost")),
        }
    }
}

/// One change of a fence.
#[derive(Debug, Clone, Copy)]
enum Step<'a> {
    AddRule(Rule),
    AddRoute(Route),
    /// With the kernel's message about it.
    RemoveRule(Rule, &'a [u8]),
    RemoveRoute(Route),
}

impl Step<'_> {
    /// The place of what it is about: the rule that lets pass, the route, the rule that asks the table.
    fn place(&self) -> u8 {
        match self {
            Step::AddRule(rule) | Step::RemoveRule(rule, _) if rule.table == MAIN => 0,
            Step::AddRoute(_) | Step::RemoveRoute(_) => 1,
            Step::AddRule(_) | Step::RemoveRule(..) => 2,
        }
    }
}

/// Sends the additions, and the removals only when none of the additions was refused: the old fence stands until the new one does.
fn in_order(
    stages: [Vec<Step<'_>>; 2],
    mut send: impl FnMut(&[Step<'_>]) -> io::Result<Result<(), Refusal>>,
) -> io::Result<Result<(), Refusal>> {
    for steps in stages.iter().filter(|steps| !steps.is_empty()) {
        if let Err(refusal) = send(steps)? {
            return Ok(Err(refusal));
        }
    }
    Ok(Ok(()))
}

fn kind(zone: Zone) -> u8 {
    match zone {
        Zone::Own => libc::RTN_BLACKHOLE,
        Zone::Network => libc::RTN_UNREACHABLE,
    }
}

/// A family, a table or policy routing that the kernel has not: nothing is there.
fn empty_if_absent(dump: io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    match dump {
        Err(error) if absent(&error) || error.raw_os_error() == Some(Errno::ENOENT as i32) => Ok(Vec::new()),
        dump => dump,
    }
}

/// `struct fib_rule_hdr` and its attributes.
fn put_rule(w: &mut Writer, rule: &Rule, family: Family, protocol: u8) {
    let mut h = [0; HEADER];
    h[0] = if family == Family::V4 { 2 } else { 10 };
    h[1] = rule.to.map_or(0, |net| net.prefix_len());
    h[7] = FR_ACT_TO_TBL;
    h[8..].copy_from_slice(&(if rule.not_own { FIB_RULE_INVERT } else { 0 }).to_ne_bytes());
    w.begin(RTM_NEWRULE, CREATE, &h);
    if let Some(net) = rule.to {
        w.attr_ip(FRA_DST, net.network());
    }
    if rule.not_own {
        w.attr_str(FRA_IIFNAME, LOOPBACK);
    }
    w.attr_u32(FRA_PRIORITY, rule.pref);
    w.attr_u32(FRA_TABLE, rule.table);
    if rule.suppress != NOT_SUPPRESSED {
        w.attr_u32(FRA_SUPPRESS_PREFIXLEN, rule.suppress);
    }
    w.attr(FRA_PROTOCOL, &[protocol]);
}

/// Reads a rule; `None` when the message is too short.
fn rule(payload: &[u8]) -> Option<Rule> {
    let len = *payload.get(1)?;
    let flags = u32_at(payload.get(..HEADER)?, 8);
    let (mut pref, mut dst, mut iif, mut table) = (0, None, "", u32::from(u8_at(payload, 4)));
    let mut suppress = NOT_SUPPRESSED;
    // A source, a class of service, another action, a rule that is always there.
    let mut strange =
        payload[2] != 0 || payload[3] != 0 || payload[7] != FR_ACT_TO_TBL || flags & !FIB_RULE_INVERT != 0;
    for (kind, value) in attrs_after(payload, HEADER) {
        match kind {
            FRA_DST => dst = ip(value),
            FRA_IIFNAME => iif = text(value),
            FRA_PRIORITY => pref = u32_at(value, 0),
            FRA_SUPPRESS_PREFIXLEN => suppress = u32_at(value, 0),
            FRA_TABLE => table = u32_at(value, 0),
            FRA_PROTOCOL | FRA_PAD => {}
            _ => strange = true,
        }
    }
    let inverted = flags & FIB_RULE_INVERT != 0;
    strange |= inverted != (iif == LOOPBACK) || !["", LOOPBACK].contains(&iif);
    let to = dst.and_then(|dst| IpNet::new(dst, len).ok());
    Some(Rule { pref, to, not_own: inverted, table, suppress, strange })
}

/// Whether a rule carries this protocol number; before Linux 4.17 rules have none.
fn is_of(payload: &[u8], protocol: u8) -> bool {
    let carried = attrs_after(payload, HEADER).find(|(kind, _)| *kind == FRA_PROTOCOL);
    carried.is_none_or(|(_, value)| value == [protocol])
}

/// A route of a table of ours: put with a protocol, or deleted.
fn put_route(w: &mut Writer, route: &Route, protocol: Option<u8>) {
    let mut h = [0; HEADER];
    h[0] = super::rt::family(route.net.addr());
    h[1] = route.net.prefix_len();
    h[5] = protocol.unwrap_or(0);
    h[6] = if protocol.is_some() { 0 } else { libc::RT_SCOPE_NOWHERE };
    h[7] = route.kind;
    let add = protocol.is_some();
    w.begin(if add { libc::RTM_NEWROUTE } else { libc::RTM_DELROUTE }, if add { REPLACE } else { PLAIN }, &h);
    w.attr_ip(libc::RTA_DST, route.net.network());
    w.attr_u32(libc::RTA_TABLE, route.table);
}

#[cfg(test)]
mod tests;
