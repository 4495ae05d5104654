// SPDX-License-Identifier: Apache-2.0
//! Real Kubernetes clusters in namespaces of this machine. They install exactly what deploy/ ships, from our own image.
//! The tests need root and what `make kube-test` prepares. `FLANNELD` names flannel's binary for the migration.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]
#![allow(clippy::disallowed_methods, reason = "the environment names binaries and images; polling needs pauses")]
#![allow(clippy::print_stdout, reason = "the tests print how long things took")]

#[path = "kube/cluster.rs"]
mod cluster;
#[path = "kube/demo_test.rs"]
mod demo_test;
#[path = "kube/drop_in.rs"]
mod drop_in;
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
#[path = "kube/udp.rs"]
mod udp;
