// SPDX-License-Identifier: Apache-2.0
//! Reads chains, rules and sets from the kernel by NETLINK_NETFILTER.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use nix::libc;
use nix::net::if_::if_nametoindex;
use weft_netlink::nftables::attributes::{
    ELEMENT_KEY, ELEMENTS_LIST, ELEMENTS_SET, RULE_CHAIN, RULE_EXPRESSIONS, RULE_HANDLE, SET_FLAGS, SET_NAME,
};
use weft_netlink::nftables::{
    BaseChain, GETRULE, GETSET, GETSETELEM, NEWRULE, NEWSET, NEWSETELEM, NFGENMSG, TABLE_NAME, be32_of, handle_of,
};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{Writer, attr, attr_after, attrs, attrs_after, messages};

use super::attributes::{elements, set};
use super::decode;
use super::instruction::Rule;
use super::set::{Data, Element, Set};
use super::walk::{self, Table};
use crate::kernel::rules::{Outcome, Tested};

/// Follows a packet through a base chain. Without a decision, the outcome has no fate, and the policy decides.
///
/// # Errors
/// The table cannot be read.
pub fn follow(netlink: &mut Netlink, chain: &BaseChain, tested: Tested<'_>) -> io::Result<Outcome> {
    let name = &chain.table;
    let mut table = KernelTable { netlink, family: chain.number, name, rules: HashMap::new(), sets: HashMap::new() };
    walk::follow(&mut table, &chain.name, tested)
}

/// The chains and sets of one table. Each is read when the packet comes to it, and once.
struct KernelTable<'a> {
    netlink: &'a mut Netlink,
    family: u8,
    name: &'a str,
    rules: HashMap<String, Rc<Vec<Rule>>>,
    sets: HashMap<String, Rc<Set>>,
}

impl KernelTable<'_> {
    /// Lists what belongs to an object of the table. `attribute` names the object.
    fn dump(&mut self, kind: u16, attribute: u16, object: &str) -> io::Result<Vec<u8>> {
        self.netlink.dump(kind, |w, kind, flags| {
            w.begin(kind, flags, &[self.family, 0, 0, 0]);
            w.attr_str(TABLE_NAME, self.name);
            w.attr_str(attribute, object);
        })
    }

    /// Returns whether the elements of a set are ranges, and the lengths of the fields of its key.
    fn shape(&mut self, name: &str) -> io::Result<(bool, Vec<usize>)> {
        let ask = |w: &mut Writer| {
            w.begin(GETSET, 0, &[self.family, 0, 0, 0]);
            w.attr_str(TABLE_NAME, self.name);
            w.attr_str(SET_NAME, name);
        };
        let data = self.netlink.request(ask)?.map_err(|refusal| io::Error::from(refusal.errno))?;
        let Some(found) = messages(&data).find(|message| message.kind == NEWSET) else {
            return Ok((false, Vec::new()));
        };
        let get = |kind: u16| attr_after(found.payload, NFGENMSG, kind);
        let fields = get(set::DESC).and_then(|shape| attr(shape, set::DESC_CONCAT)).unwrap_or_default();
        let len = |(_, field): (u16, &[u8])| attr(field, set::FIELD_LEN).map(|len| be32_of(len) as usize);
        Ok((has_flag(get(SET_FLAGS), libc::NFT_SET_INTERVAL), attrs(fields).filter_map(len).collect()))
    }
}

impl Table for KernelTable<'_> {
    fn rules(&mut self, chain: &str) -> io::Result<Rc<Vec<Rule>>> {
        if let Some(rules) = self.rules.get(chain) {
            return Ok(Rc::clone(rules));
        }
        let data = self.dump(GETRULE, RULE_CHAIN, chain)?;
        let read = |payload: &[u8]| {
            let mut read = Rule::default();
            for (kind, value) in attrs_after(payload, NFGENMSG) {
                match kind {
                    RULE_HANDLE => read.handle = handle_of(value),
                    RULE_EXPRESSIONS => read.instructions = decode::list(value),
                    _ => {}
                }
            }
            read
        };
        let rules = messages(&data).filter(|message| message.kind == NEWRULE);
        let rules: Rc<Vec<Rule>> = Rc::new(rules.map(|message| read(message.payload)).collect());
        self.rules.insert(chain.to_owned(), Rc::clone(&rules));
        Ok(rules)
    }

    fn set(&mut self, name: &str) -> io::Result<Rc<Set>> {
        if let Some(set) = self.sets.get(name) {
            return Ok(Rc::clone(set));
        }
        let (has_ranges, fields) = self.shape(name)?;
        let data = self.dump(GETSETELEM, ELEMENTS_SET, name)?;
        let lists = messages(&data).filter(|message| message.kind == NEWSETELEM);
        let lists =
            lists.flat_map(|message| attrs_after(message.payload, NFGENMSG).filter(|(kind, _)| *kind == ELEMENTS_LIST));
        let elements = lists.flat_map(|(_, list)| attrs(list)).map(|(_, one)| element(one)).collect();
        let set = Rc::new(Set { elements, has_ranges, fields });
        self.sets.insert(name.to_owned(), Rc::clone(&set));
        Ok(set)
    }

    fn index(&self, link: &str) -> Option<u32> {
        if_nametoindex(link).ok()
    }
}

fn has_flag(flags: Option<&[u8]>, flag: i32) -> bool {
    flags.is_some_and(|flags| be32_of(flags).cast_signed() & flag != 0)
}

fn element(bytes: &[u8]) -> Element {
    let get = |kind: u16| attr(bytes, kind);
    let data = get(elements::DATA).and_then(|data| {
        let verdict = decode::verdict(data).map(Data::Verdict);
        verdict.or_else(|| decode::value(data).map(Data::Value))
    });
    Element {
        key: get(ELEMENT_KEY).and_then(decode::value),
        last: get(elements::KEY_END).and_then(decode::value),
        is_end: has_flag(get(elements::FLAGS), libc::NFT_SET_ELEM_INTERVAL_END),
        data: data.unwrap_or(Data::Nothing),
    }
}
