// SPDX-License-Identifier: Apache-2.0
//! A tunnel through which the agent itself carries the packets, because the kernel has no device for it. A backend describes the tunnel
//! and its peers with these values, and the agent runs it (`src/data_path.rs`).

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};

use ipnet::Ipv4Net;

use crate::name::Name;

/// A tunnel between a TUN device and a UDP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tunnel {
    /// The TUN device.
    pub device: Name,
    /// The MTU of the device in bytes.
    pub mtu: u16,
    /// The address of the uplink, to which the socket is bound.
    pub local: Ipv4Addr,
    /// The UDP port of this node, and of all nodes unless it changes.
    pub port: u16,
    /// The subnet of this node. Packets from peers to other addresses are dropped.
    pub subnet: Ipv4Net,
}

impl fmt::Display for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mtu {}, {}:{}, {}", self.device, self.mtu, self.local, self.port, self.subnet)
    }
}

/// A peer of a [`Tunnel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelPeer {
    /// The subnet of its pods. It may send packets from there only.
    pub subnet: Ipv4Net,
    /// The address and the UDP port to which packets for the subnet are sent.
    pub address: SocketAddrV4,
    /// Another address from which the peer sends, if it has one.
    pub sends_from: Option<Ipv4Addr>,
}

impl fmt::Display for TunnelPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.subnet, self.address)?;
        self.sends_from.map_or(Ok(()), |other| write!(f, ", which also sends from {other}"))
    }
}
