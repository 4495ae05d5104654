// SPDX-License-Identifier: Apache-2.0
//! `weft doctor`: finds what is wrong with a node. [`node`] gathers facts, [`checks`] decides, without side effects.
//!
//! `weft explain`: follows one packet through this node ([`explain`]).
//!
//! `weft doctor pods`: finds what deleted pods left behind on a node ([`pods`]).
//!
//! All of them ask the kernel ([`kernel`]) and read /proc ([`processes`]).

pub mod absent_agent;
pub mod agent_problems;
mod arp_rules;
mod base;
mod certificates;
mod chains;
pub mod checks;
pub mod cni_files;
mod cni_plugins;
pub mod duplicates;
pub mod explain;
mod filters;
pub mod finding;
mod forwarding;
mod host_firewalls;
pub mod ipsec;
pub mod kernel;
pub mod legacy_tables;
mod limits;
pub mod locks;
pub mod lossy;
pub mod node;
mod node_findings;
pub mod offload;
mod other_networks;
pub mod other_rules;
mod own_subnet;
mod peer_port;
mod pod_addresses;
mod pod_links;
pub mod pods;
mod policy_rules;
mod port_users;
pub mod processes;
mod programs;
mod rule_findings;
pub mod store;
mod store_findings;
mod tunnel;
mod tunnel_rules;
pub mod underlay;
mod uplinks;
mod way_findings;
pub mod ways;

/// Examines this node. An empty `only` means all checks.
///
/// # Errors
/// The kernel's tables or /proc cannot be read, so that nothing is known.
pub fn examine_node(sources: &node::NodeSources, only: &[String]) -> anyhow::Result<checks::NodeReport> {
    Ok(checks::decide(&node::read(sources)?, only))
}
