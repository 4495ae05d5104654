// SPDX-License-Identifier: Apache-2.0
//! kube-proxy or its rules are gone, or do not fit this cluster.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use nix::libc;
use weft_cni::iptables::{value, words};

use crate::facts::NodeFacts;
use crate::facts::unserved::Unserved;
use crate::facts::ways::OtherRoute;
use crate::finding::{NodeFinding, finding, some_of};
use crate::kernel::rules::net;
use crate::known_links::{KUBE_IPVS, ports_that};

/// Pods begin before kube-proxy at a boot. From this age of a pod on, it does not only begin.
const BEGINS: Duration = Duration::from_secs(120);

/// Services do not work as they should.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let flushed = flushed(facts).or_else(|| empty_ipvs(facts)).or_else(|| unserved(facts)).into_iter();
    flushed.chain(cluster_cidr(facts)).chain(overlap(facts)).chain(hairpin(facts)).collect()
}

/// kube-proxy runs, and its rules are gone.
fn flushed(facts: &NodeFacts) -> Option<NodeFinding> {
    let rules = &facts.rules;
    let process = rules.kube_proxy.as_ref().filter(|_| rules.carry_certainly_none())?;
    let evidence = format!(
        "{process} runs, and its rules are gone: nothing in PREROUTING leads to KUBE-SERVICES, and nftables has no table kube-proxy"
    );
    let remedy = "restart kube-proxy, which writes its rules again; then find what flushes them (`iptables -F` of a script, a \
                  firewall that starts later)";
    Some(finding(evidence, remedy.to_owned()))
}

/// kube-proxy does not run, and no program is known to do its work.
fn unserved(facts: &NodeFacts) -> Option<NodeFinding> {
    let Unserved { service, .. } = facts.rules.unserved.filter(|unserved| unserved.age >= BEGINS)?;
    let evidence = format!(
        "a kubelet runs, kube-proxy does not, and there are no rules of it: pods have been told the address {service} of the Kubernetes API, \
         and it does not answer this node either (if a program that weft doctor does not know carries services here, such as one with eBPF, the \
         Kubernetes API itself may be down instead)"
    );
    // Without its configuration, kubeadm would write its defaults over the kube-proxy of the whole cluster.
    let remedy = "`kubectl -n kube-system get pods -o wide` shows whether a kube-proxy, or a program in its place, belongs to this node, and its log \
                  why it does not run; repair the one that your installer deploys; if that is kubeadm, and there is no kube-proxy: \
                  kubeadm init phase addon kube-proxy --config FILE, on a node of the control plane, with the ClusterConfiguration of the ConfigMap \
                  kubeadm-config (namespace kube-system) for FILE";
    Some(finding(evidence, remedy.to_owned()))
}

/// The addresses of services are there, and IPVS carries none of them, so this node itself refuses their packets.
fn empty_ipvs(facts: &NodeFacts) -> Option<NodeFinding> {
    facts.rules.ipvs_is_empty.then(|| {
        let evidence = format!("{KUBE_IPVS} has the addresses of services, and the table of IPVS is empty: no service is reached from this node");
        let remedy = format!(
            "restart kube-proxy, which writes the table again, and find what flushes it (`ipvsadm -C`); if kube-proxy has another mode now: \
             ip link del {KUBE_IPVS}"
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

/// kube-proxy has another range for pods than this cluster, so it takes pods for strangers.
fn cluster_cidr(facts: &NodeFacts) -> Option<NodeFinding> {
    let env = facts.subnet_file.env()?;
    let not_from = |words: Vec<String>| {
        let at = words.windows(2).position(|two| two == ["!", "-s"])?;
        net(words.get(at + 2)?)
    };
    let in_nft = |line: &str| {
        let mut words = line.split_once("saddr != ")?.1.split_whitespace();
        // A rule that drops others keeps to the sources that a load balancer may have (`loadBalancerSourceRanges`).
        net(words.next()?).filter(|_| !words.any(|word| word == "drop"))
    };
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
    // The setting names the networks of both families.
    let all: Vec<String> = env.networks.iter().map(|network| network.trunc().to_string()).collect();
    let all = all.join(",");
    let remedy =
        format!("set `clusterCIDR: {all}` in the configuration of kube-proxy (--cluster-cidr), and restart it");
    Some(finding(evidence, remedy))
}

/// The addresses that kube-proxy's rules carry to services of the cluster. Those of load balancers and of nodes are not among them.
fn service_addresses(facts: &NodeFacts) -> impl Iterator<Item = IpAddr> {
    // A map of nftables has several services in a line; the key of each ends before `: goto`.
    let in_map = |line: &'_ str| -> Vec<IpAddr> {
        let keys = line.split(" : goto service-").take(line.matches(" : goto service-").count());
        keys.filter_map(|key| key.split([' ', ',']).rev().find_map(|word| word.parse().ok())).collect()
    };
    let cluster_ip = |words: Vec<String>| {
        let is_cluster_ip = value(&words, "--comment")?.contains("cluster IP");
        net(value(&words, "-d")?).filter(|_| is_cluster_ip).map(|net| net.addr())
    };
    service_rules(facts).filter_map(cluster_ip).chain(service_lines(facts).flat_map(in_map))
}

/// A service has an address of a pod.
fn overlap(facts: &NodeFacts) -> Option<NodeFinding> {
    let env = facts.subnet_file.env()?;
    let mut inside = service_addresses(facts).filter(|addr| env.networks.iter().any(|network| network.contains(addr)));
    let addr = inside.next()?;
    let network = env.networks.iter().map(|network| network.trunc()).find(|network| network.contains(&addr))?;
    let evidence = format!("the service address {addr} is inside Network {network}: services and pods share addresses");
    let remedy =
        "give services another range (--service-cluster-ip-range of kube-apiserver), or the cluster another Network";
    Some(finding(evidence, remedy.to_owned()))
}

/// Returns for people that a service has an address of a network that a link connects. kube-proxy takes the packets to services before the route
/// matters, so this does no harm unless a host there has the address of a service. No table shows such a host: packets to it never leave. Links that
/// have the single addresses of services connect no network.
pub(super) fn not_examined(facts: &NodeFacts) -> Option<String> {
    let is_network = |route: &&OtherRoute| {
        let is_of_kernel = !route.has_gateway && route.protocol == libc::RTPROT_KERNEL;
        is_of_kernel && route.dst.prefix_len() < route.dst.max_prefix_len()
    };
    let networks: Vec<&OtherRoute> = facts.ways.other_routes.iter().filter(is_network).collect();
    let around = |addr: IpAddr| Some((addr, networks.iter().find(|route| route.dst.contains(&addr))?));
    let (addr, OtherRoute { dst, link, .. }) = service_addresses(facts).find_map(around)?;
    Some(format!(
        "whether a host has the address of a service: services such as {addr} are inside {dst}, the network of {link}, and such a host is not \
         reached from here"
    ))
}

/// A pod that is an endpoint of a service cannot reach itself by the address of the service. Without kube-proxy this does not matter.
fn hairpin(facts: &NodeFacts) -> Option<NodeFinding> {
    let pods = &facts.pods;
    facts.rules.kube_proxy.as_ref().filter(|_| !pods.promiscuous)?;
    let without =
        || pods.links.iter().filter(|link| link.port.is_some_and(|port| !port.hairpin)).map(|link| link.name.as_str());
    without().next()?;
    let evidence = format!(
        "{} no hairpin mode ({}): these pods do not reach themselves by the address of a service",
        ports_that(without().count(), "has", "have"),
        some_of(without())
    );
    let remedy = "set `\"hairpinMode\": true` in the delegate of the CNI configuration, and delete these pods; until then, for each port: \
                  bridge link set dev PORT hairpin on";
    Some(finding(evidence, remedy.to_owned()))
}

#[cfg(test)]
mod tests {
    use weft_subnet::env::SubnetEnv;

    use super::*;
    use crate::saved_rules::SavedRules;
    use crate::subnet_file::SubnetFile;

    fn facts() -> NodeFacts {
        let mut facts = NodeFacts::of_a_node();
        facts.rules.nft = Some("table ip other {\n}\n".to_owned());
        facts
    }

    #[test]
    fn the_right_range_for_kube_proxy_has_both_families() {
        let text = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_IPV6_NETWORK=fd00:5::/48\n\
                    FLANNEL_IPV6_SUBNET=fd00:5:0:7::1/64\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        let mut facts = NodeFacts { subnet_file: SubnetFile::Good(SubnetEnv::parse(text).unwrap()), ..facts() };
        let rule = "-A KUBE-SVC-A ! -s 10.42.0.0/16 -d 10.96.0.1/32 -p tcp -j KUBE-MARK-MASQ";
        facts.rules.iptables = vec![SavedRules::of_nat("iptables-nft", rule)];
        let found = check(&facts);
        assert!(found.len() == 1 && found[0].remedy.contains("`clusterCIDR: 10.5.0.0/16,fd00:5::/48`"), "{found:?}");
    }

    #[test]
    fn the_sources_that_a_load_balancer_may_have_are_no_range_of_pods() {
        for (rule, found) in [
            ("ip saddr != 203.0.113.0/24 drop", 0),
            ("ip saddr != 10.42.0.0/16 jump mark-for-masquerade", 1),
            ("ip saddr != 10.5.0.0/16 jump mark-for-masquerade", 0),
        ] {
            let mut facts = facts();
            let chain = format!("\tchain firewall-A {{\n\t\t{rule}\n\t}}\n");
            facts.rules.nft = Some(format!("table ip kube-proxy {{\n{chain}}}\n"));
            assert_eq!(check(&facts).len(), found, "{rule}");
        }
    }

    #[test]
    fn a_service_inside_a_network_of_this_node_is_said_and_is_no_finding() {
        let rule = "-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment \"default/kubernetes:https cluster IP\" -j KUBE-SVC-A";
        for (dst, has_gateway, protocol, said) in [
            ("10.96.0.0/24", false, libc::RTPROT_KERNEL, true),
            ("10.0.0.0/8", false, libc::RTPROT_KERNEL, true),
            ("10.97.0.0/16", false, libc::RTPROT_KERNEL, false),
            // kube-proxy or a cache of DNS gives a link the address itself.
            ("10.96.0.1/32", false, libc::RTPROT_KERNEL, false),
            // A default gateway for a part of the Internet, or the route of a program.
            ("10.0.0.0/8", true, libc::RTPROT_STATIC, false),
            ("10.96.0.0/12", false, libc::RTPROT_STATIC, false),
        ] {
            let mut facts = facts();
            facts.rules.iptables = vec![SavedRules::of_nat("iptables-nft", rule)];
            let dst = dst.parse().unwrap();
            facts.ways.other_routes = vec![OtherRoute { dst, link: "docker0".to_owned(), has_gateway, protocol }];
            assert_eq!(not_examined(&facts).is_some(), said, "{dst} {has_gateway} {protocol}");
            assert_eq!(check(&facts), [], "services work: {dst} {has_gateway} {protocol}");
        }
    }

    #[test]
    fn a_table_of_ipvs_that_was_flushed_is_found() {
        let mut facts = facts();
        assert_eq!(check(&facts), []);
        facts.rules.ipvs_is_empty = true;
        let found = check(&facts);
        assert!(found.len() == 1 && found[0].evidence.contains("the table of IPVS is empty"), "{found:?}");
    }

    #[test]
    fn pods_without_kube_proxy_are_found_once_it_does_not_only_begin() {
        let service = "10.96.0.1:443".parse().unwrap();
        for (seconds, found) in [(119, false), (120, true)] {
            let mut facts = facts();
            facts.rules.unserved = Some(Unserved { service, age: Duration::from_secs(seconds) });
            let findings = check(&facts);
            assert_eq!(findings.len(), usize::from(found), "{findings:?}");
            assert!(findings.iter().all(|one| one.evidence.contains("kube-proxy does not")), "{findings:?}");
            // Without a file, kubeadm replaces the kube-proxy of the whole cluster by its defaults.
            assert!(findings.iter().all(|one| one.remedy.contains("kube-proxy --config FILE")), "{findings:?}");
        }
    }

    #[test]
    fn services_without_rules_are_found_only_if_everything_was_read() {
        let mut facts = facts();
        facts.rules.iptables = vec![SavedRules::of_nat("iptables-nft", "")];
        assert_eq!(check(&facts), [], "no kube-proxy");
        facts.rules.kube_proxy = Some("kube-proxy (pid 7)".to_owned());
        assert_eq!(check(&facts).len(), 1);
        for change in [
            (|facts: &mut NodeFacts| facts.rules.ipvs = true) as fn(&mut NodeFacts),
            |facts| facts.rules.unreadable = vec!["nft: no".to_owned()],
            |facts| facts.rules.nft = Some("table ip kube-proxy {\n}\n".to_owned()),
            |facts| facts.rules.nft = None,
            |facts| {
                let jump = "-A PREROUTING -m comment --comment \"kubernetes service portals\" -j KUBE-SERVICES";
                facts.rules.iptables = vec![SavedRules::of_nat("iptables-nft", jump)];
            },
        ] {
            let mut facts = facts.clone();
            change(&mut facts);
            assert_eq!(check(&facts), []);
        }
    }
}
