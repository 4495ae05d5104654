// SPDX-License-Identifier: Apache-2.0
//! The checks that need nothing but the facts of [`super::node`], without side effects.

use super::agent_problems::AgentProblem;
use super::base::{BRIDGE, Fill, SubnetFile};
use super::finding::{NodeFinding, finding};
use super::lossy;
use super::node::{AgentAnswer, NodeFacts};
use super::pod_links;

/// A table of the kernel is reported from this share of its limit, in percent. Bursts fill the rest.
const FULL: u64 = 90;

pub(super) fn agent(facts: &NodeFacts) -> Vec<NodeFinding> {
    match &facts.agent {
        AgentAnswer::None => facts.absent_agent.iter().cloned().collect(),
        AgentAnswer::Failed { why, stopped } => {
            let remedy = match stopped {
                Some(pid) => format!(
                    "kill -CONT {pid}; then find out who stopped it (SIGSTOP, a debugger); pods keep their network meanwhile"
                ),
                None => "read the log of the agent, and restart it if this lasts; pods keep their network".to_owned(),
            };
            vec![finding(format!("the agent does not show its status: {why}"), remedy)]
        }
        AgentAnswer::Problems(problems) => {
            problems.iter().map(AgentProblem::finding).chain(lossy::lossy(facts)).collect()
        }
    }
}

pub(super) fn subnet_file(facts: &NodeFacts) -> Vec<NodeFinding> {
    let path = facts.path.display();
    let mut findings = Vec::new();
    if let SubnetFile::Bad(why) = &facts.subnet_file {
        let remedy = "remove the file; the agent writes it again at its next start".to_owned();
        findings.push(finding(format!("{path} cannot be used: {why}"), remedy));
    }
    if let Some(why) = &facts.unwritable {
        let remedy =
            "mount the directory read-write, make room on it, or give the agent another --subnet-file".to_owned();
        findings.push(finding(format!("{path} cannot be written: {why}"), remedy));
    }
    findings
}

pub(super) fn port(facts: &NodeFacts) -> Vec<NodeFinding> {
    let port = facts.port;
    let one = |user: &String| {
        let remedy = format!("stop {user}, or choose another Port in the net-conf of the whole cluster");
        finding(format!("{user} has a socket on UDP port {port}, so a vxlan device cannot use this port"), remedy)
    };
    facts.port_users.iter().map(one).collect()
}

pub(super) fn bridge_subnet(facts: &NodeFacts) -> Vec<NodeFinding> {
    let (Some(env), Some(bridge)) = (facts.subnet_file.env(), &facts.bridge) else { return Vec::new() };
    let mut findings = Vec::new();
    for subnet in env.subnets.iter() {
        let same_family = bridge.addrs.iter().filter(|addr| addr.is_ipv4() == subnet.addr().is_ipv4());
        let addrs: Vec<String> = same_family.clone().map(ToString::to_string).collect();
        if !addrs.is_empty() && !same_family.clone().any(|addr| subnet.contains(addr)) {
            let evidence =
                format!("{BRIDGE} has {}, but the subnet of this node is {}", addrs.join(", "), subnet.trunc());
            let remedy = format!("drain the node, `ip link del {BRIDGE}`, and let its pods be made again");
            findings.push(finding(evidence, remedy));
        }
    }
    findings
}

pub(super) fn mtu(facts: &NodeFacts) -> Vec<NodeFinding> {
    let (Some(env), Some(bridge)) = (facts.subnet_file.env(), &facts.bridge) else {
        return pod_links::mtu(facts).into_iter().collect();
    };
    // The kernel gives a bridge without ports the MTU 1500, and one with ports the smallest of theirs, unless somebody set it.
    let has_ports = facts.pods.links.iter().any(|link| link.port.is_some());
    if env.mtu == 0 || bridge.mtu <= env.mtu || !has_ports {
        return pod_links::mtu(facts).or_else(|| pod_links::small_bridge(facts, bridge.mtu)).into_iter().collect();
    }
    let evidence = format!("{BRIDGE} has MTU {}, but the way to other nodes has {}", bridge.mtu, env.mtu);
    let remedy = format!("drain the node, `ip link del {BRIDGE}`, and let its pods be made again");
    vec![finding(evidence, remedy)]
}

pub(super) fn br_netfilter(facts: &NodeFacts) -> Vec<NodeFinding> {
    let has_v6 = facts.subnet_file.env().is_some_and(|env| env.subnets.v6.is_some());
    let (sysctl, evidence) = match (facts.bridge_calls_iptables, facts.bridge_calls_ip6tables) {
        (None, _) => ("iptables", "the module br_netfilter is not loaded"),
        (Some(0), _) => ("iptables", "net.bridge.bridge-nf-call-iptables is 0"),
        (_, Some(0)) if has_v6 => ("ip6tables", "net.bridge.bridge-nf-call-ip6tables is 0"),
        _ => return Vec::new(),
    };
    if facts.bridge.is_none() {
        return Vec::new();
    }
    let evidence =
        format!("{BRIDGE} exists and {evidence}: a pod may not reach a service whose pod is on the same node");
    vec![finding(evidence, format!("modprobe br_netfilter && sysctl -w net.bridge.bridge-nf-call-{sysctl}=1"))]
}

pub(super) fn ipv6(facts: &NodeFacts) -> Vec<NodeFinding> {
    if facts.subnet_file.env().is_none_or(|env| env.subnets.v6.is_none()) {
        return Vec::new();
    }
    let one = |name: &String| {
        let evidence = format!("this node has an IPv6 subnet, but net.ipv6.conf.{name}.disable_ipv6 is not 0");
        finding(evidence, format!("sysctl -w net.ipv6.conf.{name}.disable_ipv6=0, and in /etc/sysctl.d"))
    };
    // Names of links may contain a dot, which sysctl writes as a slash.
    facts.ipv6_disabled.iter().map(|name| name.replace('.', "/")).map(|name| one(&name)).collect()
}

pub(super) fn conntrack(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(fill) = facts.conntrack.filter(|fill| fill.entries * 100 >= fill.max * FULL && fill.max > 0) else {
        return Vec::new();
    };
    let evidence = format!(
        "{} of {} connections are tracked; when the table is full, new ones are dropped",
        fill.entries, fill.max
    );
    vec![finding(evidence, format!("sysctl -w net.netfilter.nf_conntrack_max={}", fill.max * 2))]
}

pub(super) fn neighbours(facts: &NodeFacts) -> Vec<NodeFinding> {
    let full = facts.neighbours.iter().filter(|(_, fill)| fill.entries * 100 >= fill.max * FULL);
    let one = |(name, fill): &(&str, Fill)| {
        let limit = format!("net.{name}.neigh.default.gc_thresh3");
        let evidence = format!("{} neighbours count against {limit}, which is {}", fill.entries, fill.max);
        finding(evidence, format!("sysctl -w {limit}={}", fill.max.max(512) * 2))
    };
    full.map(one).collect()
}
