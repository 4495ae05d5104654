// SPDX-License-Identifier: Apache-2.0
//! Commands that need no running agent.

pub mod cleanup;
pub mod copy;
pub mod docker_options;
pub mod install_cni;
