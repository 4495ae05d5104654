// SPDX-License-Identifier: Apache-2.0
//! The netlink socket of nftables.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use weft_netlink::socket::Netlink;

/// Opens a socket in the network namespace of this thread.
///
/// # Errors
/// The kernel has no nfnetlink, and so no nftables; or there are too many open files.
pub fn open() -> io::Result<Netlink> {
    Netlink::open_on(NETLINK_NETFILTER)
}

/// Returns a socket that is open already, or opens it. To close one costs the kernel 16 ms.
///
/// # Errors
/// As [`open`].
pub fn open_once(netlink: &mut Option<Netlink>) -> io::Result<&mut Netlink> {
    Ok(match netlink {
        Some(netlink) => netlink,
        none => none.insert(open()?),
    })
}

/// Returns true if this error means that the kernel has no nftables, so that no rule can be there.
pub fn is_unsupported(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    // A kernel with nfnetlink but without nf_tables answers EINVAL.
    let known = matches!(errno, Some(Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT | Errno::EINVAL));
    known || error.kind() == io::ErrorKind::Unsupported
}
