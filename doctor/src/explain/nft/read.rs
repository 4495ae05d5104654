// SPDX-License-Identifier: Apache-2.0
//! Reads chains, rules and sets from the kernel by NETLINK_NETFILTER.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use weft_netlink::socket::Netlink;
use weft_netlink::wire::{Writer, attrs, attrs_after, messages, text};

use super::instruction::{self, Rule, number};
use super::set::{Data, Element, Set};
use super::walk::Table;

/// Kinds of messages (linux/netfilter/nf_tables.h).
const SUBSYSTEM: u16 = 10 << 8;
const NEWCHAIN: u16 = SUBSYSTEM | 3;
const GETCHAIN: u16 = SUBSYSTEM | 4;
const NEWRULE: u16 = SUBSYSTEM | 6;
const GETRULE: u16 = SUBSYSTEM | 7;
const NEWSET: u16 = SUBSYSTEM | 9;
const GETSET: u16 = SUBSYSTEM | 10;
const NEWSETELEM: u16 = SUBSYSTEM | 12;
const GETSETELEM: u16 = SUBSYSTEM | 13;
/// Length of `struct nfgenmsg`.
const NFGENMSG: usize = 4;
/// The attribute that names the table, the same in every kind of message.
const TABLE_NAME: u16 = 1;
/// Flags of a set and of an element.
const SET_INTERVAL: u32 = 1 << 2;
const ELEMENT_INTERVAL_END: u32 = 1;

/// A point in the kernel that packets pass (`enum nf_inet_hooks`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Before the routing decision.
    Prerouting = 0,
    /// Packets for this host.
    Input = 1,
    /// Forwarded packets.
    Forward = 2,
    /// Packets of this host.
    Output = 3,
    /// After the routing decision.
    Postrouting = 4,
}

/// A base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChain {
    /// `ip`, `ip6` or `inet`.
    pub family: &'static str,
    /// The family as the kernel numbers it.
    pub number: u8,
    /// The name of its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// It translates addresses, and sees only the first packet of a connection.
    pub is_nat: bool,
    /// Chains with a smaller number come first.
    pub priority: i32,
    /// Its policy is drop.
    pub drops: bool,
}

/// Returns the base chains of a hook, in the order in which packets pass them.
///
/// # Errors
/// The chains cannot be listed.
pub fn base_chains(netlink: &mut Netlink, hook: Hook) -> io::Result<Vec<BaseChain>> {
    let data = netlink.dump(GETCHAIN, |w, kind, flags| w.begin(kind, flags, &[0; NFGENMSG]))?;
    let chain = |payload: &[u8]| {
        let family_number = *payload.first()?;
        let family = match family_number {
            1 => "inet",
            2 => "ip",
            10 => "ip6",
            _ => return None,
        };
        let get = |kind: u16| attrs_after(payload, NFGENMSG).find(|(found, _)| *found == kind).map(|(_, value)| value);
        let position = get(4)?;
        let of_hook = |kind: u16| attrs(position).find(|(found, _)| *found == kind).map(|(_, value)| number(value));
        (of_hook(1)? == hook as u32).then(|| BaseChain {
            family,
            number: family_number,
            table: get(TABLE_NAME).map(text).unwrap_or_default().to_owned(),
            name: get(3).map(text).unwrap_or_default().to_owned(),
            is_nat: get(7).map(text) == Some("nat"),
            priority: of_hook(2).unwrap_or(0).cast_signed(),
            drops: get(5).is_some_and(|policy| number(policy) == 0),
        })
    };
    let chains = messages(&data).filter(|message| message.kind == NEWCHAIN);
    let mut chains: Vec<BaseChain> = chains.filter_map(|message| chain(message.payload)).collect();
    chains.sort_by_key(|chain| chain.priority);
    Ok(chains)
}

/// The chains and sets of one table. Each is read when the packet comes to it, and once.
pub struct KernelTable<'a> {
    netlink: &'a mut Netlink,
    family: u8,
    name: &'a str,
    rules: HashMap<String, Rc<Vec<Rule>>>,
    sets: HashMap<String, Rc<Set>>,
}

impl<'a> KernelTable<'a> {
    /// The table with this name, in a family as the kernel numbers it.
    pub fn new(netlink: &'a mut Netlink, family: u8, name: &'a str) -> KernelTable<'a> {
        KernelTable { netlink, family, name, rules: HashMap::new(), sets: HashMap::new() }
    }

    /// Lists what belongs to an object of the table. `attribute` names the object.
    fn dump(&mut self, kind: u16, (attribute, object): (u16, &str)) -> io::Result<Vec<u8>> {
        self.netlink.dump(kind, |w, kind, flags| {
            w.begin(kind, flags, &[self.family, 0, 0, 0]);
            w.attr_str(TABLE_NAME, self.name);
            w.attr_str(attribute, object);
        })
    }

    /// Returns whether the elements of a set are ranges, and the lengths of the fields of its key.
    fn shape(&mut self, set: &str) -> io::Result<(bool, Vec<usize>)> {
        let ask = |w: &mut Writer| {
            w.begin(GETSET, 0, &[self.family, 0, 0, 0]);
            w.attr_str(TABLE_NAME, self.name);
            w.attr_str(2, set);
        };
        let data = self.netlink.request(ask)?.map_err(|refusal| io::Error::from(refusal.errno))?;
        let Some(found) = messages(&data).find(|message| message.kind == NEWSET) else {
            return Ok((false, Vec::new()));
        };
        let get = |kind: u16| attrs_after(found.payload, NFGENMSG).find(|(k, _)| *k == kind).map(|(_, value)| value);
        let inner =
            |bytes: &'_ [u8], kind: u16| attrs(bytes).find(|(k, _)| *k == kind).map(|(_, value)| value.to_vec());
        let fields = get(9).and_then(|shape| inner(shape, 2)).unwrap_or_default();
        let len = |(_, field): (u16, &[u8])| inner(field, 1).map(|len| number(&len) as usize);
        Ok((get(3).is_some_and(|flags| number(flags) & SET_INTERVAL != 0), attrs(&fields).filter_map(len).collect()))
    }
}

impl Table for KernelTable<'_> {
    fn rules(&mut self, chain: &str) -> io::Result<Rc<Vec<Rule>>> {
        if let Some(rules) = self.rules.get(chain) {
            return Ok(Rc::clone(rules));
        }
        let data = self.dump(GETRULE, (2, chain))?;
        let rule = |payload: &[u8]| {
            let mut rule = Rule::default();
            for (kind, value) in attrs_after(payload, NFGENMSG) {
                match kind {
                    3 => rule.handle = value.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes)),
                    4 => rule.instructions = instruction::list(value),
                    _ => {}
                }
            }
            rule
        };
        let rules = messages(&data).filter(|message| message.kind == NEWRULE);
        let rules: Rc<Vec<Rule>> = Rc::new(rules.map(|message| rule(message.payload)).collect());
        self.rules.insert(chain.to_owned(), Rc::clone(&rules));
        Ok(rules)
    }

    fn set(&mut self, name: &str) -> io::Result<Rc<Set>> {
        if let Some(set) = self.sets.get(name) {
            return Ok(Rc::clone(set));
        }
        let (has_ranges, fields) = self.shape(name)?;
        let data = self.dump(GETSETELEM, (2, name))?;
        let lists = messages(&data).filter(|message| message.kind == NEWSETELEM);
        let lists = lists.flat_map(|message| attrs_after(message.payload, NFGENMSG).filter(|(kind, _)| *kind == 3));
        let elements = lists.flat_map(|(_, list)| attrs(list)).map(|(_, one)| element(one)).collect();
        let set = Rc::new(Set { elements, has_ranges, fields });
        self.sets.insert(name.to_owned(), Rc::clone(&set));
        Ok(set)
    }
}

fn element(bytes: &[u8]) -> Element {
    let get = |kind: u16| attrs(bytes).find(|(found, _)| *found == kind).map(|(_, value)| value);
    let data = get(2).and_then(|data| {
        let verdict = instruction::verdict(data).map(Data::Verdict);
        verdict.or_else(|| instruction::value(data).map(Data::Value))
    });
    Element {
        key: get(1).and_then(instruction::value),
        last: get(10).and_then(instruction::value),
        is_end: get(3).is_some_and(|flags| number(flags) & ELEMENT_INTERVAL_END != 0),
        data: data.unwrap_or(Data::Nothing),
    }
}
