// SPDX-License-Identifier: Apache-2.0
//! Deterministic simulation of whole clusters in one process: docs/simulation.md.
//!
//! The agents are real: `weft::agent::serve_in` with the real store code for etcd and for Kubernetes. What surrounds them is simulated:
//! time, the etcd server or the Kubernetes API server and the network to it, the kernel of each machine, and the network between the
//! machines.

pub mod agent;
pub mod api;
pub mod chance;
pub mod check;
pub mod cluster;
pub mod disk;
pub mod etcd;
pub mod event;
pub mod hostile;
pub mod kernel;
pub mod lossless;
pub mod machine;
pub mod net_conf;
pub mod nodes;
pub mod pb;
pub mod run;
pub mod scenario;
pub mod server;
pub mod shared;
pub mod shrink;
pub mod store;
pub mod timeline;
pub mod walk;
pub mod wire;
