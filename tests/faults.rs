// SPDX-License-Identifier: Apache-2.0
//! One agent as a process on the real kernel, while the test breaks everything that can break. Each test has a network namespace of its own,
//! and a directory store whose peers are lease files without a machine. The audit is an hour away, so only an event can lead to a repair.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "faults/alloc.rs"]
mod alloc;
#[path = "faults/claims.rs"]
mod claims;
#[path = "faults/conflist.rs"]
mod conflist;
#[path = "faults/devices.rs"]
mod devices;
#[path = "faults/entries.rs"]
mod entries;
#[path = "common/exe.rs"]
mod exe;
#[path = "faults/fences.rs"]
mod fences;
#[path = "faults/hostile.rs"]
mod hostile;
#[path = "faults/identity.rs"]
mod identity;
#[path = "faults/instances.rs"]
mod instances;
#[path = "common/namespace.rs"]
mod namespace;
#[path = "faults/process.rs"]
mod process;
#[path = "faults/rules.rs"]
mod rules;
#[path = "faults/site.rs"]
mod site;
#[path = "faults/store.rs"]
mod store;
#[path = "faults/takeover.rs"]
mod takeover;
#[path = "faults/uplink.rs"]
mod uplink;
