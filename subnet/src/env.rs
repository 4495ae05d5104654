// SPDX-License-Identifier: Apache-2.0
//! The file subnet.env (docs/flannel-formats.md, "subnet.env").

use std::collections::HashMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::cidr::{Subnets, address, bits, family};

/// Default path. It is flannel's, so that flannel's CNI plugin finds the file.
pub const USUAL_FILE: &str = "/run/flannel/subnet.env";

/// Name of the file in that place.
const USUAL_NAME: &str = "subnet.env";

/// The file of an instance that stands beside its subnet file: the place of `usual` for a subnet file called `subnet.env`, else
/// what `other` makes of the name of the subnet file. Names from `other` must differ from `usual` and from one another.
pub fn beside(subnet_file: &Path, usual: &str, other: impl Fn(&str) -> String) -> PathBuf {
    let name = subnet_file.file_name().unwrap_or_default().to_string_lossy();
    let name = if name == USUAL_NAME { usual.to_owned() } else { other(&name) };
    subnet_file.with_file_name(name)
}

/// The socket of the agent that writes this subnet file, unless somebody says otherwise: agent, commands and CNI plugin find one
/// another by this rule. `weft.sock` beside a file called `subnet.env`; beside any other file `weft-NAME.sock`, so that two subnet
/// files of one directory have two sockets.
///
/// ```
/// # use std::path::{Path, PathBuf};
/// # use weft_subnet::env::socket;
/// assert_eq!(socket(Path::new("/run/flannel/subnet.env")), PathBuf::from("/run/flannel/weft.sock"));
/// assert_eq!(socket(Path::new("/run/flannel/second.env")), PathBuf::from("/run/flannel/weft-second.env.sock"));
/// ```
pub fn socket(subnet_file: &Path) -> PathBuf {
    beside(subnet_file, "weft.sock", |name| format!("weft-{name}.sock"))
}

/// The content of subnet.env.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The cluster's networks.
    pub networks: Subnets,
    /// The node's subnets.
    pub subnets: Subnets,
    /// MTU in bytes; 0 if the file does not contain it.
    pub mtu: u32,
    /// True if the agent masquerades.
    pub ipmasq: bool,
}

/// Returns the node's own address in its subnet: the first after the network address.
fn gateway(net: IpNet) -> IpAddr {
    let first = bits(net.network());
    address(family(&net), if net.prefix_len() < net.max_prefix_len() { first + 1 } else { first })
}

impl SubnetEnv {
    /// Renders the file exactly as flannel does. FLANNEL_SUBNET is the network address plus 1.
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

    /// Parses the file. Returns `None` if it contains no valid subnet.
    ///
    /// A key may contain a comma-separated list. Entries that are not a network of the key's family are skipped. The
    /// key counts as absent unless exactly one entry remains.
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

/// Parses one line of a dotenv file: `[export ]KEY=value`. The value may be quoted. An unquoted value ends at ` #`.
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

/// Returns the item of an iterator that has exactly one item.
fn only<T>(mut entries: impl Iterator<Item = T>) -> Option<T> {
    let first = entries.next()?;
    entries.next().is_none().then_some(first)
}

// The parsers of ipnet require the prefix length, as flannel's parser does.
fn v4(vars: &HashMap<&str, &str>, key: &str) -> Option<Ipv4Net> {
    only(vars.get(key)?.split(',').filter_map(|entry| entry.trim().parse().ok())).map(|net: Ipv4Net| net.trunc())
}

fn v6(vars: &HashMap<&str, &str>, key: &str) -> Option<Ipv6Net> {
    only(vars.get(key)?.split(',').filter_map(|entry| entry.trim().parse().ok())).map(|net: Ipv6Net| net.trunc())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_subnet_file_has_a_socket_of_its_own() {
        let names = ["subnet.env", "second.env", "second", "weft", ".env", "-", "subnet.env.env", "SUBNET.ENV"];
        let files: Vec<PathBuf> =
            ["/run/flannel", "/run", ""].iter().flat_map(|dir| names.map(|name| Path::new(dir).join(name))).collect();
        let sockets: BTreeSet<PathBuf> = files.iter().map(|file| socket(file)).collect();
        assert_eq!(sockets.len(), files.len(), "{sockets:?}");
        assert!(files.iter().all(|file| !sockets.contains(file)), "no socket takes the place of a subnet file");
        for (file, wanted) in [
            (USUAL_FILE, "/run/flannel/weft.sock"),
            ("/run/flannel/second.env", "/run/flannel/weft-second.env.sock"),
            ("/run/other/subnet.env", "/run/other/weft.sock"),
            ("subnet.env", "weft.sock"),
        ] {
            assert_eq!(socket(Path::new(file)), Path::new(wanted), "{file}");
        }
    }
}
