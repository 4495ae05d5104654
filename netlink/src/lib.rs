// SPDX-License-Identifier: Apache-2.0
//! Netlink on the byte level, for the agent and the CNI plugin: messages written into one buffer, one blocking request socket.
//! Knows no route from a link but for the two helpers of `rt`.

pub mod hash;
pub mod rt;
pub mod socket;
pub mod wire;
