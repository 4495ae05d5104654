// SPDX-License-Identifier: Apache-2.0
//! Tests of the net-conf (what is accepted, what is refused, how two of them differ), and of the choice of a free
//! subnet.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests, which clippy does not take for tests")]

use std::net::IpAddr;

use ipnet::IpNet;
use proptest::prelude::*;
use weft_subnet::allocate::{complete, is_compatible};
use weft_subnet::cidr::Subnets;
use weft_subnet::net_conf::{BadNetConf, NetConf};

fn net_conf(text: &str) -> NetConf {
    NetConf::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn v4(text: &str) -> (String, u8, String, String) {
    let range = net_conf(text).v4.unwrap();
    (range.network.to_string(), range.len, range.min.to_string(), range.max.to_string())
}

fn v6(text: &str) -> (String, u8, String, String) {
    let range = net_conf(text).v6.unwrap();
    (range.network.to_string(), range.len, range.min.to_string(), range.max.to_string())
}

fn row(network: &str, len: u8, min: &str, max: &str) -> (String, u8, String, String) {
    (network.into(), len, min.into(), max.into())
}

#[test]
fn ipv4_defaults_are_those_of_flannel() {
    assert_eq!(v4(r#"{"Network":"10.5.0.0/16"}"#), row("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0"));
    assert_eq!(v4(r#"{"Network":"10.5.3.4/22"}"#), row("10.5.0.0/22", 24, "10.5.1.0", "10.5.3.0"));
    assert_eq!(v4(r#"{"Network":"10.5.0.0/23"}"#), row("10.5.0.0/23", 25, "10.5.0.128", "10.5.1.128"));
    assert_eq!(v4(r#"{"Network":"10.5.0.0/28"}"#), row("10.5.0.0/28", 30, "10.5.0.4", "10.5.0.12"));
    assert_eq!(v4(r#"{"Network":"128.0.0.0/1"}"#), row("128.0.0.0/1", 24, "128.0.1.0", "255.255.255.0"));
    assert_eq!(
        v4(r#"{"Network":"10.0.0.0/8","SubnetLen":20,"SubnetMin":"10.10.0.0","SubnetMax":"10.99.0.0"}"#),
        row("10.0.0.0/8", 20, "10.10.0.0", "10.99.0.0")
    );
    // The shortest and the longest one.
    assert_eq!(v4(r#"{"Network":"10.5.0.0/16","SubnetLen":18}"#), row("10.5.0.0/16", 18, "10.5.64.0", "10.5.192.0"));
    assert_eq!(v4(r#"{"Network":"10.5.0.0/16","SubnetLen":30}"#), row("10.5.0.0/16", 30, "10.5.0.4", "10.5.255.252"));
    assert_eq!(
        v4(r#"{"Network":"10.5.0.0/16","SubnetLen":0,"SubnetMin":"0.0.0.0","SubnetMax":null}"#),
        row("10.5.0.0/16", 24, "10.5.1.0", "10.5.255.0")
    );
}

#[test]
fn names_that_are_not_known_are_kept_for_messages() {
    let all = r#"{"Network":"10.5.0.0/16","subnetlen":24,"SubnetMin":"10.5.1.0","SubnetMax":"10.5.9.0","EnableIPv4":true,
        "EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetLen":64,"IPv6SubnetMin":"fd00:0:0:1::",
        "IPv6SubnetMax":"fd00:0:0:9::","EnableNFTables":true,"MasqueradeExcept":[],"MasqueradeToNodes":true,
        "Backend":{"Type":"vxlan"}}"#;
    assert_eq!(net_conf(all).unknown, [""; 0]);
    let misspelled = r#"{"Network":"10.5.0.0/16","SubnetLength":24,"Backend":{"Type":"vxlan","vnni":7}}"#;
    assert_eq!(net_conf(misspelled).unknown, ["SubnetLength"], "the options belong to the backend");
}

#[test]
fn ipv6_defaults_are_those_of_flannel() {
    let conf = |rest: &str| format!(r#"{{"EnableIPv4":false,"EnableIPv6":true,{rest}}}"#);
    assert_eq!(v6(&conf(r#""IPv6Network":"fd00::/48""#)), row("fd00::/48", 64, "fd00:0:0:1::", "fd00:0:0:ffff::"));
    assert_eq!(
        v6(&conf(r#""IPv6Network":"fd00::7/63""#)),
        row("fd00::/63", 65, "fd00::8000:0:0:0", "fd00:0:0:1:8000::")
    );
    assert_eq!(v6(&conf(r#""IPv6Network":"fd00::/124""#)), row("fd00::/124", 126, "fd00::4", "fd00::c"));
    assert_eq!(v6(&conf(r#""IPv6Network":"8000::/1""#)), row("8000::/1", 64, "8000:0:0:1::", "ffff:ffff:ffff:ffff::"));
    assert_eq!(net_conf(&conf(r#""IPv6Network":"fd00::/48""#)).networks.v4, None);
}

#[test]
fn keys_match_in_any_case_and_unknown_keys_are_ignored() {
    let conf = net_conf(
        r#"{"NETWORK":"10.1.0.0/16","network":"10.5.0.0/16","enableipv6":true,"ipv6network":"fd00::/48","ENABLENFTABLES":true,
            "Comment":{"a":[1,2]},"backend":{"type":"VXLAN","Directrouting":true}}"#,
    );
    assert_eq!(conf.networks.to_string(), "10.5.0.0/16,fd00::/48", "the last of several equal keys must count");
    assert_eq!(conf.nftables, Some(true));
    assert_eq!(conf.backend_type, "vxlan");
    assert_eq!(&*conf.backend, r#"{"type":"VXLAN","Directrouting":true}"#);
}

#[test]
fn masquerade_exceptions_are_parsed() {
    let conf =
        net_conf(r#"{"Network":"10.5.0.0/16","MasqueradeExcept":["10.0.0.0/8","fd00::/8"],"MasqueradeToNodes":false}"#);
    let except = ["10.0.0.0/8", "fd00::/8"].map(|net| net.parse().unwrap());
    assert_eq!((&conf.masquerade.except[..], conf.masquerade.except_nodes), (&except[..], true));
    assert_eq!(net_conf(r#"{"Network":"10.5.0.0/16"}"#).masquerade, Default::default());
    let bad = NetConf::parse(r#"{"Network":"10.5.0.0/16","MasqueradeExcept":["10.0.0.0"]}"#)
        .expect_err("a network without a length");
    assert!(bad.to_string().contains("MasqueradeExcept"), "{bad}");
}

#[test]
fn without_backend_the_type_is_udp() {
    let conf = net_conf(r#"{"Network":"10.5.0.0/16"}"#);
    assert_eq!((conf.backend_type.as_str(), &*conf.backend), ("udp", "{}"));
    assert_eq!(conf.nftables, None);
}

/// Each row: the net-conf, a check of the error's variant, and a part of the message that names the key or the remedy.
#[test]
#[allow(clippy::too_many_lines, reason = "a table")]
fn each_error_names_the_key_and_the_remedy() {
    type Check = fn(&BadNetConf) -> bool;
    let rows: &[(&str, Check, &str)] = &[
        ("", |e| matches!(e, BadNetConf::Json(_)), "not valid"),
        ("[]", |e| matches!(e, BadNetConf::Json(_)), "object"),
        (r#"{"Network":"10.5.0.0"}"#, |e| matches!(e, BadNetConf::Json(_)), "Network = \"10.5.0.0\""),
        (r#"{"Network":"10.5.0.0/16","SubnetLen":"24"}"#, |e| matches!(e, BadNetConf::Json(_)), "SubnetLen = \"24\""),
        (r#"{"Network":"10.5.0.0/16","SubnetLen":-1}"#, |e| matches!(e, BadNetConf::Json(_)), "SubnetLen = -1"),
        (
            r#"{"Network":"10.5.0.0/16","EnableIPv6":"yes"}"#,
            |e| matches!(e, BadNetConf::Json(_)),
            "EnableIPv6 = \"yes\"",
        ),
        (r#"{"Network":"10.5.0.0/16","Backend":"vxlan"}"#, |e| matches!(e, BadNetConf::Json(_)), "Backend: "),
        (
            r#"{"Network":"10.5.0.0/16","Backend":{"Type":1}}"#,
            |e| matches!(e, BadNetConf::Json(_)),
            "Backend: Type = 1",
        ),
        (r#"{"Network":"fd00::/48"}"#, |e| matches!(e, BadNetConf::Json(_)), "Network = \"fd00::/48\""),
        (r#"{"EnableIPv4":false}"#, |e| matches!(e, BadNetConf::NoFamily), "none defined stack: set EnableIPv4"),
        ("{}", |e| matches!(e, BadNetConf::Missing { key: "Network", .. }), "Network is missing: set it"),
        (
            r#"{"Network":"0.0.0.0/0"}"#,
            |e| matches!(e, BadNetConf::Missing { key: "Network", .. }),
            "e.g. 10.244.0.0/16",
        ),
        (
            r#"{"Network":"10.5.0.0/16","EnableIPv6":true}"#,
            |e| matches!(e, BadNetConf::Missing { key: "IPv6Network", .. }),
            "IPv6Network is missing",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetLen":31}"#,
            |e| matches!(e, BadNetConf::SubnetTooSmall { key: "SubnetLen", len: 31, limit: 31 }),
            "must be less than /31",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetLen":4294967296}"#,
            |e| matches!(e, BadNetConf::SubnetTooSmall { len: 4_294_967_296, .. }),
            "SubnetLen 4294967296 is too long",
        ),
        (
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetLen":127}"#,
            |e| matches!(e, BadNetConf::SubnetTooSmall { key: "IPv6SubnetLen", limit: 127, .. }),
            "must be less than /127",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetLen":17}"#,
            |e| matches!(e, BadNetConf::TooFewSubnets { key: "SubnetLen", len: 17, shortest: 18, .. }),
            "10.5.0.0/16 must hold at least four subnets",
        ),
        (
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetLen":49}"#,
            |e| matches!(e, BadNetConf::TooFewSubnets { key: "IPv6SubnetLen", shortest: 50, .. }),
            "must be /50 or longer",
        ),
        (
            r#"{"Network":"10.5.0.0/29"}"#,
            |e| matches!(e, BadNetConf::NetworkTooSmall { key: "Network", longest: 28, .. }),
            "must be a /28 or larger",
        ),
        (
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/125"}"#,
            |e| matches!(e, BadNetConf::NetworkTooSmall { key: "IPv6Network", longest: 124, .. }),
            "must be a /124 or larger",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetMin":"10.6.0.0"}"#,
            |e| matches!(e, BadNetConf::OutOfNetwork { key: "SubnetMin", .. }),
            "SubnetMin 10.6.0.0 is outside 10.5.0.0/16: set it",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetMax":"10.4.0.0"}"#,
            |e| matches!(e, BadNetConf::OutOfNetwork { key: "SubnetMax", .. }),
            "or leave it out",
        ),
        (
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetMax":"fd01::"}"#,
            |e| matches!(e, BadNetConf::OutOfNetwork { key: "IPv6SubnetMax", .. }),
            "IPv6SubnetMax fd01:: is outside",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.1.7"}"#,
            |e| matches!(e, BadNetConf::NotOnBoundary { key: "SubnetMin", len: 24, .. }),
            "begins at 10.5.1.0",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetLen":20,"SubnetMax":"10.5.9.0"}"#,
            |e| matches!(e, BadNetConf::NotOnBoundary { key: "SubnetMax", len: 20, .. }),
            "begins at 10.5.0.0",
        ),
        (
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48","IPv6SubnetMin":"fd00:0:0:1::1"}"#,
            |e| matches!(e, BadNetConf::NotOnBoundary { key: "IPv6SubnetMin", len: 64, .. }),
            "begins at fd00:0:0:1::",
        ),
        (
            r#"{"Network":"10.5.0.0/16","SubnetMin":"10.5.9.0","SubnetMax":"10.5.8.0"}"#,
            |e| matches!(e, BadNetConf::Reversed { min_key: "SubnetMin", max_key: "SubnetMax", .. }),
            "swap them",
        ),
        (
            r#"{"Network":"10.5.0.0/16","Backend":{}}"#,
            |e| matches!(e, BadNetConf::NoBackendType),
            "unknown backend type: set Backend.Type",
        ),
        (
            r#"{"Network":"10.5.0.0/16","Backend":null}"#,
            |e| matches!(e, BadNetConf::NoBackendType),
            "unknown backend type",
        ),
    ];
    for (text, variant, part) in rows {
        let error = NetConf::parse(text).expect_err(text);
        assert!(variant(&error), "{text}: {error:?}");
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
}

#[test]
fn differences_are_named_by_key() {
    let base = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":8472,"VNI":1}}"#;
    let differ = |text: &str| net_conf(base).differing_keys(&net_conf(text)).join(" ");
    assert_eq!(
        differ(r#"{"backend":{"vni":1, "port": 8472 ,"type":"VXLAN"},"network":"10.5.9.9/16","SubnetLen":24}"#),
        ""
    );
    assert_eq!(
        differ(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":8472,"VNI":1,"vni":null,"MTU":null}}"#),
        "",
        "null says nothing"
    );
    assert_eq!(
        differ(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","Port":4789,"MTU":1400}}"#),
        "Backend.MTU Backend.Port Backend.VNI"
    );
    assert_eq!(differ(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw","Port":8472,"VNI":1}}"#), "Backend.Type");
    assert_eq!(
        differ(
            r#"{"Network":"10.5.0.0/16","EnableNFTables":true,"EnableIPv6":true,"IPv6Network":"fd00::/48","SubnetMax":"10.5.9.0","Backend":{"Type":"vxlan","Port":8472,"VNI":1}}"#
        ),
        "SubnetMax EnableIPv6 EnableNFTables"
    );
    assert_eq!(
        differ(
            r#"{"Network":"10.0.0.0/8","SubnetLen":20,"SubnetMin":"10.16.0.0","MasqueradeExcept":["192.0.2.0/24"],"MasqueradeToNodes":false,"Backend":{"Type":"vxlan","Port":8472,"VNI":1}}"#
        ),
        "Network SubnetLen SubnetMin SubnetMax MasqueradeExcept MasqueradeToNodes"
    );
    let ipv6 = net_conf(r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48"}"#);
    let other = net_conf(
        r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00::/40","IPv6SubnetLen":60,"IPv6SubnetMin":"fd00:0:0:100::"}"#,
    );
    assert_eq!(
        ipv6.differing_keys(&other).join(" "),
        "EnableIPv4 IPv6Network IPv6SubnetLen IPv6SubnetMin IPv6SubnetMax"
    );
}

/// Chooses a subnet for a node that has none.
fn choose(conf: &NetConf, taken: &[Subnets], random: &mut dyn FnMut() -> u64) -> Option<Subnets> {
    complete(conf, &Subnets::default(), taken, random)
}

fn nets(texts: &[&str]) -> Vec<Subnets> {
    texts.iter().map(|text| Subnets { v4: text.parse().ok(), v6: text.parse().ok() }).collect()
}

#[test]
fn only_free_subnets_are_chosen() {
    let conf = net_conf(r#"{"Network":"10.5.0.0/21","SubnetLen":24,"SubnetMax":"10.5.4.0"}"#);
    let all = |taken: &[&str]| -> Vec<String> {
        let taken = nets(taken);
        let found = (0..100).filter_map(|n| choose(&conf, &taken, &mut || n)).map(|s| s.to_string());
        found.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    };
    assert_eq!(all(&[]), ["10.5.1.0/24", "10.5.2.0/24", "10.5.3.0/24", "10.5.4.0/24"]);
    assert_eq!(all(&["10.5.2.0/24", "10.9.0.0/16"]), ["10.5.1.0/24", "10.5.3.0/24", "10.5.4.0/24"]);
    assert_eq!(
        all(&["10.5.2.0/23", "10.5.1.128/25", "10.5.2.0/25"]),
        ["10.5.4.0/24"],
        "taken subnets may have other lengths and may be nested"
    );
    assert_eq!(all(&["10.5.0.0/16"]), Vec::<String>::new());
    let top = net_conf(r#"{"Network":"255.255.0.0/16","SubnetMin":"255.255.254.0"}"#);
    let taken = nets(&["255.255.254.0/24"]);
    assert_eq!(
        choose(&top, &taken, &mut || 7).unwrap().to_string(),
        "255.255.255.0/24",
        "the last subnet of the address space must be found"
    );
    let top = net_conf(
        r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"8000::/1","IPv6SubnetMin":"ffff:ffff:ffff:ffff::"}"#,
    );
    assert_eq!(choose(&top, &nets(&["ffff::/16"]), &mut || 7), None);
    assert_eq!(choose(&top, &[], &mut || 7).unwrap().to_string(), "ffff:ffff:ffff:ffff::/64");
}

#[test]
fn each_family_is_chosen_among_all_free_subnets() {
    let conf = net_conf(r#"{"Network":"10.0.0.0/8","EnableIPv6":true,"IPv6Network":"fd00::/48"}"#);
    let mut calls = [65_534, 0].into_iter();
    let picked = choose(&conf, &[], &mut || calls.next().unwrap()).unwrap();
    assert_eq!(picked.to_string(), "10.255.255.0/24,fd00:0:0:1::/64");
    assert_eq!(
        choose(&conf, &[], &mut || 65_535).unwrap().v4.unwrap().to_string(),
        "10.0.1.0/24",
        "65,535 modulo 65,535 free subnets selects the first"
    );
    let taken = nets(&["10.0.2.0/24", "10.0.2.128/25", "10.0.4.0/22"]);
    assert_eq!(choose(&conf, &taken, &mut || 2).unwrap().v4.unwrap().to_string(), "10.0.8.0/24");
    assert_eq!(choose(&conf, &nets(&["fd00::/40"]), &mut || 0), None, "one family has no free subnet");
    let wide = net_conf(r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/16","IPv6SubnetLen":126}"#);
    assert!(choose(&wide, &[], &mut || u64::MAX).is_some(), "there are more subnets than random numbers");
}

#[test]
fn to_choose_takes_less_than_quadratic_time() {
    let conf = net_conf(r#"{"Network":"10.0.0.0/8"}"#);
    let taken: Vec<Subnets> = (1..65_535u32)
        .rev()
        .map(|n| Subnets { v4: Some(ipnet::Ipv4Net::new((0x0a00_0000 + n * 256).into(), 24).unwrap()), v6: None })
        .collect();
    // CPU time of this thread: what else the machine does must not count.
    let cpu = || nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().tv_sec();
    let start = cpu();
    assert_eq!(choose(&conf, &taken, &mut || 5).unwrap().to_string(), "10.255.255.0/24");
    assert!(cpu() - start < 5, "pick took {} s of CPU time", cpu() - start);
}

#[test]
fn is_compatible_accepts_exactly_what_could_be_chosen() {
    let dual =
        net_conf(r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0","EnableIPv6":true,"IPv6Network":"fd00::/48"}"#);
    let single = net_conf(r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0"}"#);
    let subnets = |v4: &str, v6: &str| Subnets { v4: v4.parse().ok(), v6: v6.parse().ok() };
    for (v4, v6, in_dual, in_single) in [
        ("10.5.1.0/24", "fd00:0:0:1::/64", true, false),
        ("10.5.1.0/24", "", false, true),
        ("10.5.9.0/24", "", false, true),
        ("10.5.10.0/24", "", false, false),
        ("10.5.0.0/24", "", false, false),
        ("10.5.1.0/25", "", false, false),
        ("10.5.1.1/24", "", false, false),
        ("10.5.1.0/24", "fd00::/64", false, false),
        ("", "fd00:0:0:1::/64", false, false),
        ("", "", false, false),
    ] {
        let subnets = subnets(v4, v6);
        assert_eq!(
            (is_compatible(&dual, &subnets), is_compatible(&single, &subnets)),
            (in_dual, in_single),
            "{v4} {v6}"
        );
    }
}

proptest! {
    #[test]
    fn parse_never_panics(text in any::<String>()) {
        let _ = NetConf::parse(&text);
    }

    /// An accepted net-conf can be allocated from. Each subnet that is allocated is inside the range, free and
    /// compatible.
    #[test]
    fn an_accepted_net_conf_is_usable(
        addr: u32, prefix in 0u8..=32, len in proptest::option::of(0u8..40),
        min in proptest::option::of(any::<u32>()), taken in proptest::collection::vec((any::<u32>(), 0u8..=32), 0..20),
        align: bool, random: u64,
    ) {
        let net = ipnet::Ipv4Net::new(addr.into(), prefix).unwrap();
        let mut conf = serde_json::json!({"Network": net.to_string()});
        if let Some(len) = len { conf["SubnetLen"] = len.into(); }
        if let Some(min) = min {
            let host = u32::from(net.hostmask());
            let min = u32::from(net.network()) | (min & host);
            conf["SubnetMin"] = IpAddr::V4((if align { min & !0xff } else { min }).into()).to_string().into();
        }
        if let Ok(net_conf) = NetConf::parse(&conf.to_string()) {
            let range = net_conf.v4.as_ref().unwrap();
            prop_assert!(range.network.contains(&range.min) && range.network.contains(&range.max));
            let taken: Vec<Subnets> = taken.into_iter().map(|(a, l)| {
                Subnets { v4: Some(ipnet::Ipv4Net::new((u32::from(net.network()) | (a & u32::from(net.hostmask()))).into(), l).unwrap().trunc()), v6: None }
            }).collect();
            if let Some(picked) = choose(&net_conf, &taken, &mut || random) {
                prop_assert!(is_compatible(&net_conf, &picked));
                prop_assert!(taken.iter().all(|t| !t.overlaps(&picked)));
                prop_assert!(net_conf.networks.of(weft_subnet::cidr::Family::V4).unwrap().contains(&picked.v4.map(IpNet::V4).unwrap()));
            } else {
                prop_assert!(!taken.is_empty());
            }
        }
    }
}
