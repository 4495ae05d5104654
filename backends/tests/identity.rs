// SPDX-License-Identifier: Apache-2.0
//! The identities that leases name, and how those of our devices follow our own lease.

// Helpers outside test functions panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use weft_backends::identity::Identities;
use weft_backends::register::{TYPES, make};
use weft_backends::state::Mac;
use weft_backends::vxlan::VtepMac;
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::Annotations;
use weft_subnet::net_conf::NetConf;

fn attrs(kind: &str, data: Option<&str>, v6_data: Option<&str>) -> Attrs {
    let (backend_data, backend_v6_data) = (data.map(Into::into), v6_data.map(Into::into));
    Attrs { backend_type: kind.into(), backend_data, backend_v6_data, ..Attrs::default() }
}

fn named(attrs: &Attrs) -> [Option<String>; 2] {
    (TYPES.identities)(attrs).map(|identity| identity.map(|identity| identity.to_string()))
}

#[test]
fn a_vxlan_lease_names_a_mac_in_any_notation() {
    let both =
        attrs("vxlan", Some(r#"{"VNI":1,"VtepMAC":"0E-00-00-00-00-01"}"#), Some(r#"{"vtepmac":"0e00.0000.0006"}"#));
    assert_eq!(named(&both), [Some("0e:00:00:00:00:01".to_owned()), Some("0e:00:00:00:00:06".to_owned())]);
}

#[test]
fn macs_that_no_device_can_have_identify_nothing() {
    for bad in ["00:00:00:00:00:00", "01:00:00:00:00:01", "no MAC", ""] {
        let data = format!(r#"{{"VtepMAC":"{bad}"}}"#);
        assert_eq!(named(&attrs("vxlan", Some(&data), None)), [None, None], "{bad}");
    }
    for bad in ["null", "[]", "{", r#"{"VtepMAC":7}"#] {
        assert_eq!(named(&attrs("vxlan", Some(bad), None)), [None, None], "{bad}");
    }
}

/// Two nodes whose leases name 32 zeros have not one key, and a port 0 is no place to which packets can be sent.
#[test]
fn a_wireguard_lease_names_its_keys_and_ports() {
    let key = "B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=";
    let data = |key: &str, port: &str| format!(r#"{{"PublicKey":"{key}"{port}}}"#);
    let (with_port, without) = (data(key, r#","Port":51820"#), data(key, r#","port":0"#));
    let both = attrs("wireguard", Some(&with_port), Some(&without));
    assert_eq!(named(&both), [Some(key.to_owned()), Some(key.to_owned())]);
    assert_eq!((TYPES.ports)(&both), [Some(51820), None]);
    assert_eq!((TYPES.ports)(&attrs("vxlan", Some(&with_port), None)), [None, None]);
    for bad in ["AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=", "no key", ""] {
        let data = data(bad, "");
        assert_eq!(named(&attrs("wireguard", Some(&data), None)), [None, None], "{bad}");
    }
}

#[test]
fn what_looks_like_a_mac_in_a_lease_of_another_type_identifies_nothing() {
    let data = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#;
    for kind in ["host-gw", "ipip", "wireguard", ""] {
        assert_eq!(named(&attrs(kind, Some(data), None)), [None, None], "{kind}");
    }
}

#[test]
fn vxlan_devices_follow_the_lease_as_far_as_it_names_macs() {
    let net_conf =
        |kind: &str| NetConf::parse(&format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{kind}"}}}}"#)).unwrap();
    let mac = |last| Mac([2, 0, 0, 0, 0, last]);
    let now = VtepMac::both(mac(1), mac(6));
    let lease = attrs("vxlan", Some(r#"{"VtepMAC":"02:00:00:00:00:09"}"#), Some("{}"));
    assert_eq!(make(&net_conf("vxlan")).unwrap().follow(&now, &lease), VtepMac::both(mac(9), mac(6)));
    let other = Attrs { backend_type: "wireguard".into(), ..lease.clone() };
    assert_eq!(make(&net_conf("vxlan")).unwrap().follow(&now, &other), now, "a lease of another type names no MAC");
    assert_eq!(make(&net_conf("host-gw")).unwrap().follow(&Identities::default(), &lease), Identities::default());
}

#[test]
fn each_type_says_what_a_node_publishes_for_its_leases() {
    let of = |kind, data, v6_data| (TYPES.annotations)(&attrs(kind, data, v6_data));
    let said = |data: Option<&str>, data_v6: Option<&str>| Annotations {
        data: data.map(str::to_owned),
        data_v6: data_v6.map(str::to_owned),
    };
    assert_eq!(of("vxlan", Some("{}"), None), said(Some("{}"), None));
    assert_eq!(of("vxlan", None, Some("[]")), said(None, Some("[]")));
    assert_eq!(of("host-gw", None, None), said(Some("null"), Some("null")));
    assert_eq!(of("ipip", None, None), said(Some("null"), None));
    // A lease of alloc has no type. The store does not publish a family without an address.
    assert_eq!(of("", None, None), said(Some("null"), Some("null")));
}

/// The leases are those that flannel writes into etcd, which the agent of this type reads and writes to the byte.
#[test]
fn wireguard_and_extension_publish_the_data_of_their_leases_on_nodes() {
    const DATA: &str = r#"{"PublicKey":"B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=","Port":51820}"#;
    const DATA_V6: &str = r#"{"PublicKey":"B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=","Port":51821}"#;
    let (v4, dual, v6) = (
        r#"{"PublicIP":"10.99.0.1","PublicIPv6":null"#,
        r#"{"PublicIP":"10.99.0.1","PublicIPv6":"fd99::1""#,
        r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd99::1""#,
    );
    let wireguard = r#""BackendType":"wireguard""#;
    let extension = r#""BackendType":"extension""#;
    // As in flannel, extension publishes `null` for IPv6 and an empty text if no command has printed data.
    for (lease, data, data_v6) in [
        (format!(r#"{v4},{wireguard},"BackendData":{DATA}}}"#), Some(DATA), None),
        (format!(r#"{dual},{wireguard},"BackendData":{DATA},"BackendV6Data":{DATA_V6}}}"#), Some(DATA), Some(DATA_V6)),
        (format!(r#"{v6},{wireguard},"BackendV6Data":{DATA_V6}}}"#), None, Some(DATA_V6)),
        (format!(r#"{v4},{extension},"BackendData":"a key"}}"#), Some(r#""a key""#), Some("null")),
        (format!(r#"{dual},{extension}}}"#), Some(""), Some("null")),
    ] {
        let attrs = Attrs::from_wire(lease.as_bytes()).unwrap();
        assert_eq!(attrs.to_wire(), lease);
        let expected = Annotations { data: data.map(str::to_owned), data_v6: data_v6.map(str::to_owned) };
        assert_eq!((TYPES.annotations)(&attrs), expected, "{lease}");
    }
}
