// SPDX-License-Identifier: Apache-2.0
//! subnet.env (flannel-compat.md section 3).

use std::collections::HashMap;
use std::fmt::Write;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::{Subnets, address, bits, family};

/// Where it is unless somebody says otherwise: flannel's place, which flannel's CNI plugin reads.
pub const USUAL_FILE: &str = "/run/flannel/subnet.env";

/// What subnet.env says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The cluster's networks.
    pub networks: Subnets,
    /// The node's subnets.
    pub subnets: Subnets,
    /// Bytes; 0 when the file does not say.
    pub mtu: u32,
    /// True when the agent masquerades.
    pub ipmasq: bool,
}

/// The node's own address in its subnet: the first after the network's.
fn gateway(net: IpNet) -> IpAddr {
    let first = bits(net.network());
    address(family(&net), if net.prefix_len() < net.max_prefix_len() { first + 1 } else { first })
}

impl SubnetEnv {
    /// The file's text, byte for byte flannel's (FLANNEL_SUBNET is network + 1).
    pub fn render(&self) -> String {
        let mut text = String::new();
        let families = [
            ("FLANNEL", self.networks.v4.map(IpNet::V4), self.subnets.v4.map(IpNet::V4)),
            ("FLANNEL_IPV6", self.networks.v6.map(IpNet::V6), self.subnets.v6.map(IpNet::V6)),
        ];
        // Writing into a String cannot fail.
        for (prefix, network, subnet) in families {
            if let Some(network) = network {
                let _ = writeln!(text, "{prefix}_NETWORK={}", network.trunc());
            }
            if let Some(subnet) = subnet {
                let _ = writeln!(text, "{prefix}_SUBNET={}/{}", gateway(subnet), subnet.prefix_len());
            }
        }
        let _ = writeln!(text, "FLANNEL_MTU={}\nFLANNEL_IPMASQ={}", self.mtu, self.ipmasq);
        text
    }

    /// Reads the file back; `None` when no subnet can be read from it. A key may hold a comma list: entries that are no
    /// network of the key's family are skipped, exactly one must remain, else the key counts as absent.
    pub fn parse(text: &str) -> Option<SubnetEnv> {
        let vars: HashMap<&str, &str> = text.lines().filter_map(assignment).collect();
        let subnets = Subnets { v4: v4(&vars, "FLANNEL_SUBNET"), v6: v6(&vars, "FLANNEL_IPV6_SUBNET") };
        if subnets == Subnets::default() {
            return None;
        }
        Some(SubnetEnv {
            networks: Subnets { v4: v4(&vars, "FLANNEL_NETWORK"), v6: v6(&vars, "FLANNEL_IPV6_NETWORK") },
            subnets,
            mtu: vars.get("FLANNEL_MTU").and_then(|mtu| mtu.parse().ok()).unwrap_or(0),
            ipmasq: vars.get("FLANNEL_IPMASQ") == Some(&"true"),
        })
    }
}

/// One line of a dotenv file: `[export ]KEY=value`, value bare (up to ` #`) or quoted.
pub fn assignment(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    let line = line.strip_prefix("export ").unwrap_or(line);
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
    if key.is_empty() || key.starts_with('#') {
        return None;
    }
    for quote in ['"', '\''] {
        if let Some((quoted, _)) = value.strip_prefix(quote).and_then(|rest| rest.split_once(quote)) {
            return Some((key, quoted));
        }
    }
    let bare = value.split_once(" #").map_or(value, |(bare, _)| bare);
    Some((key, bare.trim()))
}

fn only<T>(mut entries: impl Iterator<Item = T>) -> Option<T> {
    let first = entries.next()?;
    entries.next().is_none().then_some(first)
}

// An address without a length is no network: ipnet's parsers insist on the slash, as flannel's does.
fn v4(vars: &HashMap<&str, &str>, key: &str) -> Option<Ipv4Net> {
    only(vars.get(key)?.split(',').filter_map(|entry| entry.trim().parse().ok())).map(|net: Ipv4Net| net.trunc())
}

fn v6(vars: &HashMap<&str, &str>, key: &str) -> Option<Ipv6Net> {
    only(vars.get(key)?.split(',').filter_map(|entry| entry.trim().parse().ok())).map(|net: Ipv6Net| net.trunc())
}
