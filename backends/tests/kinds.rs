// SPDX-License-Identifier: Apache-2.0
//! What golden plans do not show: the types of backends, and the reasons why a lease of another type gets no entries.

// Helpers outside test functions panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;

use weft_backends::backend::EchoAddress;
use weft_backends::host::{Host, OnLink, Reach, Uplink};
use weft_backends::register::{
    TYPES, device_kind, make, make_for_lease, make_kind, makes_routes, names_its_leases, unknown_options,
};
use weft_backends::state::{Key, Mac, Name, Value};
use weft_backends::traffic_rules::Test;
use weft_backends::vxlan::VtepMac;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::lease::{Age, Lease};
use weft_subnet::net_conf::NetConf;

const KINDS: [&str; 3] = ["vxlan", "host-gw", "ipip"];

fn net_conf() -> NetConf {
    NetConf {
        networks: Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None },
        v4: None,
        v6: None,
        nftables: None,
        masquerade: Default::default(),
        backend_type: "vxlan".to_owned(),
        backend: "{}".into(),
        unknown: Vec::new(),
    }
}

fn host() -> Host {
    let (name, address) = (Name::new("eth0").unwrap(), Ipv4Addr::new(192, 168, 64, 1));
    Host {
        public_v4: Some(address),
        identities: VtepMac::both(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 6, 1])),
        routes: OnLink::new([("192.168.64.0/24".parse().unwrap(), 0, Reach::Link(name))]),
        ..Host::new(Uplink { name, mtu: 1500, v4: Some(address), v6: None })
    }
}

fn lease(key: &str, kind: &str, last: u8) -> Lease {
    let value = format!(
        r#"{{"PublicIP": "192.168.64.{last}", "PublicIPv6": null, "BackendType": "{kind}",
            "BackendData": {{"VNI": 1, "VtepMAC": "02:00:00:00:00:0{last}"}}}}"#
    );
    Lease {
        id: key.into(),
        subnets: Subnets::from_key(key).unwrap(),
        attrs: Attrs::from_wire(value.as_bytes()).unwrap(),
        age: Age::default(),
    }
}

#[test]
fn each_backend_plans_for_leases_of_its_own_type_alone() {
    let (net_conf, host) = (net_conf(), host());
    for kind in KINDS {
        let backend = make_kind(kind, "{}", &net_conf).unwrap();
        assert_eq!(backend.kind(), kind);
        let own = lease("10.5.1.0-24", kind, 1);
        for other in KINDS {
            let planned = backend.plan(&host, &own, &lease("10.5.2.0-24", other, 2));
            if other == kind {
                assert!(!planned.state.is_empty() && planned.skipped.is_empty(), "{kind}: {planned:?}");
                continue;
            }
            assert!(planned.state.is_empty(), "{kind} plans for {other}: {planned:?}");
            let reasons: Vec<String> = planned.skipped.iter().map(ToString::to_string).collect();
            assert_eq!(reasons, [format!("BackendType is {other:?}, not {kind:?}")]);
        }
    }
}

#[test]
fn host_gw_has_no_device() {
    let backend = make_kind("host-gw", "{}", &net_conf()).unwrap();
    assert!(backend.device(&host(), &lease("10.5.1.0-24", "host-gw", 1)).is_empty());
}

/// `weft doctor` asks the register for the module of the kernel that a backend needs, and whether routes of other programs are expected.
#[test]
fn the_register_names_the_devices_of_a_backend_and_says_whether_it_makes_routes() {
    for (kind, device, routes) in [
        ("vxlan", Some("vxlan"), true),
        ("host-gw", None, true),
        ("ipip", Some("ipip"), true),
        ("udp", Some("tun"), true),
        ("alloc", None, false),
        ("extension", None, false),
    ] {
        let net_conf = NetConf { backend_type: kind.to_owned(), ..net_conf() };
        let backend = make(&net_conf).unwrap();
        let state = backend.device(&host(), &lease("10.5.1.0-24", kind, 1));
        let made = state.iter().find_map(|(_, value)| match value {
            Value::Link(link) => Some(link.kind.name()),
            _ => None,
        });
        assert_eq!((made, device_kind(kind)), (device, device), "{kind}");
        assert_eq!((backend.makes_routes(), makes_routes(kind)), (routes, routes), "{kind}");
    }
    assert_eq!((device_kind("wireguard"), makes_routes("wireguard")), (Some("wireguard"), true));
    assert_eq!((device_kind(""), makes_routes("")), (None, true), "no agent has said which backend it has");
}

/// Up to eight nodes are named one by one. More are counted.
#[test]
fn many_nodes_of_a_rule_are_counted_and_few_are_named() {
    let nodes = |count: u8| (1..=count).map(|last| Ipv4Addr::new(192, 168, 64, last).into()).collect();
    assert_eq!(Test::ToOneOf(nodes(9)).to_string(), "to one of 9 nodes");
    assert_eq!(Test::ToOneOf(nodes(12)).to_string(), "to one of 12 nodes");
    let eight = Test::ToOneOf(nodes(8)).to_string();
    assert!(eight.ends_with(" 192.168.64.7 192.168.64.8"), "{eight}");
}

/// The uplink has addresses of both families, but our own lease has no IPv6 subnet. So there is no address to send from.
#[test]
fn vxlan_needs_an_address_and_a_subnet_of_a_family() {
    let mut net_conf = net_conf();
    net_conf.networks.v6 = Some("fd00:5::/48".parse().unwrap());
    let mut host = host();
    host.uplink.v6 = Some("fd00::1".parse().unwrap());
    let backend = make_kind("vxlan", r#"{"VNI": 1}"#, &net_conf).unwrap();
    let value = r#"{"PublicIP": "192.168.64.2", "PublicIPv6": "fd00::2", "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": "02:00:00:00:00:02"},
        "BackendV6Data": {"VNI": 1, "VtepMAC": "02:00:00:00:06:02"}}"#;
    let mut peer = lease("10.5.2.0-24", "vxlan", 2);
    peer.attrs = Attrs::from_wire(value.as_bytes()).unwrap();
    peer.subnets.v6 = Some("fd00:5:0:2::/64".parse().unwrap());
    let own_backend = make(&net_conf).unwrap();
    let mut own = lease("10.5.1.0-24", "vxlan", 1);
    for (backend, name) in [(&own_backend, "our own VNI"), (&backend, "another's type")] {
        let planned = backend.plan(&host, &own, &peer);
        let [reason] = &planned.skipped[..] else { panic!("{name}: {planned:?}") };
        assert!(
            reason.to_string().ends_with("this node has no IPv6 address on eth0, or no IPv6 subnet"),
            "{name}: {reason}"
        );
    }
    own.subnets.v6 = Some("fd00:5:0:1::/64".parse().unwrap());
    assert!(own_backend.plan(&host, &own, &peer).skipped.is_empty());
}

/// Otherwise, packets would be sent through a device that the peer does not have.
#[test]
fn vxlan_understands_a_lease_whose_vnis_are_its_own() {
    let mut net_conf = net_conf();
    net_conf.networks.v6 = Some("fd00:5::/48".parse().unwrap());
    let backend = make_kind("vxlan", r#"{"VNI": 5}"#, &net_conf).unwrap();
    let attrs = |v4: &str, v6: &str| {
        let data = |vni: &str| Some(format!(r#"{{{vni}"VtepMAC":"02:00:00:00:00:02"}}"#).into());
        let (backend_data, backend_v6_data) = (data(v4), data(v6));
        Attrs { backend_type: "vxlan".to_owned(), backend_data, backend_v6_data, ..Attrs::default() }
    };
    let (ours, other) = (r#""VNI":5,"#, r#""VNI":6,"#);
    for (v4, v6, wanted) in [(ours, ours, true), (ours, other, false), (other, ours, false), ("", ours, true)] {
        assert_eq!(backend.understands(&attrs(v4, v6)), wanted, "{v4} {v6}");
    }
    assert!(backend.understands(&attrs("no JSON", ours)), "the plan says what is wrong");
    assert!(!backend.understands(&Attrs { backend_type: "host-gw".to_owned(), ..attrs(ours, ours) }));
}

/// Otherwise, packets would take a way on which the peer does not expect them.
#[test]
fn each_backend_understands_leases_of_its_own_type_alone() {
    for (kind, named) in [
        ("host-gw", "host-gw"),
        ("ipip", "ipip"),
        ("wireguard", "wireguard"),
        ("extension", "extension"),
        ("udp", ""),
        ("alloc", ""),
    ] {
        let backend = make(&NetConf { backend_type: kind.to_owned(), ..net_conf() }).unwrap();
        for other in ["vxlan", "host-gw", "ipip", "wireguard", "extension", ""] {
            let understands = backend.understands(&lease("10.5.2.0-24", other, 2).attrs);
            assert_eq!(understands, other == named, "{kind}: {other:?}");
        }
        assert_eq!(names_its_leases(kind), !named.is_empty(), "{kind}");
    }
}

/// A route into a tunnel that has no address would lose packets.
#[test]
fn ipip_needs_an_address_and_a_subnet_of_this_node() {
    let backend = make_kind("ipip", "{}", &net_conf()).unwrap();
    let (own, peer) = (lease("10.5.1.0-24", "ipip", 1), lease("10.5.2.0-24", "ipip", 2));
    let reasons = |host: &Host, own: &Lease| {
        let planned = backend.plan(host, own, &peer);
        assert!(planned.state.is_empty(), "{planned:?}");
        planned.skipped.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let wanted = ["10.5.2.0/24: this node has no IPv4 address on eth0 for ipip"];
    let mut without = host();
    without.uplink.v4 = None;
    assert_eq!(reasons(&without, &own), wanted);
    let of_v6 = Lease { subnets: Subnets::from_key("fd00:5:0:1::-64").unwrap(), ..own.clone() };
    assert_eq!(reasons(&host(), &of_v6), wanted);
    assert!(backend.plan(&host(), &own, &peer).skipped.is_empty());
}

/// A peer would be shown as unreachable if its probes went to an address that does not answer.
#[test]
fn probes_are_sent_to_an_address_that_answers() {
    let first = "10.5.2.0".parse().unwrap();
    let through = |outer| Some(EchoAddress::Device { address: first, outer });
    let published = Some(EchoAddress::Published([192, 168, 64, 2].into()));
    for (kind, named, wanted) in [
        ("vxlan", "vxlan", through(Some(Family::V4))),
        ("ipip", "ipip", through(None)),
        ("udp", "", through(None)),
        ("host-gw", "host-gw", published),
        ("alloc", "", None),
    ] {
        let backend = make_kind(kind, "{}", &net_conf()).unwrap();
        let mut peer = lease("10.5.2.0-24", named, 2);
        assert_eq!(backend.echo_address(&peer, Family::V4), wanted, "{kind}");
        assert_eq!(backend.echo_address(&peer, Family::V6), None, "{kind}: the peer has no IPv6 subnet");
        (peer.subnets.v6, peer.attrs.public_ipv6) = ("fd00:5:0:2::/64".parse().ok(), "fd00::2".parse().ok());
        if kind == "host-gw" {
            assert_eq!(backend.echo_address(&peer, Family::V6), None, "the network has no IPv6");
        }
    }
}

/// The tunnel could not carry the smallest packets that IPv4 demands.
#[test]
fn an_mtu_that_leaves_no_room_for_packets_is_refused() {
    for (kind, least) in [("vxlan", 138), ("wireguard", 148)] {
        let with = |mtu: u32| make_kind(kind, &format!(r#"{{"MTU": {mtu}}}"#), &net_conf());
        let said = with(least - 1).err().unwrap().to_string();
        assert!(said.starts_with(&format!("Backend.MTU in net-conf is {}: ", least - 1)), "{said}");
        assert!(said.contains(&format!("at least {least},")), "{said}");
        assert!(with(least).is_ok() && with(0).is_ok(), "{kind}");
    }
}

/// Probes show whether packets of this size reach a peer. The operator is told if net-conf asks for more than the uplink carries.
#[test]
fn the_smaller_of_the_mtus_of_net_conf_and_of_the_uplink_counts() {
    for kind in ["vxlan", "wireguard"] {
        for (mtu, counts, too_large) in [(1400, 1400, false), (0, 1500, false), (1500, 1500, false), (9000, 1500, true)]
        {
            let backend = make_kind(kind, &format!(r#"{{"MTU": {mtu}}}"#), &net_conf()).unwrap();
            assert_eq!(backend.underlay_mtu(&host()), counts, "{kind} {mtu}");
            let remark = backend.remark(&host()).unwrap_or_default();
            assert_eq!(remark.contains("but the uplink eth0 carries 1500"), too_large, "{kind} {mtu}: {remark}");
        }
    }
    assert_eq!(make_kind("host-gw", r#"{"MTU": 1400}"#, &net_conf()).unwrap().underlay_mtu(&host()), 1500);
}

#[test]
fn a_route_shows_its_metric_unless_it_is_the_familys_default() {
    let route = |net: &str, metric| Key::Route(net.parse().unwrap(), metric).to_string();
    assert_eq!(route("10.5.1.0/24", 0), "route 10.5.1.0/24");
    assert_eq!(route("10.5.1.0/24", 7), "route 10.5.1.0/24 metric 7");
    assert_eq!(route("fd00:5::/64", 1024), "route fd00:5::/64");
}

#[test]
fn a_lease_without_a_type_is_set_aside_with_the_types_that_it_may_be_of() {
    let said = make_for_lease("", &net_conf()).err().unwrap().to_string();
    for kind in ["udp", "alloc", "tencent-vpc", "aws-vpc", "gce"] {
        assert!(said.contains(kind), "{said}");
    }
    for kind in KINDS {
        assert_eq!(make_for_lease(kind, &net_conf()).unwrap().kind(), kind);
    }
}

/// udp and alloc share leases without a type, so the own network decides what such a lease is.
#[test]
fn a_lease_without_a_type_is_one_of_udp_in_a_network_of_udp_alone() {
    let peer = lease("10.5.2.0-24", "", 2);
    let own = lease("10.5.1.0-24", "", 1);
    for (kind, reached) in [("udp", true), ("alloc", false), ("vxlan", false), ("host-gw", false), ("ipip", false)] {
        let backend = make_kind(kind, "{}", &net_conf()).unwrap();
        assert_eq!(backend.tunnel_peer(&host(), &peer).is_some() && backend.serves(""), reached, "{kind}");
        assert_eq!(backend.tunnel(&host(), &own).is_some(), reached, "{kind}");
    }
    let udp = make_kind("udp", "{}", &net_conf()).unwrap();
    assert!(!udp.serves("vxlan"), "a node of vxlan does not listen on the port of udp");
    let published = (TYPES.annotations)(&udp.advertise(&host()).unwrap());
    assert_eq!(published.data.as_deref(), Some("null"));
}

/// Peers see in the lease whether this node has followed a change of the port. flannel names no port, whatever its port is.
#[test]
fn udp_names_a_port_that_is_not_the_usual_one_and_understands_leases_of_its_own_port() {
    let [usual, other] =
        [8285, 8286].map(|port| make_kind("udp", &format!(r#"{{"Port":{port}}}"#), &net_conf()).unwrap());
    assert_eq!(usual.advertise(&host()).unwrap().backend_data, None, "the lease is as flannel writes it");
    let moved = other.advertise(&host()).unwrap();
    assert_eq!(moved.backend_data.as_deref(), Some(r#"{"Port":8286}"#));
    assert_eq!((TYPES.annotations)(&moved).data.as_deref(), Some(r#"{"Port":8286}"#));
    let unreadable = [r#"{"Port":0}"#, r#"{"Port":65536}"#, r#"{"Port":"8286"}"#, "[]", r#"{"VNI":1}"#];
    let unnamed = std::iter::once(None).chain(unreadable.into_iter().map(Some)).map(|data| (data, [8285, 8286]));
    for (data, ports) in unnamed.chain([(Some(r#"{"port":8286}"#), [8286, 8286])]) {
        let mut peer = lease("10.5.2.0-24", "", 2);
        peer.attrs.backend_data = data.map(Into::into);
        let is_moved = ports[0] == 8286;
        assert_eq!([usual.understands(&peer.attrs), other.understands(&peer.attrs)], [!is_moved, is_moved], "{data:?}");
        let sent_to = [&usual, &other].map(|udp| udp.tunnel_peer(&host(), &peer).unwrap().address.port());
        assert_eq!(sent_to, ports, "{data:?}");
    }
}

/// Whoever can write a lease could let other nodes send datagrams to a service of a host.
#[test]
fn udp_believes_a_port_of_the_system_only_if_net_conf_names_it() {
    let mut peer = lease("10.5.2.0-24", "", 2);
    for (named, net_conf_port, reached) in [(53, 8285, false), (53, 53, true), (1023, 53, false), (1024, 8285, true)] {
        peer.attrs.backend_data = Some(format!(r#"{{"Port":{named}}}"#).into());
        let udp = make_kind("udp", &format!(r#"{{"Port":{net_conf_port}}}"#), &net_conf()).unwrap();
        let sent_to = udp.tunnel_peer(&host(), &peer).map(|peer| peer.address.port());
        assert_eq!(sent_to, reached.then_some(named));
        let skipped = udp.plan(&host(), &lease("10.5.1.0-24", "", 1), &peer).skipped;
        let reason = format!(
            "10.5.2.0/24: the lease names the port {named}, which is below 1024 and is not the Port of net-conf"
        );
        let reasons: Vec<String> = skipped.iter().map(ToString::to_string).collect();
        assert_eq!(reasons, if reached { Vec::new() } else { vec![reason] });
    }
}

/// Such a lease of udp does not name the port. So the tunnel with an earlier port is kept, but only for a limited time. One of wireguard hides
/// the mode if there are two families, and the network of this test has one.
#[test]
fn of_all_backends_of_one_family_only_udp_has_options_that_leases_of_flannel_hide() {
    for (kind, shows_them) in [
        ("vxlan", true),
        ("host-gw", true),
        ("ipip", true),
        ("wireguard", true),
        ("alloc", true),
        ("extension", true),
        ("udp", false),
    ] {
        let backend = make(&NetConf { backend_type: kind.to_owned(), ..net_conf() }).unwrap();
        assert_eq!(backend.knows_options_of_flannel(), shows_them, "{kind}");
    }
}

/// The tunnel answers "network unreachable" from an address of this host, and the kernel drops such packets otherwise.
#[test]
fn the_device_of_udp_accepts_packets_from_an_address_of_this_host() {
    let udp = make_kind("udp", "{}", &net_conf()).unwrap();
    let device = udp.device(&host(), &lease("10.5.1.0-24", "", 1));
    let settings = device.iter().find_map(|(_, value)| match value {
        Value::Link(link) => Some(link.kind.ipv4_settings()),
        _ => None,
    });
    assert_eq!(settings, Some(&[("accept_local", "1")][..]));
}

/// flannel also uses udp, although its documentation says vxlan.
#[test]
fn a_net_conf_without_a_backend_is_one_of_udp() {
    let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16"}"#).unwrap();
    assert_eq!(make(&net_conf).unwrap().kind(), "udp");
}

#[test]
fn a_type_that_weft_does_not_have_is_refused_with_what_to_use_instead() {
    let said = |kind: &str| make_kind(kind, "{}", &net_conf()).err().unwrap().to_string();
    for kind in ["ipsec", "tencent-vpc", "aws-vpc", "gce", "ali-vpc"] {
        let said = said(kind);
        assert!(said.starts_with(&format!("backend type {kind} is not supported by weft")), "{said}");
        assert!(said.contains("use "), "{said}");
    }
    assert_eq!(
        said("aws-vpc"),
        "backend type aws-vpc is not supported by weft: use alloc, and let a controller of the cloud make the routes"
    );
    assert!(said("").starts_with("no backend type is given (Backend.Type in net-conf)"));
    assert!(said("carrier\u{1b}pigeon").starts_with("unknown backend type \"carrier"));
}

#[test]
fn options_that_no_backend_knows_are_named() {
    let unknown = |kind: &str, options: &str| {
        let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{kind}"{options}}}}}"#);
        unknown_options(&NetConf::parse(&text).unwrap())
    };
    assert_eq!(unknown("vxlan", r#","DirectRoutting":true,"vni":7,"MTU":1400"#), ["DirectRoutting"]);
    assert_eq!(unknown("host-gw", r#","VNI":7"#), ["VNI"]);
    let many: String = (0..9).map(|n| format!(r#","\u001b{n}":{n}"#)).collect();
    assert_eq!(unknown("udp", &many), [r"\u{1b}0", r"\u{1b}1", r"\u{1b}2"]);
    let of_wireguard = r#","ListenPort":1,"ListenPortV6":2,"Mode":"separate","PersistentKeepaliveInterval":9,"PSK":"",
        "AllowPlaintext":true,"MTU":1400"#;
    let of_extension = r#","PreStartupCommand":"a","PostStartupCommand":"b","SubnetAddCommand":"c",
        "SubnetRemoveCommand":"d","Shell":true,"Reconcile":9"#;
    for (kind, options) in [
        ("vxlan", r#","VNI":7,"Port":8473,"GBP":true,"Learning":true,"DirectRouting":true,"MTU":1400"#),
        ("ipip", r#","DirectRouting":true"#),
        ("udp", r#","Port":8286"#),
        ("wireguard", of_wireguard),
        ("extension", of_extension),
        ("alloc", ""),
        ("host-gw", ""),
    ] {
        assert_eq!(unknown(kind, options), [""; 0], "{kind}");
    }
}

/// Only a net-conf of this type names the commands that reach such a node.
#[test]
fn a_lease_of_extension_is_set_aside_in_a_network_of_another_type() {
    let said = make_for_lease("extension", &net_conf()).err().unwrap().to_string();
    assert_eq!(said, "its BackendType is extension, and this node's net-conf names no commands that reach it");
    let attrs = |data: Option<&str>, v6| Attrs {
        public_ip: Some([192, 168, 64, 2].into()),
        public_ipv6: v6,
        backend_type: "extension".to_owned(),
        backend_data: data.map(Into::into),
        ..Attrs::default()
    };
    // flannel publishes an empty text without data, and null for IPv6 if there is an address.
    let said = (TYPES.annotations)(&attrs(Some("\"key\""), None));
    assert_eq!((said.data.as_deref(), said.data_v6.as_deref()), (Some("\"key\""), Some("null")));
    assert_eq!((TYPES.annotations)(&attrs(None, "fd00::2".parse().ok())).data.as_deref(), Some(""));
}
