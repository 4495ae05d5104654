// SPDX-License-Identifier: Apache-2.0
//! The lease of this node: how it is acquired at the start, kept while the agent runs, and handled by hand.

pub mod acquire;
pub mod admin;
pub mod contest;
pub mod keep;
