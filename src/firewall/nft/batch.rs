// SPDX-License-Identifier: Apache-2.0
//! A transaction of nftables: messages that take effect together or not at all.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use weft_subnet::cidr::Family;

use super::expr::{Expr, be32};
use super::table::{Position, REQUEST, Set, Table, head, nfgen};
use crate::firewall::error::FirewallError;
use weft_netlink::nftables::attributes::{
    CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TYPE, ELEMENT, ELEMENT_KEY, ELEMENTS_LIST, ELEMENTS_SET, HOOK_NUMBER,
    HOOK_PRIORITY, POLICY_ACCEPT, RULE_CHAIN, RULE_EXPRESSIONS, RULE_HANDLE, RULE_POSITION, RULE_USERDATA, SET_FLAGS,
    SET_ID, SET_KEY_LENGTH, SET_KEY_TYPE, SET_NAME, TABLE_FLAGS, TABLE_USERDATA,
};
use weft_netlink::nftables::{
    DATA_VALUE, DELCHAIN, DELRULE, DELSETELEM, DELTABLE, NEWCHAIN, NEWRULE, NEWSET, NEWSETELEM, NEWTABLE, TABLE_NAME,
};
use weft_netlink::socket::{Netlink, Refusal};
use weft_netlink::wire::Writer;

const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const ACK: u16 = 0x4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
/// The most elements in one message. A list of attributes holds at most 64 KiB.
const ELEMENTS: usize = 1024;

/// Messages that take effect together or not at all.
#[derive(Debug)]
pub struct Batch<'a> {
    netlink: &'a mut Netlink,
    w: Writer,
}

/// A chain or a set.
#[derive(Debug, Clone, Copy)]
pub struct InTable<'a> {
    /// The name of its table.
    pub table: &'a str,
    /// Its own name.
    pub name: &'a str,
}

/// A rule for a chain of another program.
#[derive(Debug, Clone, Copy)]
pub struct NewRule<'a> {
    /// What it does.
    pub exprs: &'a [Expr],
    /// The comment by which its owner knows it again.
    pub comment: &'a str,
    /// The handle of the rule before which it is inserted. Without one it goes to the end.
    pub before: Option<u64>,
}

impl<'a> Batch<'a> {
    /// Returns an empty transaction.
    pub fn new(netlink: &'a mut Netlink) -> Batch<'a> {
        let mut batch = Batch { netlink, w: Writer::default() };
        batch.edge(BATCH_BEGIN);
        batch
    }

    /// Removes a table, if there is one.
    pub fn delete(&mut self, family: Family, name: &str) {
        // To delete a table that does not exist makes the transaction fail, so the table is created first.
        self.message(NEWTABLE, CREATE, family, |w| w.attr_str(TABLE_NAME, name));
        self.message(DELTABLE, 0, family, |w| w.attr_str(TABLE_NAME, name));
    }

    /// Replaces a table. The comment is for people who list the tables.
    pub fn replace(&mut self, table: &Table, comment: &str) {
        self.delete(table.family, &table.name);
        self.add(table, comment);
    }

    /// Adds a table, or adds chains and sets to it. None of the chains may exist.
    pub fn add(&mut self, table: &Table, comment: &str) {
        let Table { family, name, chains, sets } = table;
        self.message(NEWTABLE, CREATE, *family, |w| {
            w.attr_str(TABLE_NAME, name);
            // Without the flag a dormant table is in force again.
            be32(w, TABLE_FLAGS, 0);
            w.attr(TABLE_USERDATA, &userdata(comment));
        });
        for (id, set) in (1..).zip(sets) {
            self.set(table, set, id);
        }
        for chain in chains {
            let Position { kind, hook, priority } = chain.position;
            self.message(NEWCHAIN, CREATE, *family, |w| {
                w.attr_str(TABLE_NAME, name);
                w.attr_str(CHAIN_NAME, chain.name);
                w.nest(CHAIN_HOOK, |w| {
                    be32(w, HOOK_NUMBER, hook as u32);
                    be32(w, HOOK_PRIORITY, priority.cast_unsigned());
                });
                be32(w, CHAIN_POLICY, POLICY_ACCEPT);
                w.attr_str(CHAIN_TYPE, kind);
            });
            for rule in &chain.rules {
                self.message(NEWRULE, CREATE | APPEND, *family, |w| {
                    w.attr_str(TABLE_NAME, name);
                    w.attr_str(RULE_CHAIN, chain.name);
                    w.nest(RULE_EXPRESSIONS, |w| rule.iter().for_each(|expr| expr.encode(w)));
                });
            }
        }
    }

    fn set(&mut self, table: &Table, set: &Set, id: u32) {
        // The numbers of the types in the program `nft`, which lists the set by them.
        let (kind, len) = if table.family == Family::V4 { (7, 4) } else { (8, 16) };
        self.message(NEWSET, CREATE, table.family, |w| {
            w.attr_str(TABLE_NAME, &table.name);
            w.attr_str(SET_NAME, set.name);
            for (attr, value) in [(SET_FLAGS, 0), (SET_KEY_TYPE, kind), (SET_KEY_LENGTH, len), (SET_ID, id)] {
                be32(w, attr, value);
            }
        });
        let elements: Vec<IpAddr> = set.elements.iter().flatten().copied().collect();
        self.elements(table.family, InTable { table: &table.name, name: set.name }, &elements, true);
    }

    /// Brings the sets of a table to what is wanted by adding and removing elements.
    pub fn change(&mut self, found: &Table, wanted: &Table) {
        let none = BTreeSet::new();
        for (before, after) in found.sets.iter().zip(&wanted.sets) {
            let set = InTable { table: &wanted.name, name: after.name };
            let (before, after) = (before.elements.as_ref().unwrap_or(&none), after.elements.as_ref().unwrap_or(&none));
            for (more, less, present) in [(after, before, true), (before, after, false)] {
                let elements: Vec<IpAddr> = more.difference(less).copied().collect();
                self.elements(wanted.family, set, &elements, present);
            }
        }
    }

    /// Adds elements to a set (`present` is true), or removes them. To add an element that is there already is no error.
    pub fn elements(&mut self, family: Family, set: InTable<'_>, elements: &[IpAddr], present: bool) {
        let (kind, flags) = if present { (NEWSETELEM, CREATE) } else { (DELSETELEM, 0) };
        for part in elements.chunks(ELEMENTS) {
            self.message(kind, flags, family, |w| {
                w.attr_str(TABLE_NAME, set.table);
                w.attr_str(ELEMENTS_SET, set.name);
                w.nest(ELEMENTS_LIST, |w| {
                    for ip in part {
                        w.nest(ELEMENT, |w| w.nest(ELEMENT_KEY, |w| w.attr_ip(DATA_VALUE, *ip)));
                    }
                });
            });
        }
    }

    /// Inserts a rule into a chain of another program.
    pub fn insert_rule(&mut self, family: Family, chain: InTable<'_>, rule: &NewRule<'_>) {
        let flags = if rule.before.is_some() { CREATE } else { CREATE | APPEND };
        self.message(NEWRULE, flags, family, |w| {
            w.attr_str(TABLE_NAME, chain.table);
            w.attr_str(RULE_CHAIN, chain.name);
            w.nest(RULE_EXPRESSIONS, |w| rule.exprs.iter().for_each(|expr| expr.encode(w)));
            if let Some(handle) = rule.before {
                w.attr(RULE_POSITION, &handle.to_be_bytes());
            }
            w.attr(RULE_USERDATA, &userdata(rule.comment));
        });
    }

    /// Removes the rule with this handle.
    pub fn delete_rule(&mut self, family: Family, chain: InTable<'_>, handle: u64) {
        self.message(DELRULE, 0, family, |w| {
            w.attr_str(TABLE_NAME, chain.table);
            w.attr_str(RULE_CHAIN, chain.name);
            w.attr(RULE_HANDLE, &handle.to_be_bytes());
        });
    }

    /// Removes a chain and its rules.
    pub fn delete_chain(&mut self, family: Family, chain: InTable<'_>) {
        self.message(DELCHAIN, 0, family, |w| {
            w.attr_str(TABLE_NAME, chain.table);
            w.attr_str(CHAIN_NAME, chain.name);
        });
    }

    /// Sends the transaction. The inner error is the kernel's refusal; nothing was changed then.
    ///
    /// # Errors
    /// The socket failed, or the acknowledgement was lost: the transaction may have taken effect.
    pub fn send(mut self) -> io::Result<Result<(), Refusal>> {
        self.w.flag_last(ACK);
        let last = self.netlink.last_seq();
        self.edge(BATCH_END);
        let replies = self.netlink.exchange(self.w.bytes(), last)?;
        if let Some(refusal) = replies.refused.into_iter().next() {
            return Ok(Err(refusal));
        }
        if replies.complete {
            Ok(Ok(()))
        } else {
            Err(io::Error::new(io::ErrorKind::WouldBlock, "acknowledgement lost"))
        }
    }

    fn message(&mut self, kind: u16, flags: u16, family: Family, body: impl FnOnce(&mut Writer)) {
        self.w.begin(kind, REQUEST | flags, &nfgen(family));
        body(&mut self.w);
        let seq = self.netlink.next_seq();
        self.w.end(seq);
    }

    fn edge(&mut self, kind: u16) {
        // The number of the subsystem, big-endian.
        self.w.begin(kind, REQUEST, &[0, 0, 0, 10]);
        let seq = self.netlink.next_seq();
        self.w.end(seq);
    }
}

/// Removes a table in a transaction of its own. Returns true if there was one.
///
/// # Errors
/// The kernel has no nftables, or refused.
pub fn remove_table(netlink: &mut Netlink, family: Family, name: &str) -> Result<bool, FirewallError> {
    if head(netlink, family, name)?.is_none() {
        return Ok(false);
    }
    let mut batch = Batch::new(netlink);
    batch.delete(family, name);
    batch.send()?.map_err(FirewallError::Refused)?;
    Ok(true)
}

/// Returns a comment in user data: type 0, length, and the text with a zero byte at its end.
fn userdata(comment: &str) -> Vec<u8> {
    let mut text: Vec<u8> = comment.bytes().take(120).collect();
    text.push(0);
    let mut data = vec![0, u8::try_from(text.len()).unwrap_or(0)];
    data.extend(text);
    data
}
