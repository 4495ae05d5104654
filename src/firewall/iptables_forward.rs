// SPDX-License-Identifier: Apache-2.0
//! Two rules in chain FORWARD of iptables-nft, written without a program of iptables: docs/adr/009-other-programs-firewalls.md.
//!
//! When nftables carries our rules, an accept in our table does not undo a drop in another table. Docker sets the policy of FORWARD to
//! DROP, and pods are cut off. The agent's image contains no program of iptables, so the agent writes the two accepts itself.
//!
//! Invariant: this module writes only rules with our comment, only into chain FORWARD of the tables `ip filter` and `ip6 filter`, and
//! only when that chain exists. It removes only rules with our comment. It does not change policies, chains or tables.

use weft_backends::traffic_rules::FamilyRules;
use weft_cni::iptables::value;
use weft_netlink::socket::Netlink;
use weft_subnet::cidr::Family;

use super::error::FirewallError;
use super::forward_chain::Ending;
use super::nft::accept::{self, Accept};
use super::nft::batch::{Batch, InTable, NewRule};
use super::nft::{connection, table};
use crate::instance::Instance;

/// The table of iptables-nft.
pub const TABLE: &str = "filter";
/// Its chain of forwarded packets.
pub const CHAIN: &str = "FORWARD";
const FORWARD: InTable<'static> = InTable { table: TABLE, name: CHAIN };

/// Returns the comment of our rules in that chain.
pub fn comment(instance: &Instance) -> String {
    format!("{} forward", instance.name)
}

/// Returns true for the words of a rule of ours, of any agent, as `iptables-save` prints it.
pub fn is_ours(words: &[String]) -> bool {
    value(words, "--comment").is_some_and(|comment| comment.starts_with("weft") && comment.ends_with(" forward"))
}

/// Brings our rules in FORWARD of one family to the forward rules of `rules` (with `None` to none). Returns true if something was written.
///
/// Missing rules are written only where the chain drops by default (its policy, or a last rule that drops all packets), and go to the
/// end of the chain, but before such a rule. Rules that another program wrote with the same meaning are enough. Where a person put a
/// rule that drops all packets first, nothing is written.
///
/// # Errors
/// The chain could not be read, or the kernel refused the transaction; then nothing was changed.
pub fn ensure(
    netlink: &mut Netlink,
    family: Family,
    rules: Option<&FamilyRules>,
    instance: &Instance,
) -> Result<bool, FirewallError> {
    if !table::has_chain(netlink, family, TABLE, CHAIN)? {
        return Ok(false);
    }
    let comment = comment(instance);
    let present = table::rules_of(netlink, family.number(), TABLE, CHAIN)?;
    let mut missing = rules.map(Accept::all).unwrap_or_default();
    let mut surplus = Vec::new();
    for rule in present.iter().filter(|rule| rule.comment == comment) {
        match missing.iter().position(|accept| accept.is_said_by(&rule.exprs)) {
            Some(at) => drop(missing.remove(at)),
            None => surplus.push(rule.handle),
        }
    }
    let ending = accept::ending(&present, &comment);
    let reached = &present[..ending.reach(present.len())];
    missing.retain(|accept| !reached.iter().any(|rule| accept.is_said_by(&rule.exprs)));
    let before = match ending {
        Ending::Default(at) => Some(present[at].handle),
        Ending::Policy if table::drops(netlink, family, TABLE, CHAIN)? => None,
        Ending::Policy | Ending::Block(_) => {
            missing.clear();
            None
        }
    };
    if missing.is_empty() && surplus.is_empty() {
        return Ok(false);
    }
    let mut batch = Batch::new(netlink);
    for accept in &missing {
        batch.insert_rule(family, FORWARD, &NewRule { exprs: &accept.exprs, comment: &comment, before });
    }
    surplus.iter().for_each(|handle| batch.delete_rule(family, FORWARD, *handle));
    batch.send()?.map_err(FirewallError::Refused)?;
    Ok(true)
}

/// Removes our rules from FORWARD of both families. Returns true if there were some.
///
/// # Errors
/// The kernel has no nftables, or refused.
pub fn remove(instance: &Instance) -> Result<bool, FirewallError> {
    let mut netlink = connection::open()?;
    let v4 = ensure(&mut netlink, Family::V4, None, instance)?;
    let v6 = ensure(&mut netlink, Family::V6, None, instance)?;
    Ok(v4 || v6)
}

#[cfg(test)]
mod tests {
    use weft_cni::iptables::words;

    use super::is_ours;

    #[test]
    fn only_rules_with_the_comment_of_an_agent_are_ours() {
        for ours in
            ["-s 10.5.0.0/16 -m comment --comment \"weft forward\" -j ACCEPT", "--comment \"weft-1a2b3c4d forward\""]
        {
            assert!(is_ours(&words(ours)), "{ours}");
        }
        for other in [
            "-s 10.5.0.0/16 -j ACCEPT",
            "--comment \"weft\" -j ACCEPT",
            "--comment \"forward\" -j ACCEPT",
            "--comment \"before weft forward\" -j ACCEPT",
            "--comment \"weft forwarded\" -j ACCEPT",
        ] {
            assert!(!is_ours(&words(other)), "{other}");
        }
    }
}
