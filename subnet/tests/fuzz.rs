// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets for the formats that other programs write: lease key, lease value, net-conf, subnet.env. A parser must
//! not panic, and what it accepts must survive a round trip.
//!
//! They run on stable Rust as ordinary tests, for one second each on random input. `WEFT_FUZZ_SECONDS=60 cargo test -p
//! weft-subnet --test fuzz` runs all targets for 60 s in total. `cargo bolero test -p weft-subnet --test fuzz
//! fuzz_net_conf` (needs nightly Rust and cargo-bolero) runs a target guided by coverage.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests, which clippy does not take for tests")]

use std::time::Duration;

use bolero::check;
use weft_subnet::allocate::{complete, is_compatible};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::env::SubnetEnv;
use weft_subnet::net_conf::NetConf;

/// Number of targets, which share the time. As many run at once as there are processors.
const TARGETS: u32 = 4;

fn time() -> Duration {
    let seconds = std::env::vars().find(|(name, _)| name == "WEFT_FUZZ_SECONDS").map(|(_, value)| value);
    let all = Duration::from_secs(seconds.map_or(1, |text| text.parse().expect("WEFT_FUZZ_SECONDS is not a number")));
    let at_once = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    all * at_once.min(TARGETS) / TARGETS
}

/// Converts random bytes to text. Random text would rarely get past the first byte of a format, so most bytes select a
/// word of the format, and the others select a single character.
fn text(input: &[u8], words: &[&str]) -> String {
    let mut text = String::new();
    let mut bytes = input.iter();
    while let Some(byte) = bytes.next() {
        match words.get(usize::from(*byte)) {
            Some(word) => text.push_str(word),
            None => text.push(char::from(*bytes.next().unwrap_or(byte))),
        }
    }
    text
}

const KEY: &[&str] =
    &["10.5.52.0", "-24", "&", "fd00:12::", "-64", "10.0.0.0", "-8", "-", "0", "::", "255", ".", "-129", ":"];

#[test]
fn fuzz_lease_key() {
    let target = |input: &Vec<u8>| {
        for key in [text(input, KEY), String::from_utf8_lossy(input).into_owned()] {
            if let Some(subnets) = Subnets::from_key(&key) {
                assert_eq!(subnets, subnets.trunc());
                assert_eq!(Subnets::from_key(&subnets.to_key()), Some(subnets), "{key}");
            }
        }
    };
    check!().with_type().with_test_time(time()).for_each(target);
}

const VALUE: &[&str] = &[
    "{",
    "}",
    "\"PublicIP\":",
    "\"10.1.2.3\"",
    ",",
    "\"PublicIPv6\":",
    "\"fd00::1\"",
    "null",
    "\"BackendType\":",
    "\"vxlan\"",
    "\"BackendData\":",
    "{\"VNI\":1,\"VtepMAC\":\"c6:d2:32:6f:8f:44\"}",
    "\"backendv6data\":",
    "[",
    "]",
    "1e999",
    "\"",
    "\\u0000",
];

#[test]
fn fuzz_lease_value() {
    let target = |input: &Vec<u8>| {
        for value in
            [text(input, VALUE).into_bytes(), format!("{{{}}}", text(input, VALUE)).into_bytes(), input.clone()]
        {
            if let Ok(attrs) = Attrs::from_wire(&value) {
                assert_eq!(Attrs::from_wire(attrs.to_wire().as_bytes()).expect("our own value"), attrs);
            }
        }
    };
    check!().with_type().with_test_time(time()).for_each(target);
}

const CONF: &[&str] = &[
    "\"Network\":",
    "\"10.5.0.0/16\"",
    "\"10.0.0.0/8\"",
    ",",
    "\"SubnetLen\":",
    "24",
    "30",
    "0",
    "\"SubnetMin\":",
    "\"10.5.4.0\"",
    "\"SubnetMax\":",
    "\"10.5.255.0\"",
    "\"enableIPv6\":",
    "true",
    "false",
    "\"IPv6Network\":",
    "\"fd00::/48\"",
    "\"8000::/1\"",
    "\"IPv6SubnetLen\":",
    "64",
    "\"Backend\":",
    "{\"Type\":\"vxlan\"}",
    "{",
    "}",
    "null",
    "\"EnableIPv4\":",
    "\"IPv6SubnetMin\":",
    "\"fd00:0:0:4::\"",
    "\"128.0.0.0/1\"",
    "126",
];

#[test]
fn fuzz_net_conf() {
    let target = |input: &Vec<u8>| {
        let body = text(input, CONF);
        for conf in [format!("{{{body}}}"), format!("{{\"Network\":\"10.5.0.0/16\",{body}}}"), body] {
            match NetConf::parse(&conf) {
                Ok(net_conf) => {
                    assert_eq!(net_conf.differing_keys(&net_conf), Vec::<String>::new());
                    let picked = complete(&net_conf, &Subnets::default(), &[], &mut || 7);
                    let picked = picked.expect("an empty network has a free subnet");
                    assert!(is_compatible(&net_conf, &picked), "{conf}: {picked}");
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
    };
    check!().with_type().with_test_time(time()).for_each(target);
}

const ENV: &[&str] = &[
    "FLANNEL_NETWORK=",
    "FLANNEL_SUBNET=",
    "FLANNEL_IPV6_NETWORK=",
    "FLANNEL_IPV6_SUBNET=",
    "FLANNEL_MTU=",
    "FLANNEL_IPMASQ=",
    "10.5.52.1/24",
    "fd00:12::1/64",
    "1450",
    "true",
    "\n",
    "\n",
    ",",
    "\"",
    "'",
    "#",
    " ",
    "export ",
    "=",
    "10.5.0.0/16",
];

#[test]
fn fuzz_subnet_env() {
    let target = |input: &Vec<u8>| {
        for file in [text(input, ENV), format!("FLANNEL_SUBNET=10.5.52.1/24\n{}", text(input, ENV))] {
            if let Some(env) = SubnetEnv::parse(&file) {
                assert_ne!(env.subnets, Subnets::default());
                assert_eq!(SubnetEnv::parse(&env.render()), Some(env), "{file}");
            }
        }
    };
    check!().with_type().with_test_time(time()).for_each(target);
}
