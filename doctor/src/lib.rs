// SPDX-License-Identifier: Apache-2.0
//! `weft doctor`: finds what is wrong with a node. The caller says what is examined ([`sources`]), [`facts`] reads, [`checks`] decides, without side
//! effects.
//!
//! `weft explain`: follows one packet through this node ([`explain`]).
//!
//! `weft doctor pods`: finds what deleted pods left behind on a node ([`pods`]).
//!
//! All of them ask the kernel ([`kernel`]) and read /proc ([`processes`]).

pub mod checks;
pub mod explain;
pub mod facts;
pub mod finding;
pub mod kernel;
mod known_links;
mod namespaces;
pub mod pods;
pub mod processes;
mod programs;
pub mod remedies;
mod saved_rules;
pub mod sources;
mod subnet_file;
mod sysctl;

/// Examines this node. An empty `only` means all checks.
///
/// # Errors
/// The kernel's tables or /proc cannot be read, so that nothing is known.
pub fn examine_node(sources: &sources::NodeSources, only: &[String]) -> anyhow::Result<checks::NodeReport> {
    Ok(checks::decide(&facts::read(sources)?, only))
}
