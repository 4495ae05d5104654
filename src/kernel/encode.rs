// SPDX-License-Identifier: Apache-2.0
//! Messages from values: pure functions that append one message's header and attributes. Who numbers and sends them is elsewhere.

use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;
use weft_backends::link::{Link, LinkKind};
use weft_backends::state::Mac;

use super::kinds::{self, Codec};
use super::rt::{CREATE, PLAIN, REPLACE, RTNH_F_ONLINK, family, ifaddrmsg, ifinfomsg};
use super::wire::Writer;

/// RTM_NEWNEXTHOP (Linux 5.3).
pub const RTM_NEWNEXTHOP: u16 = 104;
/// RTM_DELNEXTHOP.
pub const RTM_DELNEXTHOP: u16 = 105;
/// RTM_GETNEXTHOP.
pub const RTM_GETNEXTHOP: u16 = 106;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const NHA_ID: u16 = 1;
const NHA_OIF: u16 = 5;
const NHA_GATEWAY: u16 = 6;
const RTA_NH_ID: u16 = 30;
const NUD_PERMANENT: u16 = 0x80;
const NTF_SELF: u8 = 0x02;
const IFA_F_NODAD: u32 = 0x02;
const RT_SCOPE_NOWHERE: u8 = 255;
/// Valid on one link only: link-local addresses, routes to neighbours.
pub const RT_SCOPE_LINK: u8 = 253;
const ADDR_GEN_MODE_NONE: u8 = 1;

/// RTM_NEWLINK that creates a tunnel device, down. `parent` is the index of the outer device. Without an MTU (0) or a MAC the
/// kernel chooses.
pub fn create_link(w: &mut Writer, name: &str, link: &Link, parent: u32) {
    w.begin(libc::RTM_NEWLINK, CREATE, &ifinfomsg(0, 0, 0));
    w.attr_str(libc::IFLA_IFNAME, name);
    if link.mtu != 0 {
        w.attr_u32(libc::IFLA_MTU, link.mtu);
    }
    if let Some(mac) = link.mac {
        w.attr(libc::IFLA_ADDRESS, &mac.0);
    }
    info(w, link.kind.name(), |w, codec| codec.create(w, &*link.kind, parent));
}

/// RTM_NEWLINK on a device that exists: the attributes of its type that can be changed in place.
pub fn alter_kind(w: &mut Writer, index: u32, want: &dyn LinkKind) {
    w.begin(libc::RTM_NEWLINK, PLAIN, &ifinfomsg(index, 0, 0));
    info(w, want.name(), |w, codec| codec.alter(w, want));
}

/// IFLA_LINKINFO with the attributes of one type.
fn info(w: &mut Writer, name: &str, data: impl FnOnce(&mut Writer, &dyn Codec)) {
    w.nest(libc::IFLA_LINKINFO, |w| {
        w.attr(IFLA_INFO_KIND, name.as_bytes());
        w.nest(IFLA_INFO_DATA, |w| {
            if let Some(codec) = kinds::codec(name) {
                data(w, codec);
            }
        });
    });
}

/// RTM_SETLINK that gives the mark of its maker to a device.
pub fn link_alias(w: &mut Writer, index: u32, alias: &str) {
    w.begin(libc::RTM_SETLINK, PLAIN, &ifinfomsg(index, 0, 0));
    w.attr(libc::IFLA_IFALIAS, alias.as_bytes());
}

/// RTM_SETLINK that keeps the kernel from giving a link-local address to a device.
pub fn link_no_link_local(w: &mut Writer, index: u32) {
    w.begin(libc::RTM_SETLINK, PLAIN, &ifinfomsg(index, 0, 0));
    w.nest(libc::IFLA_AF_SPEC, |w| w.nest(10, |w| w.attr(8, &[ADDR_GEN_MODE_NONE])));
}

/// RTM_SETLINK with those of MTU, MAC and administrative state that are to change.
pub fn alter_link(w: &mut Writer, index: u32, mtu: Option<u32>, mac: Option<Mac>, up: Option<bool>) {
    let (flags, change) = up.map_or((0, 0), |up| (u32::from(up), 1));
    w.begin(libc::RTM_SETLINK, PLAIN, &ifinfomsg(index, flags, change));
    if let Some(mtu) = mtu {
        w.attr_u32(libc::IFLA_MTU, mtu);
    }
    if let Some(mac) = mac {
        w.attr(libc::IFLA_ADDRESS, &mac.0);
    }
}

/// RTM_NEWADDR or RTM_DELADDR. IPv6 without duplicate address detection: nobody on a tunnel would answer.
pub fn address(w: &mut Writer, add: bool, index: u32, net: IpNet) {
    let ip = net.addr();
    let h = ifaddrmsg(ip, net.prefix_len(), index);
    w.begin(if add { libc::RTM_NEWADDR } else { libc::RTM_DELADDR }, if add { REPLACE } else { PLAIN }, &h);
    w.attr_ip(libc::IFA_LOCAL, ip);
    w.attr_ip(libc::IFA_ADDRESS, ip);
    if add && ip.is_ipv6() {
        w.attr_u32(libc::IFA_FLAGS, IFA_F_NODAD);
    }
}

/// `struct ndmsg`.
fn ndmsg(family: u8, index: u32, state: u16, flags: u8) -> [u8; 12] {
    let mut h = [0; 12];
    h[0] = family;
    h[4..8].copy_from_slice(&index.to_ne_bytes());
    h[8..10].copy_from_slice(&state.to_ne_bytes());
    h[10] = flags;
    h
}

/// A vxlan forwarding entry: put with a destination, or deleted with all its destinations.
pub fn fdb(w: &mut Writer, index: u32, mac: Mac, dst: Option<IpAddr>) {
    let (kind, flags) = if dst.is_some() { (libc::RTM_NEWNEIGH, REPLACE) } else { (libc::RTM_DELNEIGH, PLAIN) };
    w.begin(kind, flags, &ndmsg(libc::AF_BRIDGE as u8, index, NUD_PERMANENT, NTF_SELF));
    w.attr(libc::NDA_LLADDR, &mac.0);
    if let Some(dst) = dst {
        w.attr_ip(libc::NDA_DST, dst);
    }
}

/// A permanent neighbour: put with a MAC, or deleted.
pub fn neighbour(w: &mut Writer, index: u32, ip: IpAddr, mac: Option<Mac>) {
    let (kind, flags) = if mac.is_some() { (libc::RTM_NEWNEIGH, REPLACE) } else { (libc::RTM_DELNEIGH, PLAIN) };
    w.begin(kind, flags, &ndmsg(family(ip), index, NUD_PERMANENT, 0));
    w.attr_ip(libc::NDA_DST, ip);
    if let Some(mac) = mac {
        w.attr(libc::NDA_LLADDR, &mac.0);
    }
}

/// A nexthop object.
#[derive(Debug, Clone, Copy)]
pub struct NewNexthop {
    /// Its id.
    pub id: u32,
    /// Who made it.
    pub protocol: u8,
    /// Gateway.
    pub via: IpAddr,
    /// Outgoing interface.
    pub index: u32,
    /// The gateway is believed to be on the link.
    pub onlink: bool,
}

/// RTM_NEWNEXTHOP, exclusively: a replaced nexthop makes the kernel walk all routes.
pub fn new_nexthop(w: &mut Writer, n: &NewNexthop) {
    let mut h = [family(n.via), 0, n.protocol, 0, 0, 0, 0, 0];
    h[4..].copy_from_slice(&(if n.onlink { RTNH_F_ONLINK } else { 0 }).to_ne_bytes());
    w.begin(RTM_NEWNEXTHOP, CREATE, &h);
    w.attr_u32(NHA_ID, n.id);
    w.attr_u32(NHA_OIF, n.index);
    w.attr_ip(NHA_GATEWAY, n.via);
}

/// RTM_DELNEXTHOP.
pub fn delete_nexthop(w: &mut Writer, id: u32) {
    w.begin(RTM_DELNEXTHOP, PLAIN, &[0; 8]);
    w.attr_u32(NHA_ID, id);
}

/// How a route leaves, in the kernel's numbers.
#[derive(Debug, Clone, Copy)]
pub enum Exit {
    /// Through a nexthop object.
    Nexthop(u32),
    /// Through a gateway: address, interface, on-link.
    Gateway(IpAddr, u32, bool),
    /// On an interface.
    Device(u32),
    /// RTN_BLACKHOLE, RTN_UNREACHABLE.
    Type(u8),
    /// Deletion of whatever has this prefix and metric.
    Any,
}

/// RTM_NEWROUTE that is refused when there is a route to this prefix with this metric, main table.
pub fn new_route(w: &mut Writer, net: IpNet, metric: u32, exit: Exit, protocol: u8) {
    put_route(w, (net, metric), exit, (libc::RTM_NEWROUTE, CREATE), protocol);
}

/// RTM_NEWROUTE (with a protocol) in the place of whatever stands there, or RTM_DELROUTE (`None`: whoever wrote it), main table.
pub fn route(w: &mut Writer, net: IpNet, metric: u32, exit: Exit, protocol: Option<u8>) {
    let message = if protocol.is_some() { (libc::RTM_NEWROUTE, REPLACE) } else { (libc::RTM_DELROUTE, PLAIN) };
    put_route(w, (net, metric), exit, message, protocol.unwrap_or(0));
}

/// RTM_DELROUTE of a route that this protocol wrote, and no other.
pub fn delete_route_of(w: &mut Writer, net: IpNet, metric: u32, exit: Exit, protocol: u8) {
    put_route(w, (net, metric), exit, (libc::RTM_DELROUTE, PLAIN), protocol);
}

fn put_route(w: &mut Writer, (net, metric): (IpNet, u32), exit: Exit, message: (u16, u16), protocol: u8) {
    let add = message.0 == libc::RTM_NEWROUTE;
    let scope = match (add, exit, net) {
        (false, _, _) => RT_SCOPE_NOWHERE,
        (true, Exit::Device(_), IpNet::V4(_)) => RT_SCOPE_LINK,
        _ => 0,
    };
    let kind = match exit {
        Exit::Type(kind) => kind,
        Exit::Any => 0,
        Exit::Nexthop(_) | Exit::Gateway(..) | Exit::Device(_) => libc::RTN_UNICAST,
    };
    let flags = if matches!(exit, Exit::Gateway(_, _, true)) { RTNH_F_ONLINK } else { 0 };
    let mut h = [0; 12];
    h[0] = family(net.addr());
    h[1] = net.prefix_len();
    h[4] = libc::RT_TABLE_MAIN;
    h[5] = protocol;
    h[6] = scope;
    h[7] = kind;
    h[8..].copy_from_slice(&flags.to_ne_bytes());
    w.begin(message.0, message.1, &h);
    w.attr_ip(libc::RTA_DST, net.network());
    if metric != 0 {
        w.attr_u32(libc::RTA_PRIORITY, metric);
    }
    match exit {
        Exit::Nexthop(id) => w.attr_u32(RTA_NH_ID, id),
        Exit::Gateway(via, index, _) => {
            w.attr_ip(libc::RTA_GATEWAY, via);
            w.attr_u32(libc::RTA_OIF, index);
        }
        Exit::Device(index) => w.attr_u32(libc::RTA_OIF, index),
        Exit::Type(_) | Exit::Any => {}
    }
}

/// Dump requests; the strict checks of the kernel allow exactly these.
pub mod dump {
    use nix::libc;

    use super::super::rt::ifinfomsg;
    use super::super::wire::Writer;
    use super::RTM_GETNEXTHOP;

    /// All links, without their statistics.
    pub fn links(w: &mut Writer, kind: u16, flags: u16) {
        w.begin(kind, flags, &ifinfomsg(0, 0, 0));
        w.attr_u32(libc::IFLA_EXT_MASK, 1 << 3);
    }

    /// All addresses.
    pub fn addresses(w: &mut Writer, kind: u16, flags: u16) {
        w.begin(kind, flags, &[0; 8]);
    }

    /// Neighbours of one device.
    pub fn neighbours(w: &mut Writer, flags: u16, index: u32) {
        w.begin(libc::RTM_GETNEIGH, flags, &[0; 12]);
        w.attr_u32(8, index);
    }

    /// Forwarding entries of one device, which the kernel takes from the header.
    pub fn fdb(w: &mut Writer, flags: u16, index: u32) {
        w.begin(libc::RTM_GETNEIGH, flags, &super::ndmsg(libc::AF_BRIDGE as u8, index, 0, 0));
    }

    /// Routes of the main table of one family.
    pub fn routes(w: &mut Writer, flags: u16, family: u8) {
        w.begin(libc::RTM_GETROUTE, flags, &[family, 0, 0, 0, libc::RT_TABLE_MAIN, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Routes of another table, or of any where the kernel does not filter (before 4.20).
    pub fn routes_of_table(w: &mut Writer, flags: u16, family: u8, table: u32) {
        w.begin(libc::RTM_GETROUTE, flags, &[family, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        w.attr_u32(libc::RTA_TABLE, table);
    }

    /// Routes of the main table that bear this protocol number. Before Linux 4.20 the kernel does not filter and shows all.
    pub fn routes_by(w: &mut Writer, flags: u16, family: u8, protocol: u8) {
        w.begin(libc::RTM_GETROUTE, flags, &[family, 0, 0, 0, libc::RT_TABLE_MAIN, protocol, 0, 0, 0, 0, 0, 0]);
    }

    /// The same of one device.
    pub fn routes_of(w: &mut Writer, flags: u16, family: u8, index: u32) {
        routes(w, flags, family);
        w.attr_u32(libc::RTA_OIF, index);
    }

    /// All nexthop objects.
    pub fn nexthops(w: &mut Writer, flags: u16) {
        w.begin(RTM_GETNEXTHOP, flags, &[0; 8]);
    }
}
