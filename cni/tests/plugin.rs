// SPDX-License-Identifier: Apache-2.0
//! Tests of the plugin that replaces flannel's. It is called as a runtime would call it, with real delegates, in
//! network namespaces that the tests create.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "plugin/agent.rs"]
mod agent;
#[path = "plugin/bandwidth.rs"]
mod bandwidth;
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
