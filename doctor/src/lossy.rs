// SPDX-License-Identifier: Apache-2.0
//! Peers that only some packets reach, as the probes of the agent found.

use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;

/// A peer that only some packets reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LossyPeer {
    /// Its subnet and its published addresses, for people.
    pub name: String,
    /// How many of the last packets were lost.
    pub lost: u32,
    /// The number of these packets.
    pub asked: u32,
}

/// Packets to some peers get lost now and then.
pub(super) fn lossy(facts: &NodeFacts) -> impl Iterator<Item = NodeFinding> {
    let uplink = facts.path_links.links.iter().find(|link| link.is_uplink);
    let link = uplink.map(|link| format!(" show {}", link.name)).unwrap_or_default();
    facts.lossy.iter().map(move |LossyPeer { name, lost, asked }| {
        let remedy = format!(
            "`ip -s link{link}` on both nodes shows errors and dropped packets of the card, then look at the switch; weft doctor --only \
             firewall,traffic-control names what drops packets at random"
        );
        finding(format!("packets to {name} get lost: {lost} of the last {asked}"), remedy)
    })
}

#[cfg(test)]
mod tests {
    use super::super::checks::decide;
    use super::super::node::AgentAnswer;
    use super::super::uplinks::{PathLink, PathLinks};
    use super::*;

    #[test]
    fn a_peer_that_loses_packets_is_found_with_the_link_to_look_at() {
        let mut facts = NodeFacts { agent: AgentAnswer::Problems(Vec::new()), ..NodeFacts::default() };
        let text = |facts: &NodeFacts| decide(facts, &["agent".to_owned()]).render();
        assert_eq!(text(&facts), "0 findings\n");
        facts.lossy = vec![LossyPeer { name: "10.5.2.0/24 (192.0.2.2)".to_owned(), lost: 3, asked: 8 }];
        let wanted = "packets to 10.5.2.0/24 (192.0.2.2) get lost: 3 of the last 8\n    `ip -s link` on both nodes";
        assert!(text(&facts).contains(wanted), "{}", text(&facts));
        let uplink = PathLink { name: "eth0".to_owned(), is_uplink: true, ..PathLink::default() };
        facts.path_links = PathLinks { links: vec![uplink], ..PathLinks::default() };
        assert!(text(&facts).contains("`ip -s link show eth0` on both nodes"), "{}", text(&facts));
    }
}
