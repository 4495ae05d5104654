// SPDX-License-Identifier: Apache-2.0
//! Decodes the kernel's messages (rtnetlink(7)).

use nix::libc;

use super::{Addr, BridgeEntry, BridgePort, Link, Neigh, Qdisc, Route, RouteKind, Vxlan};
use crate::wire::{attr, attr_after, attrs, attrs_after, i32_at, ip, messages, text, u8_at, u16_at, u32_at};

/// Attributes of vxlan devices (linux/if_link.h).
const IFLA_VXLAN_ID: u16 = 1;
const IFLA_VXLAN_LINK: u16 = 3;
const IFLA_VXLAN_PORT: u16 = 15;
const IFLA_VXLAN_GROUP6: u16 = 16;
const IFLA_VXLAN_LOCAL6: u16 = 17;
const IFLA_VXLAN_COLLECT_METADATA: u16 = 25;
/// The link of an ipip device (linux/if_tunnel.h).
const IFLA_IPTUN_LINK: u16 = 1;
/// Attributes of ports of bridges and of XDP programs (linux/if_link.h).
const IFLA_INFO_SLAVE_KIND: u16 = 4;
const IFLA_INFO_SLAVE_DATA: u16 = 5;
const IFLA_BRPORT_STATE: u16 = 1;
const IFLA_BRPORT_MODE: u16 = 4;
const IFLA_BRPORT_LEARNING: u16 = 8;
const IFLA_BRPORT_UNICAST_FLOOD: u16 = 9;
const IFLA_BRPORT_BCAST_FLOOD: u16 = 30;
const IFLA_BRPORT_ISOLATED: u16 = 33;
const IFLA_BRPORT_LOCKED: u16 = 39;
/// The attributes of bridges that say whether they use the spanning tree protocol, and whether they filter by VLAN.
const IFLA_BR_STP_STATE: u16 = 5;
const IFLA_BR_VLAN_FILTERING: u16 = 7;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_ATTACHED: u16 = 2;
/// Attributes of routes (linux/rtnetlink.h). The crate libc does not have all of them for musl.
const RTA_VIA: u16 = 18;
/// The MTU among the metrics of a route.
const RTAX_MTU: u16 = 2;
/// Where `struct rta_cacheinfo` has the time until the end.
const RTA_EXPIRES: usize = 8;
/// Another host has the address (linux/if_addr.h).
const IFA_F_DADFAILED: u8 = 8;
/// Attributes of queueing disciplines (linux/rtnetlink.h, linux/pkt_sched.h).
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_TBF_PARMS: u16 = 1;
const TCA_TBF_RATE64: u16 = 4;
/// The parent of the queueing discipline of all packets that leave.
const TC_H_ROOT: u32 = u32::MAX;

/// Decodes the links of an answer or a dump.
pub fn links(data: &[u8]) -> impl Iterator<Item = Link> {
    messages(data).filter(|m| m.kind == libc::RTM_NEWLINK).map(|m| link(m.payload))
}

fn link(payload: &[u8]) -> Link {
    let flags = u32_at(payload, 8);
    let has = |flag: i32| flags & flag.cast_unsigned() != 0;
    let mut link = Link {
        index: u32_at(payload, 4),
        up: has(libc::IFF_UP),
        flags,
        promiscuous: has(libc::IFF_PROMISC),
        ..Link::default()
    };
    for (kind, value) in attrs_after(payload, 16) {
        match kind {
            libc::IFLA_IFNAME => link.name = text(value).to_owned(),
            libc::IFLA_MTU => link.mtu = u32_at(value, 0),
            libc::IFLA_MASTER => link.master = u32_at(value, 0),
            libc::IFLA_LINK => link.peer = u32_at(value, 0),
            libc::IFLA_LINK_NETNSID => link.peer_netns = Some(i32_at(value, 0)),
            libc::IFLA_IFALIAS => link.alias = text(value).to_owned(),
            libc::IFLA_ADDRESS => link.mac = value.try_into().ok(),
            libc::IFLA_LINKINFO => add_info(&mut link, value),
            IFLA_XDP => link.xdp = attrs(value).find(|(kind, _)| *kind == IFLA_XDP_ATTACHED).is_some_and(is_on),
            _ => {}
        }
    }
    link
}

/// Adds what belongs to the kind of the link, and to that of the link above it.
fn add_info(link: &mut Link, info: &[u8]) {
    link.kind = attr(info, libc::IFLA_INFO_KIND).map(|kind| text(kind).to_owned()).unwrap_or_default();
    let data = |kind: &str| attr(info, libc::IFLA_INFO_DATA).filter(|_| link.kind == kind);
    let lower = data("vxlan").and_then(|data| attr(data, IFLA_VXLAN_LINK));
    let lower = lower.or_else(|| attr(data("ipip")?, IFLA_IPTUN_LINK)).map_or(0, |index| u32_at(index, 0));
    let stp = data("bridge").and_then(|data| attr(data, IFLA_BR_STP_STATE));
    (link.vxlan, link.stp) = (data("vxlan").map(vxlan), stp.map_or(0, |state| u32_at(state, 0)));
    let filtering = data("bridge").and_then(|data| attr(data, IFLA_BR_VLAN_FILTERING));
    link.vlan_filtering = filtering.is_some_and(|filtering| u8_at(filtering, 0) != 0);
    link.lower = lower;
    let is_port = attr(info, IFLA_INFO_SLAVE_KIND).map(text) == Some("bridge");
    link.port = attr(info, IFLA_INFO_SLAVE_DATA).filter(|_| is_port).map(port);
}

fn port(data: &[u8]) -> BridgePort {
    let mut port = BridgePort::default();
    for (kind, value) in attrs(data) {
        match kind {
            IFLA_BRPORT_STATE => port.state = u8_at(value, 0),
            IFLA_BRPORT_MODE => port.hairpin = u8_at(value, 0) != 0,
            IFLA_BRPORT_LEARNING => port.learning = u8_at(value, 0) != 0,
            IFLA_BRPORT_UNICAST_FLOOD => port.flood = u8_at(value, 0) != 0,
            IFLA_BRPORT_BCAST_FLOOD => port.no_broadcasts = u8_at(value, 0) == 0,
            IFLA_BRPORT_ISOLATED => port.isolated = u8_at(value, 0) != 0,
            IFLA_BRPORT_LOCKED => port.locked = u8_at(value, 0) != 0,
            _ => {}
        }
    }
    port
}

fn is_on((_, value): (u16, &[u8])) -> bool {
    u8_at(value, 0) != 0
}

fn vxlan(data: &[u8]) -> Vxlan {
    let mut vxlan = Vxlan::default();
    for (kind, value) in attrs(data) {
        match kind {
            IFLA_VXLAN_ID => vxlan.vni = u32_at(value, 0),
            // The port is in network byte order.
            IFLA_VXLAN_PORT => vxlan.port = u16::from_be(u16_at(value, 0)),
            IFLA_VXLAN_COLLECT_METADATA => vxlan.external = u8_at(value, 0) != 0,
            // The kernel leaves out addresses that are not set. A device without any is one of IPv4, unless it was made with `remote ::`.
            IFLA_VXLAN_GROUP6 | IFLA_VXLAN_LOCAL6 => vxlan.v6 = true,
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
    let duplicate = u8_at(payload, 2) & IFA_F_DADFAILED != 0;
    Some(Addr { index: u32_at(payload, 4), addr: ip(value)?, len: u8_at(payload, 1), global, duplicate })
}

/// Decodes the routes of an answer or a dump, of all kinds and tables.
pub fn routes(data: &[u8]) -> impl Iterator<Item = Route> {
    messages(data).filter(|m| m.kind == libc::RTM_NEWROUTE).map(|m| route(m.payload))
}

fn route(payload: &[u8]) -> Route {
    let kind = match u8_at(payload, 7) {
        libc::RTN_UNICAST => RouteKind::Unicast,
        libc::RTN_LOCAL => RouteKind::Local,
        kind @ (libc::RTN_BLACKHOLE | libc::RTN_UNREACHABLE | libc::RTN_PROHIBIT) => RouteKind::Refuses(kind),
        kind => RouteKind::Other(kind),
    };
    let mut route = Route {
        kind,
        table: u8_at(payload, 4).into(),
        dst: None,
        len: u8_at(payload, 1),
        v6: i32::from(u8_at(payload, 0)) == libc::AF_INET6,
        index: 0,
        gateway: None,
        via: None,
        source: None,
        mtu: None,
        expires: None,
        protocol: u8_at(payload, 5),
    };
    for (kind, value) in attrs_after(payload, 12) {
        match kind {
            libc::RTA_DST => route.dst = ip(value),
            libc::RTA_OIF => route.index = u32_at(value, 0),
            libc::RTA_GATEWAY => route.gateway = ip(value),
            // The address follows its family.
            RTA_VIA => route.via = value.get(2..).and_then(ip),
            libc::RTA_PREFSRC => route.source = ip(value),
            // A number that does not fit into the header is here.
            libc::RTA_TABLE => route.table = u32_at(value, 0),
            libc::RTA_METRICS => route.mtu = attr(value, RTAX_MTU).map(|mtu| u32_at(mtu, 0)),
            libc::RTA_CACHEINFO => {
                // 0 means that it does not expire, and what has expired already is negative.
                let ticks = u32::try_from(i32_at(value, RTA_EXPIRES)).ok();
                route.expires = ticks.filter(|ticks| *ticks > 0);
            }
            _ => {}
        }
    }
    route
}

/// Decodes the neighbours of an answer or a dump. Those without an address are left out.
pub fn neighbours(data: &[u8]) -> impl Iterator<Item = Neigh> {
    messages(data).filter(|m| m.kind == libc::RTM_NEWNEIGH).filter_map(|m| neigh(m.payload))
}

fn neigh(payload: &[u8]) -> Option<Neigh> {
    let find = |wanted: u16| attr_after(payload, 12, wanted);
    Some(Neigh {
        index: u32_at(payload, 4),
        addr: ip(find(libc::NDA_DST)?)?,
        mac: find(libc::NDA_LLADDR).unwrap_or_default().to_vec(),
        state: u16_at(payload, 8),
    })
}

/// Decodes the entries of the table of a bridge in an answer.
pub fn bridge_entries(data: &[u8]) -> impl Iterator<Item = BridgeEntry> {
    let entry = |payload: &[u8]| BridgeEntry { port: u32_at(payload, 4), state: u16_at(payload, 8) };
    messages(data).filter(|m| m.kind == libc::RTM_NEWNEIGH).map(move |m| entry(m.payload))
}

/// Decodes a queueing discipline. The fixed part is `struct tcmsg`.
pub(super) fn qdisc(payload: &[u8]) -> Option<Qdisc> {
    let kind = text(attr_after(payload, 20, TCA_KIND)?).to_owned();
    let options = attr_after(payload, 20, TCA_OPTIONS).filter(|_| kind == "tbf");
    let rate = options.and_then(tbf_rate);
    Some(Qdisc { index: u32_at(payload, 4), kind, is_root: u32_at(payload, 12) == TC_H_ROOT, rate })
}

/// Returns the rate in bytes a second. `struct tc_tbf_qopt` begins with the rate, which has an attribute of its own if it needs more bits.
fn tbf_rate(options: &[u8]) -> Option<u64> {
    let wide = attr(options, TCA_TBF_RATE64).and_then(|value| value.first_chunk().copied()).map(u64::from_ne_bytes);
    wide.or_else(|| Some(u32_at(attr(options, TCA_TBF_PARMS)?, 8).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an attribute, with the bytes that fill it up to four.
    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len() + 4).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn an_xdp_program_and_a_queueing_discipline_are_decoded() {
        let of = |attached: u8| [vec![0; 16], attribute(IFLA_XDP, &attribute(IFLA_XDP_ATTACHED, &[attached]))].concat();
        assert!(!link(&of(0)).xdp && link(&of(2)).xdp);
        let mut fixed = vec![0; 20];
        fixed[4] = 7;
        let netem = Qdisc { index: 7, kind: "netem".to_owned(), ..Qdisc::default() };
        assert_eq!(qdisc(&[fixed.clone(), attribute(TCA_KIND, b"netem\0")].concat()), Some(netem));
        assert_eq!(qdisc(&fixed), None);
        fixed[12..16].copy_from_slice(&TC_H_ROOT.to_ne_bytes());
        let narrow = attribute(TCA_TBF_PARMS, &[vec![0; 8], 1250_u32.to_ne_bytes().to_vec()].concat());
        let wide = attribute(TCA_TBF_RATE64, &(1_u64 << 33).to_ne_bytes());
        for (options, rate) in [(narrow.clone(), 1250), ([narrow, wide].concat(), 1 << 33)] {
            let message = [fixed.clone(), attribute(TCA_KIND, b"tbf\0"), attribute(TCA_OPTIONS, &options)].concat();
            let tbf = Qdisc { index: 7, kind: "tbf".to_owned(), is_root: true, rate: Some(rate) };
            assert_eq!(qdisc(&message), Some(tbf));
        }
    }

    #[test]
    fn a_route_has_its_kind_its_table_and_next_hops_of_both_families() {
        // Family, prefix length, table, protocol and kind.
        let header = vec![2, 24, 0, 0, 252, 90, 0, libc::RTN_PROHIBIT, 0, 0, 0, 0];
        let via = [&10_u16.to_ne_bytes()[..], &[0xfe; 16]].concat();
        let metrics = attribute(RTAX_MTU, &1400_u32.to_ne_bytes());
        let attributes = [
            attribute(libc::RTA_DST, &[10, 5, 7, 0]),
            attribute(libc::RTA_TABLE, &1000_u32.to_ne_bytes()),
            attribute(RTA_VIA, &via),
            attribute(libc::RTA_METRICS, &metrics),
        ];
        let found = route(&[header, attributes.concat()].concat());
        assert_eq!((found.kind, found.table, found.protocol), (RouteKind::Refuses(libc::RTN_PROHIBIT), 1000, 90));
        assert_eq!((found.dst, found.len, found.v6), (Some([10, 5, 7, 0].into()), 24, false));
        assert_eq!((found.gateway, found.via, found.mtu), (None, Some([0xfe; 16].into()), Some(1400)));
        assert!(found.refuses() && found.expires.is_none());
    }

    #[test]
    fn the_time_until_the_kernel_forgets_a_learned_mtu_is_decoded() {
        let header = vec![2, 32, 0, 0, 254, 0, 0, libc::RTN_UNICAST, 0, 0, 0, 0];
        let of = |cacheinfo: &[u8]| route(&[header.clone(), attribute(libc::RTA_CACHEINFO, cacheinfo)].concat());
        // References, last use, time until the end, error, uses, and three fields that are not used any more.
        let with = |ticks: i32| [0, 0, ticks, 0, 0, 0, 0, 0].map(i32::to_ne_bytes).concat();
        for (ticks, expires) in [(59_500, Some(59_500)), (i32::MAX, Some(2_147_483_647)), (0, None), (-1, None)] {
            assert_eq!(of(&with(ticks)).expires, expires, "{ticks}");
        }
        assert_eq!(of(&[0; 7]).expires, None, "it is too short");
    }

    /// Returns `struct ifinfomsg` of the link 7 with these flags.
    fn link_header(flags: i32) -> Vec<u8> {
        [&[0_u8; 4][..], &7_u32.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 4]].concat()
    }

    #[test]
    fn each_part_of_a_link_is_decoded() {
        let attributes = [
            attribute(libc::IFLA_IFNAME, b"vethpod\0"),
            attribute(libc::IFLA_MTU, &1400_u32.to_ne_bytes()),
            attribute(libc::IFLA_MASTER, &3_u32.to_ne_bytes()),
            attribute(libc::IFLA_LINK, &2_u32.to_ne_bytes()),
            attribute(libc::IFLA_LINK_NETNSID, &5_i32.to_ne_bytes()),
            attribute(libc::IFLA_IFALIAS, b"weft\0"),
            attribute(libc::IFLA_ADDRESS, &[2, 0, 0, 0, 0, 9]),
            attribute(libc::IFLA_LINKINFO, &attribute(libc::IFLA_INFO_KIND, b"veth\0")),
        ];
        let found = link(&[link_header(libc::IFF_UP | libc::IFF_LOWER_UP), attributes.concat()].concat());
        assert_eq!((found.index, found.name.as_str(), found.kind.as_str()), (7, "vethpod", "veth"));
        assert_eq!((found.mtu, found.master, found.peer, found.peer_netns), (1400, 3, 2, Some(5)));
        assert_eq!((found.alias.as_str(), found.mac), ("weft", Some([2, 0, 0, 0, 0, 9])));
        assert!(found.up && found.has_carrier());
        assert!(!found.promiscuous && !found.is_running() && !found.is_loopback() && !found.is_without_arp());
        let of = |flags| link(&link_header(flags));
        assert!(of(libc::IFF_PROMISC).promiscuous && of(libc::IFF_RUNNING).is_running());
        assert!(of(libc::IFF_LOOPBACK).is_loopback() && of(libc::IFF_NOARP).is_without_arp());
        assert_eq!((found.port, found.vxlan, found.stp, found.lower, found.xdp), (None, None, 0, 0, false));
    }

    /// Returns the link of this kind whose own attributes are these, as a port of this kind.
    fn link_of(kind: &[u8], own: &[u8], port: Option<(&[u8], &[u8])>) -> Link {
        let mut info = [attribute(libc::IFLA_INFO_KIND, kind), attribute(libc::IFLA_INFO_DATA, own)].concat();
        if let Some((kind, data)) = port {
            info.extend(attribute(IFLA_INFO_SLAVE_KIND, kind));
            info.extend(attribute(IFLA_INFO_SLAVE_DATA, data));
        }
        link(&[link_header(0), attribute(libc::IFLA_LINKINFO, &info)].concat())
    }

    /// The same number means something else in each kind.
    #[test]
    fn the_attributes_of_a_kind_are_read_for_that_kind_alone() {
        let vxlan = [
            attribute(IFLA_VXLAN_ID, &7_u32.to_ne_bytes()),
            attribute(IFLA_VXLAN_LINK, &2_u32.to_ne_bytes()),
            attribute(IFLA_VXLAN_PORT, &8472_u16.to_be_bytes()),
            attribute(IFLA_VXLAN_COLLECT_METADATA, &[0]),
        ];
        let found = link_of(b"vxlan\0", &vxlan.concat(), None);
        assert_eq!(found.vxlan, Some(Vxlan { vni: 7, port: 8472, external: false, v6: false }));
        assert_eq!((found.lower, found.stp), (2, 0));
        let external = link_of(b"vxlan\0", &attribute(IFLA_VXLAN_COLLECT_METADATA, &[1]), None);
        assert!(external.vxlan.unwrap().external);
        for address in [IFLA_VXLAN_GROUP6, IFLA_VXLAN_LOCAL6] {
            assert!(link_of(b"vxlan\0", &attribute(address, &[0xfd; 16]), None).vxlan.unwrap().v6);
        }
        let ipip = link_of(b"ipip\0", &attribute(IFLA_IPTUN_LINK, &4_u32.to_ne_bytes()), None);
        assert_eq!((ipip.lower, ipip.vxlan), (4, None));
        let bridge = link_of(b"bridge\0", &attribute(IFLA_BR_STP_STATE, &2_u32.to_ne_bytes()), None);
        assert_eq!((bridge.stp, bridge.lower, bridge.vxlan, bridge.vlan_filtering), (2, 0, None, false));
        assert!(link_of(b"bridge\0", &attribute(IFLA_BR_VLAN_FILTERING, &[1]), None).vlan_filtering);
    }

    #[test]
    fn what_a_bridge_does_with_a_port_is_read_flag_by_flag() {
        const ON: [u16; 5] = [
            IFLA_BRPORT_MODE,
            IFLA_BRPORT_LEARNING,
            IFLA_BRPORT_UNICAST_FLOOD,
            IFLA_BRPORT_ISOLATED,
            IFLA_BRPORT_LOCKED,
        ];
        let port = |on: Option<u16>, broadcasts: u8| {
            let mut data = attribute(IFLA_BRPORT_STATE, &[BridgePort::FORWARDING]);
            data.extend(attribute(IFLA_BRPORT_BCAST_FLOOD, &[broadcasts]));
            ON.iter().for_each(|kind| data.extend(attribute(*kind, &[u8::from(on == Some(*kind))])));
            link_of(b"veth\0", &[], Some((&b"bridge\0"[..], &data[..]))).port.unwrap()
        };
        let plain = BridgePort { state: BridgePort::FORWARDING, ..BridgePort::default() };
        assert_eq!(port(None, 1), plain);
        assert_eq!(port(None, 0), BridgePort { no_broadcasts: true, ..plain });
        assert_eq!(port(Some(IFLA_BRPORT_MODE), 1), BridgePort { hairpin: true, ..plain });
        assert_eq!(port(Some(IFLA_BRPORT_LEARNING), 1), BridgePort { learning: true, ..plain });
        assert_eq!(port(Some(IFLA_BRPORT_UNICAST_FLOOD), 1), BridgePort { flood: true, ..plain });
        assert_eq!(port(Some(IFLA_BRPORT_ISOLATED), 1), BridgePort { isolated: true, ..plain });
        assert_eq!(port(Some(IFLA_BRPORT_LOCKED), 1), BridgePort { locked: true, ..plain });
        // A port of a bond has other attributes with these numbers.
        let state = attribute(IFLA_BRPORT_STATE, &[3]);
        let of_bond = link_of(b"veth\0", &[], Some((&b"bond\0"[..], &state[..])));
        assert_eq!(of_bond.port, None);
    }

    #[test]
    fn an_address_is_that_of_this_host_with_its_scope() {
        let of = |(flags, scope): (u8, u8), attributes: &[(u16, &[u8])]| {
            let header = vec![2, 24, flags, scope, 7, 0, 0, 0];
            let attributes = attributes.iter().flat_map(|(kind, value)| attribute(*kind, value));
            addr(&header.into_iter().chain(attributes).collect::<Vec<u8>>())
        };
        let v4 = [(libc::IFA_ADDRESS, &[10_u8, 0, 9, 2][..]), (libc::IFA_LOCAL, &[10_u8, 0, 9, 1][..])];
        let index = u32::from_ne_bytes([7, 0, 0, 0]);
        let ours = Addr { index, addr: [10, 0, 9, 1].into(), len: 24, global: true, duplicate: false };
        assert_eq!(of((0, 0), &v4), Some(ours), "the other one is the far end");
        for (scope, global) in [(200, true), (libc::RT_SCOPE_LINK, false), (libc::RT_SCOPE_HOST, false)] {
            assert_eq!(of((0, scope), &v4), Some(Addr { global, ..ours }), "scope {scope}");
        }
        assert_eq!(of((IFA_F_DADFAILED, 0), &v4), Some(Addr { duplicate: true, ..ours }));
        let v6 = of((0x80, 0), &[(libc::IFA_ADDRESS, &[0xfd_u8; 16][..])]);
        assert_eq!(v6, Some(Addr { addr: [0xfd; 16].into(), ..ours }));
        assert_eq!(of((0, 0), &[]), None);
    }

    #[test]
    fn entries_that_somebody_wrote_are_told_from_those_that_were_learned() {
        let message = |state: u16, attributes: &[Vec<u8>]| {
            let mut w = crate::wire::Writer::default();
            let [low, high] = state.to_ne_bytes();
            w.begin(libc::RTM_NEWNEIGH, 0, &[2, 0, 0, 0, 7, 0, 0, 0, low, high, 0, 0]);
            w.fixed(&attributes.concat());
            w.end(1);
            w.bytes().to_vec()
        };
        let (dst, mac) = (attribute(libc::NDA_DST, &[10, 0, 0, 9]), attribute(libc::NDA_LLADDR, &[2; 6]));
        let index = u32::from_ne_bytes([7, 0, 0, 0]);
        for (state, permanent) in [(libc::NUD_PERMANENT, true), (libc::NUD_REACHABLE, false), (libc::NUD_NOARP, false)]
        {
            let found: Vec<Neigh> = neighbours(&message(state, &[dst.clone(), mac.clone()])).collect();
            assert_eq!(found, [Neigh { index, addr: [10, 0, 0, 9].into(), mac: vec![2; 6], state }]);
            assert_eq!(found[0].is_permanent(), permanent, "{state}");
        }
        assert!(neighbours(&message(libc::NUD_FAILED, &[dst])).next().unwrap().mac.is_empty());
        assert_eq!(neighbours(&message(libc::NUD_PERMANENT, &[mac])).count(), 0, "an entry without an address");
        for (state, written) in [
            (libc::NUD_PERMANENT, true),
            (libc::NUD_NOARP, true),
            (libc::NUD_REACHABLE, false),
            (libc::NUD_STALE, false),
        ] {
            let found: Vec<BridgeEntry> = bridge_entries(&message(state, &[])).collect();
            assert_eq!(found, [BridgeEntry { port: index, state }]);
            assert_eq!(found[0].is_written(), written, "{state}");
        }
    }
}
