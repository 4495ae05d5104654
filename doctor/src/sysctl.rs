// SPDX-License-Identifier: Apache-2.0
//! The sysctls, which are files below /proc/sys.

use std::fs;
use std::path::Path;

/// Reads a number below /proc/sys/net. The kernel shows the namespace of the calling thread there.
pub(crate) fn number(name: &str) -> Option<u64> {
    number_in(&Path::new("/proc/sys/net").join(name))
}

/// Reads the number in a file.
pub(crate) fn number_in(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns whether the kernel forwards packets of a family: net.ipv4.ip_forward, or net.ipv6.conf.all.forwarding.
pub(crate) fn forwarding(is_ipv4: bool) -> Option<u64> {
    number(if is_ipv4 { "ipv4/ip_forward" } else { "ipv6/conf/all/forwarding" })
}

/// Returns true if this kernel has no IPv6.
pub(crate) fn kernel_lacks_ipv6() -> bool {
    !Path::new("/proc/sys/net/ipv6").exists()
}
