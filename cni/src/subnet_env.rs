// SPDX-License-Identifier: Apache-2.0
//! The content of subnet.env as the plugin needs it: checked, with an error that names everything that is missing or wrong.
//!
//! There are two types for this file: [`CheckedSubnetEnv`] and [`weft_subnet::env::SubnetEnv`]. [`settings`] reads the lines for both. The agent,
//! its commands and `weft doctor` use the other one: they ignore what they cannot read, and know one network of each family, because that is
//! what an agent writes. The plugin must not connect a pod by half of a file, so it refuses such a file. It allows several networks of one
//! family, because flannel's plugin does.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use weft_subnet::env::{Value, settings};

/// Why a node's subnet.env cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Something in the file is missing or wrong.
    #[error("{} {problems}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// Everything that is missing or wrong.
        problems: Problems,
    },
}

/// Something that is missing or wrong in subnet.env.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The value does not fit its key.
    #[error("has {key}={value}, which cannot be read")]
    Unreadable {
        /// The key.
        key: String,
        /// The value.
        value: String,
    },
    /// A node has at most one subnet of each family.
    #[error("has several subnets of one family")]
    SeveralSubnets,
    /// Keys without a value. Of two keys in one text, one is enough.
    #[error("is missing {}", .0.join(", "))]
    Missing(Vec<&'static str>),
}

/// Everything that is missing or wrong in subnet.env.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.0.iter().enumerate() {
            write!(f, "{}{problem}", if i == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// The content of a subnet.env in which nothing is missing or wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CheckedSubnetEnv {
    /// The cluster's networks without duplicates, IPv4 first.
    pub networks: Vec<IpNet>,
    /// The node's subnets, IPv4 first.
    pub subnets: Vec<IpNet>,
    /// MTU in bytes.
    pub mtu: u32,
    /// True if the agent masquerades.
    pub ipmasq: bool,
}

impl CheckedSubnetEnv {
    /// Reads and parses the file.
    ///
    /// # Errors
    /// The file cannot be read, or something in it is missing or wrong.
    pub fn load(file: &Path) -> Result<CheckedSubnetEnv, LoadError> {
        let text = std::fs::read_to_string(file).map_err(|source| LoadError::Read { path: file.into(), source })?;
        CheckedSubnetEnv::parse(&text).map_err(|problems| LoadError::Content { path: file.into(), problems })
    }

    fn parse(text: &str) -> Result<CheckedSubnetEnv, Problems> {
        let mut env = CheckedSubnetEnv::default();
        let (mut mtu, mut ipmasq) = (None, None);
        let mut problems = Vec::new();
        for setting in settings(text) {
            let is_valid = match setting.value {
                Value::Networks(_, nets) => extend(&mut env.networks, nets),
                Value::Subnets(_, nets) => extend(&mut env.subnets, nets),
                Value::Mtu(bytes) => {
                    mtu = bytes.or(mtu);
                    bytes.is_some()
                }
                Value::Ipmasq(is_on) => {
                    ipmasq = Some(is_on);
                    true
                }
            };
            if !is_valid {
                problems.push(Problem::Unreadable { key: setting.key.to_owned(), value: setting.text.to_owned() });
            }
        }
        env.networks = deduplicated(env.networks);
        env.subnets = deduplicated(env.subnets);
        let count_v4 = |nets: &[IpNet]| nets.iter().filter(|net| net.addr().is_ipv4()).count();
        let v4 = count_v4(&env.subnets);
        if v4 > 1 || env.subnets.len() - v4 > 1 {
            problems.push(Problem::SeveralSubnets);
        }
        let missing = [
            (env.networks.is_empty(), "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK"),
            (env.subnets.is_empty(), "FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET"),
            (mtu.is_none(), "FLANNEL_MTU"),
            (ipmasq.is_none(), "FLANNEL_IPMASQ"),
        ];
        let missing: Vec<_> = missing.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, keys)| keys).collect();
        if !missing.is_empty() {
            problems.push(Problem::Missing(missing));
        }
        if !problems.is_empty() {
            return Err(Problems(problems));
        }
        env.mtu = mtu.unwrap_or_default();
        env.ipmasq = ipmasq.unwrap_or_default();
        Ok(env)
    }
}

/// Appends the networks of a list. Returns false and appends nothing if an entry could not be read.
fn extend(all: &mut Vec<IpNet>, list: Vec<Option<IpNet>>) -> bool {
    let nets: Option<Vec<IpNet>> = list.into_iter().map(|net| net.map(|net| net.trunc())).collect();
    let is_valid = nets.is_some();
    all.extend(nets.into_iter().flatten());
    is_valid
}

/// Removes duplicates and moves IPv4 to the front. The order within a family is kept.
fn deduplicated(nets: Vec<IpNet>) -> Vec<IpNet> {
    let mut all: Vec<IpNet> = Vec::new();
    for net in nets {
        if !all.contains(&net) {
            all.push(net);
        }
    }
    all.sort_by_key(|net| net.addr().is_ipv6());
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_deduplicated_and_sorted_by_family() {
        let text = "FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_NETWORK=10.5.0.0/16,10.6.0.0/16,10.5.0.0/16\n\
                    FLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_IPV6_SUBNET=fd00:0:0:1::1/64\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\nX=1\n";
        let env = CheckedSubnetEnv::parse(text).unwrap();
        let texts = |nets: &[IpNet]| nets.iter().map(IpNet::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&env.networks), ["10.5.0.0/16", "10.6.0.0/16", "fd00::/48"]);
        assert_eq!(texts(&env.subnets), ["10.5.1.0/24", "fd00:0:0:1::/64"]);
        assert_eq!((env.mtu, env.ipmasq), (1450, true));
    }

    #[test]
    fn the_error_names_everything_that_is_missing_or_wrong() {
        let all = "is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ";
        assert_eq!(CheckedSubnetEnv::parse("").unwrap_err().to_string(), all);
        let rows = [
            (
                "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_IPMASQ=false\n",
                "is missing FLANNEL_MTU",
            ),
            (
                "FLANNEL_NETWORK=nonsense\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=x\nFLANNEL_IPMASQ=false\n",
                "has FLANNEL_NETWORK=nonsense, which cannot be read; has FLANNEL_MTU=x, which cannot be read; \
                 is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_MTU",
            ),
            (
                "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24,10.5.2.1/24\nFLANNEL_MTU=1\nFLANNEL_IPMASQ=false\n",
                "has several subnets of one family",
            ),
            (
                "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64,fd05:0:0:2::1/64\n\
                 FLANNEL_MTU=1\nFLANNEL_IPMASQ=false\n",
                "has several subnets of one family",
            ),
        ];
        for (text, wrong) in rows {
            assert_eq!(CheckedSubnetEnv::parse(text).unwrap_err().to_string(), wrong);
        }
    }
}
