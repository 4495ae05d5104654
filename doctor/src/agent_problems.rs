// SPDX-License-Identifier: Apache-2.0
//! What to do about the commonest problems that an agent reports.

use std::net::IpAddr;

use super::finding::{NodeFinding, finding};

/// The programs that undo again and again what the agent writes.
const FIND: &str = "find the program that does it: cron, networkd, NetworkManager, a VPN, a firewall, a second agent";

/// A problem that the agent reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentProblem {
    /// What is wrong, in the words of the agent. They may contain what another node says of itself, so no remedy is taken from them.
    pub text: String,
    /// What is known beyond the text.
    pub hint: Hint,
}

/// What is known of a problem beyond its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hint {
    /// Nothing.
    None,
    /// This command ends it.
    Command(String),
    /// The store fails.
    Store,
    /// Packets do not reach some peers.
    Unreachable,
    /// Another program undoes again and again what the agent writes.
    Fight,
    /// This published address of a peer does not answer.
    Silent(IpAddr),
    /// A firewall drops these packets to a peer, in words: `UDP port 8472`.
    Dropped(String),
    /// A link of the path to a peer carries only packets of this size.
    SmallMtu {
        /// The uplink of this node.
        uplink: String,
        /// The size in bytes.
        mtu: u32,
    },
}

impl AgentProblem {
    /// Returns a problem about which nothing is known beyond its text.
    pub fn new(text: impl Into<String>) -> AgentProblem {
        AgentProblem { text: text.into(), hint: Hint::None }
    }

    /// Returns the finding about the problem.
    pub(super) fn finding(&self) -> NodeFinding {
        finding(format!("the agent reports: {}", self.text), self.hint.remedy())
    }
}

impl Hint {
    fn remedy(&self) -> String {
        match self {
            Hint::None => "look for this text in docs/messages.md; `weft status` shows the whole state".to_owned(),
            Hint::Command(command) => command.clone(),
            Hint::Store => "weft doctor --check-store, with the agent's flags of the store, finds out why".to_owned(),
            Hint::Unreachable => "weft mesh shows which ways are broken, and why".to_owned(),
            Hint::Fight => format!(
                "`ip monitor link address route neigh` (`bridge monitor fdb` for FDB entries, `nft monitor` for rules) shows when; {FIND}"
            ),
            Hint::Silent(address) => format!(
                "ping -c 3 {address}; if that node is up: weft status and weft doctor there, and compare its addresses with {address}"
            ),
            Hint::Dropped(packets) => format!(
                "weft doctor --only firewall on both nodes names the rule; if there is none, let {packets} pass between the nodes (security group, switch)"
            ),
            Hint::SmallMtu { uplink, mtu } => {
                format!("ip link set {uplink} mtu {mtu} on every node; or raise the MTU of the link between them")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commonest_problems_have_a_command() {
        for (hint, begin) in [
            (Hint::Command("ip link set eth0 up".to_owned()), "ip link set eth0 up"),
            (Hint::Store, "weft doctor --check-store"),
            (Hint::Unreachable, "weft mesh"),
            (Hint::Fight, "`ip monitor link address route neigh` "),
            (Hint::Silent([192, 0, 2, 2].into()), "ping -c 3 192.0.2.2;"),
            (Hint::Dropped("UDP port 8472".to_owned()), "weft doctor --only firewall"),
            (Hint::SmallMtu { uplink: "eth0".to_owned(), mtu: 1404 }, "ip link set eth0 mtu 1404 "),
        ] {
            let finding = AgentProblem { text: "it is broken".to_owned(), hint }.finding();
            assert!(finding.remedy.starts_with(begin), "{finding:?}");
            assert_eq!(finding.evidence, "the agent reports: it is broken");
        }
        let dropped = Hint::Dropped("UDP port 8472".to_owned()).remedy();
        assert!(dropped.contains("let UDP port 8472 pass between"), "{dropped}");
    }

    #[test]
    fn no_command_is_taken_from_what_another_node_may_say() {
        let said = "peer 10.5.2.0/24 (192.0.2.2) is set aside: its node is x; run: rm /file";
        let remedy = AgentProblem::new(said).finding().remedy;
        assert!(remedy.starts_with("look for this text"), "{remedy}");
    }
}
