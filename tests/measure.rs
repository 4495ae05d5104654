// SPDX-License-Identifier: Apache-2.0
//! `weft lab --measure` against the real kernel, iperf3 and ping: short streams, one backend.

#[path = "common/exe.rs"]
mod exe;

use weft_lab::measure::{measure, table};
use weft_lab::{BackendKind, LabOptions};

#[test]
fn a_backend_is_measured_beside_its_underlay() {
    let options = LabOptions { exe: Some(exe::weft_exe()), ..LabOptions::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let row = runtime.block_on(measure(&options, BackendKind::Vxlan, 1)).unwrap();
    let (pods, bare) = row.paths.unwrap();
    for path in [pods, bare] {
        assert!(path.tcp > 0.0 && path.udp > 0.0 && path.trip > 0.0, "{path:?}");
    }
    assert_eq!(row.mtu, 1450);
    let text = table(&[row]);
    assert!(text.contains("vxlan      1450"), "{text}");
}
