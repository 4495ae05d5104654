// SPDX-License-Identifier: Apache-2.0
//! Another program manages weft's devices.

use crate::facts::NodeFacts;
use crate::facts::self_assigned::SelfAssigned;
use crate::facts::ways::ManagedLink;
use crate::finding::{NodeFinding, counted, finding};

/// A program that manages the devices of weft removes what it does not know.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let managed = &facts.ways.managed;
    // A second line of this kind would replace the first one, so each remedy names all links.
    let links_of =
        |wanted: &'static str| managed.iter().filter(move |one| one.program == wanted).map(|one| one.link.as_str());
    let one = |ManagedLink { link, program }: &ManagedLink| {
        let evidence = format!("{program} manages {link}: it may set {link} down and remove its addresses and routes");
        let remedy = match *program {
            "NetworkManager" => format!(
                "put `unmanaged-devices={}` below [keyfile] of a file in /etc/NetworkManager/conf.d, and `nmcli general reload`",
                links_of(program).map(|link| format!("interface-name:{link}")).collect::<Vec<_>>().join(";")
            ),
            _ => format!(
                "put `[Match] Name={}` and `[Link] Unmanaged=yes` into /etc/systemd/network/05-weft.network, and `networkctl reload`",
                links_of(program).collect::<Vec<_>>().join(" ")
            ),
        };
        finding(evidence, remedy)
    };
    managed.iter().map(one).chain(facts.self_assigned.as_ref().map(self_assigned)).collect()
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
    fn who_follows_one_remedy_after_the_other_excludes_all_links() {
        let mut facts = NodeFacts::of_a_node();
        let both = |program| ["flannel.1", "cni0"].map(|link| ManagedLink { link: link.to_owned(), program });
        facts.ways.managed = ["NetworkManager", "systemd-networkd"].into_iter().flat_map(both).collect();
        let findings = check(&facts);
        assert_eq!(findings.len(), 4, "{findings:?}");
        let words =
            ["`unmanaged-devices=interface-name:flannel.1;interface-name:cni0`", "`[Match] Name=flannel.1 cni0`"];
        for (number, found) in findings.iter().enumerate() {
            assert!(found.remedy.contains(words[number / 2]), "{found:?}");
        }
    }

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
        assert!(findings[0].remedy.contains("unmanaged-devices=interface-name:flannel.1"), "{findings:?}");
        assert!(findings[1].remedy.contains("Unmanaged=yes"), "{findings:?}");
    }
}
