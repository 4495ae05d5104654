// SPDX-License-Identifier: Apache-2.0
//! A table of nftables as a value: written whole, read back whole.

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

/// The table's name is attribute 1 of every kind of message.
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
    /// Where it stands.
    pub place: Place,
    /// Its rules, in order.
    pub rules: Vec<Vec<Expr>>,
}

/// Type, hook and priority of a base chain; the policy is accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub(super) kind: &'static str,
    pub(super) hook: u32,
    pub(super) priority: i32,
}

/// After routing, where sources are translated.
pub const SOURCE_NAT: Place = Place { kind: "nat", hook: 4, priority: 100 };
/// Forwarded packets.
pub const FORWARD: Place = Place { kind: "filter", hook: 2, priority: 0 };
/// Packets to this machine, before anyone else's rules for them.
pub const INPUT: Place = Place { kind: "filter", hook: 1, priority: -300 };

/// A set of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: &'static str,
    /// What is in it; `None`: looked after elsewhere, element by element.
    pub elements: Option<BTreeSet<IpAddr>>,
}

impl Table {
    /// The table that carries the rules of one family.
    pub fn of(rules: &FamilyRules, name: &str) -> Table {
        let chain = |name, place, rules: &[Rule]| {
            let rules: Vec<Vec<Expr>> = rules.iter().map(expr::of).collect();
            (!rules.is_empty()).then_some(Chain { name, place, rules })
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

/// Reads the table of this shape: the same name, chains and sets by name. `None`: not there, or of another shape.
pub fn read(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Table>> {
    match read_there(netlink, shape) {
        // Gone while it was read.
        Err(e) if e.raw_os_error() == Some(Errno::ENOENT as i32) => Ok(None),
        answer => answer,
    }
}

fn read_there(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Table>> {
    let Table { family, name, chains, sets } = shape;
    let Some((flags, objects)) = look(netlink, *family, name)? else { return Ok(None) };
    // Flags: a table that sleeps has none of its rules in force.
    if flags != 0 || objects != chains.len() + sets.len() {
        return Ok(None);
    }
    let mut found = Table { family: *family, name: name.clone(), chains: Vec::new(), sets: Vec::new() };
    for chain in chains {
        let Some(place) = place(netlink, shape, chain)? else { return Ok(None) };
        if !place {
            return Ok(None);
        }
        let rules = rules_of(netlink, number(*family), name, chain.name)?;
        let rules = rules.into_iter().map(|found| found.exprs).collect();
        found.chains.push(Chain { name: chain.name, place: chain.place, rules });
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

/// Flags of a table and the number of its chains and sets; `None`: there is no such table.
pub fn look(netlink: &mut Netlink, family: Family, name: &str) -> io::Result<Option<(u32, usize)>> {
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

/// The rules of the first chain of this shape; `None`: it does not stand where it should.
pub fn chain(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Vec<Vec<Expr>>>> {
    let Some(chain) = shape.chains.first() else { return Ok(None) };
    if place(netlink, shape, chain)? != Some(true) {
        return Ok(None);
    }
    let rules = rules_of(netlink, number(shape.family), &shape.name, chain.name)?;
    Ok(Some(rules.into_iter().map(|found| found.exprs).collect()))
}

/// Whether a chain stands where it should; `None`: there is no such chain.
fn place(netlink: &mut Netlink, table: &Table, chain: &Chain) -> io::Result<Option<bool>> {
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
    let wanted = chain.place;
    Ok(Some((kind, policy, hook, priority) == (wanted.kind, Some(1), Some(wanted.hook), wanted.priority)))
}

/// A rule that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What it says.
    pub exprs: Vec<Expr>,
    /// Its comment, perhaps empty.
    pub comment: String,
    /// The kernel's number of it.
    pub handle: u64,
}

/// The rules of a chain; `number` as [`number`] gives it. Asked for by table and chain, so foreign rules cost nothing.
pub fn rules_of(netlink: &mut Netlink, number: u8, table: &str, chain: &str) -> io::Result<Vec<Found>> {
    let data = netlink.dump(GETRULE, |w, kind, flags| {
        w.begin(kind, flags, &[number, 0, 0, 0]);
        w.attr_str(TABLE_NAME, table);
        w.attr_str(2, chain);
    })?;
    let found = |m: wire::Message<'_>| {
        let mut found = Found { exprs: Vec::new(), comment: String::new(), handle: 0 };
        for (kind, value) in attrs_after(m.payload, NFGEN) {
            match kind {
                3 => found.handle = super::foreign_chains::handle_of(value),
                4 => found.exprs = Expr::list(value),
                7 => found.comment = comment_of(value),
                _ => {}
            }
        }
        found
    };
    Ok(messages(&data).filter(|m| m.kind == NEWRULE).map(found).collect())
}

/// A base chain of forwarded packets.
#[derive(Debug)]
pub struct ForwardChain {
    /// `ip`, `ip6` or `inet`.
    pub family: &'static str,
    /// The family on the wire.
    pub number: u8,
    /// Its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Its policy is drop.
    pub drops: bool,
}

/// All base chains of forwarded packets. Costs the kernel a look at every chain there is.
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

/// Whether there is such a chain with the policy to drop.
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
pub fn has_chain(netlink: &mut Netlink, family: Family, table: &str, chain: &str) -> io::Result<bool> {
    let data = get(netlink, GETCHAIN, family, |w| {
        w.attr_str(TABLE_NAME, table);
        w.attr_str(3, chain);
    })?;
    Ok(data.is_some())
}

/// The elements of a set of addresses.
pub fn elements(netlink: &mut Netlink, family: Family, table: &str, set: &str) -> io::Result<BTreeSet<IpAddr>> {
    let data = netlink.dump(GETSETELEM, |w, kind, flags| {
        w.begin(kind, flags, &nfgen(family));
        w.attr_str(TABLE_NAME, table);
        w.attr_str(2, set);
    })?;
    let elements = messages(&data).filter(|m| m.kind == NEWSETELEM);
    Ok(elements.flat_map(|m| element_addresses(m.payload)).collect())
}

/// The addresses that a message about elements names.
pub fn element_addresses(payload: &[u8]) -> Vec<IpAddr> {
    let lists = attrs_after(payload, NFGEN).filter(|(kind, _)| *kind == 3);
    let inner = |bytes, wanted: u16| attrs(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    lists.flat_map(|(_, list)| attrs(list)).filter_map(|(_, e)| wire::ip(inner(inner(e, 1)?, DATA_VALUE)?)).collect()
}

/// A message that elements of this set are there (true) or gone (false) now; `None`: it says something else.
pub fn elements_told(message: &wire::Message<'_>, set: &str) -> Option<(bool, Vec<IpAddr>)> {
    let there = match message.kind {
        NEWSETELEM => true,
        DELSETELEM => false,
        _ => return None,
    };
    let named = attrs_after(message.payload, NFGEN).any(|(kind, value)| kind == 2 && text(value) == set);
    named.then(|| (there, element_addresses(message.payload)))
}

/// A message that a set is there, new or as before: newer kernels say so whenever one is asked for that is there.
pub fn adds_a_set(message: &wire::Message<'_>) -> bool {
    message.kind == NEWSET
}

/// One object; `None`: there is none.
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

/// A family on the wire.
pub fn number(family: Family) -> u8 {
    if family == Family::V4 { 2 } else { 10 }
}

/// The comment in a rule's data of user space: entries of type, length, value.
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
