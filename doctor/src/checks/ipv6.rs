// SPDX-License-Identifier: Apache-2.0
//! IPv6 is switched off on a node with an IPv6 subnet.

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::remedies::set_sysctl;

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    if facts.subnet_file.env().is_none_or(|env| env.subnets.v6.is_none()) {
        return Vec::new();
    }
    if facts.kernel_lacks_ipv6 {
        let evidence =
            "this node has an IPv6 subnet, but its kernel has no IPv6: there is no /proc/sys/net/ipv6".to_owned();
        let remedy = "take ipv6.disable=1 out of the command line of the kernel (`cat /proc/cmdline`, usually from /etc/default/grub) and boot \
                      again; or set EnableIPv6 to false in net-conf";
        return vec![finding(evidence, remedy.to_owned())];
    }
    let one = |name: &String| {
        let evidence = format!("this node has an IPv6 subnet, but net.ipv6.conf.{name}.disable_ipv6 is not 0");
        finding(evidence, set_sysctl(&format!("net.ipv6.conf.{name}.disable_ipv6=0")))
    };
    // Names of links may contain a dot, which sysctl writes as a slash.
    facts.ipv6_disabled.iter().map(|name| name.replace('.', "/")).map(|name| one(&name)).collect()
}

#[cfg(test)]
mod tests {
    use weft_subnet::env::SubnetEnv;

    use super::*;
    use crate::subnet_file::SubnetFile;

    #[test]
    fn a_kernel_without_ipv6_is_one_finding_that_names_its_command_line() {
        let text = "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n";
        let subnet_file = SubnetFile::Good(SubnetEnv::parse(text).unwrap());
        // None of the entries below net.ipv6.conf can be read then.
        let ipv6_disabled = vec!["cni0".to_owned(), "default".to_owned()];
        let facts = NodeFacts { subnet_file, kernel_lacks_ipv6: true, ipv6_disabled, ..NodeFacts::of_a_node() };
        let found = check(&facts);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].remedy.contains("ipv6.disable=1"), "{found:?}");
        assert_eq!(check(&NodeFacts { kernel_lacks_ipv6: true, ..NodeFacts::of_a_node() }).len(), 0, "IPv4 alone");
    }
}
