// SPDX-License-Identifier: Apache-2.0
//! The weft agent as a library, so that tests and benches use the same parts as the binary.

pub mod agent;
pub mod async_socket;
pub mod cli;
pub mod commands;
pub mod conflicts;
pub mod conflist;
pub mod data_path;
pub mod debt;
pub mod extension;
pub mod files;
pub mod firewall;
pub mod instance;
pub mod kernel;
#[cfg(test)]
mod layers;
pub mod lease;
pub mod log;
pub mod node;
pub mod observe;
pub mod offload;
pub mod options;
pub mod pass;
pub mod plan;
pub mod probe;
pub mod processes;
pub mod saved;
pub mod subnet_file;
pub mod sysctls;
pub mod uplink;
