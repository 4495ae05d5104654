// SPDX-License-Identifier: Apache-2.0
//! What every message of NETLINK_ROUTE about links and addresses needs (linux/rtnetlink.h).

use std::net::IpAddr;

/// `AF_INET` or `AF_INET6`.
pub fn family(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 2,
        IpAddr::V6(_) => 10,
    }
}

/// `struct ifinfomsg`: index of the link, flags and the mask of those that change.
pub fn ifinfomsg(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut h = [0; 16];
    h[4..8].copy_from_slice(&index.to_ne_bytes());
    h[8..12].copy_from_slice(&flags.to_ne_bytes());
    h[12..16].copy_from_slice(&change.to_ne_bytes());
    h
}
