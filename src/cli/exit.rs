// SPDX-License-Identifier: Apache-2.0
//! The exit codes besides 0.

/// The command failed, or cannot give an answer.
pub const FAILURE: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// The answer to a question is not the good one: `weft plan` has something to write, a way of `weft mesh` is broken, `weft doctor` has
/// findings, or `weft explain` says that the packet is lost.
pub const FOUND: u8 = 2;
