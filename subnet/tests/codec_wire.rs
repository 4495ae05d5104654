// SPDX-License-Identifier: Apache-2.0
//! Tests of lease keys, lease values and subnet.env: literal examples from flannel, and round trips.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use proptest::prelude::*;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::env::SubnetEnv;

fn subnets(v4: &str, v6: &str) -> Subnets {
    Subnets { v4: v4.parse().ok(), v6: v6.parse().ok() }
}

#[test]
fn keys_are_read_and_written_as_flannel_does() {
    for (key, v4, v6) in [
        ("10.5.52.0-24", "10.5.52.0/24", ""),
        ("10.5.52.0-24&fd00:12::-64", "10.5.52.0/24", "fd00:12::/64"),
        ("fd00:12::-64", "", "fd00:12::/64"),
        ("10.5.0.0-30&fc00:0:0:1::-64", "10.5.0.0/30", "fc00:0:0:1::/64"),
    ] {
        let read = Subnets::from_key(key).unwrap();
        assert_eq!(read, subnets(v4, v6), "{key}");
        assert_eq!(read.to_key(), key);
    }
    assert_eq!(Subnets::from_key("10.5.52.7-24"), Some(subnets("10.5.52.0/24", "")), "host bits must be set to zero");
}

#[test]
fn other_keys_are_not_leases() {
    for key in [
        "",
        "config",
        "10.5.52.0",
        "10.5.52.0-",
        "10.5.52.0-33",
        "10.5.52.0-24x",
        "10.5.52-24",
        "10.5.52.256-24",
        "10.5.52.0-24&",
        "10.5.52.0-24&fd00::-129",
        "fd00::-64&10.5.52.0-24",
        "10.5.52.0-24&10.5.53.0-24",
        "10.5.52.0-24&FD00::-64",
        "::ffff:10.5.52.0-120",
        "10.5.52.0/24",
        " 10.5.52.0-24",
        "10.5.52.0-+24",
        "10.5.52.0--4",
        "fd00::-64&fd01::-64",
        "10.5.52.0-24&fd00::-64&fd01::-64",
    ] {
        assert_eq!(Subnets::from_key(key), None, "{key:?}");
    }
}

const VXLAN: &str = r#"{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}}"#;

#[test]
fn values_are_written_byte_for_byte_as_flannel_does() {
    let attrs = Attrs::from_wire(VXLAN.as_bytes()).unwrap();
    assert_eq!(attrs.public_ip, Some(Ipv4Addr::new(192, 168, 64, 3)));
    assert_eq!(attrs.public_ipv6, None);
    assert_eq!(attrs.backend_type, "vxlan");
    assert_eq!(attrs.backend_data.as_deref(), Some(r#"{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}"#));
    assert_eq!(attrs.backend_v6_data, None);
    assert_eq!(attrs.to_wire(), VXLAN);
    for wire in [
        r#"{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"host-gw"}"#,
        r#"{"PublicIP":"192.168.64.3","PublicIPv6":null}"#,
        r#"{"PublicIP":"0.0.0.0","PublicIPv6":"fd00::3","BackendType":"vxlan","BackendV6Data":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}}"#,
        r#"{"PublicIP":"192.168.64.3","PublicIPv6":"fd00::3","BackendType":"extension","BackendData":"text","BackendV6Data":"more"}"#,
    ] {
        assert_eq!(Attrs::from_wire(wire.as_bytes()).unwrap().to_wire(), wire);
    }
}

#[test]
fn values_written_by_hand_are_read_as_go_reads_them() {
    let text = r#"{ "publicip": "10.1.2.3", "Unknown": [1], "BACKENDTYPE": "VXLAN", "backenddata": null, "PublicIP": "10.1.2.4" }"#;
    let expected =
        Attrs { public_ip: Some(Ipv4Addr::new(10, 1, 2, 4)), backend_type: "vxlan".into(), ..Attrs::default() };
    assert_eq!(Attrs::from_wire(text.as_bytes()).unwrap(), expected);
    for bad in ["", "null", "[]", "{", r#"{"PublicIP":"10.1.2"}"#, r#"{"PublicIP":7}"#, r#"{"BackendType":{}}"#, "{} x"]
    {
        assert!(Attrs::from_wire(bad.as_bytes()).is_err(), "{bad}");
    }
    assert!(Attrs::from_wire(b"{\"PublicIP\":\"\xff\"}").is_err());
}

#[test]
fn subnet_env_is_written_byte_for_byte_as_flannel_does() {
    let v4 = SubnetEnv {
        networks: subnets("10.5.0.0/16", ""),
        subnets: subnets("10.5.52.0/24", ""),
        mtu: 1450,
        ipmasq: true,
    };
    assert_eq!(
        v4.render(),
        "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
    );
    let dual = SubnetEnv {
        networks: subnets("10.5.0.0/16", "fd00::/48"),
        subnets: subnets("10.5.52.0/24", "fd00:0:0:12::/64"),
        mtu: 1430,
        ipmasq: false,
    };
    assert_eq!(
        dual.render(),
        "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_IPV6_NETWORK=fd00::/48\n\
         FLANNEL_IPV6_SUBNET=fd00:0:0:12::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n"
    );
    let v6 = SubnetEnv { networks: subnets("", "fd00::/48"), subnets: subnets("", "fd00:0:0:12::/64"), ..dual.clone() };
    assert_eq!(
        v6.render(),
        "FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_IPV6_SUBNET=fd00:0:0:12::1/64\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n"
    );
    for env in [v4, dual, v6] {
        assert_eq!(SubnetEnv::parse(&env.render()), Some(env));
    }
}

#[test]
fn subnet_env_of_other_writers_is_read() {
    let parsed = |text: &str| SubnetEnv::parse(text).map(|env| (env.networks, env.subnets, env.mtu, env.ipmasq));
    let text = "# by hand\n\nexport FLANNEL_NETWORK=\"10.5.0.0/16\"\r\n FLANNEL_SUBNET = '10.5.52.1/24' # mine\nFLANNEL_MTU=1450 # bytes\nFLANNEL_IPMASQ=true\nX=1\n";
    assert_eq!(parsed(text), Some((subnets("10.5.0.0/16", ""), subnets("10.5.52.0/24", ""), 1450, true)));
    let list = |value: &str| parsed(&format!("FLANNEL_SUBNET={value}")).map(|p| p.1);
    assert_eq!(list("10.5.52.1/24"), Some(subnets("10.5.52.0/24", "")));
    assert_eq!(
        list("nonsense, 10.5.52.1/24,10.5.53.1"),
        Some(subnets("10.5.52.0/24", "")),
        "invalid entries must be skipped"
    );
    assert_eq!(list("10.5.52.1/24,10.5.53.1/24"), None, "a list with two valid entries must be refused");
    assert_eq!(list("fd00::1/64"), None, "an IPv6 network is not valid in FLANNEL_SUBNET");
    assert_eq!(list(""), None);
    assert_eq!(parsed(""), None);
    assert_eq!(parsed("FLANNEL_MTU=1450"), None);
    assert_eq!(
        parsed("FLANNEL_SUBNET=10.5.52.1/24\nFLANNEL_MTU=x"),
        Some((subnets("", ""), subnets("10.5.52.0/24", ""), 0, false))
    );
}

fn any_subnets() -> impl Strategy<Value = Subnets> {
    let v4 = proptest::option::of((any::<u32>(), 1u8..=32));
    // The top bit is set, so that no address is IPv4-mapped. Clusters and nodes have no such subnets.
    let v6 = proptest::option::of((any::<u128>(), 1u8..=128));
    (v4, v6).prop_filter_map("no subnet", |(v4, v6)| {
        let v4 = v4.and_then(|(a, l)| Ipv4Net::new(Ipv4Addr::from(a), l).ok());
        let v6 = v6.and_then(|(a, l)| Ipv6Net::new(Ipv6Addr::from(a | 1 << 127), l).ok());
        (v4.is_some() || v6.is_some()).then_some(Subnets { v4, v6 }.trunc())
    })
}

proptest! {
    #[test]
    fn keys_survive_a_round_trip(subnets in any_subnets()) {
        prop_assert_eq!(Subnets::from_key(&subnets.to_key()), Some(subnets));
    }

    #[test]
    fn overlap_is_symmetric_and_means_a_shared_address(a in any_subnets(), b in any_subnets()) {
        prop_assert_eq!(a.overlaps(&b), b.overlaps(&a));
        prop_assert!(a.overlaps(&a));
        let inside = Family::BOTH.iter().any(|f| match (a.of(*f), b.of(*f)) {
            (Some(a), Some(b)) => a.contains(&b.network()) || b.contains(&a.network()),
            _ => false,
        });
        prop_assert_eq!(a.overlaps(&b), inside);
    }

    #[test]
    fn values_survive_a_round_trip(
        v4 in proptest::option::of(1u32..), v6 in proptest::option::of(any::<u128>()),
        kind in "[a-z-]{0,9}", data in proptest::option::of("[ -~]{0,40}"), vni in proptest::option::of(any::<u32>()),
        tunnel in proptest::option::of((1u32.., any::<u128>())), way in proptest::option::of("[a-z-]{0,9}"),
    ) {
        let attrs = Attrs {
            public_ip: v4.map(Ipv4Addr::from),
            public_ipv6: v6.map(Ipv6Addr::from),
            backend_type: kind,
            backend_data: data.map(|text| serde_json::to_string(&text).unwrap().into()),
            backend_v6_data: vni.map(|vni| format!("{{\"VNI\":{vni}}}").into()),
            tunnel_ip: tunnel.map(|(v4, _)| Ipv4Addr::from(v4)),
            tunnel_ipv6: tunnel.map(|(_, v6)| Ipv6Addr::from(v6)),
            other_ways: way.map(|kind| format!("[{{\"BackendType\":\"{kind}\"}}]").into()),
        };
        prop_assert_eq!(Attrs::from_wire(attrs.to_wire().as_bytes()).unwrap(), attrs);
    }

    #[test]
    fn subnet_env_survives_a_round_trip(networks in any_subnets(), subnets in any_subnets(), mtu: u32, ipmasq: bool) {
        let env = SubnetEnv { networks, subnets, mtu, ipmasq };
        prop_assert_eq!(SubnetEnv::parse(&env.render()), Some(env));
    }
}
