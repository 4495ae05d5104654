// SPDX-License-Identifier: Apache-2.0
//! The kernel adapter with the real kernel. Each test has a network namespace of its own, which ends with its thread.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "kernel/adapter.rs"]
mod adapter;
#[path = "kernel/adapter_devices.rs"]
mod adapter_devices;
#[path = "kernel/adapter_monitor.rs"]
mod adapter_monitor;
#[path = "kernel/adapter_net.rs"]
mod adapter_net;
#[path = "kernel/adapter_replace.rs"]
mod adapter_replace;
#[path = "kernel/agent.rs"]
mod agent;
#[path = "kernel/echo.rs"]
mod echo;
#[path = "kernel/fake.rs"]
mod fake;
#[path = "kernel/fence.rs"]
mod fence;
#[path = "kernel/guard.rs"]
mod guard;
#[path = "common/namespace.rs"]
mod namespace;
#[path = "kernel/nft.rs"]
mod nft;
#[path = "kernel/offload.rs"]
mod offload;
#[path = "common/patience.rs"]
mod patience;
#[path = "kernel/rtnl.rs"]
mod rtnl;
#[path = "kernel/sysctls.rs"]
mod sysctls;
#[path = "kernel/tun.rs"]
mod tun;
