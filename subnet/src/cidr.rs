// SPDX-License-Identifier: Apache-2.0
//! Address families, and the pair of subnets (one of each family at most) that a lease grants.

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

/// The family of a network.
pub fn family(net: &IpNet) -> Family {
    match net {
        IpNet::V4(_) => Family::V4,
        IpNet::V6(_) => Family::V6,
    }
}

/// An address as a number.
pub(crate) fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The address that has this number (the low 32 bits of it in IPv4).
pub(crate) fn address(family: Family, bits: u128) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
    }
}

/// How many addresses a network of this length has; at most 2^127, so a length of 0 is out of range in IPv6.
pub(crate) fn size(family: Family, len: u8) -> u128 {
    let all = match family {
        Family::V4 => 32,
        Family::V6 => 128,
    };
    1 << (all - len).min(127)
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

    /// Reads a key back; `None` when it is no key of ours (flannel's pattern: IPv4 first, IPv6 in lower case). Host bits are
    /// cut off.
    pub fn from_key(key: &str) -> Option<Subnets> {
        let part = |text: &str| -> Option<IpNet> {
            let (addr, len) = text.rsplit_once('-')?;
            if len.is_empty() || len.len() > 3 || !len.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            let addr: IpAddr = addr.parse().ok()?;
            // flannel's pattern for IPv6 is [a-f0-9:]+: what it would not match is another key to it, so it is to us.
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

    /// The same networks without host bits.
    pub fn trunc(&self) -> Subnets {
        Subnets { v4: self.v4.map(|net| net.trunc()), v6: self.v6.map(|net| net.trunc()) }
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
