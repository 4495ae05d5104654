// SPDX-License-Identifier: Apache-2.0
//! A rule hides pods from other nodes.

mod chains;

use crate::facts::NodeFacts;
use crate::facts::other_rules::NftRule;
use crate::finding::{NodeFinding, finding};
use crate::saved_rules::SavedRules;
use chains::{PodPacket, masquerading_rule};

/// A rule of another program that hides the addresses of pods from other nodes.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(env) = facts.subnet_file.env() else { return Vec::new() };
    let routed = facts.ways.reverse_path.iter().map(|path| path.link.as_str());
    let devices = facts.ways.vxlan.iter().filter(|device| device.ours).map(|device| device.name.as_str());
    let mut links: Vec<&str> = routed.chain(devices).collect();
    links.sort_unstable();
    links.dedup();
    let mut findings = Vec::new();
    for saved in &facts.rules.iptables {
        let is_v6 = saved.program.starts_with("ip6");
        for subnet in env.subnets.iter().map(|subnet| subnet.trunc()) {
            let to = env.networks.iter().map(|network| network.trunc()).find(|to| to.addr().is_ipv6() == is_v6);
            let Some(to) = to.filter(|_| subnet.addr().is_ipv6() == is_v6) else { continue };
            let packet = PodPacket { from: subnet, to, links: &links };
            let rule = saved.tables.table("nat").and_then(|nat| masquerading_rule(nat, &packet));
            findings.extend(rule.map(|rule| second_masquerade(saved, &rule)));
        }
    }
    findings.extend(facts.rules.nft_masquerades.iter().map(second_masquerade_of_nft));
    findings
}

fn second_masquerade_of_nft(found: &NftRule) -> NodeFinding {
    let NftRule { chain, rule } = found;
    let evidence = format!(
        "the rule `{rule}`, to which the chain {chain} of nftables leads, replaces the source address of packets to pods of other nodes: \
         network policies and logs there see this node instead of the pod"
    );
    let remedy = format!(
        "`nft -a list chain {chain}` shows the way to it; `nft delete rule` with its handle, and switch it off in the program that writes it \
         (a VPN, a script)"
    );
    finding(evidence, remedy)
}

fn second_masquerade(saved: &SavedRules, rule: &str) -> NodeFinding {
    let program = &saved.program;
    let evidence = format!(
        "the rule `{rule}` of {program} replaces the source address of packets to pods of other nodes: network policies and \
         logs there see this node instead of the pod"
    );
    let deletion = rule.replacen("-A ", "-D ", 1);
    let remedy = format!(
        "`{program} -t nat {deletion}`, and switch it off in the program that writes it (`ipMasq` of the CNI plugin, a VPN, a script)"
    );
    finding(evidence, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::ways::ReversePath;

    #[test]
    fn a_second_masquerade_is_quoted_with_the_command_that_removes_it() {
        let mut facts = NodeFacts::of_a_node();
        facts.ways.reverse_path = vec![ReversePath { link: "flannel.1".to_owned(), value: 0 }];
        let rule = "-A POSTROUTING -o flannel.1 -j MASQUERADE";
        facts.rules.iptables =
            vec![SavedRules::of_nat("iptables-nft", rule), SavedRules::of_nat("ip6tables-nft", rule)];
        let findings = check(&facts);
        assert_eq!(findings.len(), 1, "this node has no IPv6 subnet: {findings:?}");
        assert!(findings[0].evidence.contains(rule), "{findings:?}");
        assert!(findings[0].remedy.contains("iptables-nft -t nat -D POSTROUTING -o flannel.1 -j MASQUERADE"));
    }
}
