// SPDX-License-Identifier: Apache-2.0
//! Agents in namespaces with the Node objects of a real API server, without kubelets. The tests need root, iproute2, ping, openssl and
//! what tools/kube-binaries builds; `make test-kube` runs them. `WEFT_BIN` names the binary under test.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "kube_mesh/away.rs"]
mod away;
#[path = "kube_mesh/change.rs"]
mod change;
#[path = "kube_mesh/condition.rs"]
mod condition;
#[path = "kube_mesh/events.rs"]
mod events;
#[path = "common/exe.rs"]
mod exe;
#[path = "kube_mesh/nodes.rs"]
mod nodes;
#[path = "kube_mesh/only_ipv6.rs"]
mod only_ipv6;
#[path = "common/places.rs"]
mod places;
#[path = "common/program.rs"]
mod program;
#[path = "kube_mesh/refused.rs"]
mod refused;
#[path = "kube_mesh/relay.rs"]
mod relay;
#[path = "kube_mesh/release.rs"]
mod release;
#[path = "../subnet/tests/kube/server.rs"]
mod server;
#[path = "kube_mesh/site.rs"]
mod site;
#[path = "common/thread.rs"]
mod thread;
#[path = "kube_mesh/tokens.rs"]
mod tokens;
