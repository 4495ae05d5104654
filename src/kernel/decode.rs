// SPDX-License-Identifier: Apache-2.0
//! Decodes the hot messages: neighbours, FDB entries, routes and nexthops. Each function reads the payload of one message. A device is
//! an index here; the caller knows its name.
//!
//! They are read by hand. With 50,000 peers, each audit reads 150,000 messages, and a library takes several times as long
//! (docs/adr/014-typed-messages.md).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use nix::libc;
use weft_backends::state::{Mac, Name, Route};

use super::RouteLookup;
use super::encode::{NHA_GATEWAY, NHA_ID, NHA_OIF, RTA_NH_ID};
use super::rt::RTNH_F_ONLINK;
use super::wire::{attrs_after, ip, u8_at, u16_at, u32_at};

/// The bits of `ndm_state` of entries that do not expire: NUD_PERMANENT, NUD_NOARP.
const LASTING: u16 = 0x80 | 0x40;

/// A neighbour or an FDB entry, as in RTM_NEWNEIGH and RTM_DELNEIGH.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Neighbour {
    /// True for an entry of the device's own FDB (AF_BRIDGE, NTF_SELF), false for a neighbour.
    pub fdb: bool,
    /// Index of the device.
    pub index: u32,
    /// The entry is permanent (or NOARP): it was not learned and does not expire.
    pub lasting: bool,
    /// The IP address of the neighbour, or the destination of the FDB entry. `None` for an FDB entry with a port, a VNI or a link of
    /// its own, which the agent never writes.
    pub dst: Option<IpAddr>,
    /// The MAC of the neighbour or of the FDB entry.
    pub mac: Option<Mac>,
}

/// Decodes a [`Neighbour`]. Returns `None` for other families, for the table of a bridge, and for the second notification of an FDB
/// entry: before Linux 6.13 the kernel repeats the notification of the device, without destination and NDA_CACHEINFO.
pub fn neighbour(payload: &[u8]) -> Option<Neighbour> {
    let family = u8_at(payload, 0);
    let fdb = i32::from(family) == libc::AF_BRIDGE;
    if !fdb && family != 2 && family != 10 || fdb && u8_at(payload, 10) & 0x02 == 0 || u8_at(payload, 10) & 0x08 != 0 {
        return None;
    }
    let (mut dst, mut mac, mut from_device, mut other_form) = (None, None, false, false);
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::NDA_DST => dst = ip(value),
            libc::NDA_LLADDR => mac = value.try_into().ok().map(Mac),
            libc::NDA_CACHEINFO => from_device = true,
            // The kernel leaves these out where they are those of the device.
            libc::NDA_PORT | libc::NDA_VNI | libc::NDA_IFINDEX => other_form = true,
            _ => {}
        }
    }
    if fdb && !from_device {
        return None;
    }
    let dst = dst.filter(|_| !(fdb && other_form));
    Some(Neighbour { fdb, index: u32_at(payload, 4), lasting: u16_at(payload, 8) & LASTING != 0, dst, mac })
}

/// A route, with the index of its interface.
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
    /// Index of the outgoing interface, 0 for none.
    pub index: u32,
    /// RTNH_F_ONLINK.
    pub onlink: bool,
    /// The nexthop object (RTA_NH_ID), 0 for none.
    pub nexthop: u32,
    /// It has several paths, an encapsulation or a gateway of the other family. The agent never writes such a route.
    pub other_form: bool,
}

impl RouteFacts {
    /// Returns the value of the route. `dev` is the name of its interface.
    pub fn value(&self, dev: Option<Name>) -> Route {
        match (self.kind, self.via, dev) {
            (libc::RTN_BLACKHOLE, _, _) => Route::Blackhole,
            (libc::RTN_UNREACHABLE, _, _) => Route::Unreachable,
            (libc::RTN_UNICAST, Some(via), Some(dev)) if !self.other_form => {
                Route::Unicast { via, dev, onlink: self.onlink }
            }
            (libc::RTN_UNICAST, None, Some(dev)) if !self.other_form => Route::Device { dev },
            _ => Route::Other,
        }
    }
}

/// Decodes RTM_NEWROUTE and RTM_DELROUTE. Returns `None` for routes of other tables, for one source or traffic class, and for
/// temporary ones.
pub fn route(payload: &[u8]) -> Option<RouteFacts> {
    let (table, route) = route_of_any_table(payload)?;
    (table == u32::from(libc::RT_TABLE_MAIN)).then_some(route)
}

/// As [`route`], but for all tables. Also returns the table.
pub fn route_of_any_table(payload: &[u8]) -> Option<(u32, RouteFacts)> {
    let (family, len, kind, flags) = (u8_at(payload, 0), u8_at(payload, 1), u8_at(payload, 7), u32_at(payload, 8));
    let known = matches!(kind, libc::RTN_UNICAST | libc::RTN_BLACKHOLE..=libc::RTN_THROW);
    // RTM_F_CLONED is a route of the kernel's cache, and protocol 1 an ICMP redirect. A route for one source or traffic class does not
    // have the key of any route of ours.
    if !known || flags & 0x200 != 0 || u8_at(payload, 5) == 1 || u16_at(payload, 2) != 0 {
        return None;
    }
    let mut dst: IpAddr = match family {
        2 => Ipv4Addr::UNSPECIFIED.into(),
        10 => Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let mut table = u32::from(u8_at(payload, 4));
    let (mut metric, mut via, mut index, mut nexthop, mut other_form) = (0, None, 0, 0, false);
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::RTA_DST => dst = ip(value)?,
            libc::RTA_TABLE => table = u32_at(value, 0),
            libc::RTA_PRIORITY => metric = u32_at(value, 0),
            libc::RTA_GATEWAY => via = ip(value),
            libc::RTA_OIF => index = u32_at(value, 0),
            RTA_NH_ID => nexthop = u32_at(value, 0),
            // RTA_VIA, RTA_ENCAP_TYPE, RTA_ENCAP.
            libc::RTA_MULTIPATH | 18 | 21 | 22 => other_form = true,
            _ => {}
        }
    }
    let net = IpNet::new(dst, len).ok()?.trunc();
    let (protocol, onlink) = (u8_at(payload, 5), flags & RTNH_F_ONLINK != 0);
    Some((table, RouteFacts { net, metric, kind, protocol, via, index, onlink, nexthop, other_form }))
}

/// Decodes the answer to the question how packets reach an address. Returns `None` if they do not leave this host.
pub fn route_lookup(payload: &[u8]) -> Option<RouteLookup> {
    let (mut index, mut source) = (0, None);
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::RTA_OIF => index = u32_at(value, 0),
            libc::RTA_PREFSRC => source = ip(value),
            _ => {}
        }
    }
    (u8_at(payload, 7) == libc::RTN_UNICAST && index != 0).then_some(RouteLookup { index, source })
}

/// Returns true if a route over this link was created by the kernel and expires: RTPROT_KERNEL or RTPROT_RA, and `rta_expires` of
/// RTA_CACHEINFO (linux/rtnetlink.h). Other programs also write routes with the protocol "ra", but theirs do not expire.
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
    /// Index of the outgoing interface, 0 for none.
    pub index: u32,
    /// RTNH_F_ONLINK.
    pub onlink: bool,
}

/// Decodes RTM_NEWNEXTHOP and RTM_DELNEXTHOP.
pub fn nexthop(payload: &[u8]) -> Nexthop {
    let onlink = u32_at(payload, 4) & RTNH_F_ONLINK != 0;
    let mut nexthop = Nexthop { id: 0, protocol: u8_at(payload, 2), via: None, index: 0, onlink };
    for (kind, value) in attrs_after(payload, 8) {
        match kind {
            NHA_ID => nexthop.id = u32_at(value, 0),
            NHA_OIF => nexthop.index = u32_at(value, 0),
            NHA_GATEWAY => nexthop.via = ip(value),
            _ => {}
        }
    }
    nexthop
}

#[cfg(test)]
mod tests {
    use super::super::encode;
    use super::super::wire::{Writer, messages};
    use super::*;

    /// Linux 6.1 notifies twice of an FDB entry. The second notification would look like a change by another program.
    #[test]
    fn only_the_notification_of_the_device_is_an_fdb_entry() {
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

    /// Somebody may give an entry another port. It must not look like the one that the agent wrote.
    #[test]
    fn an_fdb_entry_with_a_port_a_vni_or_a_link_of_its_own_has_no_destination() {
        let dst = "10.0.0.1".parse().unwrap();
        let with = |attribute: u16| {
            neighbour(&payload(|w| {
                encode::fdb(w, 7, Mac([2, 0, 0, 0, 0, 1]), Some(dst));
                w.attr(libc::NDA_CACHEINFO, &[0; 16]);
                w.attr_u32(attribute, 1);
            }))
        };
        // NDA_PORT, NDA_VNI and NDA_IFINDEX of linux/neighbour.h.
        for attribute in [6, 7, 8] {
            let entry = with(attribute).unwrap_or_else(|| panic!("attribute {attribute}"));
            assert_eq!((entry.dst, entry.fdb), (None, true), "attribute {attribute}");
        }
        // NDA_LINK_NETNSID says where the link of the device is.
        assert_eq!(with(10).and_then(|entry| entry.dst), Some(dst));
    }

    /// Returns the payload of the message that `build` writes.
    fn payload(build: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut w = Writer::default();
        build(&mut w);
        w.end(1);
        messages(w.bytes()).next().unwrap().payload.to_vec()
    }

    /// Returns the payload of a route of ours, with these further attributes.
    fn route_payload(more: &[(u16, u32)]) -> Vec<u8> {
        let exit = encode::Exit::Gateway { via: "10.5.2.0".parse().unwrap(), index: 7, onlink: true };
        payload(|w| {
            encode::new_route(w, "10.5.2.0/24".parse().unwrap(), 9, exit, 90);
            more.iter().for_each(|(kind, value)| w.attr_u32(*kind, *value));
        })
    }

    #[test]
    fn each_part_of_a_route_is_decoded() {
        let (net, via) = ("10.5.2.0/24".parse().unwrap(), "10.5.2.0".parse().ok());
        let (kind, protocol, nexthop, other_form) = (libc::RTN_UNICAST, 90, 0, false);
        let ours = RouteFacts { net, metric: 9, kind, protocol, via, index: 7, onlink: true, nexthop, other_form };
        assert_eq!(route(&route_payload(&[])), Some(ours));
        let of_object = RouteFacts { nexthop: 5, ..ours };
        assert_eq!(route(&route_payload(&[(30, 5)])), Some(of_object));
        // RTA_MULTIPATH, RTA_VIA, RTA_ENCAP_TYPE and RTA_ENCAP of linux/rtnetlink.h.
        for attribute in [9, 18, 21, 22] {
            let other = RouteFacts { other_form: true, ..ours };
            assert_eq!(route(&route_payload(&[(attribute, 0)])), Some(other), "attribute {attribute}");
        }
        // The number of a table that does not fit into the header stands in an attribute.
        let elsewhere = route_payload(&[(libc::RTA_TABLE, 90_000)]);
        assert_eq!((route(&elsewhere), route_of_any_table(&elsewhere)), (None, Some((90_000, ours))));
    }

    /// Such a route does not have the key of any route of ours. It would be deleted or replaced in the place of one.
    #[test]
    fn routes_for_one_source_or_class_and_those_that_pass_are_left_out() {
        let with = |at: usize, byte: u8| {
            let mut payload = route_payload(&[]);
            payload[at] = byte;
            route_of_any_table(&payload).is_some()
        };
        // struct rtmsg: family, length of the destination and of the source, class, table, protocol, scope, type.
        assert!(with(0, 2), "as it was");
        for (what, at, byte) in [
            ("another family", 0, 28),
            ("a source", 2, 24),
            ("a class", 3, 16),
            ("an ICMP redirect", 5, 1),
            ("a local address", 7, libc::RTN_LOCAL),
            ("a longer prefix than addresses have", 1, 33),
        ] {
            assert!(!with(at, byte), "{what}");
        }
        let mut cached = route_payload(&[]);
        // RTM_F_CLONED.
        cached[8..12].copy_from_slice(&0x200_u32.to_ne_bytes());
        assert_eq!(route_of_any_table(&cached), None);
    }

    #[test]
    fn only_a_route_that_the_agent_could_have_written_has_a_form() {
        let dev = Name::new("eth0").unwrap();
        let ours = route(&route_payload(&[])).unwrap();
        let via = ours.via.unwrap();
        assert_eq!(ours.value(Some(dev)), Route::Unicast { via, dev, onlink: true });
        assert_eq!(RouteFacts { onlink: false, ..ours }.value(Some(dev)), Route::Unicast { via, dev, onlink: false });
        assert_eq!(RouteFacts { via: None, ..ours }.value(Some(dev)), Route::Device { dev });
        let of_kind = |kind| RouteFacts { kind, ..ours }.value(Some(dev));
        assert_eq!(of_kind(libc::RTN_BLACKHOLE), Route::Blackhole);
        assert_eq!(of_kind(libc::RTN_UNREACHABLE), Route::Unreachable);
        assert_eq!(of_kind(libc::RTN_PROHIBIT), Route::Other);
        assert_eq!(ours.value(None), Route::Other, "its link is not known");
        for via in [Some(via), None] {
            assert_eq!(RouteFacts { via, other_form: true, ..ours }.value(Some(dev)), Route::Other);
        }
    }

    #[test]
    fn each_part_of_a_neighbour_is_decoded_and_tables_of_bridges_and_proxies_are_left_out() {
        let (mac, dst) = (Mac([2, 0, 0, 0, 0, 1]), "10.5.2.0".parse().unwrap());
        let plain = payload(|w| encode::neighbour(w, 7, dst, Some(mac)));
        let wanted = Neighbour { fdb: false, index: 7, lasting: true, dst: Some(dst), mac: Some(mac) };
        assert_eq!(neighbour(&plain), Some(wanted));
        let with = |at: usize, byte: u8| {
            let mut payload = plain.clone();
            payload[at] = byte;
            neighbour(&payload)
        };
        // struct ndmsg: family, index, state and flags. NUD_REACHABLE, NUD_NOARP, and NTF_PROXY.
        for (state, lasting) in [(0x02, false), (0x40, true)] {
            let state = u16::to_ne_bytes(state);
            let mut payload = plain.clone();
            payload[8..10].copy_from_slice(&state);
            assert_eq!(neighbour(&payload), Some(Neighbour { lasting, ..wanted }));
        }
        assert_eq!(with(10, 0x08), None, "an address for which this host answers");
        assert_eq!(with(0, 28), None, "another family");
        let mut of_bridge = payload(|w| {
            encode::fdb(w, 7, mac, Some(dst));
            w.attr(libc::NDA_CACHEINFO, &[0; 16]);
        });
        assert!(neighbour(&of_bridge).is_some_and(|entry| entry.fdb));
        // Without NTF_SELF it is an entry of the bridge above the device.
        of_bridge[10] = 0;
        assert_eq!(neighbour(&of_bridge), None);
    }

    #[test]
    fn a_nexthop_is_decoded_as_it_was_written() {
        for onlink in [true, false] {
            let via = "10.5.2.0".parse().unwrap();
            let new = encode::NewNexthop { id: 5, protocol: 90, via, index: 7, onlink };
            let wanted = Nexthop { id: 5, protocol: 90, via: Some(via), index: 7, onlink };
            assert_eq!(nexthop(&payload(|w| encode::new_nexthop(w, &new))), wanted);
        }
    }

    #[test]
    fn messages_that_are_too_short_are_not_decoded() {
        for len in 0..12 {
            let bytes = vec![0; len];
            assert!(neighbour(&bytes).is_none() && route(&bytes).is_none());
        }
    }
}
