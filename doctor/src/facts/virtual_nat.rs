// SPDX-License-Identifier: Apache-2.0
//! A published address behind the NAT that a hypervisor makes for a single machine: that of VirtualBox, with which Vagrant connects all
//! its machines first, and the user network of QEMU. Each such machine has the same address, and no other one reaches it.

use std::net::{IpAddr, Ipv4Addr};

use weft_netlink::rtnl::{Addr, Neigh};

use super::tables::Tables;

/// The MAC address of the gateway that VirtualBox simulates, and its last byte in the network.
const VIRTUALBOX: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x35, 2];
const VIRTUALBOX_HOST: u8 = 2;
/// How the MAC address of a gateway of libslirp begins. Its IPv4 address follows.
const SLIRP: [u8; 2] = [0x52, 0x55];

/// A published address that other machines have, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualNat {
    /// The address.
    pub addr: IpAddr,
    /// The link that has it.
    pub link: String,
}

/// Returns the first of these published addresses whose link has such a gateway.
pub(super) fn read(tables: &Tables<'_>, published: &[IpAddr]) -> Option<VirtualNat> {
    let is_behind = |addr: &&Addr| {
        let gateways = tables.routes.iter().filter(|route| route.dst.is_none() && route.index == addr.index);
        let gateways: Vec<IpAddr> = gateways.filter_map(|route| route.gateway).collect();
        let is_gateway = |neigh: &&Neigh| neigh.index == addr.index && gateways.contains(&neigh.addr);
        tables.neighbours.iter().filter(is_gateway).any(|neigh| is_simulated(neigh.addr, &neigh.mac))
    };
    let addr = tables.addrs.iter().filter(|addr| published.contains(&addr.addr)).find(is_behind)?;
    Some(VirtualNat { addr: addr.addr, link: tables.link(addr.index)?.name.clone() })
}

/// Returns true for the gateway of such a network.
fn is_simulated(gateway: IpAddr, mac: &[u8]) -> bool {
    let IpAddr::V4(gateway) = gateway else { return false };
    let octets = Ipv4Addr::octets(&gateway);
    mac == [&SLIRP[..], &octets].concat() || mac == VIRTUALBOX && octets[3] == VIRTUALBOX_HOST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gateways_of_virtualbox_and_qemu_are_known_by_their_mac_addresses() {
        for (gateway, mac, is_known) in [
            ([10, 0, 2, 2], VIRTUALBOX, true),
            ([10, 0, 2, 1], VIRTUALBOX, false),
            ([10, 0, 2, 2], [0x52, 0x55, 10, 0, 2, 2], true),
            ([192, 168, 5, 2], [0x52, 0x55, 192, 168, 5, 2], true),
            ([192, 168, 5, 2], [0x52, 0x55, 10, 0, 2, 2], false),
            ([10, 0, 2, 2], [0x52, 0x54, 0, 0x12, 0x34, 0x56], false),
        ] {
            assert_eq!(is_simulated(gateway.into(), &mac), is_known, "{gateway:?} {mac:?}");
        }
        assert!(!is_simulated("fd00::2".parse().unwrap(), &VIRTUALBOX));
        assert!(!is_simulated([10, 0, 2, 2].into(), &[]), "it is not known yet");
    }
}
