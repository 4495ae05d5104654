// SPDX-License-Identifier: Apache-2.0
//! What may be wrong with the links by which this node reaches others: programs that see packets before the kernel does, simulated loss,
//! a bridge that takes the packets, and addresses that another host has, too.

use std::collections::BTreeMap;
use std::net::IpAddr;

use weft_netlink::rtnl::{Addr, Link, Qdisc, Route};

use super::arp_rules;
use super::base::{BRIDGE, sysctl};
use super::filters;
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::ways::is_ours;

/// The queueing discipline that delays and drops packets, for tests.
const NETEM: &str = "netem";
/// The queueing disciplines that carry the filters of tc.
const FILTERED: [&str; 2] = ["clsact", "ingress"];
/// The queueing disciplines that limit the rate.
const SHAPERS: [&str; 2] = ["tbf", "htb"];
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
    /// True if weft made it.
    pub is_of_weft: bool,
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
    /// A queueing discipline of this kind that limits the rate of all packets that leave, to this many bytes a second if it has one rate.
    Shaper(&'static str, Option<u64>),
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
pub fn read(links: &[Link], (addrs, routes): (&[Addr], &[Route]), qdiscs: &[Qdisc], published: &[IpAddr]) -> PathLinks {
    let by_index: BTreeMap<u32, &Link> = links.iter().map(|link| (link.index, link)).collect();
    let bridge = links.iter().find(|link| link.name == BRIDGE).map(|link| link.index);
    let of_link = |link: &Link| qdiscs.iter().filter(|qdisc| qdisc.index == link.index).collect::<Vec<_>>();
    let suspects = |link: &Link| {
        let qdiscs = of_link(link);
        let has_qdisc = |kind: &str| qdiscs.iter().any(|qdisc| qdisc.kind == kind);
        let filters = FILTERED.into_iter().map(|kind| (Suspect::Filters(kind), has_qdisc(kind)));
        let all = [(Suspect::Netem, has_qdisc(NETEM)), (Suspect::Xdp, link.xdp)].into_iter().chain(filters);
        let shaper = |qdisc: &&Qdisc| {
            let kind = SHAPERS.into_iter().find(|kind| qdisc.is_root && qdisc.kind == *kind)?;
            Some(Suspect::Shaper(kind, qdisc.rate))
        };
        let found = all.filter(|(_, is_there)| *is_there).map(|(suspect, _)| suspect);
        found.chain(qdiscs.iter().filter_map(shaper)).collect()
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
            is_of_weft: is_ours(link),
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
        if facts.unreachable == 0 || !(link.is_uplink || link.is_of_weft) {
            continue;
        }
        findings.extend(link.suspects.iter().filter_map(|suspect| shaper(link, *suspect)));
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
            Suspect::Netem | Suspect::Xdp | Suspect::Shaper(..) => None,
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
    findings.extend(filters::of_pods(facts));
    findings
}

/// A queueing discipline that lets less pass than the link does. Somebody may want that, as long as no packets are lost.
fn shaper(link: &PathLink, suspect: Suspect) -> Option<NodeFinding> {
    let Suspect::Shaper(kind, rate) = suspect else { return None };
    let name = &link.name;
    let rate = rate.map_or_else(|| " by classes".to_owned(), |bytes| format!(" to {} bit/s", bytes.saturating_mul(8)));
    let evidence = format!(
        "the queueing discipline {kind} limits the rate of {name}{rate}, and drops what does not fit, and packets do not reach a peer"
    );
    Some(finding(evidence, format!("tc qdisc del dev {name} root; then find the program that made it")))
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
    findings.extend(arp_rules::found(facts));
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
        let pods = PathLink { is_uplink: false, ..xdp };
        assert_eq!(traffic_control(&facts(pods.clone(), 3)), [], "a link of pods");
        let of_weft = PathLink { is_of_weft: true, ..pods };
        assert_eq!(traffic_control(&facts(of_weft.clone(), 0)), []);
        assert_eq!(traffic_control(&facts(of_weft, 3)).len(), 1, "a device of weft");
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
        let qdisc = |index, kind: &str| Qdisc { index, kind: kind.to_owned(), ..Qdisc::default() };
        let tbf = |is_root| Qdisc { is_root, rate: Some(1250), ..qdisc(2, "tbf") };
        let qdiscs =
            [qdisc(2, "fq_codel"), qdisc(2, "clsact"), tbf(false), tbf(true), qdisc(3, "netem"), qdisc(4, "netem")];
        let addr = Addr { index: 2, addr: [192, 0, 2, 1].into(), len: 24, global: true, duplicate: false };
        let found = read(&links, (&[addr], &[]), &qdiscs, &[addr.addr]);
        let named: Vec<_> = found.links.into_iter().map(|link| (link.name, link.suspects)).collect();
        let of_eth0 = vec![Suspect::Filters("clsact"), Suspect::Shaper("tbf", Some(1250))];
        let wanted = [("eth0".to_owned(), of_eth0), ("flannel.1".to_owned(), vec![Suspect::Netem])];
        assert_eq!(named, wanted, "eth9 is not on the way");
    }
}
