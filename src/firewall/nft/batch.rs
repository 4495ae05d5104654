// SPDX-License-Identifier: Apache-2.0
//! A batch: messages about tables of nftables that take effect together or not at all.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use weft_subnet::cidr::Family;

use super::expr::{DATA_VALUE, Expr, be32};
use super::table::{
    DELSETELEM, NEWCHAIN, NEWRULE, NEWSET, NEWSETELEM, NEWTABLE, Place, REQUEST, SUBSYS, Set, TABLE_NAME, Table, nfgen,
};
use weft_netlink::socket::{Netlink, Refusal};
use weft_netlink::wire::Writer;

const DELTABLE: u16 = SUBSYS | 2;
const DELCHAIN: u16 = SUBSYS | 5;
const DELRULE: u16 = SUBSYS | 8;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
const ACK: u16 = 0x4;
const CREATE: u16 = 0x400;
const APPEND: u16 = 0x800;
/// Elements per message: a list of attributes holds 64 KiB.
const ELEMENTS: usize = 1024;

/// Messages that take effect together or not at all.
#[derive(Debug)]
pub struct Batch<'a> {
    netlink: &'a mut Netlink,
    w: Writer,
}

/// A rule for someone else's chain.
#[derive(Debug, Clone, Copy)]
pub struct New<'a> {
    /// What it says.
    pub exprs: &'a [Expr],
    /// Says whose it is.
    pub comment: &'a str,
    /// The rule that it goes before.
    pub before: Option<u64>,
}

impl<'a> Batch<'a> {
    /// Empty.
    pub fn new(netlink: &'a mut Netlink) -> Batch<'a> {
        let mut batch = Batch { netlink, w: Writer::default() };
        batch.edge(BATCH_BEGIN);
        batch
    }

    /// Removes a table if it is there.
    pub fn delete(&mut self, family: Family, name: &str) {
        // Deleting what is not there fails the batch: make it first.
        self.message(NEWTABLE, CREATE, family, |w| w.attr_str(TABLE_NAME, name));
        self.message(DELTABLE, 0, family, |w| w.attr_str(TABLE_NAME, name));
    }

    /// Puts a table in the place of the one that is there. `comment`: for people.
    pub fn replace(&mut self, table: &Table, comment: &str) {
        self.delete(table.family, &table.name);
        self.add(table, comment);
    }

    /// Adds what of a table is not there yet; its chains must not be.
    pub fn add(&mut self, table: &Table, comment: &str) {
        let Table { family, name, chains, sets } = table;
        self.message(NEWTABLE, CREATE, *family, |w| {
            w.attr_str(TABLE_NAME, name);
            // No flag: one that was put to sleep wakes up.
            be32(w, 2, 0);
            w.attr(6, &userdata(comment));
        });
        for (id, set) in (1..).zip(sets) {
            self.set(table, set, id);
        }
        for chain in chains {
            let Place { kind, hook, priority } = chain.place;
            self.message(NEWCHAIN, CREATE, *family, |w| {
                w.attr_str(TABLE_NAME, name);
                w.attr_str(3, chain.name);
                w.nest(4, |w| {
                    be32(w, 1, hook);
                    be32(w, 2, priority.cast_unsigned());
                });
                be32(w, 5, 1);
                w.attr_str(7, kind);
            });
            for rule in &chain.rules {
                self.message(NEWRULE, CREATE | APPEND, *family, |w| {
                    w.attr_str(TABLE_NAME, name);
                    w.attr_str(2, chain.name);
                    w.nest(4, |w| rule.iter().for_each(|expr| expr.encode(w)));
                });
            }
        }
    }

    fn set(&mut self, table: &Table, set: &Set, id: u32) {
        // nft's own numbers of the types, for its listing.
        let (kind, len) = if table.family == Family::V4 { (7, 4) } else { (8, 16) };
        self.message(NEWSET, CREATE, table.family, |w| {
            w.attr_str(TABLE_NAME, &table.name);
            w.attr_str(2, set.name);
            for (attr, value) in [(3, 0), (4, kind), (5, len), (10, id)] {
                be32(w, attr, value);
            }
        });
        let elements: Vec<IpAddr> = set.elements.iter().flatten().copied().collect();
        self.elements(table.family, (&table.name, set.name), &elements, true);
    }

    /// Brings the sets of a table to what is wanted, element by element.
    pub fn change(&mut self, found: &Table, wanted: &Table) {
        let none = BTreeSet::new();
        for (before, after) in found.sets.iter().zip(&wanted.sets) {
            let name = (&*wanted.name, after.name);
            let (before, after) = (before.elements.as_ref().unwrap_or(&none), after.elements.as_ref().unwrap_or(&none));
            for (more, less, there) in [(after, before, true), (before, after, false)] {
                let elements: Vec<IpAddr> = more.difference(less).copied().collect();
                self.elements(wanted.family, name, &elements, there);
            }
        }
    }

    /// Adds elements to a set (`there`: no error when they are there), or removes them.
    pub fn elements(&mut self, family: Family, (table, set): (&str, &str), elements: &[IpAddr], there: bool) {
        let (kind, flags) = if there { (NEWSETELEM, CREATE) } else { (DELSETELEM, 0) };
        for part in elements.chunks(ELEMENTS) {
            self.message(kind, flags, family, |w| {
                w.attr_str(TABLE_NAME, table);
                w.attr_str(2, set);
                w.nest(3, |w| {
                    for ip in part {
                        w.nest(1, |w| w.nest(1, |w| w.attr_ip(DATA_VALUE, *ip)));
                    }
                });
            });
        }
    }

    /// Puts a rule before the one with this handle, or at the end of a chain.
    pub fn insert(&mut self, family: Family, (table, chain): (&str, &str), rule: &New<'_>) {
        let flags = if rule.before.is_some() { CREATE } else { CREATE | APPEND };
        self.message(NEWRULE, flags, family, |w| {
            w.attr_str(TABLE_NAME, table);
            w.attr_str(2, chain);
            w.nest(4, |w| rule.exprs.iter().for_each(|expr| expr.encode(w)));
            if let Some(handle) = rule.before {
                w.attr(6, &handle.to_be_bytes());
            }
            w.attr(7, &userdata(rule.comment));
        });
    }

    /// Removes a rule.
    pub fn delete_rule(&mut self, family: Family, (table, chain): (&str, &str), handle: u64) {
        self.message(DELRULE, 0, family, |w| {
            w.attr_str(TABLE_NAME, table);
            w.attr_str(2, chain);
            w.attr(3, &handle.to_be_bytes());
        });
    }

    /// Removes a chain with its rules.
    pub fn delete_chain(&mut self, family: Family, (table, chain): (&str, &str)) {
        self.message(DELCHAIN, 0, family, |w| {
            w.attr_str(TABLE_NAME, table);
            w.attr_str(3, chain);
        });
    }

    /// Sends it. The inner error is the kernel's: nothing was changed.
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
        // The subsystem, big-endian, where other messages have none.
        self.w.begin(kind, REQUEST, &[0, 0, 0, 10]);
        let seq = self.netlink.next_seq();
        self.w.end(seq);
    }
}

/// A comment as nft's user space keeps it: type 0, length, text with its zero.
fn userdata(comment: &str) -> Vec<u8> {
    let mut text: Vec<u8> = comment.bytes().take(120).collect();
    text.push(0);
    let mut data = vec![0, u8::try_from(text.len()).unwrap_or(0)];
    data.extend(text);
    data
}
