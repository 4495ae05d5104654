// SPDX-License-Identifier: Apache-2.0
//! The fence in the kernel: policy rules and routing tables of the agent. For packets that this host forwards, the kernel asks them
//! before the main table. docs/adr/005-fail-closed-after-dnat.md says why the fence is made like this.
//!
//! There are two rules and one route for each fenced prefix:
//!
//! ```text
//! PREF    from all to PREFIX lookup main suppress_prefixlength LENGTH-1
//! PREF+1  not from all iif lo lookup TABLE
//! table TABLE:  unreachable PREFIX  (or blackhole PREFIX)
//! ```
//!
//! With the first rule, a packet takes its route in the main table if that route is at least as long as the prefix. The second rule
//! catches all other packets, except those of the host itself (`iif lo`). An exception is a `throw` route in TABLE, with which the
//! kernel goes on to the main table.

mod messages;

use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::diff::Op;
use weft_backends::owner::{ALIAS, FENCE_TABLES};
use weft_backends::state::{Fence, Key, ObservedValue, Value};
use weft_subnet::cidr::Family;

use self::messages::{MAIN, Route, Rule, SUPPRESS_NOTHING};
use super::encode::dump;
use super::socket::{NLM_F_ACK, Netlink, Refusal, empty_if_absent};
use super::wire::{Message, Writer, messages as all};
use super::{Outcome, decode, errno};

/// The lowest preference of a fence. All preferences are below that of the main table (32766), and there are enough for 640 agents
/// on one host.
const FIRST_PREF: u32 = 30_200;
const AGENTS: u64 = 640;
/// Number of pairs of tables, of which each agent has one.
const PAIRS: u32 = (FENCE_TABLES.end - FENCE_TABLES.start) / 2;

/// The preferences and tables of one agent. Another agent of the host has others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    pref: u32,
    table: u32,
}

/// A prefix that a fence encloses. Each has two preferences and one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Zone {
    /// The subnet of this node. Its rules come first, since it is a part of Network.
    Own,
    Network,
}

impl Numbers {
    /// Returns the numbers of the agent whose links have this alias (`weft FILE`). With flannel's usual file these are the lowest.
    pub fn of_alias(alias: &str) -> Numbers {
        let file = Path::new(alias.strip_prefix(ALIAS).unwrap_or(alias));
        let hash = crate::instance::hash(file);
        let usual = file == Path::new(weft_subnet::env::USUAL_FILE);
        let number = |below: u64, hash: u64| if usual { 0 } else { 1 + u32::try_from(hash % (below - 1)).unwrap_or(0) };
        Numbers {
            pref: FIRST_PREF + 4 * number(AGENTS, hash),
            table: FENCE_TABLES.start + 2 * number(PAIRS.into(), hash.rotate_left(32)),
        }
    }

    /// Returns true if a notification is about a rule with a preference of this agent.
    pub fn has_rule(&self, m: &Message<'_>) -> bool {
        matches!(m.kind, libc::RTM_NEWRULE | libc::RTM_DELRULE)
            && messages::read_rule(m.payload).is_some_and(|(rule, _)| self.has_pref(rule.pref))
    }

    fn has_pref(&self, pref: u32) -> bool {
        (self.pref..self.pref + 4).contains(&pref)
    }

    /// Returns true if a table belongs to this agent.
    pub fn has_table(&self, table: u32) -> bool {
        (self.table..self.table + 2).contains(&table)
    }

    fn table(&self, zone: Zone) -> u32 {
        match zone {
            Zone::Own => self.table + 1,
            Zone::Network => self.table,
        }
    }

    /// Returns the two rules that enclose a prefix.
    fn rules(&self, zone: Zone, net: IpNet) -> [Rule; 2] {
        let pref = match zone {
            Zone::Own => self.pref,
            Zone::Network => self.pref + 2,
        };
        let (table, suppress) = (self.table(zone), u32::from(net.prefix_len().saturating_sub(1)));
        [
            Rule { pref, to: Some(net), not_own: false, table: MAIN, suppress, other: false },
            Rule { pref: pref + 1, to: None, not_own: true, table, suppress: SUPPRESS_NOTHING, other: false },
        ]
    }
}

/// The rules and routes of one family that are in the kernel.
#[derive(Debug, Default)]
struct Present {
    /// The rules, with the message of the kernel about each. The kernel deletes a rule by this message.
    rules: Vec<(Rule, Vec<u8>)>,
    routes: Vec<Route>,
    /// The exceptions.
    open: Vec<IpAddr>,
}

/// The fence of one agent.
#[derive(Debug)]
pub struct FenceTable {
    numbers: Numbers,
    protocol: u8,
}

impl FenceTable {
    /// Returns the fence of the agent whose links have this alias. Its rules and routes carry this protocol number.
    pub fn new(alias: &str, protocol: u8) -> FenceTable {
        FenceTable { numbers: Numbers::of_alias(alias), protocol }
    }

    /// Returns the fence and its exceptions as they are in the kernel. A kernel without policy routing has none.
    ///
    /// # Errors
    /// A dump failed. Its entries then do not count as missing.
    pub fn observe(&self, netlink: &mut Netlink) -> io::Result<Vec<(Key, ObservedValue)>> {
        let mut found = Vec::new();
        for family in Family::BOTH {
            let present = self.present(netlink, family)?;
            found.extend(present.open.iter().map(|ip| (Key::Open(*ip), Value::Open.into())));
            if !present.rules.is_empty() || !present.routes.is_empty() {
                found.push((Key::Fence(family), Value::fence(self.value(&present)).into()));
            }
        }
        Ok(found)
    }

    /// Reads the rules and routes of one family.
    fn present(&self, netlink: &mut Netlink, family: Family) -> io::Result<Present> {
        let number = family.number();
        let mut present = Present::default();
        // A kernel may lack the family, or policy routing.
        let data = empty_if_absent(
            netlink.dump(libc::RTM_GETRULE, |w, kind, flags| messages::dump_rules(w, kind, flags, family)),
        )?;
        for m in all(&data).filter(|m| m.kind == libc::RTM_NEWRULE && m.payload.first() == Some(&number)) {
            // Another program may use the same preference, and its rule must stay. Before Linux 4.17, rules have no protocol.
            let ours = |(rule, protocol): &(Rule, Option<u8>)| {
                self.numbers.has_pref(rule.pref) && protocol.is_none_or(|of| of == self.protocol)
            };
            present
                .rules
                .extend(messages::read_rule(m.payload).filter(ours).map(|(rule, _)| (rule, m.payload.to_vec())));
        }
        for zone in [Zone::Own, Zone::Network] {
            let table = self.numbers.table(zone);
            let dump = netlink.dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes_of_table(w, flags, number, table));
            let data = empty_if_absent(dump)?;
            // A kernel without IPv6 (ipv6.disable=1) answers a question for its routes with those of all other families.
            let routes = all(&data).filter(|m| m.kind == libc::RTM_NEWROUTE && m.payload.first() == Some(&number));
            for (_, route) in routes.filter_map(|m| decode::route_of_any_table(m.payload)).filter(|(t, _)| *t == table)
            {
                let host = route.net.prefix_len() == route.net.max_prefix_len();
                if route.kind == libc::RTN_THROW && host && zone == Zone::Network {
                    present.open.push(route.net.addr());
                } else {
                    present.routes.push(Route { table, net: route.net, kind: route.kind });
                }
            }
        }
        Ok(present)
    }

    /// Returns the fence that these rules and routes form.
    fn value(&self, present: &Present) -> Fence {
        let route = |zone| {
            let found = |route: &&Route| route.table == self.numbers.table(zone) && route.kind == kind(zone);
            present.routes.iter().find(found).map(|route| route.net)
        };
        let mut fence = Fence { unreachable: route(Zone::Network), blackhole: route(Zone::Own), whole: true };
        let (rules, routes) = self.wanted(&fence);
        let same_rules =
            rules.len() == present.rules.len() && present.rules.iter().all(|(rule, _)| rules.contains(rule));
        fence.whole = same_rules && routes.len() == present.routes.len();
        fence
    }

    /// Returns the rules and routes that form this fence.
    fn wanted(&self, fence: &Fence) -> (Vec<Rule>, Vec<Route>) {
        let zones = [(Zone::Own, fence.blackhole), (Zone::Network, fence.unreachable)];
        let zones = zones.into_iter().filter_map(|(zone, net)| Some((zone, net?)));
        let route = |(zone, net)| Route { table: self.numbers.table(zone), net, kind: kind(zone) };
        (zones.clone().flat_map(|(zone, net)| self.numbers.rules(zone, net)).collect(), zones.map(route).collect())
    }

    /// Begins the message that adds or removes an exception.
    pub fn open(&self, w: &mut Writer, ip: IpAddr, add: bool) {
        let (net, table) = (IpNet::from(ip), self.numbers.table(Zone::Network));
        messages::put_route(w, &Route { table, net, kind: libc::RTN_THROW }, add.then_some(self.protocol));
    }

    /// Carries out an operation on the fence.
    pub fn apply(&self, netlink: &mut Netlink, op: &Op) -> Outcome {
        let (Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value)) = op;
        let (Key::Fence(family), Value::Fence(fence)) = (key, value) else {
            return errno::fatal(op, "the value does not fit the key");
        };
        let wanted = if matches!(op, Op::Remove(..)) { Fence::default() } else { **fence };
        match self.write(netlink, *family, &wanted) {
            Ok(Ok(())) => Outcome::Done,
            Ok(Err(refusal)) => errno::outcome(op, &refusal),
            Err(error) => errno::retry(op, &error.to_string()),
        }
    }

    fn write(&self, netlink: &mut Netlink, family: Family, wanted: &Fence) -> io::Result<Result<(), Refusal>> {
        let present = self.present(netlink, family)?;
        in_order(self.steps(&present, wanted), |steps| self.send(netlink, family, steps))
    }

    /// Returns what to add, and then what to remove. In this order one of the two fences is complete at every moment, and no packet
    /// that has a route is lost: the first rule lets packets with a route pass before the others can catch them, so it is added
    /// before the route and removed after it. The rule that asks the table is added last and removed first.
    fn steps<'a>(&self, present: &'a Present, wanted: &Fence) -> [Vec<Step<'a>>; 2] {
        let (rules, routes) = self.wanted(wanted);
        let missing = rules.iter().filter(|rule| !present.rules.iter().any(|(other, _)| other == *rule));
        let missing = missing.map(|rule| Step::AddRule(*rule));
        let mut add: Vec<Step<'_>> = missing.collect();
        add.extend(routes.iter().filter(|route| !present.routes.contains(route)).map(|route| Step::AddRoute(*route)));
        let surplus = present.rules.iter().filter(|(rule, _)| !rules.contains(rule));
        let mut remove: Vec<Step<'_>> = surplus.map(|(rule, message)| Step::RemoveRule(*rule, message)).collect();
        let routes = present.routes.iter().filter(|route| !routes.contains(route));
        remove.extend(routes.map(|route| Step::RemoveRoute(*route)));
        add.sort_by_key(Step::position);
        remove.sort_by_key(|step| std::cmp::Reverse(step.position()));
        [add, remove]
    }

    /// Sends these steps in one datagram. To remove what is already gone is no error.
    fn send(&self, netlink: &mut Netlink, family: Family, steps: &[Step<'_>]) -> io::Result<Result<(), Refusal>> {
        let (mut w, mut last, mut removals) = (Writer::default(), 0, Vec::new());
        for step in steps {
            match step {
                Step::AddRule(rule) => messages::add_rule(&mut w, rule, family, self.protocol),
                Step::AddRoute(route) => messages::put_route(&mut w, route, Some(self.protocol)),
                Step::RemoveRule(_, message) => messages::delete_rule(&mut w, message),
                Step::RemoveRoute(route) => messages::put_route(&mut w, route, None),
            }
            last = netlink.next_seq();
            w.end(last);
            if matches!(step, Step::RemoveRule(..) | Step::RemoveRoute(_)) {
                removals.push(last);
            }
        }
        w.flag_last(NLM_F_ACK);
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
    /// With the message of the kernel about it.
    RemoveRule(Rule, &'a [u8]),
    RemoveRoute(Route),
}

impl Step<'_> {
    /// Returns the position in the order of additions: the first rule, the route, the rule that asks the table.
    fn position(&self) -> u8 {
        match self {
            Step::AddRule(rule) | Step::RemoveRule(rule, _) if rule.table == MAIN => 0,
            Step::AddRoute(_) | Step::RemoveRoute(_) => 1,
            Step::AddRule(_) | Step::RemoveRule(..) => 2,
        }
    }
}

/// Sends the additions. Sends the removals only if no addition was refused, so that the old fence stays until the new one is there.
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

#[cfg(test)]
mod tests;
