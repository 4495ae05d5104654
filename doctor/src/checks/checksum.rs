// SPDX-License-Identifier: Apache-2.0
//! Packets arrive with wrong checksums.

use weft_netlink::ethtool::TX_CHECKSUM;

use crate::facts::NodeFacts;
use crate::facts::checksums::ChecksumErrors;
use crate::facts::underlay::USUAL_DEVICE;
use crate::finding::{NodeFinding, finding};

/// A network card that computes wrong checksums for tunnel packets makes the receiver drop them. The counters know an old fault for as long as
/// the machine runs, so only one that goes on is a finding.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    // The device has the same name on all nodes. The counters are those of IPv4.
    let ours = facts.ways.vxlan.iter().filter(|device| device.ours);
    let device = ours.min_by_key(|device| device.vxlan.v6).map_or(USUAL_DEVICE, |device| device.name.as_str());
    let bad = facts.checksums.iter().filter(|errors| errors.are_many() && !errors.are_old());
    let one = |errors: &ChecksumErrors| {
        let (protocol, wrong, received) = (errors.protocol.to_uppercase(), errors.wrong, errors.received);
        let evidence = format!(
            "{wrong} of {received} received {protocol} packets had a wrong checksum, and were dropped; {} of them arrived just now",
            errors.recent
        );
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
    fn wrong_checksums_are_a_finding_only_while_they_arrive() {
        for (recent, found) in [(0, false), (1, true)] {
            let checksums = vec![ChecksumErrors { protocol: "Icmp", wrong: 20, received: 100, recent }];
            let facts = NodeFacts { checksums, ..NodeFacts::of_a_node() };
            assert_eq!(check(&facts).len(), usize::from(found), "{recent}");
        }
    }
}
