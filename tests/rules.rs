// SPDX-License-Identifier: Apache-2.0
//! The traffic rules, judged by packets: which source address does the other end see? The lab has two nodes with pods on bridges
//! (br_netfilter), and a host outside the cluster. Needs root, iproute2, iptables of both flavours, nftables and etcd.
//! `WEFT_BIN` names the binary under test (the static one in `make test`), `FLANNELD` that of flannel.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "rules/adapter.rs"]
mod adapter;
#[path = "rules/alone.rs"]
mod alone;
#[path = "rules/blackhole.rs"]
mod blackhole;
#[path = "rules/closed.rs"]
mod closed;
#[path = "common/exe.rs"]
mod exe;
#[path = "common/flanneld.rs"]
mod flanneld;
#[path = "rules/forward.rs"]
mod forward;
#[path = "rules/guard.rs"]
mod guard;
#[allow(dead_code, reason = "others use more of it")]
#[path = "common/namespace.rs"]
mod namespace;
#[path = "rules/packets.rs"]
mod packets;
#[path = "common/patience.rs"]
mod patience;
#[path = "common/places.rs"]
mod places;
#[path = "common/program.rs"]
mod program;
#[path = "rules/repair.rs"]
mod repair;
#[path = "rules/site.rs"]
mod site;
#[path = "common/thread.rs"]
mod thread;
#[path = "rules/traffic.rs"]
mod traffic;
#[path = "rules/verdicts.rs"]
mod verdicts;
