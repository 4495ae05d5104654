// SPDX-License-Identifier: Apache-2.0
//! Finds chains of other programs, in nftables, that drop forwarded packets of pods. Nothing is written here. The operator gets a warning.

use std::io;

use weft_backends::traffic_rules::FamilyRules;
use weft_netlink::nftables::BaseChain;
use weft_netlink::socket::Netlink;
use weft_subnet::cidr::Family;

use super::forward_chain::Ending;
use super::iptables_forward;
use super::nft::accept::{self, Accept};
use super::nft::table;
use crate::instance::Instance;

/// The table of firewalld.
const FIREWALLD: &str = "firewalld";
/// The chains in which firewalld, over its versions, assigns source addresses to zones.
const ZONES: [&str; 3] = ["filter_FORWARD_ZONES", "filter_FORWARD_IN_ZONES", "filter_FORWARD_IN_ZONES_SOURCE"];

/// A base chain of forwarded packets that drops packets which our rules accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppingChain {
    /// `ip`, `ip6` or `inet`.
    pub family: &'static str,
    /// The name of its table.
    pub table: String,
    /// Its own name.
    pub chain: String,
    /// A person has put a rule that drops all packets before the other rules.
    pub blocked: bool,
}

impl DroppingChain {
    /// Returns true for chain FORWARD of iptables-nft.
    pub fn is_iptables(&self) -> bool {
        self.table == iptables_forward::TABLE && self.chain == iptables_forward::CHAIN && self.family != "inet"
    }

    /// Returns true for a chain of firewalld.
    pub fn is_firewalld(&self) -> bool {
        self.table == FIREWALLD
    }
}

/// Returns the chains among `chains` that drop packets which these rules accept.
///
/// # Errors
/// A chain could not be read.
pub fn dropping(
    netlink: &mut Netlink,
    chains: &[BaseChain],
    rules: &FamilyRules,
    instance: &Instance,
) -> io::Result<Vec<DroppingChain>> {
    let accepts = Accept::all(rules);
    let comment = iptables_forward::comment(instance);
    let mut found = Vec::new();
    for chain in chains {
        if !chain.sees(rules.family == Family::V4) || chain.table == instance.name {
            continue;
        }
        let present = match table::rules_of(netlink, chain.number, &chain.table, &chain.name) {
            // The chain was removed since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            answer => answer?,
        };
        if chain.table == FIREWALLD && has_zone(netlink, chain.number, &accepts)? {
            continue;
        }
        let ending = accept::ending(&present, &comment);
        let reached = &present[..ending.reach(present.len())];
        let drops = chain.drops || reached.len() < present.len();
        let accepted = |accept: &Accept| reached.iter().any(|rule| accept.is_said_by(&rule.exprs));
        if drops && !accepts.iter().all(accepted) {
            let blocked = matches!(ending, Ending::Block(_));
            found.push(DroppingChain {
                family: chain.family,
                table: chain.table.clone(),
                chain: chain.name.clone(),
                blocked,
            });
        }
    }
    Ok(found)
}

/// Returns true if firewalld has a zone for the sources of our rules. What a zone lets through is the operator's choice.
fn has_zone(netlink: &mut Netlink, number: u8, accepts: &[Accept]) -> io::Result<bool> {
    let Some(sources) = accepts.first() else { return Ok(true) };
    for chain in ZONES {
        let present = match table::rules_of(netlink, number, FIREWALLD, chain) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            answer => answer?,
        };
        if present.iter().any(|rule| sources.has_same_test(&rule.exprs)) {
            return Ok(true);
        }
    }
    Ok(false)
}
