// SPDX-License-Identifier: Apache-2.0
//! flannel's program, which is not part of weft: the only tests that may be left out are those that need it.

use std::io::Write as _;
use std::path::PathBuf;

/// What `FLANNELD` names; else says so past the test runner's capture, for a person must see it.
pub fn flanneld() -> Option<PathBuf> {
    let path = std::env::var_os("FLANNELD").map(PathBuf::from);
    if path.is_none() {
        let _ = std::io::stderr().lock().write_all(b"skipped: no FLANNELD\n");
    }
    path
}
