// SPDX-License-Identifier: Apache-2.0
//! What the rules of nftables do with a packet: [`read`] asks the kernel for rules and sets, [`decode`] makes each an [`instruction`], and [`walk`]
//! follows the packet as the kernel does (`nft_do_chain` in net/netfilter/nf_tables_core.c).
//!
//! A rule is a list of small instructions that load parts of the packet into registers and test them. What the kernel knows and this program does
//! not (the state of a rate limit, a random number) is unknown in a register, and a rule that tests it is followed in both cases.

mod attributes;
mod chance;
mod decode;
mod instruction;
mod read;
mod registers;
mod set;
#[cfg(test)]
mod tests;
mod text;
mod walk;

pub use read::follow;
