// SPDX-License-Identifier: Apache-2.0
//! Many agents, real kernel, real etcd: whole clusters in network namespaces. Needs root, iproute2, ping and etcd.
//! `WEFT_BIN` names the binary under test (the static one in `make test`), `FLANNELD` that of flannel.

#[path = "mesh/cni.rs"]
mod cni;
#[path = "mesh/interop.rs"]
mod interop;
#[path = "mesh/killed.rs"]
mod killed;
#[path = "common/places.rs"]
mod places;
#[path = "mesh/reach.rs"]
mod reach;
#[path = "mesh/restart.rs"]
mod restart;
#[path = "mesh/saved.rs"]
mod saved;
#[path = "mesh/store.rs"]
mod store;
#[path = "mesh/subnets.rs"]
mod subnets;

use std::path::PathBuf;

use places::Place;
use weft::lab::LabOptions;

/// Runs a test on this thread, which the lab's namespaces belong to.
fn on_this_thread(test: impl Future<Output = anyhow::Result<()>>) {
    let place = Place::take();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(test));
    drop(place);
    if let Err(error) = result {
        panic!("{error:#}");
    }
}

/// Options with the binary under test.
fn options() -> LabOptions {
    let exe = std::env::var_os("WEFT_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_weft").into());
    LabOptions { exe: Some(PathBuf::from(exe)), ..LabOptions::default() }
}
