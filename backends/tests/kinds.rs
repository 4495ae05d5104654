// SPDX-License-Identifier: Apache-2.0
//! Backend types: each backend says its own, and a lease of another type gets no entries, but a reason.

// Helpers outside test functions panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::net::Ipv4Addr;

use weft_backends::backend::make_kind;
use weft_backends::host::{Host, OnLink, Reach, Uplink};
use weft_backends::state::{Mac, Name};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Lease};
use weft_subnet::network::Network;

const KINDS: [&str; 3] = ["vxlan", "host-gw", "ipip"];

fn network() -> Network {
    Network {
        networks: Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None },
        v4: None,
        v6: None,
        nftables: None,
        masquerade: Default::default(),
        backend_type: "vxlan".to_owned(),
        backend: "{}".into(),
    }
}

fn host() -> Host {
    let (name, address) = (Name::new("eth0").unwrap(), Ipv4Addr::new(192, 168, 64, 1));
    Host {
        uplink: Uplink { name, mtu: 1500, v4: Some(address), v6: None },
        public_v4: Some(address),
        public_v6: None,
        vtep_mac_v4: Mac([2, 0, 0, 0, 0, 1]),
        vtep_mac_v6: Mac([2, 0, 0, 0, 6, 1]),
        routes: OnLink::new([("192.168.64.0/24".parse().unwrap(), 0, Reach::Link(name))]),
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
    let (network, host) = (network(), host());
    for kind in KINDS {
        let backend = make_kind(kind, "{}", &network).unwrap();
        assert_eq!(backend.kind(), kind);
        let own = lease("10.5.1.0-24", kind, 1);
        for other in KINDS {
            let planned = backend.plan(&host, &own, &lease("10.5.2.0-24", other, 2));
            if other == kind {
                assert!(!planned.state.is_empty() && planned.skipped.is_empty(), "{kind}: {planned:?}");
                continue;
            }
            assert!(planned.state.is_empty(), "{kind} plans for {other}: {planned:?}");
            let reasons: Vec<&str> = planned.skipped.iter().map(|skip| skip.0.as_str()).collect();
            assert_eq!(reasons, [format!("BackendType is {other:?}, not {kind:?}")]);
        }
    }
}

#[test]
fn host_gw_has_no_device() {
    let backend = make_kind("host-gw", "{}", &network()).unwrap();
    assert!(backend.device(&host(), &lease("10.5.1.0-24", "host-gw", 1)).is_empty());
}
