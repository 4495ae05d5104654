// SPDX-License-Identifier: Apache-2.0
//! subnet.env (flannel-compat.md section 3).

use crate::cidr::Subnets;

/// What subnet.env says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The cluster's networks.
    pub networks: Subnets,
    /// The node's subnets.
    pub subnets: Subnets,
    /// Bytes.
    pub mtu: u32,
    /// True when the agent masquerades.
    pub ipmasq: bool,
}

impl SubnetEnv {
    /// The file's text, byte for byte flannel's (FLANNEL_SUBNET is network + 1).
    pub fn render(&self) -> String {
        String::new()
    }

    /// Reads the file back; `None` when no subnet can be read from it.
    pub fn parse(text: &str) -> Option<SubnetEnv> {
        let _ = text;
        None
    }
}
