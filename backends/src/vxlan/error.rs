// SPDX-License-Identifier: Apache-2.0
//! Why vxlan does not reach a peer, or cannot run.

use std::io;

use ipnet::IpNet;

use crate::state::{Mac, Name};

/// Why vxlan cannot run with these options, or on this host.
#[derive(Debug, thiserror::Error)]
pub(super) enum VxlanError {
    #[error("Backend.VNI in net-conf: {0}; give a smaller one")]
    OwnVni(LongName),
    #[error("{uplink} has no {family} address, which vxlan needs for its {family} device")]
    NoAddress { uplink: Name, family: &'static str },
    #[error("no MAC was chosen for the {0} vxlan device")]
    NoMac(&'static str),
    #[error("choose a MAC for the vxlan device: {0}")]
    Random(io::Error),
}

/// A name of a device that Linux does not take.
#[derive(Debug, thiserror::Error)]
#[error("VNI {vni} makes the device name {name} longer than 15 bytes")]
pub(super) struct LongName {
    pub(super) vni: u32,
    pub(super) name: String,
}

/// Why vxlan does not reach one subnet of a peer.
#[derive(Debug, thiserror::Error)]
#[error("{subnet}: {reason}")]
pub(super) struct NotReached {
    pub(super) subnet: IpNet,
    pub(super) reason: ReachError,
}

/// Why a peer is not reached: something of its lease is wrong, or missing on this node.
#[derive(Debug, thiserror::Error)]
pub(super) enum ReachError {
    #[error("the lease has no {0}, which vxlan needs")]
    Missing(&'static str),
    #[error("{member} is not a JSON object ({error})")]
    NoObject { member: &'static str, error: String },
    #[error("VNI {vni} in {member} is not a number of 24 bits")]
    BadVni { vni: String, member: &'static str },
    #[error("{member}: {long}")]
    LongName { member: &'static str, long: LongName },
    #[error("{0} has no VtepMAC")]
    NoMac(&'static str),
    #[error("VtepMAC {mac} in {member} is not an Ethernet address")]
    BadMac { mac: String, member: &'static str },
    #[error("VtepMAC {mac} in {member} is zero")]
    ZeroMac { mac: Mac, member: &'static str },
    #[error("VtepMAC {mac} in {member} is a multicast address")]
    MulticastMac { mac: Mac, member: &'static str },
    #[error("VtepMAC {mac} in {member} is our own: two nodes share it")]
    OurMac { mac: Mac, member: &'static str },
    #[error("this node has no {family} address on {uplink}, or no {family} subnet")]
    NoLocal { family: &'static str, uplink: Name },
}
