// SPDX-License-Identifier: Apache-2.0
//! The table of docs/adr/004-which-lease-is-ours.md, row by row.

use super::*;
use crate::backend_types::{FOR_TESTS, PublicIdentity};
use crate::lease::Age;

const OURS: &str = "02:00:00:00:00:01";

/// Returns a lease as a row of the table describes it. Its subnet, its address and its MAC are each ours (`=`), of others (`x`), or absent (`-`).
fn lease(subnet: &str, address: &str, mac: &str) -> Lease {
    let key = if subnet == "=" { "10.5.1.0-24" } else { "10.5.2.0-24" };
    let last = if mac == "=" { 1 } else { 2 };
    let data = format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:0{last}"}}"#);
    let attrs = Attrs {
        public_ip: Some([192, 0, 2, if address == "=" { 1 } else { 2 }].into()),
        backend_type: "vxlan".into(),
        backend_data: (mac != "-").then(|| data.into()),
        ..Attrs::default()
    };
    Lease { id: key.into(), subnets: Subnets::from_key(key).unwrap(), attrs, age: Age { stamp: 1, tie: "".into() } }
}

/// Returns what a node knows that publishes 192.0.2.1, and that may have a subnet.env and a device.
fn evidence(subnet_env: bool, device: bool) -> Evidence {
    Evidence {
        previous: subnet_env.then(|| Subnets::from_key("10.5.1.0-24").unwrap()),
        identities: [device.then(|| PublicIdentity::new("vxlan", OURS)), None],
        public: vec![(Some([192, 0, 2, 1].into()), None)],
        ..Evidence::none(FOR_TESTS)
    }
}

#[test]
fn every_row_of_the_table() {
    use Proof::{Address, AddressAndIdentity, SubnetAndAddress, SubnetAndIdentity};
    // What we know: subnet.env, a device. What the lease says: subnet, address, MAC. Is it ours?
    type Row = (bool, bool, &'static str, &'static str, &'static str, Option<Proof>);
    let table: [Row; 24] = [
        // The agent starts again on a machine that went on.
        (true, true, "=", "=", "=", Some(SubnetAndIdentity)),
        (true, true, "=", "x", "=", Some(SubnetAndIdentity)),
        (true, true, "=", "=", "x", None),
        (true, true, "=", "x", "x", None),
        (true, true, "=", "=", "-", Some(SubnetAndAddress)),
        (true, true, "=", "x", "-", None),
        (true, true, "x", "=", "=", Some(AddressAndIdentity)),
        (true, true, "x", "=", "x", None),
        (true, true, "x", "=", "-", None),
        (true, true, "x", "x", "=", None),
        // subnet.env is there and no device: a backend without one, or a file that outlives a boot.
        (true, false, "=", "=", "=", Some(SubnetAndAddress)),
        (true, false, "=", "=", "-", Some(SubnetAndAddress)),
        (true, false, "=", "x", "=", None),
        (true, false, "=", "x", "-", None),
        (true, false, "x", "=", "=", None),
        (true, false, "x", "=", "-", None),
        // subnet.env was removed, the device is there.
        (false, true, "x", "=", "=", Some(AddressAndIdentity)),
        (false, true, "x", "=", "x", None),
        (false, true, "x", "=", "-", Some(Address)),
        (false, true, "x", "x", "=", None),
        // The machine was booted, has a new disk, or is new.
        (false, false, "x", "=", "=", Some(Address)),
        (false, false, "x", "=", "-", Some(Address)),
        (false, false, "x", "x", "=", None),
        (false, false, "x", "x", "-", None),
    ];
    for (subnet_env, device, subnet, address, mac, wanted) in table {
        let got = evidence(subnet_env, device).proof(&lease(subnet, address, mac));
        assert_eq!(got, wanted, "subnet.env {subnet_env}, device {device}: lease {subnet} {address} {mac}");
    }
}

/// While net-conf changes the backend, a node has a device of the next type before its lease names that type. A restart in this moment must
/// not take the own lease for that of another node.
#[test]
fn a_lease_of_another_type_says_nothing_about_our_device() {
    use Proof::{Address, SubnetAndAddress, SubnetAndIdentity};
    let key = |key: &str| {
        let mut lease = lease("=", "=", "-");
        lease.attrs.backend_type = "wireguard".into();
        lease.attrs.backend_data = Some(format!(r#"{{"PublicKey":"{key}"}}"#).into());
        lease
    };
    let keyed = |subnet_env| Evidence {
        identities: [Some(PublicIdentity::new("wireguard", "ours")), None],
        ..evidence(subnet_env, false)
    };
    let table = [
        (true, "=", "=", Some(SubnetAndAddress)),
        (true, "=", "x", None),
        (true, "x", "=", None),
        (false, "x", "=", Some(Address)),
        (false, "x", "x", None),
    ];
    for (subnet_env, subnet, address, wanted) in table {
        for mac in ["=", "x"] {
            let got = keyed(subnet_env).proof(&lease(subnet, address, mac));
            assert_eq!(got, wanted, "subnet.env {subnet_env}: lease {subnet} {address} {mac}");
        }
    }
    assert_eq!(evidence(true, true).proof(&key("any")), Some(SubnetAndAddress), "the other way round");
    assert_eq!(keyed(true).proof(&key("ours")), Some(SubnetAndIdentity));
    assert_eq!(keyed(true).proof(&key("of another node")), None);
    // The write of a lease of the other type may have been carried out although its answer was lost.
    let was = lease("=", "=", "=");
    let changing = Evidence::of(FOR_TESTS, was.subnets, &was.attrs).with_next(&key("ours").attrs);
    assert_eq!(changing.proof(&was), Some(SubnetAndIdentity));
    assert_eq!(changing.proof(&lease("=", "=", "x")), None);
    assert_eq!(changing.proof(&key("ours")), Some(SubnetAndIdentity));
    assert_eq!(changing.proof(&key("of another node")), None);
}

#[test]
fn a_reservation_is_for_the_address_that_it_names() {
    let reserved = |address| {
        let mut lease = lease("x", address, "-");
        lease.attrs.backend_type.clear();
        lease
    };
    for (subnet_env, device) in [(true, true), (true, false), (false, true), (false, false)] {
        let ours = evidence(subnet_env, device);
        assert_eq!(ours.proof(&reserved("=")), Some(Proof::Reservation));
        assert_eq!(ours.proof(&reserved("x")), None);
    }
}

/// With alloc no lease has a type: one that another node with our address holds is not reserved for us.
#[test]
fn without_types_in_leases_there_are_no_reservations() {
    let mut theirs = lease("x", "=", "-");
    theirs.attrs.backend_type.clear();
    let ours = Evidence { reservations: false, ..evidence(true, false) };
    assert_eq!(ours.proof(&theirs), None, "our pods are in another subnet");
    let booted = Evidence { reservations: false, ..evidence(false, false) };
    assert_eq!(booted.proof(&theirs), Some(Proof::Address));
    let holder = Evidence::of(FOR_TESTS, theirs.subnets, &theirs.attrs);
    assert_eq!(holder.proof(&theirs), Some(Proof::SubnetAndAddress));
    let moved = named(theirs, "10.5.9.0-24", 1);
    assert_eq!(holder.proof(&moved), None);
}

#[test]
fn another_address_of_our_uplink_counts_with_the_subnet_alone() {
    let with_other_address = |subnet_env, device| Evidence {
        other_uplink: vec![(Some([192, 0, 2, 2].into()), None)],
        ..evidence(subnet_env, device)
    };
    assert_eq!(with_other_address(true, false).proof(&lease("=", "x", "-")), Some(Proof::SubnetAndAddress));
    assert_eq!(with_other_address(true, true).proof(&lease("=", "x", "x")), None);
    assert_eq!(with_other_address(true, false).proof(&lease("x", "x", "-")), None);
    assert_eq!(with_other_address(false, true).proof(&lease("x", "x", "=")), None);
    assert_eq!(with_other_address(false, false).proof(&lease("x", "x", "-")), None);
}

#[test]
fn a_store_that_knows_its_nodes_is_believed() {
    let ours = Evidence { id: Some("10.5.2.0-24".into()), ..evidence(true, true) };
    assert_eq!(ours.proof(&lease("x", "x", "x")), Some(Proof::Id), "whatever else the lease says");
    assert_eq!(ours.proof(&lease("=", "=", "=")), None, "whatever else the lease says");
}

#[test]
fn dual_stack_needs_both_identities() {
    let mut ours = evidence(true, true);
    ours.identities[1] = Some(PublicIdentity::new("vxlan", "02:00:00:00:00:06"));
    let with_v6 = |last: u8| {
        let mut lease = lease("=", "x", "=");
        lease.attrs.backend_v6_data = Some(format!(r#"{{"VtepMAC":"02:00:00:00:00:0{last}"}}"#).into());
        lease
    };
    assert_eq!(ours.proof(&with_v6(6)), Some(Proof::SubnetAndIdentity));
    assert_eq!(ours.proof(&with_v6(7)), None);
    assert_eq!(ours.proof(&lease("=", "x", "=")), Some(Proof::SubnetAndIdentity), "one half alone can be compared");
    let only_v6 =
        |last| Evidence { public: vec![(None, Some([0, 0, 0, 0, 0, 0, 0, last].into()))], ..Evidence::none(FOR_TESTS) };
    let mut lease = lease("x", "x", "-");
    (lease.attrs.public_ip, lease.attrs.public_ipv6) = (None, Some([0, 0, 0, 0, 0, 0, 0, 1].into()));
    assert_eq!((only_v6(1).proof(&lease), only_v6(2).proof(&lease)), (Some(Proof::Address), None));
}

fn named(mut lease: Lease, id: &str, stamp: u64) -> Lease {
    (lease.id, lease.subnets, lease.age.stamp) = (id.into(), Subnets::from_key(id).unwrap(), stamp);
    lease
}

#[test]
fn of_several_the_best_proof_counts_and_an_address_alone_cannot_choose() {
    let all = [
        named(lease("x", "=", "x"), "10.5.7.0-24", 1),
        named(lease("x", "=", "="), "10.5.8.0-24", 2),
        named(lease("=", "=", "="), "10.5.1.0-24", 3),
    ];
    let ids = |evidence: &Evidence, leases: &[Lease]| {
        evidence.ours(leases.iter()).into_iter().map(|lease| lease.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(ids(&evidence(true, true), &all), ["10.5.1.0-24", "10.5.8.0-24"]);
    assert_eq!(ids(&evidence(false, true), &all), ["10.5.8.0-24", "10.5.1.0-24"], "the older one");
    assert_eq!(ids(&evidence(true, false), &all), ["10.5.1.0-24"]);
    assert!(
        ids(&evidence(false, false), &all).is_empty(),
        "two nodes have one address: we must not take the other one's"
    );
    assert_eq!(ids(&evidence(false, false), &all[..1]), ["10.5.7.0-24"]);
}

/// Nodes behind one NAT have one public address, and each has a port of its own.
#[test]
fn our_address_with_another_port_is_that_of_another_node() {
    let with_port = |port: u16| {
        let mut lease = lease("=", "=", "-");
        lease.attrs.backend_type = "wireguard".into();
        lease.attrs.backend_data = Some(format!(r#"{{"Port":{port}}}"#).into());
        lease
    };
    let ours = |subnet_env| Evidence { ports: vec![[Some(51820), None]], ..evidence(subnet_env, false) };
    assert_eq!(ours(false).proof(&with_port(51820)), Some(Proof::Address));
    assert_eq!(ours(false).proof(&with_port(51822)), None);
    assert_eq!(ours(true).proof(&with_port(51820)), Some(Proof::SubnetAndAddress));
    assert_eq!(ours(true).proof(&with_port(51822)), None, "it got our subnet after our lease had ended");
    // A port of ours that changes is known to us.
    let changed =
        Evidence::of(FOR_TESTS, with_port(51822).subnets, &with_port(51822).attrs).with_next(&with_port(7).attrs);
    assert_eq!(changed.proof(&with_port(51822)), Some(Proof::SubnetAndAddress));
    assert_eq!(changed.proof(&with_port(7)), Some(Proof::SubnetAndAddress));
    assert_eq!(changed.proof(&with_port(51820)), None);
    assert!(!changed.owner(&with_port(51820)).contains("our address"));
    // Other types have no ports, so our address counts as before, whoever copied it.
    assert_eq!(ours(false).proof(&lease("x", "=", "=")), Some(Proof::Address));
    assert_eq!(evidence(false, false).proof(&with_port(51822)), Some(Proof::Address));
}

#[test]
fn without_ipv4_the_port_of_ipv6_decides() {
    let public_ipv6 = "2001:db8::1".parse().ok();
    let with_port = |port: u16| {
        let attrs = Attrs {
            public_ipv6,
            backend_type: "wireguard".into(),
            backend_v6_data: Some(format!(r#"{{"Port":{port}}}"#).into()),
            ..Attrs::default()
        };
        Lease { attrs, ..lease("x", "x", "-") }
    };
    let ours =
        Evidence { public: vec![(None, public_ipv6)], ports: vec![[None, Some(51821)]], ..Evidence::none(FOR_TESTS) };
    assert_eq!(ours.proof(&with_port(51821)), Some(Proof::Address));
    assert_eq!(ours.proof(&with_port(51822)), None, "another node behind the same NAT");
}

/// A node without an identity, such as one of host-gw, publishes another address. If the answer is lost, it finds its own write.
#[test]
fn our_lease_with_the_address_that_we_are_about_to_publish_is_ours() {
    let (was, now) = (lease("=", "=", "-"), lease("=", "x", "-"));
    let before = Evidence::of(FOR_TESTS, was.subnets, &was.attrs);
    assert_eq!(before.proof(&now), None);
    let ours = before.with_next(&now.attrs);
    assert_eq!([&was, &now].map(|lease| ours.proof(lease)), [Some(Proof::SubnetAndAddress); 2]);
}

/// A node that gives its device another identity writes its lease. If the answer is lost, it writes again, and finds its own write.
#[test]
fn our_lease_with_the_identity_that_we_are_about_to_publish_is_ours() {
    let (was, now) = (lease("=", "=", "="), lease("=", "=", "x"));
    let ours = Evidence::of(FOR_TESTS, was.subnets, &was.attrs).with_next(&now.attrs);
    assert_eq!(ours.proof(&was), Some(Proof::SubnetAndIdentity));
    assert_eq!(ours.proof(&now), Some(Proof::SubnetAndIdentity));
    let mut other = lease("=", "=", "x");
    other.attrs.backend_data = Some(r#"{"VtepMAC":"02:00:00:00:00:09"}"#.into());
    assert_eq!(ours.proof(&other), None);
}

#[test]
fn if_two_leases_name_our_address_and_nothing_else_is_known_neither_is_ours() {
    let known = evidence(false, false);
    let (one, other) = (lease("=", "=", "-"), lease("x", "=", "-"));
    assert_eq!(known.ours([&one].into_iter()), [&one]);
    assert_eq!(known.ours([&one, &other].into_iter()), [&one; 0]);
}

#[test]
fn a_lease_without_a_type_is_a_reservation_only_for_a_backend_that_names_its_leases() {
    let subnets = Subnets::from_key("10.5.1.0-24").unwrap();
    let named = lease("=", "=", "-").attrs;
    let unnamed = Attrs { backend_type: String::new(), ..named.clone() };
    for (was, new, wanted) in [(&named, &named, true), (&named, &unnamed, false), (&unnamed, &named, false)] {
        assert_eq!(Evidence::of(FOR_TESTS, subnets, was).with_next(new).reservations, wanted, "{was:?} {new:?}");
    }
}

#[test]
fn the_ipv4_addresses_decide_if_either_node_has_one() {
    let (our_v6, other_v6) = ("2001:db8::1".parse().ok(), "2001:db8::2".parse().ok());
    let ours = Evidence { public: vec![(Some([192, 0, 2, 1].into()), our_v6)], ..evidence(false, false) };
    let with_v6 = |mut lease: Lease, public_ipv6| {
        lease.attrs.public_ipv6 = public_ipv6;
        lease
    };
    for public_ipv6 in [None, our_v6, other_v6] {
        assert_eq!(ours.proof(&with_v6(lease("x", "=", "-"), public_ipv6)), Some(Proof::Address), "{public_ipv6:?}");
    }
    assert_eq!(ours.proof(&with_v6(lease("x", "x", "-"), our_v6)), None);
    let mut without_v4 = with_v6(lease("x", "x", "-"), our_v6);
    without_v4.attrs.public_ip = None;
    assert_eq!(ours.proof(&without_v4), None, "it is that of a node without an IPv4 address");
}

/// Otherwise two nodes whose leases name no address would each take the lease of the other one for its own.
#[test]
fn a_lease_that_names_no_address_names_nobody() {
    let mut nobody = lease("x", "x", "-");
    nobody.attrs.public_ip = None;
    let ours = Evidence { public: vec![(None, None)], ..evidence(false, false) };
    assert_eq!(ours.proof(&nobody), None);
    assert_eq!(ours.owner(&nobody), nobody.attrs.owner(), "nor does it name an address of ours");
}

/// Our lease is gone, and we take its subnet again.
#[test]
fn only_a_lease_of_another_node_with_our_length_keeps_us_from_our_subnet() {
    let ours = evidence(true, true);
    let subnets = |key: &str| Subnets::from_key(key).unwrap();
    let keeps = |subnet: &str, lease: &Lease| ours.keeps_us_from(&subnets(subnet), lease);
    let of = |id: &str, mac: &str| named(lease("x", "x", mac), id, 1);
    assert!(keeps("10.5.1.0-24", &named(lease("=", "x", "x"), "10.5.1.0-24", 1)));
    assert!(!keeps("10.5.1.0-24", &lease("=", "=", "=")), "it is ours");
    assert!(!keeps("10.5.1.0-24", &of("10.5.0.0-16", "x")) && !keeps("10.5.1.0-24", &of("10.5.1.0-25", "x")));
    assert!(!keeps("10.5.1.0-24", &of("10.5.2.0-24", "x")), "it has another subnet");
    assert!(keeps("10.5.1.0-24&fd00:5::-64", &of("10.5.2.0-24&fd00:5::-64", "x")), "it has one half of ours");
    assert!(!keeps("10.5.1.0-24", &of("10.5.1.0-24&fd00:5::-64", "x")), "it has other families");
}
