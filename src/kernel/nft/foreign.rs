// SPDX-License-Identifier: Apache-2.0
//! Other people's chains on the way of forwarded packets. An accept in our chain does not undo a drop in theirs: where the policy or
//! the last rule drops, what we accept must be accepted there too.
//!
//! In FORWARD of iptables-nft our two rules go to the end, in the form that iptables itself writes: behind network policies, before
//! what drops all the rest. Any other chain is only named.

use std::io;

use nix::errno::Errno;
use weft_backends::masq::FamilyRules;
use weft_subnet::cidr::Family;

use super::batch::{Batch, New};
use super::expr::{self, Expr, be32_of};
use super::table::{self, Found};
use crate::kernel::socket::Netlink;

/// Tables that iptables-nft looks after.
const IPTABLES: &str = "filter";
const FORWARD: &str = "FORWARD";
/// firewalld's table.
const FIREWALLD: &str = "firewalld";
/// Its chains, over its versions, that send sources to their zones.
const ZONES: [&str; 3] = ["filter_FORWARD_ZONES", "filter_FORWARD_IN_ZONES", "filter_FORWARD_IN_ZONES_SOURCE"];

/// A base chain of forwarded packets that drops what it does not know, and does not know ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropping {
    /// `ip`, `ip6` or `inet`.
    pub family: &'static str,
    /// Its table.
    pub table: String,
    /// Its name.
    pub chain: String,
}

impl Dropping {
    /// One of iptables-nft.
    pub fn is_iptables(&self) -> bool {
        self.table == IPTABLES && self.chain == FORWARD && self.family != "inet"
    }

    /// One of firewalld.
    pub fn is_firewalld(&self) -> bool {
        self.table == FIREWALLD
    }
}

/// The chains that drop what these rules accept.
///
/// # Errors
/// The kernel's tables could not be read.
pub fn dropping(netlink: &mut Netlink, rules: &FamilyRules, own: &str) -> io::Result<Vec<Dropping>> {
    let wanted: Vec<[Vec<Expr>; 2]> = rules.forward.iter().map(|rule| forms(&expr::of(rule))).collect();
    let mut all = Vec::new();
    for chain in table::forward_chains(netlink)? {
        let theirs = match rules.family {
            Family::V4 => chain.family == "ip6",
            Family::V6 => chain.family == "ip",
        };
        if theirs || chain.table == own {
            continue;
        }
        let there = table::rules_of(netlink, chain.number, &chain.table, &chain.name)?;
        let end = end(&there);
        let drops = chain.drops || end < there.len();
        if chain.table == FIREWALLD && has_zone(netlink, chain.number, &wanted)? {
            continue;
        }
        if drops && !wanted.iter().all(|forms| there[..end].iter().any(|found| accepts(&found.exprs, forms))) {
            all.push(Dropping { family: chain.family, table: chain.table, chain: chain.name });
        }
    }
    Ok(all)
}

/// Puts the accepts into FORWARD of iptables-nft, marked with this comment. True when something was written.
///
/// # Errors
/// The kernel refused, or its tables could not be read.
pub fn accept(netlink: &mut Netlink, rules: &FamilyRules, comment: &str) -> io::Result<bool> {
    let family = rules.family;
    if !table::has_chain(netlink, family, IPTABLES, FORWARD)? {
        return Ok(false);
    }
    let there = table::rules_of(netlink, table::number(family), IPTABLES, FORWARD)?;
    let end = end(&there);
    let known = |exprs: &Vec<Expr>| there[..end].iter().any(|found| accepts(&found.exprs, &forms(exprs)));
    let missing: Vec<Vec<Expr>> = rules.forward.iter().map(expr::of).filter(|exprs| !known(exprs)).collect();
    if missing.is_empty() {
        return Ok(false);
    }
    let before = there.get(end).map(|found| found.handle);
    let mut batch = Batch::new(netlink);
    missing.iter().for_each(|exprs| batch.insert(family, (IPTABLES, FORWARD), &New { exprs, comment, before }));
    batch.send()?.map_err(|refusal| io::Error::from(refusal.errno))?;
    Ok(true)
}

/// Whether firewalld was told of our sources: they have a zone, and the zone is an operator's to choose.
fn has_zone(netlink: &mut Netlink, number: u8, wanted: &[[Vec<Expr>; 2]]) -> io::Result<bool> {
    let Some(sources) = wanted.first() else { return Ok(true) };
    for chain in ZONES {
        let there = match table::rules_of(netlink, number, FIREWALLD, chain) {
            Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => continue,
            there => there?,
        };
        // The accept at the end of ours is a jump in theirs.
        let tests = sources.each_ref().map(|form| &form[..form.len() - 1]);
        let names = |found: &Found| tests.iter().any(|test| found.exprs.windows(test.len()).any(|part| part == *test));
        if there.iter().any(names) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Where a chain ends: at the first rule that drops or rejects everything, or behind the last.
fn end(rules: &[Found]) -> usize {
    let drops_all = |found: &Found| {
        let mut said = found.exprs.iter().filter(|expr| **expr != Expr::Counter);
        let last = match said.next() {
            Some(Expr::Drop) => true,
            Some(Expr::Other(name)) => name == "reject" || name == "REJECT",
            _ => false,
        };
        last && said.next().is_none()
    };
    rules.iter().position(drops_all).unwrap_or(rules.len())
}

/// Removes the accepts that bear this comment. True when there were some.
///
/// # Errors
/// As [`accept`].
pub fn withdraw(netlink: &mut Netlink, comment: &str) -> io::Result<bool> {
    let mut gone = false;
    for family in [Family::V4, Family::V6] {
        if !table::has_chain(netlink, family, IPTABLES, FORWARD)? {
            continue;
        }
        let there = table::rules_of(netlink, table::number(family), IPTABLES, FORWARD)?;
        let ours: Vec<&Found> = there.iter().filter(|found| found.comment == comment).collect();
        if ours.is_empty() {
            continue;
        }
        let mut batch = Batch::new(netlink);
        ours.iter().for_each(|found| batch.delete_rule(family, (IPTABLES, FORWARD), found.handle));
        batch.send()?.map_err(|refusal| io::Error::from(refusal.errno))?;
        gone = true;
    }
    Ok(gone)
}

/// A rule as we write it, and as programs do that load no more bytes than the prefix has.
fn forms(exprs: &[Expr]) -> [Vec<Expr>; 2] {
    let plain: Vec<Expr> = exprs.iter().filter(|expr| **expr != Expr::Counter).cloned().collect();
    let mut short = plain.clone();
    if let [Expr::Payload { base, offset, .. }, Expr::Mask(mask), Expr::Cmp { equal, data }, ..] = &plain[..] {
        let bytes = mask.iter().take_while(|byte| **byte == 255).count();
        if mask.iter().skip(bytes).all(|byte| *byte == 0) {
            let len = u32::try_from(bytes).unwrap_or_default();
            let load = Expr::Payload { base: *base, offset: *offset, len };
            let cmp = Expr::Cmp { equal: *equal, data: data[..bytes].to_vec() };
            short = [load, cmp].into_iter().chain(plain[3..].iter().cloned()).collect();
        }
    }
    [plain, short]
}

/// In a table of both families a test of the family may come first.
fn accepts(found: &[Expr], forms: &[Vec<Expr>]) -> bool {
    let found: Vec<&Expr> = found.iter().filter(|expr| **expr != Expr::Counter).collect();
    let only_family = |head: &[&Expr]| match head {
        [] => true,
        [Expr::Other(meta), Expr::Cmp { equal: true, data }] => meta == "meta" && data.len() == 1,
        _ => false,
    };
    forms.iter().any(|form| {
        let Some(at) = found.len().checked_sub(form.len()) else { return false };
        found[at..].iter().copied().eq(form.iter()) && only_family(&found[..at])
    })
}

/// A handle, as the kernel gives it.
pub fn handle_of(value: &[u8]) -> u64 {
    match value.first_chunk::<8>() {
        Some(bytes) => u64::from_be_bytes(*bytes),
        None => u64::from(be32_of(value)),
    }
}
