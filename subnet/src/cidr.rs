// SPDX-License-Identifier: Apache-2.0
//! Address families, and the subnets of a lease, which has at most one of each family.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

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

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    /// Returns the family of an address.
    pub fn of(address: IpAddr) -> Family {
        match address {
            IpAddr::V4(_) => Family::V4,
            IpAddr::V6(_) => Family::V6,
        }
    }

    /// Returns the other family.
    pub fn other(self) -> Family {
        match self {
            Family::V4 => Family::V6,
            Family::V6 => Family::V4,
        }
    }

    /// Returns the number of the family in Linux: `AF_INET` or `AF_INET6`, which netfilter calls `NFPROTO_IPV4` and `NFPROTO_IPV6`.
    pub fn number(self) -> u8 {
        match self {
            Family::V4 => 2,
            Family::V6 => 10,
        }
    }
}

/// Returns the family of a network.
pub fn family(net: &IpNet) -> Family {
    match net {
        IpNet::V4(_) => Family::V4,
        IpNet::V6(_) => Family::V6,
    }
}

/// Converts an address to a number.
pub(crate) fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// Converts a number to an address. For IPv4 only the low 32 bits count.
pub(crate) fn address(family: Family, bits: u128) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
    }
}

/// Returns the number of addresses in a network with this prefix length. The result is at most 2^127, so it is wrong
/// for an IPv6 network of length 0.
pub(crate) fn size(family: Family, len: u8) -> u128 {
    let all = match family {
        Family::V4 => 32,
        Family::V6 => 128,
    };
    1 << (all - len).min(127)
}

/// At most one network of each family: the subnets of a lease, or the networks of a cluster. Host bits are zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subnets {
    /// The IPv4 network.
    pub v4: Option<Ipv4Net>,
    /// The IPv6 network.
    pub v6: Option<Ipv6Net>,
}

impl From<IpNet> for Subnets {
    /// Returns the network alone.
    fn from(net: IpNet) -> Subnets {
        match net {
            IpNet::V4(v4) => Subnets { v4: Some(v4), v6: None },
            IpNet::V6(v6) => Subnets { v4: None, v6: Some(v6) },
        }
    }
}

impl Subnets {
    /// Iterates over the networks, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = IpNet> + use<> {
        self.v4.map(IpNet::V4).into_iter().chain(self.v6.map(IpNet::V6))
    }

    /// Returns the network of one family.
    pub fn of(&self, family: Family) -> Option<IpNet> {
        match family {
            Family::V4 => self.v4.map(IpNet::V4),
            Family::V6 => self.v6.map(IpNet::V6),
        }
    }

    /// Returns the networks whose families `other` has, too.
    #[must_use]
    pub fn in_families_of(&self, other: &Subnets) -> Subnets {
        Subnets { v4: self.v4.filter(|_| other.v4.is_some()), v6: self.v6.filter(|_| other.v6.is_some()) }
    }

    /// Formats the key of a lease (docs/flannel-formats.md, "Leases in etcd"): `10.5.52.0-24`, or
    /// `10.5.52.0-24&fd00:12::-64` for dual-stack. The directory and Kubernetes stores also use `fd00:12::-64` for IPv6
    /// only, which flannel does not know.
    pub fn to_key(&self) -> String {
        let part = |net: IpNet| format!("{}-{}", net.network(), net.prefix_len());
        self.iter().map(part).collect::<Vec<_>>().join("&")
    }

    /// Parses the key of a lease. Returns `None` if the key does not match flannel's pattern: IPv4 comes first, and
    /// IPv6 is in lower case. Host bits are set to zero.
    pub fn from_key(key: &str) -> Option<Subnets> {
        let part = |text: &str| -> Option<IpNet> {
            let (addr, len) = text.rsplit_once('-')?;
            if len.is_empty() || len.len() > 3 || !len.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            let addr: IpAddr = addr.parse().ok()?;
            // flannel's pattern for IPv6 is `[a-f0-9:]+`. A key that flannel does not match is not a lease for weft
            // either.
            if addr.is_ipv6() && text.bytes().any(|b| b == b'.' || b.is_ascii_uppercase()) {
                return None;
            }
            Some(IpNet::new(addr, len.parse().ok()?).ok()?.trunc())
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

    /// Returns the same networks with their host bits set to zero.
    pub fn trunc(&self) -> Subnets {
        Subnets { v4: self.v4.map(|net| net.trunc()), v6: self.v6.map(|net| net.trunc()) }
    }

    /// Returns true if a network of `self` and one of `other` have a common address.
    pub fn overlaps(&self, other: &Subnets) -> bool {
        self.iter().any(|a| other.iter().any(|b| a.contains(&b) || b.contains(&a)))
    }
}

impl fmt::Display for Subnets {
    /// Writes `10.5.1.0/24`, or `10.5.1.0/24,fd00::/64` for dual-stack.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, net) in self.iter().enumerate() {
            write!(f, "{}{net}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
