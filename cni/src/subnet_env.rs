// SPDX-License-Identifier: Apache-2.0
//! Reads subnet.env for the plugin. Unlike [`weft_subnet::env`], it accepts several networks of one family and names
//! every missing key.

use std::path::Path;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use weft_subnet::env::assignment;

/// The content of subnet.env.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The cluster's networks without duplicates, IPv4 first.
    pub networks: Vec<IpNet>,
    /// The node's subnets, IPv4 first.
    pub subnets: Vec<IpNet>,
    /// MTU in bytes.
    pub mtu: u32,
    /// True if the agent masquerades.
    pub ipmasq: bool,
}

impl SubnetEnv {
    /// Reads and parses the file.
    ///
    /// # Errors
    /// A sentence that says why the file cannot be read, or names everything in it that is missing or wrong.
    pub fn load(file: &Path) -> Result<SubnetEnv, String> {
        let path = file.display();
        let text = std::fs::read_to_string(file).map_err(|error| format!("{path}: {error}"))?;
        SubnetEnv::parse(&text).map_err(|wrong| format!("{path} {wrong}"))
    }

    fn parse(text: &str) -> Result<SubnetEnv, String> {
        let mut env = SubnetEnv::default();
        let (mut mtu, mut ipmasq) = (None, None);
        let mut wrong = Vec::new();
        for (key, value) in text.lines().filter_map(assignment) {
            let is_valid = match key {
                "FLANNEL_NETWORK" => nets::<Ipv4Net>(value).map(|nets| env.networks.extend(nets)).is_some(),
                "FLANNEL_IPV6_NETWORK" => nets::<Ipv6Net>(value).map(|nets| env.networks.extend(nets)).is_some(),
                "FLANNEL_SUBNET" => nets::<Ipv4Net>(value).map(|nets| env.subnets.extend(nets)).is_some(),
                "FLANNEL_IPV6_SUBNET" => nets::<Ipv6Net>(value).map(|nets| env.subnets.extend(nets)).is_some(),
                "FLANNEL_MTU" => value.parse().map(|bytes| mtu = Some(bytes)).is_ok(),
                "FLANNEL_IPMASQ" => {
                    ipmasq = Some(value == "true");
                    true
                }
                _ => true,
            };
            if !is_valid {
                wrong.push(format!("has {key}={value}, which cannot be read"));
            }
        }
        env.networks = deduplicated(env.networks);
        env.subnets = deduplicated(env.subnets);
        let count_v4 = |nets: &[IpNet]| nets.iter().filter(|net| net.addr().is_ipv4()).count();
        let v4 = count_v4(&env.subnets);
        if v4 > 1 || env.subnets.len() - v4 > 1 {
            wrong.push("has several subnets of one family".to_owned());
        }
        let missing = [
            (env.networks.is_empty(), "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK"),
            (env.subnets.is_empty(), "FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET"),
            (mtu.is_none(), "FLANNEL_MTU"),
            (ipmasq.is_none(), "FLANNEL_IPMASQ"),
        ];
        let missing: Vec<_> = missing.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, keys)| keys).collect();
        if !missing.is_empty() {
            wrong.push(format!("is missing {}", missing.join(", ")));
        }
        if !wrong.is_empty() {
            return Err(wrong.join("; "));
        }
        env.mtu = mtu.unwrap_or_default();
        env.ipmasq = ipmasq.unwrap_or_default();
        Ok(env)
    }
}

/// Parses a comma-separated list of networks. Returns `None` if an entry is not a network of the family `N`.
fn nets<N>(text: &str) -> Option<Vec<IpNet>>
where
    N: std::str::FromStr,
    IpNet: From<N>,
{
    text.split(',').map(|net| net.trim().parse::<N>().ok().map(|net| IpNet::from(net).trunc())).collect()
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
        let env = SubnetEnv::parse(text).unwrap();
        let texts = |nets: &[IpNet]| nets.iter().map(IpNet::to_string).collect::<Vec<_>>();
        assert_eq!(texts(&env.networks), ["10.5.0.0/16", "10.6.0.0/16", "fd00::/48"]);
        assert_eq!(texts(&env.subnets), ["10.5.1.0/24", "fd00:0:0:1::/64"]);
        assert_eq!((env.mtu, env.ipmasq), (1450, true));
    }

    #[test]
    fn the_error_names_everything_that_is_missing_or_wrong() {
        let all = "is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ";
        assert_eq!(SubnetEnv::parse("").unwrap_err(), all);
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
        ];
        for (text, wrong) in rows {
            assert_eq!(SubnetEnv::parse(text).unwrap_err(), wrong);
        }
    }
}
