// SPDX-License-Identifier: Apache-2.0
//! Constants and headers of rtnetlink messages about links and addresses (linux/rtnetlink.h).

use std::net::IpAddr;

/// Flags of a message that creates an object or replaces an existing one: NLM_F_REQUEST, NLM_F_REPLACE, NLM_F_CREATE.
pub const REPLACE: u16 = 0x1 | 0x100 | 0x400;
/// Flags of a message that creates an object and fails if it exists: NLM_F_REQUEST, NLM_F_EXCL, NLM_F_CREATE.
pub const CREATE: u16 = 0x1 | 0x200 | 0x400;
/// Flags of a message that adds an object next to existing ones and fails if an identical one exists: NLM_F_REQUEST,
/// NLM_F_CREATE.
pub const CREATE_ANOTHER: u16 = 0x1 | 0x400;
/// Flags of any other message: NLM_F_REQUEST.
pub const PLAIN: u16 = 0x1;
/// The gateway is directly reachable on the link, even if no route says so.
pub const RTNH_F_ONLINK: u32 = 4;

/// Returns `AF_INET` or `AF_INET6`.
pub fn family(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 2,
        IpAddr::V6(_) => 10,
    }
}

/// Builds a `struct ifinfomsg` from the interface index, the flags, and the mask of the flags to change.
pub fn ifinfomsg(index: u32, flags: u32, change: u32) -> [u8; 16] {
    let mut h = [0; 16];
    h[4..8].copy_from_slice(&index.to_ne_bytes());
    h[8..12].copy_from_slice(&flags.to_ne_bytes());
    h[12..16].copy_from_slice(&change.to_ne_bytes());
    h
}

/// Builds a `struct ifaddrmsg` from an address, its prefix length and the interface index.
pub fn ifaddrmsg(addr: IpAddr, len: u8, index: u32) -> [u8; 8] {
    let mut h = [family(addr), len, 0, 0, 0, 0, 0, 0];
    h[4..8].copy_from_slice(&index.to_ne_bytes());
    h
}
