// SPDX-License-Identifier: Apache-2.0
//! What may be wrong with the links by which this node reaches others: programs that see packets before the kernel does, simulated loss,
//! a bridge that takes the packets, and addresses that another host has, too.

use std::collections::BTreeMap;
use std::net::IpAddr;

use weft_netlink::rtnl::{Addr, Link, Route};

use super::node::{BRIDGE, NodeFacts, sysctl};
use super::node_findings::{NodeFinding, finding};
use super::ways::is_ours;

/// The queueing discipline that delays and drops packets, for tests.
const NETEM: &str = "netem";
/// The queueing disciplines that carry the filters of tc.
const FILTERED: [&str; 2] = ["clsact", "ingress"];
/// The kinds of links that take the packets of the links below them.
const TAKERS: [&str; 4] = ["bridge", "bond", "team", "openvswitch"];
/// The kinds of links that need ARP. Physical devices have none.
const WITH_ARP: [&str; 6] = ["", "veth", "bridge", "bond", "team", "vlan"];
/// The value of arp_ignore with which the kernel answers for no address.
const IGNORES_ALL: u64 = 8;
/// The sysctls of all links.
const ALL: &str = "all";

/// A link on the way of packets between nodes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PathLink {
    /// Its name.
    pub name: String,
    /// Name and kind of the link above it.
    pub master: Option<(String, String)>,
    /// True if it has the published address or a default route, and neither weft nor a CNI plugin made it.
    pub is_uplink: bool,
    /// What keeps the kernel from asking for MAC addresses or from answering on this link, of an uplink or the bridge of pods.
    pub arp: Option<ArpOff>,
    /// What may drop packets on it.
    pub suspects: Vec<Suspect>,
}

/// Why there is no ARP on a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArpOff {
    /// The flag IFF_NOARP: the kernel does not ask.
    Flag,
    /// The sysctl arp_ignore: the kernel does not answer. The name is that of the link, or `all`.
    Ignored(String),
}

/// Something on a link that may drop packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suspect {
    /// The queueing discipline netem.
    Netem,
    /// An XDP program.
    Xdp,
    /// Filters of tc for packets that arrive or leave, in a queueing discipline of this kind.
    Filters(&'static str),
}

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PathLinks {
    /// The uplinks, weft's devices, the bridge of pods and its ports.
    pub links: Vec<PathLink>,
    /// The IPv6 addresses of this node that another host has, too, each with its link.
    pub duplicates: Vec<(IpAddr, String)>,
}

/// Reads from the tables of the kernel. `published` contains the addresses that this node publishes, if they are known.
pub fn read(
    links: &[Link],
    (addrs, routes): (&[Addr], &[Route]),
    qdiscs: &[(u32, String)],
    published: &[IpAddr],
) -> PathLinks {
    let by_index: BTreeMap<u32, &Link> = links.iter().map(|link| (link.index, link)).collect();
    let bridge = links.iter().find(|link| link.name == BRIDGE).map(|link| link.index);
    let has_qdisc = |link: &Link, kind: &str| qdiscs.iter().any(|(index, name)| *index == link.index && name == kind);
    let suspects = |link: &Link| {
        let filters = FILTERED.into_iter().map(|kind| (Suspect::Filters(kind), has_qdisc(link, kind)));
        let all = [(Suspect::Netem, has_qdisc(link, NETEM)), (Suspect::Xdp, link.xdp)].into_iter().chain(filters);
        all.filter(|(_, is_there)| *is_there).map(|(suspect, _)| suspect).collect()
    };
    let path_link = |link: &Link| {
        let is_default = routes.iter().any(|route| route.dst.is_none() && route.index == link.index);
        let is_published = addrs.iter().any(|addr| addr.index == link.index && published.contains(&addr.addr));
        let of_pods = bridge.is_some_and(|bridge| link.index == bridge || link.master == bridge);
        let is_uplink = (is_default || is_published) && !is_ours(link) && !of_pods;
        let master = by_index.get(&link.master).filter(|_| link.master != 0);
        (is_uplink || is_ours(link) || of_pods).then(|| PathLink {
            name: link.name.clone(),
            master: master
                .filter(|master| master.name != BRIDGE)
                .map(|master| (master.name.clone(), master.kind.clone())),
            is_uplink,
            arp: arp_off(link).filter(|_| is_uplink || link.name == BRIDGE),
            suspects: suspects(link),
        })
    };
    let duplicates = addrs.iter().filter(|addr| addr.duplicate);
    let named = |addr: &Addr| Some((addr.addr, by_index.get(&addr.index)?.name.clone()));
    PathLinks {
        links: links.iter().filter_map(path_link).collect(),
        duplicates: duplicates.filter_map(named).collect(),
    }
}

fn arp_off(link: &Link) -> Option<ArpOff> {
    if link.mac.is_none() || !WITH_ARP.contains(&link.kind.as_str()) {
        return None;
    }
    if link.is_without_arp() {
        return Some(ArpOff::Flag);
    }
    let ignores = |name: &&str| sysctl(&format!("ipv4/conf/{name}/arp_ignore")) == Some(IGNORES_ALL);
    [ALL, &link.name].into_iter().find(ignores).map(|name| ArpOff::Ignored(name.to_owned()))
}

/// Something drops or delays packets where neither routes nor firewalls show it.
pub(super) fn traffic_control(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    for link in &facts.path_links.links {
        let name = &link.name;
        if link.suspects.contains(&Suspect::Netem) {
            let evidence = format!(
                "the queueing discipline netem of {name} delays, drops or changes packets, as a test of faults wants it"
            );
            findings
                .push(finding(evidence, format!("`tc qdisc show dev {name}` shows it; tc qdisc del dev {name} root")));
        }
        // Programs that work well are no fault. What they do with a packet cannot be read.
        if facts.unreachable == 0 || !link.is_uplink {
            continue;
        }
        if link.suspects.contains(&Suspect::Xdp) {
            let evidence = format!(
                "packets do not reach {} peers, and an XDP program on {name} sees all packets before the firewall and may drop those of the tunnel",
                facts.unreachable
            );
            let remedy = format!(
                "`ip -d link show {name}` shows it; if nobody needs it (another network left it): ip link set {name} xdp off"
            );
            findings.push(finding(evidence, remedy));
        }
        let filters = |suspect: &Suspect| match suspect {
            Suspect::Filters(kind) => Some(*kind),
            Suspect::Netem | Suspect::Xdp => None,
        };
        if let Some(kind) = link.suspects.iter().find_map(filters) {
            let evidence = format!(
                "packets do not reach {} peers, and filters of tc on {name} see all packets before the firewall and may drop those of the tunnel",
                facts.unreachable
            );
            let remedy = format!(
                "`tc filter show dev {name} ingress` and `... egress` show them; if nobody needs them (Cilium leaves some): tc qdisc del dev {name} {kind}"
            );
            findings.push(finding(evidence, remedy));
        }
    }
    findings
}

/// A bridge or a bond takes the packets of a link that has an address or routes of its own.
pub(super) fn uplink(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    for link in &facts.path_links.links {
        let Some((master, kind)) = &link.master else { continue };
        let name = &link.name;
        let takes = TAKERS.contains(&kind.as_str());
        if link.is_uplink && takes {
            let evidence = format!(
                "{name} has an address or the default route, and is a part of {master} ({kind}), which takes the packets that arrive on {name}"
            );
            let remedy =
                format!("give the address and the routes of {name} to {master}, or `ip link set {name} nomaster`");
            findings.push(finding(evidence, remedy));
        } else if !link.is_uplink && (takes || kind == "vrf") {
            let what = if takes {
                "takes the packets that arrive on it"
            } else {
                "routes its packets by another table than that of weft's routes"
            };
            let evidence = format!("{name} is a part of {master} ({kind}), which {what}");
            findings.push(finding(
                evidence,
                format!("ip link set {name} nomaster; then exclude {name} in the program that did it"),
            ));
        }
    }
    for found in facts.path_links.links.iter().filter_map(|link| no_arp(facts, link)) {
        // The setting for all links is found at each of them.
        if !findings.contains(&found) {
            findings.push(found);
        }
    }
    findings
}

/// The kernel does not ask for MAC addresses on a link, or does not answer. Permanent neighbours can do the work of ARP on an uplink.
fn no_arp(facts: &NodeFacts, link: &PathLink) -> Option<NodeFinding> {
    let name = &link.name;
    match link.arp.as_ref()? {
        ArpOff::Flag if link.is_uplink && facts.unreachable == 0 => None,
        ArpOff::Flag => {
            let evidence = format!("{name} has the flag NOARP, so this node asks nobody there for a MAC address");
            Some(finding(evidence, format!("ip link set {name} arp on")))
        }
        ArpOff::Ignored(conf) => {
            let extent = if conf == ALL { "on no link" } else { "not on this link" };
            let evidence =
                format!("net/ipv4/conf/{conf}/arp_ignore is {IGNORES_ALL}, so this node answers ARP requests {extent}");
            let remedy = format!("sysctl -w net/ipv4/conf/{conf}/arp_ignore=0; and correct it in /etc/sysctl.d");
            Some(finding(evidence, remedy))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(link: PathLink, unreachable: usize) -> NodeFacts {
        let path_links = PathLinks { links: vec![link], duplicates: Vec::new() };
        NodeFacts { path_links, unreachable, ..NodeFacts::default() }
    }

    #[test]
    fn netem_is_always_a_finding_and_xdp_only_if_peers_are_not_reached() {
        let link = PathLink { name: "eth0".to_owned(), is_uplink: true, ..PathLink::default() };
        assert_eq!(traffic_control(&facts(link.clone(), 3)), []);
        let netem = traffic_control(&facts(PathLink { suspects: vec![Suspect::Netem], ..link.clone() }, 0));
        assert!(netem.len() == 1 && netem[0].remedy.ends_with("tc qdisc del dev eth0 root"), "{netem:?}");
        let xdp = PathLink { suspects: vec![Suspect::Xdp], ..link };
        assert_eq!(traffic_control(&facts(xdp.clone(), 0)), []);
        let found = traffic_control(&facts(xdp.clone(), 3));
        assert!(found.len() == 1 && found[0].evidence.contains("do not reach 3 peers"), "{found:?}");
        assert!(found[0].remedy.ends_with("ip link set eth0 xdp off"), "{found:?}");
        assert_eq!(traffic_control(&facts(PathLink { is_uplink: false, ..xdp }, 3)), [], "a device of weft");
    }

    #[test]
    fn links_that_never_need_arp_are_no_finding() {
        let flags = nix::libc::IFF_NOARP.cast_unsigned();
        let link = |kind: &str| Link { kind: kind.to_owned(), flags, mac: Some([2; 6]), ..Link::default() };
        assert_eq!(arp_off(&link("dummy")), None);
        assert_eq!(arp_off(&Link { mac: None, ..link("") }), None, "a tunnel");
        assert_eq!(arp_off(&link("vlan")), Some(ArpOff::Flag));
    }

    #[test]
    fn queueing_disciplines_belong_to_their_links() {
        let link = |index, name: &str| Link { index, name: name.to_owned(), ..Link::default() };
        let links = [link(2, "eth0"), link(3, "flannel.1"), link(4, "eth9")];
        let qdiscs =
            [(2, "fq_codel".to_owned()), (2, "clsact".to_owned()), (3, "netem".to_owned()), (4, "netem".to_owned())];
        let addr = Addr { index: 2, addr: [192, 0, 2, 1].into(), len: 24, global: true, duplicate: false };
        let found = read(&links, (&[addr], &[]), &qdiscs, &[addr.addr]);
        let named: Vec<_> = found.links.into_iter().map(|link| (link.name, link.suspects)).collect();
        let wanted =
            [("eth0".to_owned(), vec![Suspect::Filters("clsact")]), ("flannel.1".to_owned(), vec![Suspect::Netem])];
        assert_eq!(named, wanted, "eth9 is not on the way");
    }
}
