// SPDX-License-Identifier: Apache-2.0
//! Names of the tables of nftables, whoever made them.

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;

use crate::kernel::nft::table::TABLE_NAME;
use crate::kernel::socket::Netlink;
use crate::kernel::wire::{attrs_after, messages, text};

/// NFT_MSG_GETTABLE of the nftables subsystem.
const GETTABLE: u16 = (10 << 8) | 1;
/// `struct nfgenmsg` with AF_UNSPEC: all families.
const ALL_FAMILIES: [u8; 4] = [0; 4];

/// Of all families, in the kernel's order.
///
/// # Errors
/// When the kernel has no nftables, or refuses.
pub fn tables() -> io::Result<Vec<String>> {
    let mut netlink = Netlink::open_on(NETLINK_NETFILTER)?;
    let data = netlink.dump(GETTABLE, |w, kind, flags| w.begin(kind, flags, &ALL_FAMILIES))?;
    let name = |payload| attrs_after(payload, ALL_FAMILIES.len()).find(|(kind, _)| *kind == TABLE_NAME);
    Ok(messages(&data).filter_map(|m| name(m.payload)).map(|(_, value)| text(value).to_owned()).collect())
}
