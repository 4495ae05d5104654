// SPDX-License-Identifier: Apache-2.0
//! Packets between pods of the bridge bypass the rules.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::known_links::BRIDGE;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let env = facts.subnet_file.env();
    let has_v4 = env.is_none_or(|env| env.subnets.v4.is_some());
    let has_v6 = env.is_some_and(|env| env.subnets.v6.is_some());
    let (sysctl, evidence) = match (facts.bridge_calls_iptables, facts.bridge_calls_ip6tables) {
        (None, _) => ("iptables", "the module br_netfilter is not loaded"),
        (Some(0), _) if has_v4 => ("iptables", "net.bridge.bridge-nf-call-iptables is 0"),
        (_, Some(0)) if has_v6 => ("ip6tables", "net.bridge.bridge-nf-call-ip6tables is 0"),
        _ => return Vec::new(),
    };
    // What carries services without such rules, such as Cilium, does not need these packets.
    if facts.bridge.is_none() || !facts.rules.carry_services() {
        return Vec::new();
    }
    let evidence =
        format!("{BRIDGE} exists and {evidence}: a pod may not reach a service whose pod is on the same node");
    let remedy = format!(
        "modprobe br_netfilter && sysctl -w net.bridge.bridge-nf-call-{sysctl}=1; for the next boot, write br_netfilter into a file in \
         /etc/modules-load.d, and the sysctl into one in /etc/sysctl.d"
    );
    vec![finding(evidence, remedy)]
}

#[cfg(test)]
mod tests {
    use weft_subnet::env::SubnetEnv;

    use super::*;
    use crate::facts::pod_links::Bridge;
    use crate::saved_rules::SavedRules;
    use crate::subnet_file::SubnetFile;

    #[test]
    fn a_bridge_whose_packets_bypass_the_rules_matters_only_where_rules_carry_services() {
        let facts = NodeFacts { bridge: Some(Bridge::default()), ..NodeFacts::of_a_node() };
        assert_eq!(check(&facts), [], "no Kubernetes, or Cilium in place of kube-proxy");
        let mut in_iptables = facts.clone();
        in_iptables.rules.iptables =
            vec![SavedRules::of_nat("iptables-nft", "-A PREROUTING -m comment --comment \"portals\" -j KUBE-SERVICES")];
        assert_eq!(check(&in_iptables).len(), 1);
        let mut in_nftables = facts;
        in_nftables.rules.nft = Some("table ip kube-proxy {\n}\n".to_owned());
        assert_eq!(check(&in_nftables).len(), 1);
        let calls = |four, six| NodeFacts {
            bridge_calls_iptables: Some(four),
            bridge_calls_ip6tables: Some(six),
            ..in_nftables.clone()
        };
        assert_eq!(check(&calls(1, 0)), [], "pods have no IPv6 addresses");
        assert_eq!(check(&calls(0, 1)).len(), 1);
        let text = "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n";
        let of_six = |facts| NodeFacts { subnet_file: SubnetFile::Good(SubnetEnv::parse(text).unwrap()), ..facts };
        assert_eq!(check(&of_six(calls(0, 1))), [], "pods have no IPv4 addresses");
        assert!(check(&of_six(calls(0, 0)))[0].evidence.contains("bridge-nf-call-ip6tables is 0"));
    }
}
