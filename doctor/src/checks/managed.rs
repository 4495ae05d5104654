// SPDX-License-Identifier: Apache-2.0
//! Another program manages weft's devices.

use crate::facts::NodeFacts;
use crate::facts::self_assigned::SelfAssigned;
use crate::facts::ways::ManagedLink;
use crate::finding::{NodeFinding, counted, finding};

/// A program that manages the devices of weft removes what it does not know.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    // The patterns are those of deploy/systemd/weft-unmanaged.conf. A second line in the same file would replace the first one, and
    // links come and go.
    let one = |ManagedLink { link, program }: &ManagedLink| {
        let evidence = format!("{program} manages {link}: it may set {link} down and remove its addresses and routes");
        let remedy = match *program {
            "NetworkManager" => {
                "put `unmanaged-devices+=interface-name:flannel*;interface-name:cni0` below [keyfile] of a file in /etc/NetworkManager/conf.d, \
                 and `nmcli general reload`"
            }
            _ => {
                "put `[Match] Name=flannel* cni0` and `[Link] Unmanaged=yes` into /etc/systemd/network/05-weft.network, and `networkctl reload`"
            }
        };
        finding(evidence, remedy.to_owned())
    };
    facts.ways.managed.iter().map(one).chain(facts.self_assigned.as_ref().map(self_assigned)).collect()
}

/// A program takes links of weft or of pods for links that need DHCP.
fn self_assigned(SelfAssigned { link, addr, count, program }: &SelfAssigned) -> NodeFinding {
    let who = program.unwrap_or("another program");
    let more = match count - 1 {
        0 => String::new(),
        more => format!(" and addresses of that kind to {}", counted(more, "more link", "more links")),
    };
    let evidence = format!(
        "{who} gave {link} the address {addr}{more}, because nobody there answers its DHCP: it may write a default route over that \
         link, too"
    );
    let exclude = match program {
        Some("dhcpcd") => {
            // A restart would take the address of the uplink away for a moment.
            "put `denyinterfaces veth* cni0 flannel*` into /etc/dhcpcd.conf, and `dhcpcd -n`".to_owned()
        }
        _ => format!("exclude the links veth*, cni0 and flannel* in the configuration of {who} (a DHCP client)"),
    };
    finding(evidence, format!("{exclude}; then ip addr del {addr}/16 dev {link}, and so on for each such link"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remedy_names_the_program_that_manages_a_device() {
        let mut facts = NodeFacts::of_a_node();
        let managed = |program| ManagedLink { link: "flannel.1".to_owned(), program };
        facts.ways.managed = vec![managed("NetworkManager"), managed("systemd-networkd")];
        let addr = [169, 254, 7, 9].into();
        let one = SelfAssigned { link: "veth1".to_owned(), addr, count: 3, program: Some("dhcpcd") };
        facts.self_assigned = Some(one.clone());
        let findings = check(&facts);
        assert!(findings[2].evidence.contains("dhcpcd gave veth1 the address 169.254.7.9 and "), "{findings:?}");
        assert!(findings[2].remedy.contains("denyinterfaces veth* cni0 flannel*"), "{findings:?}");
        facts.self_assigned = Some(SelfAssigned { program: None, ..one });
        assert!(check(&facts)[2].remedy.starts_with("exclude the links veth*, "), "{findings:?}");
        // Who follows one remedy after the other excludes all links, also those that come later.
        let words =
            ["`unmanaged-devices+=interface-name:flannel*;interface-name:cni0`", "`[Match] Name=flannel* cni0`"];
        for (word, found) in words.into_iter().zip(&findings) {
            assert!(found.remedy.contains(word), "{found:?}");
        }
    }
}
