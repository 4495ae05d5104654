// SPDX-License-Identifier: Apache-2.0
//! A table of nftables as a value that is written and read back as a whole.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use nix::errno::Errno;
use weft_backends::traffic_rules::{FamilyRules, Rule, Test};
use weft_subnet::cidr::Family;

use super::expr::{self, Expr, NODES};
use weft_netlink::nftables::attributes::{
    CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TYPE, ELEMENT_KEY, ELEMENTS_LIST, ELEMENTS_SET, HOOK_NUMBER,
    HOOK_PRIORITY, POLICY_ACCEPT, POLICY_DROP, RULE_CHAIN, RULE_EXPRESSIONS, RULE_HANDLE, RULE_USERDATA, TABLE_FLAGS,
    TABLE_USE,
};
use weft_netlink::nftables::{
    DATA_VALUE, DELSETELEM, GETCHAIN, GETRULE, GETSETELEM, GETTABLE, Hook, NEWCHAIN, NEWRULE, NEWSET, NEWSETELEM,
    NEWTABLE, NFGENMSG, TABLE_NAME, be32_of, handle_of,
};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{self, Writer, attr, attr_after, attrs, attrs_after, messages, text};

pub(super) const REQUEST: u16 = 0x1;

/// How often the elements of a set are read while the kernel moves them. A list that is long enough for that takes milliseconds to read.
const TRIES: usize = 8;

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
    pub(super) hook: Hook,
    pub(super) priority: i32,
}

/// After routing, where source addresses are translated.
pub const SOURCE_NAT: Position = Position { kind: "nat", hook: Hook::Postrouting, priority: 100 };
/// Forwarded packets.
pub const FORWARD: Position = Position { kind: "filter", hook: Hook::Forward, priority: 0 };
/// Packets to this host, before the rules of other programs.
pub const INPUT: Position = Position { kind: "filter", hook: Hook::Input, priority: -300 };

/// A set of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Set {
    /// Its name.
    pub name: &'static str,
    /// Its elements. `None` if they are written one by one elsewhere, and are not compared.
    pub elements: Option<BTreeSet<IpAddr>>,
}

impl Table {
    /// Returns the table with the rules of one family.
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

/// Reads the table with this name, and the chains and sets that `shape` names. Returns `None` if there is no such table, or if it has another
/// number of chains and sets.
///
/// # Errors
/// A part of the table could not be read.
pub fn read(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Table>> {
    match read_present(netlink, shape) {
        // The table was removed while it was read.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        answer => answer,
    }
}

fn read_present(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Table>> {
    let Table { family, name, chains, sets } = shape;
    let Some(Head { flags, objects }) = head(netlink, *family, name)? else { return Ok(None) };
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
        let rules = rules_of(netlink, family.number(), name, chain.name)?;
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

/// What the kernel says about a table without its content.
pub struct Head {
    /// Its flags.
    pub flags: u32,
    /// The number of its chains and sets.
    pub objects: usize,
}

/// Reads the head of a table. Returns `None` if there is no such table.
///
/// # Errors
/// The kernel has no nftables, or did not answer.
pub fn head(netlink: &mut Netlink, family: Family, name: &str) -> io::Result<Option<Head>> {
    let Some(data) = get(netlink, GETTABLE, family, |w| w.attr_str(TABLE_NAME, name))? else { return Ok(None) };
    let Some(m) = messages(&data).find(|m| m.kind == NEWTABLE) else { return Ok(None) };
    let number = |kind: u16| attr_after(m.payload, NFGENMSG, kind).map_or(0, be32_of);
    Ok(Some(Head { flags: number(TABLE_FLAGS), objects: number(TABLE_USE) as usize }))
}

/// Returns the rules of the first chain that `shape` names, or `None` if there is no such chain, or if it has another type, hook, priority or
/// policy.
///
/// # Errors
/// The chain could not be read.
pub fn chain(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Vec<Vec<Expr>>>> {
    let Some(chain) = shape.chains.first() else { return Ok(None) };
    if is_in_position(netlink, shape, chain)? != Some(true) {
        return Ok(None);
    }
    let rules = rules_of(netlink, shape.family.number(), &shape.name, chain.name)?;
    Ok(Some(rules.into_iter().map(|rule| rule.exprs).collect()))
}

/// Returns true if a chain has its type, hook, priority and policy, and `None` if there is no such chain.
fn is_in_position(netlink: &mut Netlink, table: &Table, chain: &Chain) -> io::Result<Option<bool>> {
    let data = get_chain(netlink, table.family, &table.name, chain.name)?;
    let Some(data) = data else { return Ok(None) };
    let Some(m) = messages(&data).find(|m| m.kind == NEWCHAIN) else { return Ok(None) };
    let get = |kind: u16| attr_after(m.payload, NFGENMSG, kind);
    let position = get(CHAIN_HOOK).unwrap_or_default();
    let (hook, priority) =
        (attr(position, HOOK_NUMBER).map(be32_of), attr(position, HOOK_PRIORITY).map_or(0, be32_of).cast_signed());
    let (policy, kind) = (get(CHAIN_POLICY).map(be32_of), get(CHAIN_TYPE).map_or("", text));
    let wanted = chain.position;
    Ok(Some(
        (kind, policy, hook, priority) == (wanted.kind, Some(POLICY_ACCEPT), Some(wanted.hook as u32), wanted.priority),
    ))
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

/// Returns the rules of a chain. `number` is that of the family ([`Family::number`]). The request names table and chain, so the rules of
/// other chains cost nothing.
///
/// # Errors
/// There is no such chain (ENOENT), or it could not be read.
pub fn rules_of(netlink: &mut Netlink, number: u8, table: &str, chain: &str) -> io::Result<Vec<ReadRule>> {
    let data = netlink.dump(GETRULE, |w, kind, flags| {
        w.begin(kind, flags, &[number, 0, 0, 0]);
        w.attr_str(TABLE_NAME, table);
        w.attr_str(RULE_CHAIN, chain);
    })?;
    let rule = |m: wire::Message<'_>| {
        let mut rule = ReadRule { exprs: Vec::new(), comment: String::new(), handle: 0 };
        for (kind, value) in attrs_after(m.payload, NFGENMSG) {
            match kind {
                RULE_HANDLE => rule.handle = handle_of(value),
                RULE_EXPRESSIONS => rule.exprs = Expr::list(value),
                RULE_USERDATA => rule.comment = comment_of(value),
                _ => {}
            }
        }
        rule
    };
    Ok(messages(&data).filter(|m| m.kind == NEWRULE).map(rule).collect())
}

/// Returns true if there is such a chain, and its policy is drop.
///
/// # Errors
/// The chain could not be read.
pub fn drops(netlink: &mut Netlink, family: Family, table: &str, chain: &str) -> io::Result<bool> {
    let data = get_chain(netlink, family, table, chain)?;
    let policy = |m: wire::Message<'_>| {
        attr_after(m.payload, NFGENMSG, CHAIN_POLICY).is_some_and(|value| be32_of(value) == POLICY_DROP)
    };
    Ok(data.is_some_and(|data| messages(&data).filter(|m| m.kind == NEWCHAIN).any(policy)))
}

/// Returns true if there is such a chain.
///
/// # Errors
/// The chain could not be read.
pub fn has_chain(netlink: &mut Netlink, family: Family, table: &str, chain: &str) -> io::Result<bool> {
    Ok(get_chain(netlink, family, table, chain)?.is_some())
}

/// Returns the elements of a set of addresses.
///
/// # Errors
/// There is no such set (ENOENT), or it could not be read.
pub fn elements(netlink: &mut Netlink, family: Family, table: &str, set: &str) -> io::Result<BTreeSet<IpAddr>> {
    complete(|| {
        let data = netlink.dump(GETSETELEM, |w, kind, flags| {
            w.begin(kind, flags, &nfgen(family));
            w.attr_str(TABLE_NAME, table);
            w.attr_str(ELEMENTS_SET, set);
        })?;
        let elements = messages(&data).filter(|m| m.kind == NEWSETELEM);
        Ok(elements.flat_map(|m| element_addresses(m.payload)).collect())
    })
}

/// Reads the elements of a set until no element comes twice.
///
/// The kernel sends a long list in parts. Each part begins after as many elements of the hash table as were sent before (`nft_rhash_walk` in
/// net/netfilter/nft_set_hash.c). After many elements were added, the kernel makes the table larger. If it does so between two parts, the
/// elements have other places: some come twice, and as many others do not come. The set itself is unchanged, so the kernel does not mark the
/// list as interrupted (NLM_F_DUMP_INTR).
fn complete(mut read: impl FnMut() -> io::Result<Vec<IpAddr>>) -> io::Result<BTreeSet<IpAddr>> {
    let mut elements = BTreeSet::new();
    for _ in 0..TRIES {
        let list = read()?;
        let count = list.len();
        elements = list.into_iter().collect();
        if elements.len() == count {
            return Ok(elements);
        }
    }
    // Another program may have put a set of ranges in place of ours. There, the end of one range may always be the start of the next one.
    tracing::debug!(elements = elements.len(), tries = TRIES, "elements come twice in each list of a set");
    Ok(elements)
}

/// Returns the addresses in a message about elements.
pub fn element_addresses(payload: &[u8]) -> Vec<IpAddr> {
    let lists = attrs_after(payload, NFGENMSG).filter(|(kind, _)| *kind == ELEMENTS_LIST);
    lists
        .flat_map(|(_, list)| attrs(list))
        .filter_map(|(_, e)| wire::ip(attr(attr(e, ELEMENT_KEY)?, DATA_VALUE)?))
        .collect()
}

/// Returns the elements of this set that a notification is about: true when they were added, false when they were removed. Returns
/// `None` if the notification is about something else.
pub fn notified_elements(message: &wire::Message<'_>, set: &str) -> Option<(bool, Vec<IpAddr>)> {
    let added = match message.kind {
        NEWSETELEM => true,
        DELSETELEM => false,
        _ => return None,
    };
    let named = attr_after(message.payload, NFGENMSG, ELEMENTS_SET).is_some_and(|name| text(name) == set);
    named.then(|| (added, element_addresses(message.payload)))
}

/// Returns true for a notification that a set was added. Newer kernels send it also when the set was there already.
pub fn is_new_set(message: &wire::Message<'_>) -> bool {
    message.kind == NEWSET
}

/// Asks for one chain. Returns `None` if there is none.
fn get_chain(netlink: &mut Netlink, family: Family, table: &str, chain: &str) -> io::Result<Option<Vec<u8>>> {
    get(netlink, GETCHAIN, family, |w| {
        w.attr_str(TABLE_NAME, table);
        w.attr_str(CHAIN_NAME, chain);
    })
}

/// Asks for one object. Returns `None` if there is none.
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

/// Returns `struct nfgenmsg` of a family.
pub(super) fn nfgen(family: Family) -> [u8; NFGENMSG] {
    [family.number(), 0, 0, 0]
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

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(all: [u8; 3]) -> Vec<IpAddr> {
        all.map(|last| IpAddr::from([10, 0, 0, last])).into()
    }

    #[test]
    fn a_list_in_which_an_element_comes_twice_is_read_again() {
        let mut lists = [[1, 2, 2], [3, 3, 1], [1, 2, 3], [7, 8, 9]].map(addresses).into_iter();
        let read = complete(|| Ok(lists.next().unwrap())).unwrap();
        assert_eq!(read, BTreeSet::from_iter(addresses([1, 2, 3])));
        assert_eq!(lists.len(), 1, "a complete list is not read again");
    }

    #[test]
    fn a_set_in_which_an_element_always_comes_twice_is_read_nevertheless() {
        let mut count = 0;
        let read = complete(|| {
            count += 1;
            Ok(addresses([1, 2, 2]))
        });
        assert_eq!((count, read.unwrap().len()), (TRIES, 2));
    }
}
