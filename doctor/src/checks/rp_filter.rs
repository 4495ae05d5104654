// SPDX-License-Identifier: Apache-2.0
//! The kernel drops packets from some nodes.

use crate::facts::NodeFacts;
use crate::facts::ways::ReversePath;
use crate::finding::{NodeFinding, finding};
use crate::remedies::set_sysctl;

/// The value of rp_filter with which a packet must come in over the link by which its source is reached.
const STRICT: u64 = 1;

/// Peers that are reached over different links answer over another link than the kernel expects. Where both ends choose the same link, as with
/// DirectRouting of vxlan, nothing is lost.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let paths = &facts.ways.reverse_path;
    if paths.len() < 2 || facts.unreachable == 0 {
        return Vec::new();
    }
    let strict = paths.iter().filter(|path| path.value == STRICT);
    let one = |path: &ReversePath| {
        let (link, count) = (&path.link, paths.len());
        let evidence = format!(
            "nodes are reached over {count} links, and rp_filter of {link} is strict: packets from a node that chooses another \
             link than this one are dropped"
        );
        // The larger one of this value and that for all links counts. In the form with dots, a dot in the name of a link would separate
        // words.
        finding(evidence, set_sysctl(&format!("net/ipv4/conf/{link}/rp_filter=2")))
    };
    strict.map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strict_rp_filter_matters_only_if_nodes_are_reached_over_several_links() {
        let path = |link: &str, value: u64| ReversePath { link: link.to_owned(), value };
        let mut facts = NodeFacts::of_a_node();
        facts.ways.reverse_path = vec![path("flannel.1", 1)];
        assert_eq!(check(&facts), []);
        facts.ways.reverse_path.push(path("eth0", 2));
        assert_eq!(check(&facts), [], "both ends choose the same link: nothing is lost");
        facts.unreachable = 1;
        assert_eq!(check(&facts).len(), 1, "only one of the two is strict");
        facts.ways.reverse_path[0].value = 0;
        assert_eq!(check(&facts), []);
    }
}
