// SPDX-License-Identifier: Apache-2.0
//! The hot messages, decoded by the crate netlink-packet-route, which knows nothing of this encoder. The whole messages are compared,
//! so an attribute too many, or one in another byte order, is noticed. The crate has no nexthop messages: only their attributes
//! are split by it, and compared with the numbers of linux/nexthop.h.

use std::net::{Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{NetlinkBuffer, NlasIterator, Parseable};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourHeader, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof};
use proptest::{prop_assert_eq, proptest};

use super::*;

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const PUT: u16 = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_REPLACE;
const ADD: u16 = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL;

/// Encodes two messages, decodes the headers of both, and returns type, flags and payload of the first. The second shows where the
/// first one ends.
fn encoded(build: impl Fn(&mut Writer)) -> (u16, u16, Vec<u8>) {
    let mut w = Writer::default();
    build(&mut w);
    w.end(7);
    build(&mut w);
    w.end(8);
    let first = NetlinkBuffer::new_checked(w.bytes()).unwrap();
    let length = usize::try_from(first.length()).unwrap();
    assert_eq!(length * 2, w.bytes().len(), "both messages have the same length, and nothing follows");
    let second = NetlinkBuffer::new_checked(&w.bytes()[length..]).unwrap();
    assert_eq!((first.sequence_number(), second.sequence_number()), (7, 8));
    assert_eq!(first.payload(), second.payload());
    (first.message_type(), first.flags(), first.payload().to_vec())
}

fn family_of(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn neighbour_message(header: NeighbourHeader, attributes: Vec<NeighbourAttribute>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    (message.header, message.attributes) = (header, attributes);
    message
}

fn nets() -> impl Strategy<Value = IpNet> {
    let v4 = (any::<Ipv4Addr>(), 0..=32_u8).prop_map(|(ip, len)| IpNet::new(ip.into(), len).unwrap());
    let v6 = (any::<Ipv6Addr>(), 0..=128_u8).prop_map(|(ip, len)| IpNet::new(ip.into(), len).unwrap());
    prop_oneof![v4, v6]
}

fn exits() -> impl Strategy<Value = Exit> {
    prop_oneof![
        any::<u32>().prop_map(Exit::Nexthop),
        (any::<IpAddr>(), any::<u32>(), any::<bool>()).prop_map(|(via, index, onlink)| Exit::Gateway {
            via,
            index,
            onlink
        }),
        any::<u32>().prop_map(Exit::Device),
        prop_oneof![Just(libc::RTN_BLACKHOLE), Just(libc::RTN_UNREACHABLE)].prop_map(Exit::Type),
        Just(Exit::Any),
    ]
}

/// The message that should be sent for a route. `protocol` is 0 where the kernel is not to compare it.
fn route_message(net: IpNet, metric: u32, exit: Exit, add: bool, protocol: u8) -> RouteMessage {
    let kind = match exit {
        Exit::Type(libc::RTN_BLACKHOLE) => RouteType::BlackHole,
        Exit::Type(_) => RouteType::Unreachable,
        Exit::Any => RouteType::Unspec,
        Exit::Nexthop(_) | Exit::Gateway { .. } | Exit::Device(_) => RouteType::Unicast,
    };
    let scope = match exit {
        _ if !add => RouteScope::NoWhere,
        Exit::Device(_) if net.addr().is_ipv4() => RouteScope::Link,
        _ => RouteScope::Universe,
    };
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: family_of(net.addr()),
        destination_prefix_length: net.prefix_len(),
        source_prefix_length: 0,
        tos: 0,
        table: RouteHeader::RT_TABLE_MAIN,
        protocol: RouteProtocol::from(protocol),
        scope,
        kind,
        flags: if matches!(exit, Exit::Gateway { onlink: true, .. }) {
            RouteFlags::Onlink
        } else {
            RouteFlags::empty()
        },
    };
    message.attributes.push(RouteAttribute::Destination(RouteAddress::from(net.network())));
    message.attributes.extend((metric != 0).then_some(RouteAttribute::Priority(metric)));
    match exit {
        Exit::Nexthop(id) => message.attributes.push(RouteAttribute::NhId(id)),
        Exit::Gateway { via, index, .. } => {
            message.attributes.extend([RouteAttribute::Gateway(via.into()), RouteAttribute::Oif(index)]);
        }
        Exit::Device(index) => message.attributes.push(RouteAttribute::Oif(index)),
        Exit::Type(_) | Exit::Any => {}
    }
    message
}

/// The crate reads a gateway in the family of the route, and the agent writes no other one.
fn same_family(net: IpNet, exit: Exit) -> bool {
    !matches!(exit, Exit::Gateway { via, .. } if via.is_ipv4() != net.addr().is_ipv4())
}

proptest! {
    // A failure prints its input, and no file is left behind.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fdb_entries_are_decoded_as_they_were_meant(index: u32, mac: [u8; 6], dst: Option<IpAddr>) {
        let (kind, flags, payload) = encoded(|w| fdb(w, index, Mac(mac), dst));
        let expected = if dst.is_some() { (libc::RTM_NEWNEIGH, PUT) } else { (libc::RTM_DELNEIGH, NLM_F_REQUEST) };
        prop_assert_eq!((kind, flags), expected);
        let header = NeighbourHeader {
            family: AddressFamily::Bridge,
            ifindex: index,
            state: NeighbourState::Permanent,
            flags: NeighbourFlags::Own,
            kind: RouteType::Unspec,
        };
        let mut attributes = vec![NeighbourAttribute::LinkLayerAddress(mac.to_vec())];
        // For the family "bridge", the crate leaves the address as bytes.
        attributes.extend(dst.map(|dst| {
            let bytes = match dst {
                IpAddr::V4(ip) => ip.octets().to_vec(),
                IpAddr::V6(ip) => ip.octets().to_vec(),
            };
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes))
        }));
        prop_assert_eq!(NeighbourMessage::parse(&payload[..]).unwrap(), neighbour_message(header, attributes));
    }

    #[test]
    fn neighbours_are_decoded_as_they_were_meant(index: u32, ip: IpAddr, mac: Option<[u8; 6]>) {
        let (kind, flags, payload) = encoded(|w| neighbour(w, index, ip, mac.map(Mac)));
        let expected = if mac.is_some() { (libc::RTM_NEWNEIGH, PUT) } else { (libc::RTM_DELNEIGH, NLM_F_REQUEST) };
        prop_assert_eq!((kind, flags), expected);
        let header = NeighbourHeader {
            family: family_of(ip),
            ifindex: index,
            state: NeighbourState::Permanent,
            flags: NeighbourFlags::empty(),
            kind: RouteType::Unspec,
        };
        let mut attributes = vec![NeighbourAttribute::Destination(ip.into())];
        attributes.extend(mac.map(|mac| NeighbourAttribute::LinkLayerAddress(mac.to_vec())));
        prop_assert_eq!(NeighbourMessage::parse(&payload[..]).unwrap(), neighbour_message(header, attributes));
    }

    #[test]
    fn routes_are_decoded_as_they_were_meant(
        (net, exit) in (nets(), exits()).prop_filter("one family", |(net, exit)| same_family(*net, *exit)),
        metric in prop_oneof![0..=2_u32, any::<u32>()],
        protocol: u8,
    ) {
        let put = |build: &dyn Fn(&mut Writer)| {
            let (kind, flags, payload) = encoded(build);
            ((kind, flags), RouteMessage::parse(&payload[..]).unwrap())
        };
        let added = route_message(net, metric, exit, true, protocol);
        prop_assert_eq!(
            put(&|w| route(w, net, metric, exit, Some(protocol))),
            ((libc::RTM_NEWROUTE, PUT), added.clone())
        );
        prop_assert_eq!(put(&|w| new_route(w, net, metric, exit, protocol)), ((libc::RTM_NEWROUTE, ADD), added));
        prop_assert_eq!(
            put(&|w| route(w, net, metric, exit, None)),
            ((libc::RTM_DELROUTE, NLM_F_REQUEST), route_message(net, metric, exit, false, 0))
        );
        prop_assert_eq!(
            put(&|w| delete_route_of(w, net, metric, exit, protocol)),
            ((libc::RTM_DELROUTE, NLM_F_REQUEST), route_message(net, metric, exit, false, protocol))
        );
    }

    #[test]
    fn nexthops_have_the_attributes_of_the_kernel(id: u32, protocol: u8, via: IpAddr, index: u32, onlink: bool) {
        let attributes = |payload: &[u8]| -> Vec<(u16, Vec<u8>)> {
            NlasIterator::new(&payload[8..]).map(|nla| nla.map(|nla| (nla.kind(), nla.value().to_vec())).unwrap()).collect()
        };
        let (kind, flags, payload) = encoded(|w| new_nexthop(w, &NewNexthop { id, protocol, via, index, onlink }));
        prop_assert_eq!((kind, flags), (104, ADD));
        // struct nhmsg: family, scope, protocol, reserved, flags. RTNH_F_ONLINK is 4.
        let family = u8::from(family_of(via));
        let [f0, f1, f2, f3] = (if onlink { 4_u32 } else { 0 }).to_ne_bytes();
        prop_assert_eq!(&payload[..8], &[family, 0, protocol, 0, f0, f1, f2, f3]);
        let gateway = match via {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let wanted = vec![(1, id.to_ne_bytes().to_vec()), (5, index.to_ne_bytes().to_vec()), (6, gateway)];
        prop_assert_eq!(attributes(&payload), wanted);

        let (kind, flags, payload) = encoded(|w| delete_nexthop(w, id));
        prop_assert_eq!((kind, flags), (105, NLM_F_REQUEST));
        prop_assert_eq!(&payload[..8], &[0; 8]);
        prop_assert_eq!(attributes(&payload), vec![(1, id.to_ne_bytes().to_vec())]);
    }
}

/// The kernel would name the main table for a route of IPv4 in another one. For IPv6 it refuses the flag that asks for the table.
#[test]
fn the_question_for_an_entry_asks_for_its_table_where_that_is_not_named_anyway() {
    let flags = |to: &str| {
        let (kind, _, payload) = encoded(|w| fib_entry(w, to.parse().unwrap()));
        assert_eq!(kind, libc::RTM_GETROUTE);
        u32::from_ne_bytes(payload[8..12].try_into().unwrap())
    };
    // RTM_F_FIB_MATCH and RTM_F_LOOKUP_TABLE.
    assert_eq!((flags("10.5.2.0"), flags("fd00:5:2::")), (0x2000 | 0x1000, 0x2000));
}
