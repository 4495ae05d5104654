// SPDX-License-Identifier: Apache-2.0
//! Real clusters of Kubernetes in namespaces of this machine, which install exactly what deploy/ ships, from our own image.
//! Needs root and what `make kube-test` prepares; `FLANNELD` names flannel's binary for the migration.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]
#![allow(
    clippy::disallowed_methods,
    reason = "binaries and images are named by the environment; pauses between two looks"
)]
#![allow(clippy::print_stdout, reason = "how long everything took")]

#[path = "kube/cluster.rs"]
mod cluster;
#[path = "kube/demo_test.rs"]
mod demo_test;
#[path = "kube/dual.rs"]
mod dual;
#[path = "common/flanneld.rs"]
mod flanneld;
#[path = "kube/fresh.rs"]
mod fresh;
#[path = "kube/install.rs"]
mod install;
#[path = "kube/migrate.rs"]
mod migrate;
#[path = "kube/ping.rs"]
mod ping;
#[path = "common/places.rs"]
mod places;
#[path = "kube/power.rs"]
mod power;
#[path = "kube/routed.rs"]
mod routed;
