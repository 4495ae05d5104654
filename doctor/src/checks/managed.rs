// SPDX-License-Identifier: Apache-2.0
//! Another program manages weft's devices.

use crate::facts::NodeFacts;
use crate::facts::ways::ManagedLink;
use crate::finding::{NodeFinding, finding};

/// A program that manages the devices of weft removes what it does not know.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |ManagedLink { link, program }: &ManagedLink| {
        let evidence = format!("{program} manages {link}: it may set {link} down and remove its addresses and routes");
        let remedy = match *program {
            "NetworkManager" => format!(
                "put `unmanaged-devices=interface-name:{link}` below [keyfile] of a file in /etc/NetworkManager/conf.d, and `nmcli general reload`"
            ),
            _ => format!(
                "put `[Match] Name={link}` and `[Link] Unmanaged=yes` into /etc/systemd/network/05-weft.network, and `networkctl reload`"
            ),
        };
        finding(evidence, remedy)
    };
    facts.ways.managed.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_names_the_program_that_manages_a_device() {
        let mut facts = NodeFacts::of_a_node();
        let managed = |program| ManagedLink { link: "flannel.1".to_owned(), program };
        facts.ways.managed = vec![managed("NetworkManager"), managed("systemd-networkd")];
        let findings = check(&facts);
        assert!(findings[0].remedy.contains("unmanaged-devices=interface-name:flannel.1"), "{findings:?}");
        assert!(findings[1].remedy.contains("Unmanaged=yes"), "{findings:?}");
    }
}
