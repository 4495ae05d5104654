// SPDX-License-Identifier: Apache-2.0
//! A card is known to spoil checksums of tunnels.

use weft_netlink::ethtool::TX_CHECKSUM;

use crate::facts::NodeFacts;
use crate::facts::offload::Offloaded;
use crate::finding::{NodeFinding, finding};

/// The card may spoil the checksums of packets that the tunnel sends.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |Offloaded { device, card }: &Offloaded| {
        let evidence = format!(
            "{device} leaves the checksums of packets to {card}, which is a VMXNET3 card of VMware; with some versions of ESXi it \
             spoils those of tunnelled packets, and the receiver drops them"
        );
        let remedy = format!(
            "`ethtool -K {device} {TX_CHECKSUM} off`, and the agent's flag --tx-checksum-off to keep it off; the node then computes them"
        );
        finding(evidence, remedy)
    };
    facts.offload.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_and_the_card_are_named() {
        let one = Offloaded { device: "flannel.7".to_owned(), card: "ens192".to_owned() };
        let facts = NodeFacts { offload: vec![one], ..NodeFacts::default() };
        let [found] = &check(&facts)[..] else { panic!("one finding is expected") };
        assert!(found.evidence.contains("flannel.7") && found.evidence.contains("ens192"), "{}", found.evidence);
        assert!(found.remedy.contains("ethtool -K flannel.7 tx-checksum-ip-generic off"), "{}", found.remedy);
        assert_eq!(check(&NodeFacts::default()), []);
    }
}
