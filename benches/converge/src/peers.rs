// SPDX-License-Identifier: Apache-2.0
//! Synthetic peers. Each has a number, from which follow its lease in the store and its entries in the kernel. An entry leads back to the
//! number.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result};
use ipnet::IpNet;
use serde_json::{Value, json};
use weft_backends::state::Mac;

/// The largest number of peers. The own subnet comes after theirs.
pub const MOST: usize = 61_440;
/// The address of etcd on the underlay.
pub const STORE: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 254);
/// The address of the measured node's uplink.
pub const NODE: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 1);
/// The IPv6 address of the measured node.
pub const NODE6: Ipv6Addr = Ipv6Addr::new(0xfd16, 0, 0, 0, 0, 0, 0xffff, 1);

/// A backend with its families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Backend {
    /// vxlan, IPv4.
    Vxlan,
    /// host-gw, IPv4.
    HostGw,
    /// vxlan, IPv4 and IPv6.
    VxlanDual,
    /// udp, which has no entries of peers in the kernel. [`crate::udp`] measures it.
    Udp,
    /// wireguard. [`crate::wireguard`] measures it in a virtual machine, which has a store of its own.
    Wireguard,
}

/// A table of the kernel for one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Forwarding entries of the vxlan device.
    Fdb,
    /// Forwarding entries of the IPv6 vxlan device.
    Fdb6,
    /// Permanent IPv4 neighbours.
    Neigh,
    /// Permanent IPv6 neighbours.
    Neigh6,
    /// IPv4 routes.
    Route,
    /// IPv6 routes.
    Route6,
}

impl Table {
    /// Returns true if its entries are those of IPv6.
    pub fn is_v6(self) -> bool {
        matches!(self, Table::Fdb6 | Table::Neigh6 | Table::Route6)
    }
}

/// All tables, in the order of their numbers.
pub const TABLES: [Table; 6] = [Table::Fdb, Table::Fdb6, Table::Neigh, Table::Neigh6, Table::Route, Table::Route6];

impl Backend {
    /// Returns the name for tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Vxlan => "vxlan",
            Backend::HostGw => "host-gw",
            Backend::VxlanDual => "vxlan-dual",
            Backend::Udp => "udp",
            Backend::Wireguard => "wireguard",
        }
    }

    /// Returns the `Type` of net-conf, which is the `BackendType` of a lease. Leases of udp have none.
    fn wire(self) -> &'static str {
        match self {
            Backend::Vxlan | Backend::VxlanDual => "vxlan",
            Backend::HostGw => "host-gw",
            Backend::Udp => "udp",
            Backend::Wireguard => "wireguard",
        }
    }

    /// Returns the families: `[false]` for IPv4 alone, and `[false, true]` for IPv4 and IPv6.
    pub fn families(self) -> &'static [bool] {
        if self == Backend::VxlanDual { &[false, true] } else { &[false] }
    }

    /// Returns its devices.
    pub fn devices(self) -> &'static [&'static str] {
        match self {
            Backend::Vxlan => &["flannel.1"],
            Backend::HostGw | Backend::Udp | Backend::Wireguard => &[],
            Backend::VxlanDual => &["flannel.1", "flannel-v6.1"],
        }
    }

    /// Returns the tables in which each peer has an entry, in the order in which they are written.
    pub fn tables(self) -> &'static [Table] {
        match self {
            Backend::Vxlan => &[Table::Fdb, Table::Neigh, Table::Route],
            Backend::HostGw => &[Table::Route],
            Backend::VxlanDual => &TABLES,
            Backend::Udp | Backend::Wireguard => &[],
        }
    }

    /// Returns the net-conf. The own subnet is chosen after those of the peers.
    pub fn net_conf(self) -> String {
        let mut conf = json!({
            "Network": "10.0.0.0/8", "SubnetLen": 24, "SubnetMin": "10.250.0.0", "SubnetMax": "10.254.0.0",
            "Backend": { "Type": self.wire() },
        });
        if self == Backend::VxlanDual {
            conf["EnableIPv6"] = true.into();
            conf["IPv6Network"] = "fd10::/40".into();
            conf["IPv6SubnetLen"] = 64.into();
            conf["IPv6SubnetMin"] = "fd10:0:f0::".into();
            conf["IPv6SubnetMax"] = "fd10:0:fe::".into();
        }
        conf.to_string()
    }
}

/// One peer.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// Its number, below [`MOST`].
    pub number: usize,
    /// True if its published address has changed.
    pub moved: bool,
}

impl Peer {
    /// Returns a peer with its first published address.
    pub fn new(number: usize) -> Peer {
        Peer { number, moved: false }
    }

    /// Returns its published address, to which the backend sends packets.
    pub fn outer(self, v6: bool) -> IpAddr {
        let offset = 256 + self.number as u32 + if self.moved { 1 << 18 } else { 0 };
        match v6 {
            false => Ipv4Addr::from(u32::from(Ipv4Addr::new(172, 16, 0, 0)) + offset).into(),
            true => Ipv6Addr::from(u128::from(Ipv6Addr::new(0xfd16, 0, 0, 0, 0, 0, 0, 0)) + u128::from(offset)).into(),
        }
    }

    /// Returns the first address of its subnet, which is also the inner address of its VTEP.
    pub fn inner(self, v6: bool) -> IpAddr {
        let n = self.number as u32;
        match v6 {
            false => Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 1, 0, 0)) + (n << 8)).into(),
            true => Ipv6Addr::from((0xfd10_u128 << 112) | (u128::from(n) << 64)).into(),
        }
    }

    /// Returns its subnet.
    ///
    /// # Errors
    /// The number is not below [`MOST`].
    pub fn subnet(self, v6: bool) -> Result<IpNet> {
        IpNet::new(self.inner(v6), if v6 { 64 } else { 24 }).context("build a subnet")
    }

    /// Returns the MAC address of its VTEP.
    pub fn mac(self, v6: bool) -> Mac {
        let [_, a, b, c] = (self.number as u32).to_be_bytes();
        Mac([2, if v6 { 6 } else { 4 }, 0, a, b, c])
    }

    /// Returns the last element of its key in the store.
    pub fn id(self, backend: Backend) -> String {
        let half = |v6: bool| format!("{}-{}", self.inner(v6), if v6 { 64 } else { 24 });
        backend.families().iter().map(|v6| half(*v6)).collect::<Vec<_>>().join("&")
    }

    /// Returns its lease as flannel writes it.
    pub fn value(self, backend: Backend) -> String {
        let data = |v6: bool| json!({ "VNI": 1, "VtepMAC": self.mac(v6).to_string() });
        let dual = backend == Backend::VxlanDual;
        let v6 = if dual { self.outer(true).to_string().into() } else { Value::Null };
        let mut lease = json!({ "PublicIP": self.outer(false).to_string(), "PublicIPv6": v6 });
        if backend != Backend::Udp {
            lease["BackendType"] = backend.wire().into();
        }
        if matches!(backend, Backend::Vxlan | Backend::VxlanDual) {
            lease["BackendData"] = data(false);
        }
        if dual {
            lease["BackendV6Data"] = data(true);
        }
        lease.to_string()
    }
}

/// Returns the number of the peer that has this inner address.
pub fn by_inner(ip: IpAddr) -> Option<usize> {
    let number = match ip {
        IpAddr::V4(v4) => (u32::from(v4).checked_sub(u32::from(Ipv4Addr::new(10, 1, 0, 0)))?) as usize >> 8,
        IpAddr::V6(v6) => {
            let all = u128::from(v6);
            (all >> 112 == 0xfd10 && all as u64 == 0).then_some(())?;
            usize::try_from((all >> 64) & 0xffff_ffff).ok()?
        }
    };
    (number < MOST).then_some(number)
}

/// Returns the number of the peer that has this VTEP MAC, and whether it is that of the IPv6 device.
pub fn by_mac(mac: Mac) -> Option<(usize, bool)> {
    let [2, kind @ (4 | 6), 0, a, b, c] = mac.0 else { return None };
    let number = u32::from_be_bytes([0, a, b, c]) as usize;
    (number < MOST).then_some((number, kind == 6))
}

#[cfg(test)]
mod tests {
    use weft_subnet::attrs::Attrs;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::net_conf::NetConf;

    use super::*;

    #[test]
    fn numbers_come_back_from_entries_and_leases_are_flannels() {
        for number in [0, 1, 255, 256, 50_000, MOST - 1] {
            let peer = Peer::new(number);
            for v6 in [false, true] {
                assert_eq!(by_inner(peer.inner(v6)), Some(number));
                assert_eq!(by_mac(peer.mac(v6)), Some((number, v6)));
            }
            for backend in [Backend::Vxlan, Backend::HostGw, Backend::VxlanDual, Backend::Udp, Backend::Wireguard] {
                let subnets = Subnets::from_key(&peer.id(backend)).unwrap();
                assert_eq!(subnets.to_key(), peer.id(backend));
                let net_conf = NetConf::parse(&backend.net_conf()).unwrap();
                assert!(subnets.iter().all(|net| net_conf.networks.iter().any(|all| all.contains(&net))));
                let attrs = Attrs::from_wire(peer.value(backend).as_bytes()).unwrap();
                assert_eq!(attrs.public_ip.map(IpAddr::V4), Some(peer.outer(false)));
                assert_ne!(peer.value(backend), Peer { moved: true, ..peer }.value(backend));
            }
        }
        assert_eq!(by_inner("10.250.0.0".parse().unwrap()), None);
        assert_eq!(by_mac(Mac([2, 5, 0, 0, 0, 1])), None);
    }
}
