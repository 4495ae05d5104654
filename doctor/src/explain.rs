// SPDX-License-Identifier: Apache-2.0
//! `weft explain`: what this node does with one packet, step by step, and where the packet is lost.
//!
//! [`read`] asks the kernel, [`steps`] and [`route_steps`] decide, in functions without side effects. The caller lists the rules
//! of iptables, [`rules`] reads those of nftables, and both are judged in [`crate::kernel::rules`].

mod explanation;
pub mod facts;
pub mod ipvs;
pub mod legacy_tables;
mod mtu_steps;
mod pod;
pub mod pod_rules;
mod pod_steps;
mod port_steps;
mod read;
mod render;
mod route_steps;
mod route_text;
mod rule_steps;
pub mod rules;
mod shared_steps;
mod steps;
#[cfg(test)]
mod tests;

pub use explanation::{Explanation, State, Step, Verdict};
pub use read::read;
pub use steps::decide;
