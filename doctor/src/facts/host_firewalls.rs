// SPDX-License-Identifier: Apache-2.0
//! ufw and firewalld: how their rules are known, and how they are told to accept packets of the tunnel.

use weft_cni::iptables::Table;

/// The table of firewalld in nftables.
const FIREWALLD: &str = "firewalld";

/// A program that keeps the firewall of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostFirewall {
    /// ufw, of Ubuntu.
    Ufw,
    /// firewalld, of Red Hat and SUSE.
    Firewalld,
}

impl HostFirewall {
    /// Returns the program whose chains of iptables packets to this host pass, in table filter.
    pub(super) fn of_iptables(filter: &Table) -> Option<HostFirewall> {
        let rules = &filter.get("INPUT")?.rules;
        let leads_to = |begin: &str| rules.iter().any(|rule| rule.contains(begin));
        if leads_to("-j ufw") {
            Some(HostFirewall::Ufw)
        } else {
            leads_to("-j INPUT_ZONES").then_some(HostFirewall::Firewalld)
        }
    }

    /// Returns the program that writes a table of nftables.
    pub(super) fn of_nftables(table: &str) -> Option<HostFirewall> {
        (table == FIREWALLD).then_some(HostFirewall::Firewalld)
    }

    /// Returns the name.
    pub(super) fn name(self) -> &'static str {
        match self {
            HostFirewall::Ufw => "ufw",
            HostFirewall::Firewalld => FIREWALLD,
        }
    }

    /// Returns what makes it accept packets to a UDP port from this node, or from all nodes, that arrive on a link.
    pub(super) fn accept(self, node: Option<&str>, port: u16, link: &str) -> String {
        match self {
            HostFirewall::Ufw => {
                let (from, what_then) = match node {
                    Some(node) => (node, "; and so on for each node"),
                    None => ("NODES", ", where NODES is the network of the nodes"),
                };
                format!("ufw allow proto udp from {from} to any port {port}{what_then}")
            }
            HostFirewall::Firewalld => format!(
                "firewall-cmd --permanent --add-port={port}/udp && firewall-cmd --reload; with --zone if {link} is not in the default zone \
                 (firewall-cmd --get-zone-of-interface={link})"
            ),
        }
    }
}
