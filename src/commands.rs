// SPDX-License-Identifier: Apache-2.0
//! Commands that are more than one question to the agent.

pub mod cleanup;
pub mod copy;
pub mod docker_options;
pub mod doctor;
pub mod history;
pub mod install_cni;
pub mod mesh;
