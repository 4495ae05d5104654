// SPDX-License-Identifier: Apache-2.0
//! net-conf: the configuration of the whole network (flannel-compat.md section 4).

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use crate::cidr::Subnets;

/// A validated net-conf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// The cluster's networks; a family that is off is `None`.
    pub networks: Subnets,
    /// IPv4 allocation, when IPv4 is on.
    pub v4: Option<Range<Ipv4Net, Ipv4Addr>>,
    /// IPv6 allocation, when IPv6 is on.
    pub v6: Option<Range<Ipv6Net, Ipv6Addr>>,
    /// `EnableNFTables`.
    pub nftables: bool,
    /// `Backend.Type`, lower case; `udp` when there is no Backend, as in flannel.
    pub backend_type: String,
    /// The whole `Backend` object, raw JSON (`{}` when there is none); each backend parses its own options.
    pub backend: Box<str>,
}

/// Where subnets of one family are allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Range<N, A> {
    /// The network it lies in.
    pub network: N,
    /// `SubnetLen`, bits.
    pub len: u8,
    /// First subnet's address.
    pub min: A,
    /// Last subnet's address.
    pub max: A,
}

/// Why a net-conf is refused: names the key and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadNetwork {
    /// Not JSON, or a value of the wrong type.
    #[error("net-conf is not valid: {0}")]
    Json(String),
}

impl Network {
    /// Reads and validates net-conf as in etcd mode (keys case-insensitive, unknown keys ignored, defaults filled in).
    pub fn parse(text: &str) -> Result<Network, BadNetwork> {
        Err(BadNetwork::Json(text.to_owned()))
    }
}
