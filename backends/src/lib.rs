// SPDX-License-Identifier: Apache-2.0
//! Backends: from facts about the host and from leases they compute the entries that should be in the kernel. They do no I/O, and use neither
//! a clock nor random numbers. The dependencies in the manifest ensure this.

pub mod alloc;
pub mod backend;
pub mod commands;
mod devices;
pub mod diff;
pub mod extension;
pub mod family;
pub mod host;
pub mod host_gw;
pub mod identity;
pub mod index;
pub mod ipip;
pub mod link;
mod mac;
mod name;
pub mod options;
pub mod overhead;
pub mod owner;
pub mod register;
mod skip;
pub mod state;
pub mod traffic_rules;
pub mod tunnel;
pub mod udp;
mod underlay_mtu;
pub mod vxlan;
pub mod wireguard;
pub mod wireguard_key;
pub mod wireguard_peer;
