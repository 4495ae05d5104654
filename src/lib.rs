// SPDX-License-Identifier: Apache-2.0
//! The weft agent as a library, so that tests and benches drive the same parts as the binary.

pub mod admin;
pub mod agent;
pub mod cleanup;
pub mod cli;
pub mod doctor;
pub mod fights;
pub mod files;
pub mod health;
pub mod kernel;
pub mod lab;
pub mod leases;
pub mod log;
pub mod metrics;
pub mod node;
pub mod notify;
pub mod options;
pub mod own;
pub mod pass;
pub mod plan;
pub mod report;
pub mod say;
pub mod start;
pub mod status;
pub mod sysctls;
pub mod uplink;
