// SPDX-License-Identifier: Apache-2.0
//! Addresses of this node that another host on the LAN has, too. The kernel finds those of IPv6. For IPv4, this module asks the LAN as RFC 5227
//! says: an ARP request for the address, with 0.0.0.0 as its sender, so that nobody learns anything from it. A MAC address that another host has,
//! too, is found in the kernel's table of neighbours.

use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::sys::socket::{LinkAddr, bind};
use rustix::net::{AddressFamily, SocketFlags, SocketType, eth, socket_with};
use weft_netlink::rtnl::{Addr, Link, Neigh};

use super::path_links::PathLinks;
use super::tables::Tables;

/// Requests for each address, and the time after each. A host on the LAN answers within a few milliseconds.
const REQUESTS: u32 = 2;
const WAIT: Duration = Duration::from_millis(100);
/// Maximum number of addresses that are asked for. A node has one or two.
const MAX_ADDRESSES: usize = 16;
/// EtherType of ARP (linux/if_ether.h).
const ETH_P_ARP: u16 = 0x0806;
/// Length of an Ethernet frame with an ARP packet for IPv4.
const FRAME: usize = 42;

type Mac = [u8; 6];

/// An IPv4 address of this node that another host has, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Duplicate {
    /// The address.
    pub addr: Ipv4Addr,
    /// The link of this node that has it.
    pub link: String,
    /// The MAC address of the other host.
    pub mac: Mac,
}

/// A MAC address of this node that another host has, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SameMac {
    /// The link of this node that has it.
    pub link: String,
    /// The MAC address.
    pub mac: Mac,
    /// An address of the other host.
    pub addr: IpAddr,
    /// How many more addresses of others have this MAC address.
    pub more: usize,
}

/// Returns the MAC addresses of uplinks that other hosts have, too, as the neighbours of the kernel show them.
pub(super) fn same_macs(tables: &Tables<'_>, path: &PathLinks) -> Vec<SameMac> {
    let is_own = |addr: IpAddr| tables.addrs.iter().any(|own| own.addr == addr);
    // On a link without ARP, the kernel gives each neighbour the MAC address of the link itself (arp_constructor).
    let was_found = |neigh: &&Neigh| neigh.state & libc::NUD_NOARP == 0;
    let same_mac = |link: &Link| {
        let mac = link.mac?;
        let of_link = tables.neighbours.iter().filter(|neigh| neigh.index == link.index && neigh.mac == mac);
        let of_link = of_link.filter(was_found);
        let mut others = of_link.map(|neigh| neigh.addr).filter(|addr| !is_own(*addr));
        Some(SameMac { link: link.name.clone(), mac, addr: others.next()?, more: others.count() })
    };
    tables.links.iter().filter(|link| path.is_uplink(&link.name)).filter_map(same_mac).collect()
}

/// Asks for the addresses of the uplinks.
///
/// # Errors
/// No packets can be sent or received, for example because the caller is not root.
pub(super) fn read(tables: &Tables<'_>, path: &PathLinks) -> io::Result<Vec<Duplicate>> {
    let Tables { links, addrs, .. } = *tables;
    // A link of this host may answer for an address of another one.
    let is_own = |mac: Mac| links.iter().any(|link| link.mac == Some(mac));
    let mut found = Vec::new();
    for link in links.iter().filter(|link| link.up && path.is_uplink(&link.name)) {
        let (Some(mac), of_link) = (link.mac, addrs.iter().filter(|addr| addr.index == link.index && addr.global))
        else {
            continue;
        };
        let wanted: Vec<Ipv4Addr> = of_link.filter_map(v4).take(MAX_ADDRESSES).collect();
        if !wanted.is_empty() {
            let others = ask(&link.name, mac, &wanted)?.into_iter().filter(|(_, mac)| !is_own(*mac));
            found.extend(others.map(|(addr, mac)| Duplicate { addr, link: link.name.clone(), mac }));
        }
    }
    Ok(found)
}

fn v4(addr: &Addr) -> Option<Ipv4Addr> {
    match addr.addr {
        IpAddr::V4(addr) => Some(addr),
        IpAddr::V6(_) => None,
    }
}

/// Sends the requests on a link, and returns who says to have one of the addresses. Equal answers are returned once.
fn ask(link: &str, mac: Mac, wanted: &[Ipv4Addr]) -> io::Result<Vec<(Ipv4Addr, Mac)>> {
    let mut found = Vec::new();
    let of_link = getifaddrs()?.filter(|one| one.interface_name == link).filter_map(|one| one.address);
    // The address of a link without ARP, such as a tunnel, has another length.
    let Some(bound) = of_link.filter_map(|addr| addr.as_link_addr().copied()).find(|addr: &LinkAddr| addr.halen() == 6)
    else {
        return Ok(found);
    };
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, Some(eth::ARP))?;
    bind(socket.as_raw_fd(), &bound)?;
    // The type of the standard library sends and receives on any socket of packets.
    let socket = UdpSocket::from(socket);
    for _ in 0..REQUESTS {
        for addr in wanted {
            // A link whose carrier is gone cannot send.
            let _ = socket.send(&request(mac, *addr));
        }
        let end = Instant::now() + WAIT;
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            socket.set_read_timeout(Some(left))?;
            let mut frame = [0; FRAME];
            // A shorter frame is no ARP packet. After an error, the time is over.
            if let Ok(FRAME) = socket.recv(&mut frame) {
                found.extend(sender(&frame).filter(|one| wanted.contains(&one.0) && !found.contains(one)));
            }
        }
    }
    Ok(found)
}

/// Returns the frame of an ARP probe (RFC 826, RFC 5227).
fn request(mac: Mac, wanted: Ipv4Addr) -> [u8; FRAME] {
    let mut frame = [0; FRAME];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    frame[12..14].copy_from_slice(&ETH_P_ARP.to_be_bytes());
    // Ethernet, IPv4, the lengths of their addresses, and "request".
    frame[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    frame[22..28].copy_from_slice(&mac);
    frame[38..42].copy_from_slice(&wanted.octets());
    frame
}

/// Returns the address that the sender of an ARP packet says to have, and its MAC address.
fn sender(frame: &[u8; FRAME]) -> Option<(Ipv4Addr, Mac)> {
    if frame[12..14] != ETH_P_ARP.to_be_bytes() || frame[14..20] != [0, 1, 8, 0, 6, 4] {
        return None;
    }
    let (mac, addr): (Mac, [u8; 4]) = (frame[22..28].try_into().ok()?, frame[28..32].try_into().ok()?);
    Some((addr.into(), mac))
}

#[cfg(test)]
mod tests {
    use super::super::path_links::PathLink;
    use super::super::policy_rules::PolicyRules;
    use super::*;

    #[test]
    fn the_mac_address_that_the_kernel_gives_neighbours_of_a_link_without_arp_is_no_clone() {
        let mac = [2, 0, 0, 0, 0, 7];
        let links = [Link { index: 2, name: "eth0".to_owned(), mac: Some(mac), ..Link::default() }];
        let uplink = PathLink { name: "eth0".to_owned(), is_uplink: true, ..PathLink::default() };
        let path = PathLinks { links: vec![uplink], ..PathLinks::default() };
        let policy = PolicyRules::default();
        for (state, found) in [(libc::NUD_NOARP, 0), (libc::NUD_STALE, 1)] {
            let neighbours = [Neigh { index: 2, addr: [192, 0, 2, 9].into(), mac: mac.to_vec(), state }];
            let tables = Tables { links: &links, addrs: &[], routes: &[], neighbours: &neighbours, policy: &policy };
            assert_eq!(same_macs(&tables, &path).len(), found, "{state:#x}");
        }
    }

    #[test]
    fn only_arp_packets_of_ipv4_name_a_sender() {
        let mac = [2, 0, 0, 0, 0, 7];
        let mut frame = request(mac, Ipv4Addr::new(192, 0, 2, 1));
        assert_eq!(sender(&frame), Some((Ipv4Addr::UNSPECIFIED, mac)), "nobody learns an address from the request");
        frame[28..32].copy_from_slice(&[192, 0, 2, 1]);
        assert_eq!(sender(&frame), Some((Ipv4Addr::new(192, 0, 2, 1), mac)));
        for at in [13, 15, 16, 18, 19] {
            let mut other = frame;
            other[at] ^= 0x40;
            assert_eq!(sender(&other), None, "byte {at}");
        }
    }
}
