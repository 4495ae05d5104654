// SPDX-License-Identifier: Apache-2.0
//! Tests of `weft-veth`. It is called as a runtime would call it, with the real host-local, in network namespaces that
//! the tests create.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "veth/faults.rs"]
mod faults;
#[path = "veth/node.rs"]
mod node;
#[path = "veth/pods.rs"]
mod pods;
#[allow(dead_code, reason = "shared with the tests of the other plugin")]
#[path = "plugin/site.rs"]
mod site;
#[path = "veth/verbs.rs"]
mod verbs;
