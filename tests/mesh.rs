// SPDX-License-Identifier: Apache-2.0
//! Many agents, real kernel, real etcd: whole clusters in network namespaces. Needs root, iproute2, ping and etcd.
//! `WEFT_BIN` names the binary under test (the static one in `make test`), `FLANNELD` that of flannel.

#[path = "mesh/change.rs"]
mod change;
#[path = "mesh/cluster.rs"]
mod cluster;
#[path = "mesh/cni.rs"]
mod cni;
#[path = "mesh/contest.rs"]
mod contest;
#[path = "common/exe.rs"]
mod exe;
#[path = "mesh/explain.rs"]
mod explain;
#[path = "mesh/extension.rs"]
mod extension;
#[path = "common/flanneld.rs"]
mod flanneld;
#[path = "mesh/identity.rs"]
mod identity;
#[path = "mesh/interop.rs"]
mod interop;
#[path = "mesh/killed.rs"]
mod killed;
#[path = "mesh/options.rs"]
mod net_conf_options;
#[path = "common/places.rs"]
mod places;
#[path = "mesh/probe.rs"]
mod probe;
#[path = "common/program.rs"]
mod program;
#[path = "mesh/reach.rs"]
mod reach;
#[path = "mesh/release.rs"]
mod release;
#[path = "mesh/restart.rs"]
mod restart;
#[path = "mesh/saved.rs"]
mod saved;
#[path = "mesh/store.rs"]
mod store;
#[path = "mesh/subnets.rs"]
mod subnets;
#[path = "common/thread.rs"]
mod thread;
#[path = "mesh/udp.rs"]
mod udp;
#[path = "mesh/ui.rs"]
mod ui;

use exe::weft_exe;
use thread::on_this_thread;
use weft_lab::LabOptions;

/// Options with the binary under test.
fn options() -> LabOptions {
    LabOptions { exe: Some(weft_exe()), ..LabOptions::default() }
}
