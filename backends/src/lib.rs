// SPDX-License-Identifier: Apache-2.0
//! Pure plans: host facts and leases in, kernel entries out. No I/O, no clock, no randomness; the manifest enforces it.

pub mod alloc;
pub mod backend;
mod devices;
pub mod diff;
pub mod entries;
pub mod family;
pub mod host;
pub mod host_gw;
pub mod identity;
pub mod index;
pub mod ipip;
pub mod link;
pub mod masq;
pub mod options;
pub mod overhead;
pub mod owner;
pub mod state;
pub mod tunnel;
pub mod udp;
pub mod vxlan;
pub mod wireguard;
