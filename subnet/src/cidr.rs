// SPDX-License-Identifier: Apache-2.0
//! Address families, and the pair of subnets (one of each family at most) that a lease grants.

use std::fmt;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// IPv4 or IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The family of a network.
pub fn family(net: &IpNet) -> Family {
    match net {
        IpNet::V4(_) => Family::V4,
        IpNet::V6(_) => Family::V6,
    }
}

/// One network of each family at most: what a lease grants, or what a cluster spans. Always truncated (host bits zero).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subnets {
    /// The IPv4 network.
    pub v4: Option<Ipv4Net>,
    /// The IPv6 network.
    pub v6: Option<Ipv6Net>,
}

impl Subnets {
    /// The networks that are there, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpNet> + use<> {
        self.v4.map(IpNet::V4).into_iter().chain(self.v6.map(IpNet::V6))
    }

    /// The network of one family.
    pub fn of(&self, family: Family) -> Option<IpNet> {
        match family {
            Family::V4 => self.v4.map(IpNet::V4),
            Family::V6 => self.v6.map(IpNet::V6),
        }
    }

    /// The key on the wire: `10.5.52.0-24`, dual-stack `10.5.52.0-24&fd00:12::-64`; a lone IPv6 subnet (directory and
    /// Kubernetes stores) is `fd00:12::-64`.
    pub fn to_key(&self) -> String {
        let part = |net: IpNet| format!("{}-{}", net.network(), net.prefix_len());
        self.iter().map(part).collect::<Vec<_>>().join("&")
    }

    /// Reads a key back; `None` when it is no key of ours (flannel: anchored at the end, IPv4 first).
    pub fn from_key(key: &str) -> Option<Subnets> {
        let part = |text: &str| -> Option<IpNet> {
            let (addr, len) = text.rsplit_once('-')?;
            if len.is_empty() || len.len() > 3 || !len.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            Some(IpNet::new(addr.parse().ok()?, len.parse().ok()?).ok()?.trunc())
        };
        let mut subnets = Subnets::default();
        let (first, second) = match key.split_once('&') {
            Some((first, second)) => (part(first)?, Some(part(second)?)),
            None => (part(key)?, None),
        };
        match (first, second) {
            (IpNet::V4(v4), None) => subnets.v4 = Some(v4),
            (IpNet::V6(v6), None) => subnets.v6 = Some(v6),
            (IpNet::V4(v4), Some(IpNet::V6(v6))) => (subnets.v4, subnets.v6) = (Some(v4), Some(v6)),
            _ => return None,
        }
        Some(subnets)
    }

    /// True when one of ours and one of theirs share an address.
    pub fn overlaps(&self, other: &Subnets) -> bool {
        self.iter().any(|a| other.iter().any(|b| a.contains(&b) || b.contains(&a)))
    }
}

impl fmt::Display for Subnets {
    /// `10.5.1.0/24` or `10.5.1.0/24,fd00::/64`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, net) in self.iter().enumerate() {
            write!(f, "{}{net}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
