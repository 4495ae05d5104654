// SPDX-License-Identifier: Apache-2.0
//! Decodes the kernel's messages (rtnetlink(7)).

use nix::libc;
use weft_netlink::wire::{attr, attr_after, attrs, attrs_after, i32_at, ip, messages, text, u8_at, u16_at, u32_at};

use super::{Addr, Link, Neigh, Route, Vxlan};

/// Attributes of vxlan devices (linux/if_link.h).
const IFLA_VXLAN_ID: u16 = 1;
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_COLLECT_METADATA: u16 = 25;

/// Decodes the links of an answer or a dump.
pub fn links(data: &[u8]) -> impl Iterator<Item = Link> {
    messages(data).filter(|m| m.kind == libc::RTM_NEWLINK).map(|m| link(m.payload))
}

fn link(payload: &[u8]) -> Link {
    let mut link =
        Link { index: u32_at(payload, 4), up: u32_at(payload, 8) & libc::IFF_UP as u32 != 0, ..Link::default() };
    for (kind, value) in attrs_after(payload, 16) {
        match kind {
            libc::IFLA_IFNAME => link.name = text(value).to_owned(),
            libc::IFLA_MTU => link.mtu = u32_at(value, 0),
            libc::IFLA_MASTER => link.master = u32_at(value, 0),
            libc::IFLA_LINK => link.peer = u32_at(value, 0),
            libc::IFLA_LINK_NETNSID => link.peer_netns = Some(i32_at(value, 0)),
            libc::IFLA_IFALIAS => link.alias = text(value).to_owned(),
            libc::IFLA_ADDRESS => link.mac = value.try_into().ok(),
            libc::IFLA_LINKINFO => {
                link.kind = attr(value, libc::IFLA_INFO_KIND).map(|kind| text(kind).to_owned()).unwrap_or_default();
                link.vxlan = attr(value, libc::IFLA_INFO_DATA).filter(|_| link.kind == "vxlan").map(vxlan);
            }
            _ => {}
        }
    }
    link
}

fn vxlan(data: &[u8]) -> Vxlan {
    let mut vxlan = Vxlan::default();
    for (kind, value) in attrs(data) {
        match kind {
            IFLA_VXLAN_ID => vxlan.vni = u32_at(value, 0),
            // The port is in network byte order.
            IFLA_VXLAN_PORT => vxlan.port = u16::from_be(u16_at(value, 0)),
            IFLA_VXLAN_COLLECT_METADATA => vxlan.external = u8_at(value, 0) != 0,
            _ => {}
        }
    }
    vxlan
}

pub(super) fn addr(payload: &[u8]) -> Option<Addr> {
    // IPv6 addresses have IFA_ADDRESS only. An IPv4 address with a peer has both, and IFA_LOCAL is the address of this
    // host.
    let value = attr_after(payload, 8, libc::IFA_LOCAL).or_else(|| attr_after(payload, 8, libc::IFA_ADDRESS))?;
    let global = u8_at(payload, 3) < libc::RT_SCOPE_LINK;
    Some(Addr { index: u32_at(payload, 4), addr: ip(value)?, len: u8_at(payload, 1), global })
}

pub(super) fn route(payload: &[u8]) -> Option<Route> {
    if u8_at(payload, 4) != libc::RT_TABLE_MAIN || u8_at(payload, 7) != libc::RTN_UNICAST {
        return None;
    }
    let v6 = i32::from(u8_at(payload, 0)) == libc::AF_INET6;
    let protocol = u8_at(payload, 5);
    let mut route = Route { dst: None, len: u8_at(payload, 1), v6, index: 0, gateway: None, protocol };
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::RTA_DST => route.dst = ip(value),
            libc::RTA_OIF => route.index = u32_at(value, 0),
            libc::RTA_GATEWAY => route.gateway = ip(value),
            _ => {}
        }
    }
    Some(route)
}

pub(super) fn neigh(payload: &[u8]) -> Option<Neigh> {
    let find = |wanted: u16| attr_after(payload, 12, wanted);
    Some(Neigh {
        index: u32_at(payload, 4),
        addr: ip(find(libc::NDA_DST)?)?,
        mac: find(libc::NDA_LLADDR).unwrap_or_default().to_vec(),
        permanent: u16_at(payload, 8) & libc::NUD_PERMANENT != 0,
    })
}
