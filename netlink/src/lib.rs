// SPDX-License-Identifier: Apache-2.0
//! Netlink on the byte level, for the agent and the CNI plugin: messages written into one buffer, one blocking request socket.
//! Knows no route from a link.

pub mod hash;
pub mod socket;
pub mod wire;
