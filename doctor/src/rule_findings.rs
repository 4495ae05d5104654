// SPDX-License-Identifier: Apache-2.0
//! Decides which rules of other programs keep packets from pods, without side effects.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_cni::iptables::{value, words};

use super::chains::{PodPacket, masquerading_rule};
use super::explain::ipvs::LINK;
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::other_rules::{NftRule, SavedRules};
use super::pod_links;
use super::tunnel_rules::DroppingRule;

/// A rule of another program that hides the addresses of pods from other nodes.
pub(super) fn masquerade(facts: &NodeFacts) -> Vec<NodeFinding> {
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

/// Services do not work as they should.
pub(super) fn services(facts: &NodeFacts) -> Vec<NodeFinding> {
    let flushed = flushed(facts).or_else(|| empty_ipvs(facts)).into_iter();
    flushed.chain(cluster_cidr(facts)).chain(overlap(facts)).chain(pod_links::hairpin(facts)).collect()
}

/// kube-proxy runs, and its rules are gone.
fn flushed(facts: &NodeFacts) -> Option<NodeFinding> {
    let rules = &facts.rules;
    let (Some(process), Some(nft), false) = (&rules.kube_proxy, &rules.nft, rules.ipvs) else { return None };
    let in_iptables = |saved: &SavedRules| {
        let chain = saved.tables.table("nat").and_then(|nat| nat.get("PREROUTING"));
        chain.is_some_and(|chain| chain.rules.iter().any(|rule| rule.ends_with("-j KUBE-SERVICES")))
    };
    let in_nft = nft.lines().any(|line| line.starts_with("table ") && line.ends_with(" kube-proxy {"));
    if in_nft || rules.unreadable.is_some() || rules.iptables.iter().any(in_iptables) {
        return None;
    }
    let evidence = format!(
        "{process} runs, and its rules are gone: nothing in PREROUTING leads to KUBE-SERVICES, and nftables has no table kube-proxy"
    );
    let remedy = "restart kube-proxy, which writes its rules again; then find what flushes them (`iptables -F` of a script, a \
                  firewall that starts later)";
    Some(finding(evidence, remedy.to_owned()))
}

/// The addresses of services are there, and IPVS carries none of them, so this node itself refuses their packets.
fn empty_ipvs(facts: &NodeFacts) -> Option<NodeFinding> {
    facts.rules.ipvs_is_empty.then(|| {
        let evidence = format!("{LINK} has the addresses of services, and the table of IPVS is empty: no service is reached from this node");
        let remedy = format!(
            "restart kube-proxy, which writes the table again, and find what flushes it (`ipvsadm -C`); if kube-proxy has another mode now: \
             ip link del {LINK}"
        );
        finding(evidence, remedy)
    })
}

/// The words of kube-proxy's rules for services, of iptables.
fn service_rules(facts: &NodeFacts) -> impl Iterator<Item = Vec<String>> {
    let tables = facts.rules.iptables.iter().filter_map(|saved| saved.tables.table("nat"));
    let chains = tables.flatten().filter(|(name, _)| name.starts_with("KUBE-S"));
    chains.flat_map(|(_, chain)| &chain.rules).map(|rule| words(rule))
}

/// The lines of kube-proxy's rules for services, of nftables.
fn service_lines(facts: &NodeFacts) -> impl Iterator<Item = &str> {
    let tables = facts.rules.nft.iter().flat_map(|nft| nft.split("\ntable "));
    let of_kube_proxy = tables.filter(|table| table.lines().next().is_some_and(|head| head.ends_with(" kube-proxy {")));
    of_kube_proxy.flat_map(str::lines)
}

/// Returns the range of a word that is an address range or an address.
fn net(word: &str) -> Option<IpNet> {
    word.parse().ok().or_else(|| word.parse::<IpAddr>().ok().map(IpNet::from))
}

/// kube-proxy has another range for pods than this cluster, so it takes pods for strangers.
fn cluster_cidr(facts: &NodeFacts) -> Option<NodeFinding> {
    let env = facts.subnet_file.env()?;
    let not_from = |words: Vec<String>| {
        let at = words.windows(2).position(|two| two == ["!", "-s"])?;
        net(words.get(at + 2)?)
    };
    let in_nft = |line: &str| net(line.split_once("saddr != ")?.1.split(' ').next()?);
    let ranges: Vec<IpNet> =
        service_rules(facts).filter_map(not_from).chain(service_lines(facts).filter_map(in_nft)).collect();
    let wrong = |subnet: IpNet| {
        let mut of_family = ranges.iter().filter(|range| range.addr().is_ipv4() == subnet.addr().is_ipv4()).peekable();
        let first = **of_family.peek()?;
        of_family.all(|range| !range.contains(&subnet.trunc())).then_some((first, subnet))
    };
    let (range, subnet) = env.subnets.iter().find_map(wrong)?;
    let network =
        env.networks.iter().map(|network| network.trunc()).find(|network| network.contains(&subnet.addr()))?;
    let evidence = format!(
        "kube-proxy takes {range} for the addresses of pods, and Network is {network}: it replaces the source address of pods that use a \
         service, so network policies and logs see this node"
    );
    let remedy =
        format!("set `clusterCIDR: {network}` in the configuration of kube-proxy (--cluster-cidr), and restart it");
    Some(finding(evidence, remedy))
}

/// A service has an address of a pod.
fn overlap(facts: &NodeFacts) -> Option<NodeFinding> {
    let env = facts.subnet_file.env()?;
    // A map of nftables has several services in a line; the key of each ends before `: goto`.
    let in_map = |line: &'_ str| -> Vec<IpAddr> {
        let keys = line.split(" : goto service-").take(line.matches(" : goto service-").count());
        keys.filter_map(|key| key.split([' ', ',']).rev().find_map(|word| word.parse().ok())).collect()
    };
    let cluster_ip = |words: Vec<String>| {
        let is_cluster_ip = value(&words, "--comment")?.contains("cluster IP");
        net(value(&words, "-d")?).filter(|_| is_cluster_ip).map(|net| net.addr())
    };
    let addresses = service_rules(facts).filter_map(cluster_ip).chain(service_lines(facts).flat_map(in_map));
    let mut inside = addresses.filter(|addr| env.networks.iter().any(|network| network.contains(addr)));
    let addr = inside.next()?;
    let network = env.networks.iter().map(|network| network.trunc()).find(|network| network.contains(&addr))?;
    let evidence = format!("the service address {addr} is inside Network {network}: services and pods share addresses");
    let remedy =
        "give services another range (--service-cluster-ip-range of kube-apiserver), or the cluster another Network";
    Some(finding(evidence, remedy.to_owned()))
}

/// A firewall drops packets of the tunnel, or forwarded packets of pods.
pub(super) fn firewall(facts: &NodeFacts) -> Vec<NodeFinding> {
    // Whether packets come faster than a rate is not known, so such a rule matters only while they are lost.
    let are_lost = facts.unreachable > 0 || !facts.lossy.is_empty();
    let matters = |found: &&DroppingRule| !found.beyond_rate || are_lost;
    let one = |found: &DroppingRule| {
        let beyond = if found.beyond_rate { " beyond a rate or at random" } else { "" };
        let DroppingRule { chain, rule, what, remedy, .. } = found;
        finding(format!("chain {chain} drops {what}{beyond}: {rule}"), remedy.clone())
    };
    facts.dropping.iter().filter(matters).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::base::SubnetFile;
    use super::super::ways::ReversePath;
    use super::*;
    use weft_cni::iptables::Saved;
    use weft_subnet::env::SubnetEnv;

    fn facts() -> NodeFacts {
        let text = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        let mut facts = NodeFacts {
            subnet_file: SubnetFile::Good(SubnetEnv::parse(text).unwrap()),
            port: 8472,
            ..NodeFacts::default()
        };
        facts.ways.reverse_path = vec![ReversePath { link: "flannel.1".to_owned(), value: 0 }];
        facts.rules.nft = Some("table ip other {\n}\n".to_owned());
        facts
    }

    #[test]
    fn a_table_of_ipvs_that_was_flushed_is_found() {
        let mut facts = facts();
        assert_eq!(services(&facts), []);
        facts.rules.ipvs_is_empty = true;
        let found = services(&facts);
        assert!(found.len() == 1 && found[0].evidence.contains("the table of IPVS is empty"), "{found:?}");
    }

    fn iptables(program: &str, nat: &str) -> SavedRules {
        let tables = Saved::parse(&format!("*nat\n{nat}\n"));
        SavedRules { program: program.to_owned(), in_nftables: true, tables }
    }

    #[test]
    fn a_second_masquerade_is_quoted_with_the_command_that_removes_it() {
        let mut facts = facts();
        let rule = "-A POSTROUTING -o flannel.1 -j MASQUERADE";
        facts.rules.iptables = vec![iptables("iptables-nft", rule), iptables("ip6tables-nft", rule)];
        let findings = masquerade(&facts);
        assert_eq!(findings.len(), 1, "this node has no IPv6 subnet: {findings:?}");
        assert!(findings[0].evidence.contains(rule), "{findings:?}");
        assert!(findings[0].remedy.contains("iptables-nft -t nat -D POSTROUTING -o flannel.1 -j MASQUERADE"));
    }

    #[test]
    fn services_without_rules_are_found_only_if_everything_was_read() {
        let mut facts = facts();
        facts.rules.iptables = vec![iptables("iptables-nft", "")];
        assert_eq!(services(&facts), [], "no kube-proxy");
        facts.rules.kube_proxy = Some("kube-proxy (pid 7)".to_owned());
        assert_eq!(services(&facts).len(), 1);
        for change in [
            (|facts: &mut NodeFacts| facts.rules.ipvs = true) as fn(&mut NodeFacts),
            |facts| facts.rules.unreadable = Some("nft: no".to_owned()),
            |facts| facts.rules.nft = Some("table ip kube-proxy {\n}\n".to_owned()),
            |facts| facts.rules.nft = None,
            |facts| {
                let jump = "-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES";
                facts.rules.iptables = vec![iptables("iptables-nft", jump)];
            },
        ] {
            let mut facts = facts.clone();
            change(&mut facts);
            assert_eq!(services(&facts), []);
        }
    }
}
