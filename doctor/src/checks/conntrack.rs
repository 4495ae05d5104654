// SPDX-License-Identifier: Apache-2.0
//! The connection tracking table is nearly full, or loses queries of DNS.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};

/// The table is reported from this share of its limit, in percent. Bursts fill the rest.
const FULL: u64 = 90;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    nearly_full(facts).into_iter().chain(clashes(facts)).collect()
}

fn nearly_full(facts: &NodeFacts) -> Option<NodeFinding> {
    let fill = facts.conntrack.filter(|fill| fill.has_reached(FULL) && fill.max > 0)?;
    let evidence = format!(
        "{} of {} connections are tracked; when the table is full, new ones are dropped",
        fill.entries, fill.max
    );
    // kube-proxy writes the limit at its start, and the files of sysctl.d are read at a boot before the module is loaded.
    let remedy = format!(
        "sysctl -w net.netfilter.nf_conntrack_max={}; for good: raise conntrack.maxPerCore in the configuration of kube-proxy, or, without \
         kube-proxy, write nf_conntrack into a file in /etc/modules-load.d, and the sysctl into one in /etc/sysctl.d",
        fill.max * 2
    );
    Some(finding(evidence, remedy))
}

/// A pod that sends two queries at once from one socket loses one of them, and asks again after 5 s.
fn clashes(facts: &NodeFacts) -> Option<NodeFinding> {
    let clashes = facts.clashes.filter(|clashes| clashes.go_on())?;
    let evidence = format!(
        "this kernel has dropped up to {} packets because another one took their entry at the same moment (insert_failed and drop in \
         /proc/net/stat/nf_conntrack), up to {} of them just now: as a rule these are queries of DNS for IPv4 and IPv6 that a pod sends at once, and \
         names are found 5 s later",
        clashes.lost, clashes.recent
    );
    let remedy = "run NodeLocal DNSCache: connection tracking does not see the queries of pods to it, and it asks CoreDNS over TCP; or give pods \
                  with glibc the option use-vc or single-request-reopen (`dnsConfig.options`); a kernel from 5.10 on loses no such query";
    Some(finding(evidence, remedy.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::clashes::Clashes;

    #[test]
    fn lost_queries_are_found_only_while_further_ones_get_lost() {
        for (recent, found) in [(0, false), (2, true)] {
            let facts = NodeFacts { clashes: Some(Clashes { lost: 700, recent }), ..NodeFacts::default() };
            let findings = check(&facts);
            assert_eq!(findings.len(), usize::from(found), "{findings:?}");
            assert!(findings.iter().all(|one| one.evidence.contains("dropped up to 700 packets")), "{findings:?}");
        }
    }
}
