// SPDX-License-Identifier: Apache-2.0
//! Values from messages: pure functions over the payload of one message. Indexes stay indexes here; names come from [`Links`].
//!
//! Written by hand, not on a packet library: 50,000 peers are 150,000 messages per audit.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use nix::libc;
use weft_backends::link::{Foreign, Link, LinkKind};
use weft_backends::state::{Mac, Name, Route};

use super::kinds::{Parents, Told};
use super::wire::{attrs, attrs_after, ip, text, u8_at, u16_at, u32_at};
use super::{AddrInfo, LinkInfo, Maker};

/// `ndm_state` bits that time does not change: NUD_PERMANENT, NUD_NOARP.
const LASTING: u16 = 0x80 | 0x40;

/// A link with all that its value needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFacts {
    /// What any link has.
    pub info: LinkInfo,
    /// Its type and attributes, if it is of a type that the agent makes.
    pub told: Option<Told>,
    /// One end of a veth pair: mostly a pod's.
    pub veth: bool,
    /// IFLA_IFALIAS.
    pub alias: String,
}

/// All links by index.
pub type Links = HashMap<u32, LinkFacts>;

impl LinkFacts {
    /// Value of the link, among all links and addresses of the host.
    pub fn value(&self, links: &Links, addrs: &[AddrInfo]) -> Link {
        let kind = self.kind(&Host { links, addrs, index: self.info.index });
        Link { kind, mtu: self.info.mtu, mac: self.info.mac, up: self.info.up }
    }

    /// Its kind, given who may be its outer device.
    pub fn kind(&self, parents: &dyn Parents) -> Arc<dyn LinkKind> {
        self.told.as_ref().map_or_else(|| Arc::new(Foreign) as Arc<dyn LinkKind>, |told| told.kind(parents))
    }

    /// True when it has forwarding entries that may be ours.
    pub fn has_fdb(&self) -> bool {
        self.told.as_ref().is_some_and(Told::has_fdb)
    }
}

/// The links and addresses around the link of this index.
struct Host<'a> {
    links: &'a Links,
    addrs: &'a [AddrInfo],
    index: u32,
}

impl Parents for Host<'_> {
    fn of_index(&self, index: u32) -> Option<Name> {
        self.links.get(&index).map(|link| link.info.name)
    }

    fn of_address(&self, address: IpAddr) -> Option<Name> {
        let mut at = self.addrs.iter().filter(|a| a.net.addr() == address && a.index != self.index);
        at.find_map(|a| self.of_index(a.index))
    }
}

/// RTM_NEWLINK and RTM_DELLINK; `None` for a message of another family (a bridge port, for instance).
pub fn link(payload: &[u8]) -> Option<LinkFacts> {
    if u8_at(payload, 0) != 0 {
        return None;
    }
    let flags = u32_at(payload, 8);
    let flag = |bit: libc::c_int| flags & u32::try_from(bit).unwrap_or(0) != 0;
    let (mut name, mut mtu, mut mac, mut alias) = (None, 0, None, String::new());
    let (mut told, mut veth) = (None, false);
    for (kind, value) in attrs_after(payload, 16) {
        match kind {
            libc::IFLA_IFNAME => name = Name::of_kernel(value),
            libc::IFLA_MTU => mtu = u32_at(value, 0),
            // ARPHRD_ETHER only: the "address" of an ipip device is its local IP.
            libc::IFLA_ADDRESS if u16_at(payload, 2) == 1 => mac = value.try_into().ok().map(Mac),
            libc::IFLA_IFALIAS => alias = text(value).to_owned(),
            libc::IFLA_LINKINFO => (told, veth) = linkinfo(value),
            _ => {}
        }
    }
    let info = LinkInfo {
        index: u32_at(payload, 4),
        name: name?,
        mtu,
        mac,
        up: flag(libc::IFF_UP),
        carrier: flag(libc::IFF_LOWER_UP),
        loopback: flag(libc::IFF_LOOPBACK),
        // Whether it is this agent is known to whoever knows its alias.
        maker: if super::dump::is_wefts(&alias) { Maker::AnotherAgent } else { Maker::Unknown },
    };
    Some(LinkFacts { info, told, veth, alias })
}

fn linkinfo(value: &[u8]) -> (Option<Told>, bool) {
    let (mut kind, mut data) = ("", &[][..]);
    for (t, v) in attrs(value) {
        match t {
            1 => kind = text(v),
            2 => data = v,
            _ => {}
        }
    }
    (Told::new(kind, data), kind == "veth")
}

/// RTM_NEWADDR and RTM_DELADDR.
pub fn address(payload: &[u8]) -> Option<AddrInfo> {
    let (mut local, mut peer, mut flags) = (None, None, u32::from(u8_at(payload, 2)));
    for (kind, value) in attrs_after(payload, 8) {
        match kind {
            libc::IFA_LOCAL => local = ip(value),
            libc::IFA_ADDRESS => peer = ip(value),
            libc::IFA_FLAGS => flags = u32_at(value, 0),
            _ => {}
        }
    }
    let net = IpNet::new(local.or(peer)?, u8_at(payload, 1)).ok()?;
    Some(AddrInfo { index: u32_at(payload, 4), net, scope: u8_at(payload, 3), flags })
}

/// RTM_NEWNEIGH and RTM_DELNEIGH, neighbour or FDB entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// True: an entry of the device's own FDB (AF_BRIDGE, NTF_SELF). False: a neighbour.
    pub fdb: bool,
    /// Index of the device.
    pub index: u32,
    /// Permanent (or NOARP): not learned, does not age.
    pub lasting: bool,
    /// IP of the neighbour, or outer destination.
    pub dst: Option<IpAddr>,
    /// Link-layer address, or inner destination.
    pub mac: Option<Mac>,
}

/// Decodes a [`Neighbour`]; `None` for other families, for a bridge's own table, and for the second notification of an FDB
/// entry: before Linux 6.13 the core repeats what the device has said, without destination and NDA_CACHEINFO.
pub fn neighbour(payload: &[u8]) -> Option<Neighbour> {
    let family = u8_at(payload, 0);
    let fdb = i32::from(family) == libc::AF_BRIDGE;
    if !fdb && family != 2 && family != 10 || fdb && u8_at(payload, 10) & 0x02 == 0 || u8_at(payload, 10) & 0x08 != 0 {
        return None;
    }
    let (mut dst, mut mac, mut from_device) = (None, None, false);
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::NDA_DST => dst = ip(value),
            libc::NDA_LLADDR => mac = value.try_into().ok().map(Mac),
            libc::NDA_CACHEINFO => from_device = true,
            _ => {}
        }
    }
    if fdb && !from_device {
        return None;
    }
    Some(Neighbour { fdb, index: u32_at(payload, 4), lasting: u16_at(payload, 8) & LASTING != 0, dst, mac })
}

/// A route, its interface still an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteFacts {
    /// Truncated prefix.
    pub net: IpNet,
    /// Priority.
    pub metric: u32,
    /// `rtm_type`.
    pub kind: u8,
    /// `rtm_protocol`.
    pub protocol: u8,
    /// Gateway of the same family.
    pub via: Option<IpAddr>,
    /// Outgoing interface, 0 for none.
    pub index: u32,
    /// RTNH_F_ONLINK.
    pub onlink: bool,
    /// RTA_NH_ID, 0 for none.
    pub nexthop: u32,
    /// Multipath, encapsulation, gateway of the other family: forms we never write.
    pub strange: bool,
}

impl RouteFacts {
    /// The route's value, given the name of its interface.
    pub fn value(&self, dev: Option<Name>) -> Route {
        match (self.kind, self.via, dev) {
            (libc::RTN_BLACKHOLE, _, _) => Route::Blackhole,
            (libc::RTN_UNREACHABLE, _, _) => Route::Unreachable,
            (libc::RTN_UNICAST, Some(via), Some(dev)) if !self.strange => {
                Route::Unicast { via, dev, onlink: self.onlink }
            }
            (libc::RTN_UNICAST, None, Some(dev)) if !self.strange => Route::Device { dev },
            _ => Route::Other,
        }
    }
}

/// RTM_NEWROUTE and RTM_DELROUTE; `None` for what is not a lasting route of the main table for all traffic classes.
pub fn route(payload: &[u8]) -> Option<RouteFacts> {
    let (table, route) = route_of_any_table(payload)?;
    (table == u32::from(libc::RT_TABLE_MAIN)).then_some(route)
}

/// The same for a route of any table; its table.
pub fn route_of_any_table(payload: &[u8]) -> Option<(u32, RouteFacts)> {
    let (family, len, kind, flags) = (u8_at(payload, 0), u8_at(payload, 1), u8_at(payload, 7), u32_at(payload, 8));
    let known = matches!(kind, libc::RTN_UNICAST | libc::RTN_BLACKHOLE..=libc::RTN_THROW);
    // RTM_F_CLONED: the kernel's cache. Protocol 1: an ICMP redirect. Source or TOS routes are other keys than ours.
    if !known || flags & 0x200 != 0 || u8_at(payload, 5) == 1 || u16_at(payload, 2) != 0 {
        return None;
    }
    let mut dst: IpAddr = match family {
        2 => Ipv4Addr::UNSPECIFIED.into(),
        10 => Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let mut table = u32::from(u8_at(payload, 4));
    let (mut metric, mut via, mut index, mut nexthop, mut strange) = (0, None, 0, 0, false);
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::RTA_DST => dst = ip(value)?,
            libc::RTA_TABLE => table = u32_at(value, 0),
            libc::RTA_PRIORITY => metric = u32_at(value, 0),
            libc::RTA_GATEWAY => via = ip(value),
            libc::RTA_OIF => index = u32_at(value, 0),
            30 => nexthop = u32_at(value, 0),
            // RTA_VIA, RTA_ENCAP_TYPE, RTA_ENCAP.
            libc::RTA_MULTIPATH | 18 | 21 | 22 => strange = true,
            _ => {}
        }
    }
    let net = IpNet::new(dst, len).ok()?.trunc();
    let (protocol, onlink) = (u8_at(payload, 5), flags & 4 != 0);
    Some((table, RouteFacts { net, metric, kind, protocol, via, index, onlink, nexthop, strange }))
}

/// Whether a route over this link is the kernel's own and expires: RTPROT_KERNEL or RTPROT_RA, and `rta_expires` of RTA_CACHEINFO
/// (linux/rtnetlink.h). Other programs, too, write routes with protocol "ra", which stay.
pub fn is_advertised(payload: &[u8], index: u32) -> bool {
    let (mut here, mut expires) = (false, false);
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::RTA_OIF => here = u32_at(value, 0) == index,
            libc::RTA_CACHEINFO => expires = u32_at(value, 8) != 0,
            _ => {}
        }
    }
    here && expires && [2, 9].contains(&u8_at(payload, 5))
}

/// A nexthop object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nexthop {
    /// Its id.
    pub id: u32,
    /// `nh_protocol`.
    pub protocol: u8,
    /// Gateway.
    pub via: Option<IpAddr>,
    /// Outgoing interface, 0 for none.
    pub index: u32,
    /// RTNH_F_ONLINK.
    pub onlink: bool,
}

/// RTM_NEWNEXTHOP and RTM_DELNEXTHOP.
pub fn nexthop(payload: &[u8]) -> Nexthop {
    let onlink = u32_at(payload, 4) & 4 != 0;
    let mut nexthop = Nexthop { id: 0, protocol: u8_at(payload, 2), via: None, index: 0, onlink };
    for (kind, value) in attrs_after(payload, 8) {
        match kind {
            1 => nexthop.id = u32_at(value, 0),
            5 => nexthop.index = u32_at(value, 0),
            6 => nexthop.via = ip(value),
            _ => {}
        }
    }
    nexthop
}

#[cfg(test)]
mod tests {
    use weft_backends::ipip::IpipLink;

    use super::super::encode;
    use super::super::wire::{Writer, messages};
    use super::*;

    fn created(kind: IpipLink, parent: u32) -> LinkFacts {
        let link = Link { kind: Arc::new(kind), mtu: 1480, mac: None, up: true };
        let mut w = Writer::default();
        encode::create_link(&mut w, "flannel.ipip", &link, parent);
        w.end(1);
        messages(w.bytes()).find_map(|m| super::link(m.payload)).unwrap()
    }

    /// The machine that runs the kernel tests may lack the ipip module: at least the two directions agree.
    #[test]
    fn an_ipip_device_reads_as_it_was_written() {
        let ipip = IpipLink { parent: Name::new("eth0").unwrap(), local: "10.0.0.1".parse().unwrap() };
        let facts = created(ipip, 5);
        let info = LinkInfo { index: 5, name: ipip.parent, ..facts.info.clone() };
        let outer = LinkFacts { info, told: None, veth: false, alias: String::new() };
        let links: Links = HashMap::from([(5, outer)]);
        assert_eq!(facts.value(&links, &[]).kind.of(), Some(&ipip));
        // flannel's: bound to the address alone.
        let facts = created(ipip, 0);
        assert_eq!(facts.value(&links, &[]).kind.of(), Some(&Foreign));
        let addr = AddrInfo { index: 5, net: "10.0.0.1/24".parse().unwrap(), scope: 0, flags: 0 };
        assert_eq!(facts.value(&links, &[addr]).kind.of(), Some(&ipip));
    }

    /// Linux 6.1 announces an FDB entry twice; taken for a value, the second message would look like a foreign change.
    #[test]
    fn an_fdb_entry_is_heard_from_its_device_only() {
        let announced = |by_device: bool| {
            let mut w = Writer::default();
            encode::fdb(&mut w, 7, Mac([2, 0, 0, 0, 0, 1]), by_device.then(|| "10.0.0.1".parse().unwrap()));
            if by_device {
                w.attr(libc::NDA_CACHEINFO, &[0; 16]);
            }
            w.end(1);
            messages(w.bytes()).find_map(|m| neighbour(m.payload))
        };
        assert_eq!(announced(true).unwrap().dst, Some("10.0.0.1".parse().unwrap()));
        assert_eq!(announced(false), None);
    }

    #[test]
    fn short_messages_are_no_values() {
        for len in 0..12 {
            let bytes = vec![0; len];
            assert!(super::link(&bytes).is_none() && address(&bytes).is_none() && neighbour(&bytes).is_none());
            assert!(route(&bytes).is_none());
        }
    }
}
