// SPDX-License-Identifier: Apache-2.0
//! A table of nftables as a value that is written and read back as a whole.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use nix::errno::Errno;
use weft_backends::masq::{FamilyRules, Rule, Test};
use weft_subnet::cidr::Family;

use super::expr::{self, DATA_VALUE, Expr, NODES, be32_of};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{self, Writer, attrs, attrs_after, messages, text};

pub(super) const SUBSYS: u16 = 10 << 8;
pub(super) const NEWTABLE: u16 = SUBSYS;
pub(super) const GETTABLE: u16 = SUBSYS | 1;
pub(super) const NEWCHAIN: u16 = SUBSYS | 3;
const GETCHAIN: u16 = SUBSYS | 4;
pub(super) const NEWRULE: u16 = SUBSYS | 6;
const GETRULE: u16 = SUBSYS | 7;
pub(super) const NEWSETELEM: u16 = SUBSYS | 12;
const GETSETELEM: u16 = SUBSYS | 13;
pub(super) const DELSETELEM: u16 = SUBSYS | 14;
pub(super) const NEWSET: u16 = SUBSYS | 9;

pub(super) const REQUEST: u16 = 0x1;

/// Length of `struct nfgenmsg`.
pub(super) const NFGEN: usize = 4;

/// The attribute that names the table, the same in every kind of message.
pub const TABLE_NAME: u16 = 1;

/// A table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// `ip` or `ip6`.
    pub family: Family,
    /// Its name.
    pub name: String,
    /// Its chains.
    pub chains: Vec<Chain>,
    /// Its sets of addresses.
    pub sets: Vec<Set>,
}

/// A base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Its name.
    pub name: &'static str,
    /// Its type, hook and priority.
    pub position: Position,
    /// Its rules, in order.
    pub rules: Vec<Vec<Expr>>,
}

/// Type, hook and priority of a base chain. The policy is accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub(super) kind: &'static str,
    pub(super) hook: u32,
    pub(super) priority: i32,
}

/// After routing, where source addresses are translated.
pub const SOURCE_NAT: Position = Position { kind: "nat", hook: 4, priority: 100 };
/// Forwarded packets.
pub const FORWARD: Position = Position { kind: "filter", hook: 2, priority: 0 };
/// Packets to this host, before the rules of other programs.
pub const INPUT: Position = Position { kind: "filter", hook: 1, priority: -300 };

/// A set of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: &'static str,
    /// Its elements; `None`: they are written one by one elsewhere, and are not compared.
    pub elements: Option<BTreeSet<IpAddr>>,
}

impl Table {
    /// Returns the table that carries the rules of one family.
    pub fn of(rules: &FamilyRules, name: &str) -> Table {
        let chain = |name, position, rules: &[Rule]| {
            let rules: Vec<Vec<Expr>> = rules.iter().map(expr::of).collect();
            (!rules.is_empty()).then_some(Chain { name, position, rules })
        };
        let chains = [chain("postrouting", SOURCE_NAT, &rules.masquerade), chain("forward", FORWARD, &rules.forward)];
        let mut nodes = BTreeSet::new();
        for test in rules.masquerade.iter().flat_map(|rule| &rule.tests) {
            if let Test::ToOneOf(addresses) = test {
                nodes.extend(addresses.iter().copied());
            }
        }
        let sets = if nodes.is_empty() { Vec::new() } else { vec![Set { name: NODES, elements: Some(nodes) }] };
        let chains = chains.into_iter().flatten().collect();
        Table { family: rules.family, name: name.to_owned(), chains, sets }
    }
}

/// Reads the table with this name, and the chains and sets that `shape` names. `None`: there is no such table, or it has another
/// number of chains and sets.
///
/// # Errors
/// A part of the table could not be read.
pub fn read(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Table>> {
    match read_present(netlink, shape) {
        // The table was removed while it was read.
        Err(e) if e.raw_os_error() == Some(Errno::ENOENT as i32) => Ok(None),
        answer => answer,
    }
}

fn read_present(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Table>> {
    let Table { family, name, chains, sets } = shape;
    let Some((flags, objects)) = head(netlink, *family, name)? else { return Ok(None) };
    // A table with a flag is dormant: none of its rules is in force.
    if flags != 0 || objects != chains.len() + sets.len() {
        return Ok(None);
    }
    let mut found = Table { family: *family, name: name.clone(), chains: Vec::new(), sets: Vec::new() };
    for chain in chains {
        let Some(in_position) = is_in_position(netlink, shape, chain)? else { return Ok(None) };
        if !in_position {
            return Ok(None);
        }
        let rules = rules_of(netlink, number(*family), name, chain.name)?;
        let rules = rules.into_iter().map(|rule| rule.exprs).collect();
        found.chains.push(Chain { name: chain.name, position: chain.position, rules });
    }
    for set in sets {
        let elements = match set.elements {
            Some(_) => Some(elements(netlink, *family, name, set.name)?),
            None => None,
        };
        found.sets.push(Set { name: set.name, elements });
    }
    Ok(Some(found))
}

/// Returns the flags of a table, and the number of its chains and sets. `None`: there is no such table.
///
/// # Errors
/// The kernel has no nftables, or did not answer.
pub fn head(netlink: &mut Netlink, family: Family, name: &str) -> io::Result<Option<(u32, usize)>> {
    let Some(data) = get(netlink, GETTABLE, family, |w| w.attr_str(TABLE_NAME, name))? else { return Ok(None) };
    let Some(m) = messages(&data).find(|m| m.kind == NEWTABLE) else { return Ok(None) };
    let (mut flags, mut objects) = (0, 0);
    for (kind, value) in attrs_after(m.payload, NFGEN) {
        match kind {
            2 => flags = be32_of(value),
            3 => objects = be32_of(value) as usize,
            _ => {}
        }
    }
    Ok(Some((flags, objects)))
}

/// Returns the rules of the first chain that `shape` names. `None`: there is no such chain, or it has another type, hook, priority or
/// policy.
///
/// # Errors
/// The chain could not be read.
pub fn chain(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Vec<Vec<Expr>>>> {
    let Some(chain) = shape.chains.first() else { return Ok(None) };
    if is_in_position(netlink, shape, chain)? != Some(true) {
        return Ok(None);
    }
    let rules = rules_of(netlink, number(shape.family), &shape.name, chain.name)?;
    Ok(Some(rules.into_iter().map(|rule| rule.exprs).collect()))
}

/// Whether a chain has its type, hook, priority and policy. `None`: there is no such chain.
fn is_in_position(netlink: &mut Netlink, table: &Table, chain: &Chain) -> io::Result<Option<bool>> {
    let data = get(netlink, GETCHAIN, table.family, |w| {
        w.attr_str(TABLE_NAME, &table.name);
        w.attr_str(3, chain.name);
    })?;
    let Some(data) = data else { return Ok(None) };
    let Some(m) = messages(&data).find(|m| m.kind == NEWCHAIN) else { return Ok(None) };
    let (mut kind, mut policy, mut hook, mut priority) = ("", None, None, 0);
    for (attr, value) in attrs_after(m.payload, NFGEN) {
        match attr {
            4 => {
                for (attr, value) in attrs(value) {
                    match attr {
                        1 => hook = Some(be32_of(value)),
                        2 => priority = be32_of(value).cast_signed(),
                        _ => {}
                    }
                }
            }
            5 => policy = Some(be32_of(value)),
            7 => kind = text(value),
            _ => {}
        }
    }
    let wanted = chain.position;
    Ok(Some((kind, policy, hook, priority) == (wanted.kind, Some(1), Some(wanted.hook), wanted.priority)))
}

/// A rule that was read from the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadRule {
    /// What it does.
    pub exprs: Vec<Expr>,
    /// Its comment; empty when it has none.
    pub comment: String,
    /// The number by which the kernel knows it in its table.
    pub handle: u64,
}

/// Returns the rules of a chain; `number`: the family as [`number`] gives it. The request names table and chain, so the rules of other
/// chains cost nothing.
///
/// # Errors
/// There is no such chain (ENOENT), or it could not be read.
pub fn rules_of(netlink: &mut Netlink, number: u8, table: &str, chain: &str) -> io::Result<Vec<ReadRule>> {
    let data = netlink.dump(GETRULE, |w, kind, flags| {
        w.begin(kind, flags, &[number, 0, 0, 0]);
        w.attr_str(TABLE_NAME, table);
        w.attr_str(2, chain);
    })?;
    let rule = |m: wire::Message<'_>| {
        let mut rule = ReadRule { exprs: Vec::new(), comment: String::new(), handle: 0 };
        for (kind, value) in attrs_after(m.payload, NFGEN) {
            match kind {
                3 => rule.handle = handle_of(value),
                4 => rule.exprs = Expr::list(value),
                7 => rule.comment = comment_of(value),
                _ => {}
            }
        }
        rule
    };
    Ok(messages(&data).filter(|m| m.kind == NEWRULE).map(rule).collect())
}

/// A base chain of forwarded packets.
#[derive(Debug)]
pub struct ForwardChain {
    /// `ip`, `ip6` or `inet`.
    pub family: &'static str,
    /// The family as the kernel numbers it.
    pub number: u8,
    /// The name of its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Its policy is drop.
    pub drops: bool,
}

/// All base chains of forwarded packets. The kernel visits every chain of the namespace for this.
///
/// # Errors
/// The chains could not be listed.
pub fn forward_chains(netlink: &mut Netlink) -> io::Result<Vec<ForwardChain>> {
    let data = netlink.dump(GETCHAIN, |w, kind, flags| w.begin(kind, flags, &[0; NFGEN]))?;
    let chain = |m: wire::Message<'_>| {
        let number = *m.payload.first()?;
        let family = match number {
            1 => "inet",
            2 => "ip",
            10 => "ip6",
            _ => return None,
        };
        let get = |kind: u16| attrs_after(m.payload, NFGEN).find(|(k, _)| *k == kind).map(|(_, value)| value);
        let (_, hook) = attrs(get(4)?).find(|(kind, _)| *kind == 1)?;
        let (table, name) = (text(get(TABLE_NAME)?).to_owned(), text(get(3)?).to_owned());
        let drops = get(5).is_some_and(|policy| be32_of(policy) == 0);
        (be32_of(hook) == FORWARD.hook).then_some(ForwardChain { family, number, table, name, drops })
    };
    Ok(messages(&data).filter(|m| m.kind == NEWCHAIN).filter_map(chain).collect())
}

/// Whether there is such a chain, and its policy is drop.
///
/// # Errors
/// The chain could not be read.
pub fn drops(netlink: &mut Netlink, family: Family, table: &str, chain: &str) -> io::Result<bool> {
    let data = get(netlink, GETCHAIN, family, |w| {
        w.attr_str(TABLE_NAME, table);
        w.attr_str(3, chain);
    })?;
    let policy =
        |m: wire::Message<'_>| attrs_after(m.payload, NFGEN).any(|(kind, value)| kind == 5 && be32_of(value) == 0);
    Ok(data.is_some_and(|data| messages(&data).filter(|m| m.kind == NEWCHAIN).any(policy)))
}

/// Whether there is such a chain.
///
/// # Errors
/// The chain could not be read.
pub fn has_chain(netlink: &mut Netlink, family: Family, table: &str, chain: &str) -> io::Result<bool> {
    let data = get(netlink, GETCHAIN, family, |w| {
        w.attr_str(TABLE_NAME, table);
        w.attr_str(3, chain);
    })?;
    Ok(data.is_some())
}

/// Returns the elements of a set of addresses.
///
/// # Errors
/// There is no such set (ENOENT), or it could not be read.
pub fn elements(netlink: &mut Netlink, family: Family, table: &str, set: &str) -> io::Result<BTreeSet<IpAddr>> {
    let data = netlink.dump(GETSETELEM, |w, kind, flags| {
        w.begin(kind, flags, &nfgen(family));
        w.attr_str(TABLE_NAME, table);
        w.attr_str(2, set);
    })?;
    let elements = messages(&data).filter(|m| m.kind == NEWSETELEM);
    Ok(elements.flat_map(|m| element_addresses(m.payload)).collect())
}

/// Returns the addresses in a message about elements.
pub fn element_addresses(payload: &[u8]) -> Vec<IpAddr> {
    let lists = attrs_after(payload, NFGEN).filter(|(kind, _)| *kind == 3);
    let inner = |bytes, wanted: u16| attrs(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    lists.flat_map(|(_, list)| attrs(list)).filter_map(|(_, e)| wire::ip(inner(inner(e, 1)?, DATA_VALUE)?)).collect()
}

/// Returns the elements of this set that a notification is about: true when they were added, false when they were removed. `None`: the
/// notification is about something else.
pub fn notified_elements(message: &wire::Message<'_>, set: &str) -> Option<(bool, Vec<IpAddr>)> {
    let added = match message.kind {
        NEWSETELEM => true,
        DELSETELEM => false,
        _ => return None,
    };
    let named = attrs_after(message.payload, NFGEN).any(|(kind, value)| kind == 2 && text(value) == set);
    named.then(|| (added, element_addresses(message.payload)))
}

/// Returns true for a notification that a set was added. Newer kernels send it also when the set was there already.
pub fn is_new_set(message: &wire::Message<'_>) -> bool {
    message.kind == NEWSET
}

/// Asks for one object. `None`: there is none.
fn get(
    netlink: &mut Netlink,
    kind: u16,
    family: Family,
    body: impl FnOnce(&mut Writer),
) -> io::Result<Option<Vec<u8>>> {
    let answer = netlink.request(|w| {
        w.begin(kind, REQUEST, &nfgen(family));
        body(w);
    })?;
    match answer {
        Ok(data) => Ok(Some(data)),
        Err(refusal) if refusal.errno == Errno::ENOENT => Ok(None),
        Err(refusal) => Err(refusal.errno.into()),
    }
}

/// `struct nfgenmsg` of a family.
pub(super) fn nfgen(family: Family) -> [u8; NFGEN] {
    [number(family), 0, 0, 0]
}

/// Returns a family as the kernel numbers it.
pub fn number(family: Family) -> u8 {
    if family == Family::V4 { 2 } else { 10 }
}

/// Returns the handle of a rule, as the kernel writes it.
fn handle_of(value: &[u8]) -> u64 {
    match value.first_chunk::<8>() {
        Some(bytes) => u64::from_be_bytes(*bytes),
        None => u64::from(be32_of(value)),
    }
}

/// Returns the comment in the user data of a rule: entries of type, length and value.
fn comment_of(mut data: &[u8]) -> String {
    while let [kind, len, rest @ ..] = data {
        let Some((value, next)) = rest.split_at_checked(usize::from(*len)) else { break };
        if *kind == 0 {
            return text(value).to_owned();
        }
        data = next;
    }
    String::new()
}
