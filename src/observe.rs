// SPDX-License-Identifier: Apache-2.0
//! What others see of the agent: readiness, `weft status`, metrics, systemd's status and the condition of the Kubernetes Node.

pub mod clients_by_age;
pub mod entries;
pub mod fault;
pub mod fault_events;
pub mod health;
pub mod history;
pub mod http;
pub mod mesh;
pub mod metrics;
pub mod node_condition;
pub mod preview;
pub mod problem;
pub mod readiness;
pub mod report;
pub mod socket;
pub mod status;
pub mod systemd;
