// SPDX-License-Identifier: Apache-2.0
//! Commands that need no running agent.

pub mod cleanup;
pub mod install_cni;
