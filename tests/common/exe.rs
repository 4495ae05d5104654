// SPDX-License-Identifier: Apache-2.0
//! The binary under test.

use std::path::PathBuf;

/// Returns the binary that `WEFT_BIN` names, or else that of this build.
pub fn weft_exe() -> PathBuf {
    std::env::var_os("WEFT_BIN").map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_weft")), PathBuf::from)
}
