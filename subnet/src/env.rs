// SPDX-License-Identifier: Apache-2.0
//! The file subnet.env (docs/flannel-formats.md, "subnet.env").

use std::fmt::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use crate::cidr::{Family, Subnets, address, bits, family};

/// Default path. It is flannel's, so that flannel's CNI plugin finds the file.
pub const USUAL_FILE: &str = "/run/flannel/subnet.env";

/// The name of that file.
const USUAL_NAME: &str = "subnet.env";

/// Returns the path of another file of an instance, in the directory of its subnet file. Its name is `usual` if the subnet file is
/// called `subnet.env`, and otherwise what `other` makes of the name of the subnet file. The names that `other` returns must differ from
/// `usual` and from each other.
pub fn sibling_file(subnet_file: &Path, usual: &str, other: impl Fn(&str) -> String) -> PathBuf {
    let name = subnet_file.file_name().unwrap_or_default().to_string_lossy();
    let name = if name == USUAL_NAME { usual.to_owned() } else { other(&name) };
    subnet_file.with_file_name(name)
}

/// Returns the default socket of the agent that writes this subnet file. The agent, the commands and the CNI plugin find each other by
/// this rule. The socket is `weft.sock` beside a file called `subnet.env`, and `weft-NAME.sock` beside any other file, so that two
/// subnet files in one directory have two sockets.
///
/// ```
/// # use std::path::{Path, PathBuf};
/// # use weft_subnet::env::socket;
/// assert_eq!(socket(Path::new("/run/flannel/subnet.env")), PathBuf::from("/run/flannel/weft.sock"));
/// assert_eq!(socket(Path::new("/run/flannel/second.env")), PathBuf::from("/run/flannel/weft-second.env.sock"));
/// ```
pub fn socket(subnet_file: &Path) -> PathBuf {
    sibling_file(subnet_file, "weft.sock", |name| format!("weft-{name}.sock"))
}

/// The content of subnet.env as an agent writes it, or as far as it can be read. The CNI plugin has a type of its own (`CheckedSubnetEnv`),
/// because it refuses a file in which something is missing or wrong.
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
pub fn gateway(net: IpNet) -> IpAddr {
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
    /// Entries of a list that are not a network of the key's family are skipped. The key counts as absent unless exactly one entry
    /// remains. If a key occurs several times, the last one counts.
    pub fn parse(text: &str) -> Option<SubnetEnv> {
        let none = Subnets::default();
        let mut env = SubnetEnv { networks: none, subnets: none, mtu: 0, ipmasq: false };
        for setting in settings(text) {
            match setting.value {
                Value::Networks(family, nets) => set(&mut env.networks, family, only(nets.into_iter().flatten())),
                Value::Subnets(family, nets) => set(&mut env.subnets, family, only(nets.into_iter().flatten())),
                Value::Mtu(mtu) => env.mtu = mtu.unwrap_or(0),
                Value::Ipmasq(is_on) => env.ipmasq = is_on,
            }
        }
        (env.subnets != none).then_some(env)
    }
}

/// Replaces the network of one family.
fn set(nets: &mut Subnets, family: Family, net: Option<IpNet>) {
    match (family, net.map(|net| net.trunc())) {
        (Family::V4, Some(IpNet::V4(v4))) => nets.v4 = Some(v4),
        (Family::V6, Some(IpNet::V6(v6))) => nets.v6 = Some(v6),
        (Family::V4, _) => nets.v4 = None,
        (Family::V6, _) => nets.v6 = None,
    }
}

/// A line of subnet.env whose key is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting<'a> {
    /// The key, such as `FLANNEL_MTU`.
    pub key: &'a str,
    /// The value as it is written, without quotes.
    pub text: &'a str,
    /// The value.
    pub value: Value,
}

/// The value of a [`Setting`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// `FLANNEL_NETWORK` or `FLANNEL_IPV6_NETWORK`: the entries of a comma-separated list. `None` for an entry that is not a network
    /// of this family.
    Networks(Family, Vec<Option<IpNet>>),
    /// `FLANNEL_SUBNET` or `FLANNEL_IPV6_SUBNET`, as above. The host bits are those of the node's own address.
    Subnets(Family, Vec<Option<IpNet>>),
    /// `FLANNEL_MTU` in bytes. `None` if it is not a number.
    Mtu(Option<u32>),
    /// `FLANNEL_IPMASQ`. Only `true` counts as true.
    Ipmasq(bool),
}

/// Reads subnet.env line by line, in the order of the file.
///
/// This is the only parser of the file. Its callers differ in what they make of errors and repeated keys: [`SubnetEnv::parse`] ignores
/// what it cannot read, as flanneld does, and the CNI plugin names it.
pub fn settings(text: &str) -> impl Iterator<Item = Setting<'_>> {
    text.lines().filter_map(assignment).filter_map(|(key, text)| {
        let value = match key {
            "FLANNEL_NETWORK" => Value::Networks(Family::V4, nets(Family::V4, text)),
            "FLANNEL_IPV6_NETWORK" => Value::Networks(Family::V6, nets(Family::V6, text)),
            "FLANNEL_SUBNET" => Value::Subnets(Family::V4, nets(Family::V4, text)),
            "FLANNEL_IPV6_SUBNET" => Value::Subnets(Family::V6, nets(Family::V6, text)),
            "FLANNEL_MTU" => Value::Mtu(text.parse().ok()),
            "FLANNEL_IPMASQ" => Value::Ipmasq(text == "true"),
            _ => return None,
        };
        Some(Setting { key, text, value })
    })
}

/// Parses one line of a dotenv file: `[export ]KEY=value`. The value may be quoted. An unquoted value ends at ` #`.
fn assignment(line: &str) -> Option<(&str, &str)> {
    let line = line.trim();
    let line = line.strip_prefix("export ").unwrap_or(line);
    let (key, value) = line.split_once('=')?;
    let (key, value) = (key.trim(), value.trim());
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

// The parser of ipnet requires the prefix length, as flannel's parser does.
fn nets(wanted: Family, text: &str) -> Vec<Option<IpNet>> {
    text.split(',').map(|net| net.trim().parse().ok().filter(|net| family(net) == wanted)).collect()
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
        assert!(files.iter().all(|file| !sockets.contains(file)), "no socket has the path of a subnet file");
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
