// SPDX-License-Identifier: Apache-2.0
//! What every message of NETLINK_ROUTE about links and addresses needs (linux/rtnetlink.h).

use std::net::IpAddr;

/// Flags of a message that creates or replaces.
pub const REPLACE: u16 = 0x1 | 0x100 | 0x400;
/// Flags of a message that creates, and fails where something is there.
pub const CREATE: u16 = 0x1 | 0x200 | 0x400;
/// Flags of a message that creates beside what is there, and fails where the very same is there.
pub const BESIDE: u16 = 0x1 | 0x400;
/// Flags of any other message.
pub const PLAIN: u16 = 0x1;
/// The gateway is on the link though no route says so.
pub const RTNH_F_ONLINK: u32 = 4;

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

/// `struct ifaddrmsg`: address, length of its prefix, index of the link.
pub fn ifaddrmsg(addr: IpAddr, len: u8, index: u32) -> [u8; 8] {
    let mut h = [family(addr), len, 0, 0, 0, 0, 0, 0];
    h[4..8].copy_from_slice(&index.to_ne_bytes());
    h
}
