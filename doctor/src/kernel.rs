// SPDX-License-Identifier: Apache-2.0
//! What the kernel says and does. `weft doctor` and `weft explain` both use it.
//!
//! [`Kernel`] asks for single entries ([`entries`]). [`nft`] follows a packet through rules of nftables, [`rules`] through those of iptables,
//! and [`links`] through chains at a link and in bridges. [`ends`] says which addresses packets of a tunnel have. [`queues`] knows which programs
//! may decide about a packet, [`ipset`] which addresses are in a set, [`tracked`] what connections keep, and [`ipvs`] the endpoints of services.

mod ask;
pub mod ends;
pub mod entries;
pub mod ipset;
pub mod ipvs;
pub mod links;
pub mod nft;
pub mod queues;
pub mod rules;
pub mod tracked;

pub use ask::Kernel;
