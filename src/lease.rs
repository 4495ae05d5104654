// SPDX-License-Identifier: Apache-2.0
//! The lease of this node: how it is acquired at the start, renewed while the agent runs, and handled by commands.

pub mod acquire;
pub mod admin;
pub mod contest;
pub mod tasks;
