// SPDX-License-Identifier: Apache-2.0
//! The netlink socket of nftables.

use std::io;

pub use weft_netlink::nftables::{is_unsupported, open};
use weft_netlink::socket::Netlink;

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
