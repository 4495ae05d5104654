// SPDX-License-Identifier: Apache-2.0
//! Netlink at the byte level, for the agent and the CNI plugin: a buffer in which messages are built, and a blocking
//! socket for requests. The modules [`rt`] and [`rtnl`] are specific to rtnetlink, [`generic`] and [`ethtool`] to generic netlink, and
//! [`nftables`] to nftables.

pub mod ethtool;
pub mod generic;
pub mod hash;
pub mod nftables;
pub mod rt;
pub mod rtnl;
pub mod socket;
pub mod wire;
