// SPDX-License-Identifier: Apache-2.0
//! The sysctls of the network.

use std::fs;
use std::path::Path;

/// Reads a number below /proc/sys/net. The kernel shows the namespace of the calling thread there.
pub(crate) fn number(name: &str) -> Option<u64> {
    fs::read_to_string(Path::new("/proc/sys/net").join(name)).ok()?.trim().parse().ok()
}

/// Returns true if this kernel has no IPv6.
pub(crate) fn kernel_lacks_ipv6() -> bool {
    !Path::new("/proc/sys/net/ipv6").exists()
}
