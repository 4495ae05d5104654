// SPDX-License-Identifier: Apache-2.0
//! The plugin in place of flannel's, called as a runtime does, with real delegates in namespaces of the tests' own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "plugin/agent.rs"]
mod agent;
#[path = "plugin/bridge.rs"]
mod bridge;
#[path = "plugin/gc.rs"]
mod gc;
#[path = "plugin/input.rs"]
mod input;
#[path = "plugin/killed.rs"]
mod killed;
#[path = "plugin/portmap.rs"]
mod portmap;
#[path = "plugin/replay.rs"]
mod replay;
#[path = "plugin/site.rs"]
mod site;
#[path = "plugin/verbs.rs"]
mod verbs;
