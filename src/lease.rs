// SPDX-License-Identifier: Apache-2.0
//! The lease of this node: how it is acquired at the start, and renewed while the agent runs.

pub mod acquire;
pub mod contest;
pub mod tasks;
