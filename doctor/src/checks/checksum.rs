// SPDX-License-Identifier: Apache-2.0
//! Packets arrive with wrong checksums.

use weft_netlink::ethtool::TX_CHECKSUM;

use crate::facts::NodeFacts;
use crate::facts::underlay::USUAL_DEVICE;
use crate::facts::ways::ChecksumErrors;
use crate::finding::{NodeFinding, finding};

/// Fewer packets with a wrong checksum than this are not reported.
const MIN_WRONG: u64 = 10;
/// Packets with a wrong checksum are reported from one in this many.
const ONE_WRONG_IN: u64 = 1000;

/// A network card that computes wrong checksums for tunnel packets makes the receiver drop them.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let is_bad = |wrong: u64, received: u64| wrong >= MIN_WRONG && wrong * ONE_WRONG_IN >= received;
    // The device has the same name on all nodes.
    let device = facts.ways.vxlan.iter().find(|device| device.ours).map_or(USUAL_DEVICE, |device| device.name.as_str());
    let bad = facts.ways.checksums.iter().filter(|errors| is_bad(errors.wrong, errors.received));
    let one = |errors: &ChecksumErrors| {
        let (protocol, wrong, received) = (errors.protocol.to_uppercase(), errors.wrong, errors.received);
        let evidence =
            format!("{wrong} of {received} received {protocol} packets had a wrong checksum, and were dropped");
        let remedy = format!(
            "on the nodes that send them: `ethtool -K {device} {TX_CHECKSUM} off`, or the agent's flag --tx-checksum-off; if this helps, the \
             network card or its driver computes wrong checksums for tunnel packets"
        );
        finding(evidence, remedy)
    };
    bad.map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_checksums_are_found_from_one_in_a_thousand() {
        for (wrong, received, found) in [(9, 9, false), (10, 10_000, true), (10, 10_001, false), (5000, 6000, true)] {
            let mut facts = NodeFacts::of_a_node();
            facts.ways.checksums = vec![ChecksumErrors { protocol: "Icmp", wrong, received }];
            assert_eq!(check(&facts).len(), usize::from(found), "{wrong} of {received}");
        }
    }
}
