// SPDX-License-Identifier: Apache-2.0
//! flannel's program, which is not part of weft. Every test that needs it is marked `#[ignore = "needs FLANNELD"]`, so that the
//! runner counts it as ignored and not as passed. `make test-flannel` runs these tests.

use std::path::PathBuf;

/// Returns the program that `FLANNELD` names. It panics if the variable is not set or names no file, because a test that was requested and cannot
/// run has failed.
pub fn flanneld() -> PathBuf {
    let Some(path) = std::env::var_os("FLANNELD").map(PathBuf::from) else {
        panic!("set FLANNELD=/path/to/flanneld to run this test");
    };
    assert!(path.is_file(), "FLANNELD names {}, which is no file", path.display());
    path
}
