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
use super::table::{self, ForwardChain, Found};
use crate::firewall::forward_chain::{Closing, Rule};
use weft_netlink::socket::Netlink;

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
    /// Someone put a rule that drops everything before all others.
    pub will: bool,
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

/// The chains among these that drop what these rules accept. `own`: our table; `comment`: as in [`bring`].
///
/// # Errors
/// The kernel's tables could not be read.
pub fn dropping(
    netlink: &mut Netlink,
    chains: &[ForwardChain],
    rules: &FamilyRules,
    (own, comment): (&str, &str),
) -> io::Result<Vec<Dropping>> {
    let wanted: Vec<[Vec<Expr>; 2]> = rules.forward.iter().map(|rule| forms(&expr::of(rule))).collect();
    let mut all = Vec::new();
    for chain in chains {
        let theirs = match rules.family {
            Family::V4 => chain.family == "ip6",
            Family::V6 => chain.family == "ip",
        };
        if theirs || chain.table == own {
            continue;
        }
        let there = match table::rules_of(netlink, chain.number, &chain.table, &chain.name) {
            // Gone since they were listed.
            Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => continue,
            there => there?,
        };
        let closing = closing(&there, comment);
        let end = closing.end(there.len());
        let drops = chain.drops || end < there.len();
        if chain.table == FIREWALLD && has_zone(netlink, chain.number, &wanted)? {
            continue;
        }
        if drops && !wanted.iter().all(|forms| there[..end].iter().any(|found| accepts(&found.exprs, forms))) {
            let will = matches!(closing, Closing::Will(_));
            all.push(Dropping { family: chain.family, table: chain.table.clone(), chain: chain.name.clone(), will });
        }
    }
    Ok(all)
}

/// Brings the accepts in FORWARD of iptables-nft that bear this comment to those of `rules` (`None`: to none). Missing ones are
/// written where the chain drops what it does not know; nothing is written against somebody's will. True when something changed.
///
/// # Errors
/// The kernel refused, or its tables could not be read.
pub fn bring(netlink: &mut Netlink, family: Family, rules: Option<&FamilyRules>, comment: &str) -> io::Result<bool> {
    if !table::has_chain(netlink, family, IPTABLES, FORWARD)? {
        return Ok(false);
    }
    let there = table::rules_of(netlink, table::number(family), IPTABLES, FORWARD)?;
    let mut lacking: Vec<Vec<Expr>> = rules.into_iter().flat_map(|rules| &rules.forward).map(expr::of).collect();
    let mut surplus = Vec::new();
    for found in there.iter().filter(|found| found.comment == comment) {
        match lacking.iter().position(|exprs| accepts(&found.exprs, &forms(exprs))) {
            Some(at) => drop(lacking.remove(at)),
            None => surplus.push(found.handle),
        }
    }
    let closing = closing(&there, comment);
    let end = closing.end(there.len());
    let known = |exprs: &Vec<Expr>| there[..end].iter().any(|found| accepts(&found.exprs, &forms(exprs)));
    lacking.retain(|exprs| !known(exprs));
    let before = match closing {
        Closing::Default(at) => Some(there[at].handle),
        Closing::Open if table::drops(netlink, family, IPTABLES, FORWARD)? => None,
        Closing::Open | Closing::Will(_) => {
            lacking.clear();
            None
        }
    };
    if lacking.is_empty() && surplus.is_empty() {
        return Ok(false);
    }
    let mut batch = Batch::new(netlink);
    lacking.iter().for_each(|exprs| batch.insert(family, (IPTABLES, FORWARD), &New { exprs, comment, before }));
    surplus.iter().for_each(|handle| batch.delete_rule(family, (IPTABLES, FORWARD), *handle));
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

/// How a chain ends. `comment`: what ours are marked with.
fn closing(rules: &[Found], comment: &str) -> Closing {
    let rule = |found: &Found| {
        let mut said = found.exprs.iter().filter(|expr| **expr != Expr::Counter);
        match (said.next(), said.next()) {
            _ if found.comment == comment => Rule::Ours,
            (Some(Expr::Drop), None) => Rule::Drops,
            (Some(Expr::Other(name)), None) if name == "reject" || name == "REJECT" => Rule::Rejects,
            _ => Rule::Other,
        }
    };
    Closing::of(&rules.iter().map(rule).collect::<Vec<_>>())
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
