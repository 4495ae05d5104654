// SPDX-License-Identifier: Apache-2.0
//! The sysctls of the network.

use std::fs;
use std::path::Path;

/// Reads a number below /proc/sys/net. The kernel shows the namespace of the calling thread there.
pub(crate) fn number(name: &str) -> Option<u64> {
    fs::read_to_string(Path::new("/proc/sys/net").join(name)).ok()?.trim().parse().ok()
}
