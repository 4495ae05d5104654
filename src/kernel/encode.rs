// SPDX-License-Identifier: Apache-2.0
//! Encodes the hot messages: FDB entries, neighbours, nexthops and routes, of which there are several for each peer. Each function
//! begins one message. The caller ends it with its sequence number, and sends many of them in one datagram.
//!
//! They are written by hand, because that is several times faster than a library (docs/adr/014-typed-messages.md).

use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;
use weft_backends::state::Mac;

use super::rt::{CREATE, PLAIN, REPLACE, RTNH_F_ONLINK, family};
use super::wire::Writer;

/// RTM_NEWNEXTHOP (Linux 5.3).
pub const RTM_NEWNEXTHOP: u16 = 104;
/// RTM_DELNEXTHOP.
pub const RTM_DELNEXTHOP: u16 = 105;
/// RTM_GETNEXTHOP.
pub const RTM_GETNEXTHOP: u16 = 106;
pub(super) const NHA_ID: u16 = 1;
pub(super) const NHA_OIF: u16 = 5;
pub(super) const NHA_GATEWAY: u16 = 6;
pub(super) const RTA_NH_ID: u16 = 30;
const NUD_PERMANENT: u16 = 0x80;
const NTF_SELF: u8 = 0x02;
const RT_SCOPE_NOWHERE: u8 = 255;
/// The scope of link-local addresses and of routes to neighbours, which are valid only on one link.
pub const RT_SCOPE_LINK: u8 = 253;

/// Builds a `struct ndmsg`.
fn ndmsg(family: u8, index: u32, state: u16, flags: u8) -> [u8; 12] {
    let mut h = [0; 12];
    h[0] = family;
    h[4..8].copy_from_slice(&index.to_ne_bytes());
    h[8..10].copy_from_slice(&state.to_ne_bytes());
    h[10] = flags;
    h
}

/// Writes the FDB entry of a MAC, or deletes it with all its destinations (`None`).
pub fn fdb(w: &mut Writer, index: u32, mac: Mac, dst: Option<IpAddr>) {
    let (kind, flags) = if dst.is_some() { (libc::RTM_NEWNEIGH, REPLACE) } else { (libc::RTM_DELNEIGH, PLAIN) };
    w.begin(kind, flags, &ndmsg(libc::AF_BRIDGE as u8, index, NUD_PERMANENT, NTF_SELF));
    w.attr(libc::NDA_LLADDR, &mac.0);
    if let Some(dst) = dst {
        w.attr_ip(libc::NDA_DST, dst);
    }
}

/// Writes a permanent neighbour, or deletes it (`None`).
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
    /// The protocol number of the program that creates it (`nh_protocol`).
    pub protocol: u8,
    /// Gateway.
    pub via: IpAddr,
    /// Outgoing interface.
    pub index: u32,
    /// The kernel does not check that the gateway is directly reachable on the link.
    pub onlink: bool,
}

/// Creates a nexthop. The kernel refuses it if the id is in use. Existing nexthops are never replaced, because the kernel would walk
/// over all routes.
pub fn new_nexthop(w: &mut Writer, n: &NewNexthop) {
    let mut h = [family(n.via), 0, n.protocol, 0, 0, 0, 0, 0];
    h[4..].copy_from_slice(&(if n.onlink { RTNH_F_ONLINK } else { 0 }).to_ne_bytes());
    w.begin(RTM_NEWNEXTHOP, CREATE, &h);
    w.attr_u32(NHA_ID, n.id);
    w.attr_u32(NHA_OIF, n.index);
    w.attr_ip(NHA_GATEWAY, n.via);
}

/// Deletes a nexthop.
pub fn delete_nexthop(w: &mut Writer, id: u32) {
    w.begin(RTM_DELNEXTHOP, PLAIN, &[0; 8]);
    w.attr_u32(NHA_ID, id);
}

/// How packets leave the host on a route, in the numbers of the kernel.
#[derive(Debug, Clone, Copy)]
pub enum Exit {
    /// Through a nexthop object.
    Nexthop(u32),
    /// Through a gateway.
    Gateway {
        /// The gateway.
        via: IpAddr,
        /// The index of the outgoing interface.
        index: u32,
        /// True if the kernel must not check that the gateway is on the link.
        onlink: bool,
    },
    /// Directly on an interface.
    Device(u32),
    /// Not at all: RTN_BLACKHOLE or RTN_UNREACHABLE.
    Type(u8),
    /// For deletions: however the route with this prefix and metric leaves the host.
    Any,
}

/// Asks how packets of this host reach an address now.
pub fn get_route(w: &mut Writer, to: IpAddr) {
    ask_for_route(w, to, 0);
}

/// Asks for the entry of the routing table by which packets of this host reach an address (RTM_F_FIB_MATCH of linux/rtnetlink.h). It costs the
/// same however many entries there are. The answer names the table, because a policy rule may lead to another one than the main table.
pub fn fib_entry(w: &mut Writer, to: IpAddr) {
    const LOOKUP_TABLE: u32 = 0x1000;
    const FIB_MATCH: u32 = 0x2000;
    // Without this flag, the kernel names the main table for every IPv4 route. For IPv6 it always names the right one, and refuses the flag.
    let table = if to.is_ipv4() { LOOKUP_TABLE } else { 0 };
    ask_for_route(w, to, FIB_MATCH | table);
}

fn ask_for_route(w: &mut Writer, to: IpAddr, flags: u32) {
    let bits = if to.is_ipv4() { 32 } else { 128 };
    let [a, b, c, d] = flags.to_ne_bytes();
    w.begin(libc::RTM_GETROUTE, PLAIN, &[family(to), bits, 0, 0, 0, 0, 0, 0, a, b, c, d]);
    w.attr_ip(libc::RTA_DST, to);
}

/// Creates a route in the main table. The kernel refuses it if there is a route to this prefix with this metric.
pub fn new_route(w: &mut Writer, net: IpNet, metric: u32, exit: Exit, protocol: u8) {
    put_route(w, (net, metric), exit, (libc::RTM_NEWROUTE, CREATE), protocol);
}

/// Writes a route with this protocol in the main table, replacing the one that is there; or deletes it, no matter which program wrote
/// it (`None`).
pub fn route(w: &mut Writer, net: IpNet, metric: u32, exit: Exit, protocol: Option<u8>) {
    let message = if protocol.is_some() { (libc::RTM_NEWROUTE, REPLACE) } else { (libc::RTM_DELROUTE, PLAIN) };
    put_route(w, (net, metric), exit, message, protocol.unwrap_or(0));
}

/// Deletes a route from the main table only if it has this protocol.
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
        Exit::Nexthop(_) | Exit::Gateway { .. } | Exit::Device(_) => libc::RTN_UNICAST,
    };
    let flags = if matches!(exit, Exit::Gateway { onlink: true, .. }) { RTNH_F_ONLINK } else { 0 };
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
        Exit::Gateway { via, index, .. } => {
            w.attr_ip(libc::RTA_GATEWAY, via);
            w.attr_u32(libc::RTA_OIF, index);
        }
        Exit::Device(index) => w.attr_u32(libc::RTA_OIF, index),
        Exit::Type(_) | Exit::Any => {}
    }
}

/// Requests for dumps. The strict checks of the kernel allow exactly these.
pub mod dump {
    use nix::libc;

    use super::super::wire::Writer;
    use super::RTM_GETNEXTHOP;

    /// Asks for the neighbours on one device.
    pub fn neighbours(w: &mut Writer, flags: u16, index: u32) {
        w.begin(libc::RTM_GETNEIGH, flags, &[0; 12]);
        w.attr_u32(8, index);
    }

    /// Asks for the FDB entries of one device. The kernel reads the device from the header.
    pub fn fdb(w: &mut Writer, flags: u16, index: u32) {
        w.begin(libc::RTM_GETNEIGH, flags, &super::ndmsg(libc::AF_BRIDGE as u8, index, 0, 0));
    }

    /// Asks for the routes of the main table of one family.
    pub fn routes(w: &mut Writer, flags: u16, family: u8) {
        w.begin(libc::RTM_GETROUTE, flags, &[family, 0, 0, 0, libc::RT_TABLE_MAIN, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Asks for the routes of another table. Before Linux 4.20 the kernel sends all tables.
    pub fn routes_of_table(w: &mut Writer, flags: u16, family: u8, table: u32) {
        w.begin(libc::RTM_GETROUTE, flags, &[family, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        w.attr_u32(libc::RTA_TABLE, table);
    }

    /// Asks for the routes of the main table with this protocol. Before Linux 4.20 the kernel sends all routes.
    pub fn routes_by(w: &mut Writer, flags: u16, family: u8, protocol: u8) {
        w.begin(libc::RTM_GETROUTE, flags, &[family, 0, 0, 0, libc::RT_TABLE_MAIN, protocol, 0, 0, 0, 0, 0, 0]);
    }

    /// Asks for the routes of the main table over one device.
    pub fn routes_of(w: &mut Writer, flags: u16, family: u8, index: u32) {
        routes(w, flags, family);
        w.attr_u32(libc::RTA_OIF, index);
    }

    /// Asks for all nexthops.
    pub fn nexthops(w: &mut Writer, flags: u16) {
        w.begin(RTM_GETNEXTHOP, flags, &[0; 8]);
    }
}

#[cfg(test)]
mod tests;
