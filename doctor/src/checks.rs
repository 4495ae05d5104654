// SPDX-License-Identifier: Apache-2.0
//! All checks, and what they decide together from the facts, without side effects. The file of each check has its name.

mod addresses;
mod agent;
mod arp_rules;
mod br_netfilter;
mod bridge;
mod bridge_subnet;
mod certificates;
mod checksum;
mod clock;
mod cni;
mod conntrack;
mod device;
mod disk;
mod duplicate_address;
mod firewall;
mod forwarding;
mod ipsec;
mod ipv6;
mod kernel;
mod leftovers;
mod limits;
mod locks;
mod managed;
mod masquerade;
mod mtu;
mod neighbours;
mod network;
mod offload;
mod other_agent;
mod port;
mod rp_filter;
mod services;
mod store;
mod subnet_file;
mod traffic_control;
mod underlay;
mod uplink;

use std::fmt::Write;

use serde_json::{Value, json};

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, counted};

/// One check: its name for `--only`, what it looks for, and the function that decides.
pub struct Check {
    /// The name.
    pub name: &'static str,
    /// What it looks for, in one line.
    pub about: &'static str,
    decide: fn(&NodeFacts) -> Vec<NodeFinding>,
}

/// Every check, in the order in which findings are shown.
pub const CHECKS: [Check; 36] = [
    Check { name: "agent", about: "problems that the agent reports, or no agent answers", decide: agent::check },
    Check { name: "other-agent", about: "flannel runs beside the agent", decide: other_agent::check },
    Check { name: "subnet-file", about: "the subnet file cannot be read or written", decide: subnet_file::check },
    Check { name: "store", about: "the store fails or is slow, or net-conf is not valid", decide: store::check },
    Check { name: "certificates", about: "a certificate of the store ended or ends soon", decide: certificates::check },
    Check {
        name: "clock",
        about: "the clock is wrong, was set back, or begins before a certificate",
        decide: clock::check,
    },
    Check { name: "kernel", about: "the kernel lacks the module of the backend", decide: kernel::check },
    Check { name: "port", about: "another program uses the UDP port of the tunnel", decide: port::check },
    Check { name: "device", about: "another vxlan device takes the packets of weft's", decide: device::check },
    Check { name: "network", about: "another program's route or network is inside Network", decide: network::check },
    Check { name: "managed", about: "another program manages weft's devices", decide: managed::check },
    Check {
        name: "uplink",
        about: "a bridge takes packets of a link, ARP is off, or the uplink is behind a NAT",
        decide: uplink::check,
    },
    Check {
        name: "underlay",
        about: "packets to other nodes do not leave, or leave by a wrong way",
        decide: underlay::check,
    },
    Check {
        name: "duplicate-address",
        about: "another host has an address of this node",
        decide: duplicate_address::check,
    },
    Check {
        name: "traffic-control",
        about: "netem, XDP programs, filters or rate limits of tc may drop packets",
        decide: traffic_control::check,
    },
    Check { name: "forwarding", about: "the kernel does not forward packets of pods", decide: forwarding::check },
    Check { name: "bridge", about: "cni0 or links of pods are down or not connected", decide: bridge::check },
    Check { name: "bridge-subnet", about: "cni0 has an address of an old subnet", decide: bridge_subnet::check },
    Check { name: "mtu", about: "cni0 or pods do not fit the size of packets in the tunnel", decide: mtu::check },
    Check {
        name: "br-netfilter",
        about: "packets between pods of the bridge bypass the rules",
        decide: br_netfilter::check,
    },
    Check { name: "masquerade", about: "a rule hides pods from other nodes", decide: masquerade::check },
    Check {
        name: "services",
        about: "kube-proxy or its rules are gone, or do not fit this cluster",
        decide: services::check,
    },
    Check { name: "firewall", about: "a firewall of this node drops tunnel packets", decide: firewall::check },
    Check {
        name: "leftovers",
        about: "rules or links of another network for pods that does not run",
        decide: leftovers::check,
    },
    Check { name: "ipsec", about: "a policy of IPsec takes packets between pods", decide: ipsec::check },
    Check { name: "rp-filter", about: "the kernel drops packets from some nodes", decide: rp_filter::check },
    Check { name: "checksum", about: "packets arrive with wrong checksums", decide: checksum::check },
    Check { name: "offload", about: "a card is known to spoil checksums of tunnels", decide: offload::check },
    Check { name: "ipv6", about: "IPv6 is switched off on a node with an IPv6 subnet", decide: ipv6::check },
    Check {
        name: "conntrack",
        about: "the connection tracking table is nearly full, or loses queries of DNS",
        decide: conntrack::check,
    },
    Check { name: "neighbours", about: "the neighbour table is nearly full", decide: neighbours::check },
    Check {
        name: "cni",
        about: "CNI configurations or plugins are missing, broken, or not those of weft",
        decide: cni::check,
    },
    Check { name: "addresses", about: "pods share addresses, or nearly all are taken", decide: addresses::check },
    Check { name: "disk", about: "a directory of the agent or of CNI cannot be written", decide: disk::check },
    Check { name: "limits", about: "inotify, open files or threads are at the limit", decide: limits::check },
    Check { name: "locks", about: "a program holds the lock of iptables or host-local", decide: locks::check },
];

/// The checks that look at rules of other programs.
const OF_RULES: [&str; 5] = ["br-netfilter", "masquerade", "services", "firewall", "leftovers"];

/// The result of an examination.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// What is wrong.
    pub findings: Vec<NodeFinding>,
    /// What the chosen checks could not examine, for people.
    pub not_examined: Vec<String>,
}

impl NodeReport {
    /// Formats the report for people.
    pub fn render(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let _ = writeln!(text, "{}: {}\n    {}", finding.check, finding.evidence, finding.remedy);
        }
        let _ = writeln!(text, "{}", counted(self.findings.len(), "finding", "findings"));
        for what in &self.not_examined {
            let _ = writeln!(text, "not examined: {what}");
        }
        text
    }

    /// Formats the report for programs.
    pub fn as_json(&self) -> Value {
        let one =
            |found: &NodeFinding| json!({"check": found.check, "evidence": found.evidence, "remedy": found.remedy});
        let findings: Vec<Value> = self.findings.iter().map(one).collect();
        json!({"findings": findings, "not_examined": self.not_examined})
    }
}

/// Runs the checks. An empty `only` means all checks.
pub fn decide(facts: &NodeFacts, only: &[String]) -> NodeReport {
    let wanted = |check: &str| only.is_empty() || only.iter().any(|name| name == check);
    let mut report = NodeReport::default();
    for check in CHECKS.iter().filter(|check| wanted(check.name)) {
        let found = (check.decide)(facts).into_iter();
        report.findings.extend(found.map(|found| NodeFinding { check: check.name, ..found }));
    }
    let not_examined = facts.not_examined.iter().filter(|one| wanted(one.check));
    report.not_examined = not_examined.map(|one| one.what.clone()).collect();
    report.not_examined.extend(services::not_examined(facts).filter(|_| wanted("services")));
    let unreadable = &facts.rules.unreadable;
    if !unreadable.is_empty() && OF_RULES.iter().any(|check| wanted(check)) {
        report.not_examined.push(format!("rules of other programs: {}", unreadable.join("; ")));
    }
    report
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::facts::NotExamined;
    use crate::facts::limits::{Fill, NeighbourTable};
    use crate::sources::{AgentAnswer, AgentProblem};

    /// Who looks for a check by the name that its findings have finds its file.
    #[test]
    fn each_check_has_a_file_of_its_name() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/checks");
        for check in &CHECKS {
            let file = dir.join(check.name.replace('-', "_")).with_extension("rs");
            let text = fs::read_to_string(&file).unwrap();
            assert!(text.contains("pub(super) fn check(facts: &NodeFacts)"), "{}", file.display());
        }
    }

    fn checks(facts: &NodeFacts) -> Vec<&'static str> {
        decide(facts, &[]).findings.iter().map(|finding| finding.check).collect()
    }

    #[test]
    fn a_node_before_the_first_start_has_no_findings() {
        assert_eq!(checks(&NodeFacts::default()), [""; 0]);
    }

    #[test]
    fn a_table_is_reported_from_nine_tenths_of_its_limit() {
        for (entries, found) in [(899, false), (900, true), (1000, true)] {
            let fill = Fill { entries, max: 1000 };
            let facts = NodeFacts { conntrack: Some(fill), ..NodeFacts::default() };
            assert_eq!(checks(&facts) == ["conntrack"], found, "{entries}");
            let facts = NodeFacts { neighbours: vec![NeighbourTable { family: "ipv6", fill }], ..NodeFacts::default() };
            assert_eq!(checks(&facts) == ["neighbours"], found, "{entries}");
        }
        let facts = NodeFacts { conntrack: Some(Fill::default()), ..NodeFacts::default() };
        assert_eq!(checks(&facts), [""; 0], "a limit of 0 means that there is no limit");
    }

    #[test]
    fn only_the_chosen_checks_run_and_problems_of_the_agent_are_findings() {
        let agent = AgentAnswer::Problems(vec![AgentProblem::new("no lease")]);
        let not_examined = vec![NotExamined { check: "port", what: "other users".to_owned() }];
        let port_users = vec!["nc (pid 7)".to_owned()];
        let facts = NodeFacts { agent, port_users, not_examined, ..NodeFacts::default() };
        assert_eq!(checks(&facts), ["agent", "port"]);
        let only = decide(&facts, &["agent".to_owned()]);
        assert_eq!(only.findings.len(), 1);
        assert_eq!(only.findings[0].evidence, "the agent reports: no lease");
        assert_eq!(only.not_examined, [""; 0], "this concerns another check");
        assert_eq!(decide(&facts, &["port".to_owned()]).not_examined, ["other users"]);
    }

    #[test]
    fn each_check_of_rules_says_which_rules_were_not_read() {
        let mut facts = NodeFacts::default();
        facts.rules.unreadable =
            ["iptables-nft-save", "nft"].map(|program| format!("{program} is not installed")).into();
        let text = ["rules of other programs: iptables-nft-save is not installed; nft is not installed"];
        for check in OF_RULES {
            assert_eq!(decide(&facts, &[check.to_owned()]).not_examined, text, "{check}");
        }
        assert_eq!(decide(&facts, &["port".to_owned()]).not_examined, [""; 0]);
        assert_eq!(decide(&facts, &[]).not_examined, text, "once for all of them");
    }
}
