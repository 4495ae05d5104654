// SPDX-License-Identifier: Apache-2.0
//! netem, XDP programs, filters or rate limits of tc may drop packets.

use crate::facts::NodeFacts;
use crate::facts::filters::{Harm, PodFilter};
use crate::facts::path_links::{PathLink, Suspect};
use crate::finding::{MAX_NAMED, NodeFinding, counted, finding};

/// Something drops or delays packets where neither routes nor firewalls show it.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    let lost = counted(facts.unreachable, "peer", "peers");
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
                "packets do not reach {lost}, and an XDP program on {name} sees all packets before the firewall and may drop those of the tunnel"
            );
            let remedy = format!(
                "`ip -d link show {name}` shows it; if nobody needs it (another network left it): ip link set {name} xdp off"
            );
            findings.push(finding(evidence, remedy));
        }
        let filters = |suspect: &Suspect| match suspect {
            Suspect::Filters(kind) => Some(*kind),
            Suspect::Netem | Suspect::Xdp | Suspect::Shaper { .. } => None,
        };
        if let Some(kind) = link.suspects.iter().find_map(filters) {
            let evidence = format!(
                "packets do not reach {lost}, and filters of tc on {name} see all packets before the firewall and may drop those of the tunnel"
            );
            let remedy = format!(
                "`tc filter show dev {name} ingress` and `... egress` show them; if nobody needs them (Cilium leaves some): tc qdisc del dev {name} {kind}"
            );
            findings.push(finding(evidence, remedy));
        }
    }
    findings.extend(of_pods(facts));
    findings
}

/// A queueing discipline that lets less pass than the link does. Somebody may want that, as long as no packets are lost.
fn shaper(link: &PathLink, suspect: Suspect) -> Option<NodeFinding> {
    let Suspect::Shaper { kind, rate } = suspect else { return None };
    let name = &link.name;
    let rate = rate.map_or_else(|| " by classes".to_owned(), |bytes| format!(" to {} bit/s", bytes.saturating_mul(8)));
    let effect = match kind {
        "tbf" | "htb" => format!("limits the rate of {name}{rate}, and drops what does not fit"),
        "bfifo" => format!("limits the queue of {name}, and drops what does not fit"),
        _ => format!("holds the packets of {name} back or drops them"),
    };
    let evidence = format!("the queueing discipline {kind} {effect}, and packets do not reach a peer");
    Some(finding(evidence, format!("tc qdisc del dev {name} root; then find the program that made it")))
}

/// Filters that drop all packets of pods. Those that may drop some are named only while a peer is not reached.
fn of_pods(facts: &NodeFacts) -> Vec<NodeFinding> {
    let lost = counted(facts.unreachable, "peer", "peers");
    let counts = |filter: &&PodFilter| filter.harm == Harm::Drops || facts.unreachable > 0;
    let one = |filter: &PodFilter| {
        let PodFilter { link, qdisc, place, packets, harm } = filter;
        let evidence = match harm {
            Harm::Drops => format!("a filter of tc on {link} drops all packets {packets}"),
            Harm::Polices => format!(
                "packets do not reach {lost}, and a filter of tc on {link} drops packets {packets} that are beyond a rate"
            ),
            Harm::Program => format!(
                "packets do not reach {lost}, and a program of tc (bpf, direct-action) on {link} may drop packets {packets}"
            ),
        };
        let remedy = format!(
            "`tc filter show dev {link} {place}` shows it; if nobody needs it: tc qdisc del dev {link} {qdisc}; then find the program that made it"
        );
        finding(evidence, remedy)
    };
    facts.filters.iter().filter(counts).take(MAX_NAMED).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::path_links::PathLinks;

    fn facts(link: PathLink, unreachable: usize) -> NodeFacts {
        let path_links = PathLinks { links: vec![link], duplicates: Vec::new() };
        NodeFacts { path_links, unreachable, ..NodeFacts::default() }
    }

    #[test]
    fn netem_is_always_a_finding_and_xdp_only_if_peers_are_not_reached() {
        let link = PathLink { name: "eth0".to_owned(), is_uplink: true, ..PathLink::default() };
        assert_eq!(check(&facts(link.clone(), 3)), []);
        let netem = check(&facts(PathLink { suspects: vec![Suspect::Netem], ..link.clone() }, 0));
        assert!(netem.len() == 1 && netem[0].remedy.ends_with("tc qdisc del dev eth0 root"), "{netem:?}");
        let xdp = PathLink { suspects: vec![Suspect::Xdp], ..link };
        assert_eq!(check(&facts(xdp.clone(), 0)), []);
        let found = check(&facts(xdp.clone(), 3));
        assert!(found.len() == 1 && found[0].evidence.contains("do not reach 3 peers"), "{found:?}");
        assert!(found[0].remedy.ends_with("ip link set eth0 xdp off"), "{found:?}");
        let pods = PathLink { is_uplink: false, ..xdp };
        assert_eq!(check(&facts(pods.clone(), 3)), [], "a link of pods");
        let of_weft = PathLink { is_of_weft: true, ..pods };
        assert_eq!(check(&facts(of_weft.clone(), 0)), []);
        assert_eq!(check(&facts(of_weft, 3)).len(), 1, "a device of weft");
    }

    #[test]
    fn what_may_drop_packets_of_pods_is_named_only_while_a_peer_is_not_reached() {
        let filter = |harm| PodFilter {
            link: "cni0".to_owned(),
            qdisc: "clsact",
            place: "ingress",
            packets: "that arrive on it",
            harm,
        };
        for (harm, unreachable, found) in [
            (Harm::Drops, 0, 1),
            (Harm::Polices, 0, 0),
            (Harm::Program, 0, 0),
            (Harm::Polices, 2, 1),
            (Harm::Program, 2, 1),
        ] {
            let facts = NodeFacts { filters: vec![filter(harm)], unreachable, ..NodeFacts::default() };
            let findings = of_pods(&facts);
            assert_eq!(findings.len(), found, "{harm:?} {unreachable}");
            assert!(findings.iter().all(|finding| finding.remedy.contains("tc qdisc del dev cni0 clsact")));
        }
    }
}
