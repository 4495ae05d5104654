// SPDX-License-Identifier: Apache-2.0
//! Tests of the whole plan: what the change of a lease costs, and what is reported about it.

use weft_backends::host::{OnLink, Uplink};
use weft_backends::register::make;
use weft_backends::state::Mac;
use weft_backends::vxlan::VtepMac;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::connected::Connected;

use super::*;
use crate::options::Fences;

mod again;
mod clear_text;
mod conflicts;
mod devices;
mod no_routes;
mod two_tunnels;
pub(crate) mod wireguard;

pub(crate) fn lease(third: u8, vni: u32) -> Lease {
    let attrs = Attrs {
        public_ip: Some([192, 168, 0, third].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(format!(r#"{{"VNI":{vni},"VtepMAC":"02:00:00:00:00:{third:02x}"}}"#).into()),
        ..Attrs::default()
    };
    let subnets = Subnets::from_key(&format!("10.5.{third}.0-24")).unwrap();
    Lease { id: subnets.to_key().into(), subnets, attrs, age: Age { stamp: third.into(), tie: "".into() } }
}

pub(crate) fn record(third: u8, vni: u32) -> Record {
    let lease = lease(third, vni);
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn plan() -> Plan {
    plan_of("vxlan")
}

/// Returns the plan of a node of this backend.
fn plan_of(backend_type: &str) -> Plan {
    let config = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{backend_type}"}}}}"#);
    let net_conf = NetConf::parse(&config).unwrap();
    let uplink = Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4: Some([192, 168, 0, 1].into()), v6: None };
    let host = Host {
        public_v4: uplink.v4,
        identities: VtepMac::both(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 1])),
        ..Host::new(uplink)
    };
    let backend = make(&net_conf).unwrap();
    Plan::new(net_conf, backend, host, lease(1, 1))
}

fn links(changed: &[Changed]) -> Vec<String> {
    changed.iter().map(|one| one.key).filter(|key| matches!(key, Key::Link(_))).map(|key| key.to_string()).collect()
}

#[test]
fn the_number_of_devices_is_limited_and_a_removed_device_makes_room() {
    let mut plan = plan();
    let last = MAX_DEVICES as u8 + 1;
    // There is the own device and one for each VNI of a peer.
    for third in 2..last {
        assert_eq!(links(&plan.put(record(third, 100 + u32::from(third)))), [format!("link flannel.{}", 100 + third)]);
    }
    let id: Id = "10.5.200.0-24".into();
    assert_eq!(plan.put(record(200, 77)), []);
    assert_eq!(plan.put(record(202, 77)), []);
    assert!(plan.unplanned(&id).unwrap().contains("needs a device of its own"), "{:?}", plan.unplanned(&id));
    assert_eq!(plan.put(record(201, 1)).len(), 3, "a lease that uses a present device needs no room");
    let changed = plan.remove(&"10.5.2.0-24".into());
    assert_eq!(links(&changed), ["link flannel.102", "link flannel.77"]);
    assert_eq!((plan.unplanned(&id), plan.devices().count()), (None, MAX_DEVICES));
    assert_eq!(plan.unplanned(&"10.5.202.0-24".into()), None, "it has waited for the same device");
}

#[test]
fn a_peer_that_names_the_tunnel_as_another_way_is_in_the_tunnel() {
    let mut plan = plan_of("udp");
    let udp = plan.advertise(plan.host()).unwrap();
    for (third, others) in [(2, vec![]), (3, vec![udp])] {
        let mut peer = lease(third, 1);
        peer.attrs = peer.attrs.with_other_ways(&others);
        plan.put(Record { id: peer.id.clone(), lease: Ok(peer) });
    }
    let subnets: Vec<String> = plan.tunnel_peers().map(|peer| peer.subnet.to_string()).collect();
    assert_eq!(subnets, ["10.5.3.0/24"]);
    let version = plan.peers_version();
    plan.remove(&lease(3, 1).id);
    assert!(plan.peers_version() > version && plan.tunnel_peers().next().is_none(), "the tunnel gets another table");
}

/// Peers that still use udp take packets only from the addresses in the lease. Behind a NAT, those on the same link get ours from the
/// address of the uplink.
#[test]
fn a_lease_that_names_udp_as_another_way_says_where_its_packets_come_from() {
    let mut plan = plan_of("udp");
    let (host, own) = (plan.host().clone(), plan.own().clone());
    plan.rebase_on(Host { public_v4: Some([203, 0, 113, 1].into()), ..host }, own);
    clear_text::prepare_wireguard(&mut plan, "");
    plan.switch_to_next(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#.to_owned()).unwrap();
    let attrs = plan.advertise(plan.host()).unwrap();
    let ways: Vec<String> = attrs.other_ways().into_iter().map(|way| way.backend_type).collect();
    assert_eq!((attrs.backend_type.as_str(), ways), ("wireguard", vec![String::new()]));
    assert_eq!((attrs.public_ip, attrs.tunnel_ip), (Some([203, 0, 113, 1].into()), Some([192, 168, 0, 1].into())));
    let earlier = plan.earlier().next().unwrap().0;
    plan.drop_earlier(earlier);
    assert_eq!(plan.advertise(plan.host()).unwrap().tunnel_ip, None, "nobody uses udp any more");
}

/// A lease for the subnet with this number, whose device no other lease needs.
fn with_own_vni(number: u32) -> Record {
    let subnets = Subnets { v4: ipnet::Ipv4Net::new((0x0a05_0200 + 16 * number).into(), 28).ok(), v6: None };
    let mut lease = lease(2, 1000 + number);
    (lease.id, lease.subnets) = (format!("lease {number:04}").into(), subnets);
    lease.attrs.public_ip = Some((0xc0a8_0100 + number).into());
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

/// Whoever can write leases can let thousands of them wait for room, and remove them one after the other.
#[test]
fn leases_that_wait_for_room_cost_little_each_time_a_device_goes() {
    const LEASES: u32 = 2000;
    let mut plan = plan();
    for number in 0..LEASES {
        plan.put(with_own_vni(number));
    }
    assert_eq!((plan.devices().count(), plan.unplanned_count()), (MAX_DEVICES, LEASES as usize + 1 - MAX_DEVICES));
    for number in 0..LEASES {
        plan.remove(&with_own_vni(number).id);
        let left = (LEASES - 1 - number) as usize;
        assert_eq!(plan.devices().count(), MAX_DEVICES.min(left + 1), "the next lease gets the room");
    }
    let examined = plan.waiting.examined.get();
    assert!(examined < 50 * LEASES as usize, "{examined} leases were examined");
}

#[test]
fn planning_everything_again_changes_no_entry_and_no_reason() {
    let mut plan = plan();
    plan.put(record(2, 1));
    let mut silent = record(3, 1);
    silent.lease.as_mut().unwrap().attrs.backend_data = None;
    plan.put(silent);
    let wanted = |plan: &Plan| plan.difference(&Observed::new(), |_, _| true);
    let (before, id) = (wanted(&plan), Id::from("10.5.3.0-24"));
    let said = plan.unplanned(&id).unwrap().to_owned();
    let net_conf = plan.net_conf().clone();
    let (backend, host, own) = (make(&net_conf).unwrap(), plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf, backend, host, own);
    assert_eq!((wanted(&plan), plan.unplanned(&id)), (before, Some(said.as_str())));
}

#[test]
fn only_peers_that_need_a_foreign_device_are_set_aside() {
    let mut plan = plan();
    for third in 2..6 {
        plan.put(record(third, if third < 4 { 7 } else { 1 }));
    }
    let dev = Name::new("flannel.7").unwrap();
    let id = |third: u8| Id::from(format!("10.5.{third}.0-24"));
    let aside = |plan: &Plan| (2..6).map(|third| plan.unplanned(&id(third)).is_some()).collect::<Vec<_>>();
    let strangers = BTreeSet::from([dev, Name::new("flannel.1").unwrap()]);
    assert!(plan.set_foreign_devices(&strangers), "the plan must have changed");
    assert_eq!(aside(&plan), [true, true, false, false], "a foreign own device does not concern peers");
    assert!(plan.unplanned(&id(2)).unwrap().contains("flannel.7"), "{:?}", plan.unplanned(&id(2)));
    let wanted = plan.difference(&Observed::new(), |_, _| true);
    assert!(!wanted.iter().any(|op| op.to_string().contains("flannel.7")), "{wanted:?}");
    assert!(plan.watched_devices().any(|name| name == dev), "the device is watched, to see when it goes");
    assert!(!plan.set_foreign_devices(&strangers), "nothing changed");
    // One more peer has that VNI, and then everything is planned again.
    assert_eq!(links(&plan.put(record(6, 7))), [""; 0]);
    let net_conf = plan.net_conf().clone();
    let (backend, host, own) = (make(&net_conf).unwrap(), plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf, backend, host, own);
    assert_eq!((aside(&plan), plan.devices().count()), (vec![true, true, false, false], 1));
    assert!(plan.set_foreign_devices(&BTreeSet::new()));
    assert_eq!((aside(&plan), plan.devices().count()), (vec![false; 4], 2));
    // No lease needs the device any more, so it is not watched.
    plan.set_foreign_devices(&strangers);
    for third in [2, 3, 6] {
        plan.remove(&id(third));
    }
    plan.set_foreign_devices(&BTreeSet::new());
    assert_eq!(plan.watched_devices().collect::<Vec<_>>(), [Name::new("flannel.1").unwrap()]);
}

#[test]
fn an_mtu_above_that_of_the_uplink_is_reported_while_it_lasts() {
    let mut plan = plan();
    assert_eq!((plan.problems(), plan.mtu()), (vec![], 1450));
    let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":9000}}"#).unwrap();
    let (mut host, own) = (plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host.clone(), own.clone());
    let said = "Backend.MTU in net-conf is 9000, but the uplink eth0 carries 1500: this node uses 1500";
    assert_eq!((plan.problems(), plan.mtu()), (vec![said.to_owned()], 1450));
    host.uplink.mtu = 9100;
    plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host, own);
    assert_eq!((plan.problems(), plan.mtu()), (vec![], 8950));
}

/// Returns a lease with this MAC and this age.
fn with_mac(third: u8, mac: u8, stamp: u64) -> Record {
    let mut lease = lease(third, 1);
    lease.attrs.backend_data = Some(format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:{mac:02x}"}}"#).into());
    lease.age.stamp = stamp;
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn entries(plan: &Plan) -> Vec<String> {
    let ops = plan.difference(&Observed::new(), |_, _| true);
    ops.iter().filter(|op| !matches!(op.key(), Key::Link(_) | Key::Addr(..))).map(Op::to_string).collect()
}

/// The winner has the MAC only for its own subnet. The order of arrival does not matter.
#[test]
fn of_two_leases_with_one_mac_the_newest_wins_or_with_assigned_subnets_the_oldest() {
    for (assigned, winner, loser, age) in [(false, 3, 2, "newer"), (true, 2, 3, "older")] {
        let mut ends = Vec::new();
        for order in [[2, 3, 4], [4, 3, 2], [3, 2, 4]] {
            let mut plan = plan().with_assigned_subnets(assigned);
            for third in order {
                plan.put(with_mac(third, if third == 4 { 4 } else { 9 }, third.into()));
            }
            let id = |third: u8| Id::from(format!("10.5.{third}.0-24"));
            let reason = plan.unplanned(&id(loser)).unwrap();
            let said = format!("VtepMAC 02:00:00:00:00:09 is also that of the {age} lease 10.5.{winner}.0-24");
            assert!(reason.starts_with(&said), "{reason}");
            assert_eq!((plan.unplanned(&id(winner)), plan.unplanned(&id(4))), (None, None));
            let all = entries(&plan);
            assert!(
                all.contains(&format!("add fdb 02:00:00:00:00:09 dev flannel.1 dst 192.168.0.{winner}")),
                "{all:#?}"
            );
            assert!(!all.iter().any(|op| op.contains(&format!("10.5.{loser}.0"))), "{all:#?}");
            let problems = crate::plan::claims::problems(&plan);
            assert_eq!(problems.len(), 1, "{problems:#?}");
            assert!(problems[0].contains(&format!("10.5.{loser}.0-24 (subnet 10.5.{loser}.0/24, 192.168.0.{loser})")));
            assert!(problems[0].contains(&format!(") is {age}. On the machine")), "{problems:#?}");
            ends.push(all);
            // When the winner goes, the other lease gets all its entries.
            plan.remove(&id(winner));
            assert_eq!(plan.unplanned(&id(loser)), None);
            assert!(entries(&plan).iter().any(|op| op.contains(&format!("route 10.5.{loser}.0/24"))));
            assert_eq!(crate::plan::claims::problems(&plan), [""; 0]);
        }
        assert!(ends.iter().all(|end| *end == ends[0]), "{ends:#?}");
    }
}

/// Whoever can write leases can let thousands of them have one MAC, at two addresses in turn, so that each newer one takes it from all the
/// others. Even then a change of one of them concerns only a few.
#[test]
fn a_change_among_thousands_of_leases_with_one_mac_concerns_a_few() {
    const LEASES: usize = 2000;
    let record = |n: usize| {
        let mut record = with_mac(2, 9, n as u64 + 1);
        let lease = record.lease.as_mut().unwrap();
        lease.subnets.v4 = Some(ipnet::Ipv4Net::new([10, 5, (n / 16) as u8, (n % 16 * 16) as u8].into(), 28).unwrap());
        lease.attrs.public_ip = Some([192, 168, 1, (n % 2) as u8].into());
        record.id = lease.subnets.to_key().into();
        lease.id = record.id.clone();
        record
    };
    let mut ends = Vec::new();
    for backward in [false, true] {
        let mut plan = plan();
        // The first 32 would be inside the own subnet.
        let mut order: Vec<usize> = (32..LEASES).collect();
        if backward {
            order.reverse();
        }
        let changed: usize = order.iter().map(|n| plan.put(record(*n)).len()).sum();
        assert!(plan.planned < 10 * LEASES, "{} leases were planned for the first list", plan.planned);
        assert!(changed < 40 * LEASES, "{changed} entries changed with the first list");
        let mut cost = |act: &mut dyn FnMut(&mut super::Plan)| {
            let before = plan.planned;
            act(&mut plan);
            plan.planned - before
        };
        assert!(cost(&mut |plan| drop(plan.remove(&record(LEASES - 1).id))) < 20);
        assert!(cost(&mut |plan| drop(plan.put(record(LEASES - 1)))) < 20);
        let again = cost(&mut |plan| {
            let (net_conf, host, own) = (plan.net_conf().clone(), plan.host().clone(), plan.own().clone());
            plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host, own);
        });
        assert!(again < 10 * LEASES, "{again} leases were planned for another host");
        let reached = entries(&plan).iter().filter(|op| op.starts_with("add route")).count();
        assert_eq!(
            reached,
            weft_backends::index::MOST_CONTRIBUTORS / 2,
            "of the eight newest those at the address of the newest"
        );
        ends.push(entries(&plan));
    }
    assert_eq!(ends[0], ends[1]);
}

/// A node may have a new lease while its old one still exists. Both lead to the same node.
#[test]
fn a_node_with_two_leases_is_reached_by_both() {
    let mut plan = plan();
    for third in [2, 3] {
        let mut record = with_mac(third, 9, third.into());
        record.lease.as_mut().unwrap().attrs.public_ip = Some([192, 168, 0, 9].into());
        plan.put(record);
    }
    assert_eq!(
        (plan.unplanned_count(), entries(&plan).len()),
        (0, 5),
        "one forwarding entry, two neighbours, two routes"
    );
    let problems = crate::plan::claims::problems(&plan);
    assert!(problems[0].starts_with("2 leases publish 192.168.0.9: lease 10.5.2.0-24"), "{problems:#?}");
    let remark = crate::plan::claims::remark(&plan, plan.peers().get(&"10.5.2.0-24".into()).unwrap()).unwrap();
    assert!(remark.contains("that of lease 10.5.3.0-24"), "{remark}");
}

#[test]
fn other_leases_with_our_address_or_our_mac_are_reported() {
    let mut plan = plan();
    plan.put(with_mac(2, 1, 2));
    let mut record = with_mac(3, 3, 3);
    record.lease.as_mut().unwrap().attrs.public_ip = Some([192, 168, 0, 1].into());
    plan.put(record);
    let problems = crate::plan::claims::problems(&plan);
    let [address, mac] = &problems[..] else { panic!("{problems:#?}") };
    assert!(
        address.starts_with("two nodes publish 192.168.0.1: this node, with lease 10.5.1.0-24 (subnet 10.5.1.0/24)")
    );
    assert!(address.contains("lease 10.5.3.0-24 (subnet 10.5.3.0/24"), "{address}");
    assert!(mac.starts_with("two nodes have one VtepMAC: this node") && mac.contains("lease 10.5.2.0-24"), "{mac}");
}

/// The guard accepts only packets of leases that have entries.
#[test]
fn the_guard_accepts_no_packets_of_a_lease_that_is_set_aside() {
    let mut plan = plan().with_tunnel_guard(true);
    let passes = |plan: &Plan| plan.guard_keys().filter(|key| matches!(key, Key::Peer(_))).count();
    plan.put(record(2, 1));
    assert_eq!(passes(&plan), 1);
    let mut silent = record(3, 1);
    silent.lease.as_mut().unwrap().attrs.backend_data = None;
    plan.put(silent);
    assert!(plan.unplanned(&"10.5.3.0-24".into()).is_some());
    // The first subnet is outside Network, and the second one is inside the own subnet.
    for net in ["10.6.4.0-24", "10.5.1.128-25"] {
        let mut outside = record(4, 1);
        outside.lease.as_mut().unwrap().subnets = Subnets::from_key(net).unwrap();
        plan.put(outside);
        assert!(plan.peers().reason(&"10.5.4.0-24".into()).is_some());
        assert_eq!(passes(&plan), 1, "{net}");
    }
    plan.put(record(3, 1));
    assert_eq!(passes(&plan), 2);
    let mut silent = record(3, 1);
    silent.lease.as_mut().unwrap().attrs.backend_data = None;
    plan.put(silent);
    assert_eq!(passes(&plan), 1, "a lease whose packets were accepted is set aside now");
}

/// Two leases have one VTEP MAC, and only one of them counts. The other peer is not reached, so its tunnel packets are dropped, and the
/// filters of the host are not loosened for it.
#[test]
fn a_lease_that_loses_its_mac_to_another_one_does_not_pass_the_guard() {
    let mut plan = plan().with_tunnel_guard(true);
    let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#).unwrap();
    let (host, own) = (plan.host().clone(), plan.own().clone());
    for backend in ["vxlan", "host-gw"] {
        if backend == "host-gw" {
            plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host.clone(), own.clone());
        }
        plan.put(with_mac(2, 9, 2));
        plan.put(with_mac(3, 9, 3));
        let peer = |last: u8| Key::Peer(std::net::IpAddr::from([192, 168, 0, last]));
        let passes = |plan: &Plan| [2, 3].map(|last| plan.guard_keys().any(|key| key == peer(last)));
        let foreign = |plan: &Plan| ["10.5.2.0-24", "10.5.3.0-24"].map(|id| plan.other_backend(&id.into()).is_some());
        let other_type = backend == "host-gw";
        assert_eq!((passes(&plan), foreign(&plan)), ([false, true], [false, other_type]), "{backend}");
        plan.remove(&"10.5.3.0-24".into());
        assert_eq!((passes(&plan), foreign(&plan)), ([true, false], [other_type, false]), "{backend}");
    }
}

/// Behind an address translation, other nodes may have the same private address. Then it is not published twice.
#[test]
fn an_address_of_the_uplink_that_is_not_published_is_not_reported_as_published_twice() {
    let mut plan = plan();
    let (net_conf, own) = (plan.net_conf().clone(), plan.own().clone());
    let mut host = plan.host().clone();
    host.public_v4 = Some([203, 0, 113, 1].into());
    plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host, own);
    let mut put = |third: u8, ip: [u8; 4]| {
        let mut record = record(third, 1);
        record.lease.as_mut().unwrap().attrs.public_ip = Some(ip.into());
        plan.put(record);
    };
    put(2, [192, 168, 0, 1]);
    put(3, [203, 0, 113, 1]);
    let reason = plan.peers().reason(&"10.5.2.0-24".into()).unwrap();
    assert_eq!(reason, "PublicIP 192.168.0.1 is the address of this node's uplink, which this node does not publish");
    let problems = crate::plan::claims::problems(&plan);
    assert!(
        problems.len() == 1 && problems[0].starts_with("two nodes publish 203.0.113.1: this node"),
        "{problems:#?}"
    );
}

/// Returns a lease with the subnet of this number, this last byte of the address, and this age. All of them have one MAC.
fn of_one_mac(number: u32, last: u8, stamp: u64) -> Record {
    let subnets = Subnets { v4: ipnet::Ipv4Net::new((0x0a05_0200 + 16 * number).into(), 28).ok(), v6: None };
    let mut lease = with_mac(2, 9, stamp).lease.unwrap();
    lease.attrs.public_ip = Some([192, 168, 0, last].into());
    (lease.id, lease.subnets) = (subnets.to_key().into(), subnets);
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn again(plan: &mut Plan) {
    let net_conf = plan.net_conf().clone();
    let (backend, host, own) = (make(&net_conf).unwrap(), plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf, backend, host, own);
}

mod laws {
    use proptest::prelude::*;

    use super::*;

    /// Returns the entries, and the reason for each lease that does not have all of its entries.
    fn outcome(plan: &Plan) -> (Vec<String>, Vec<(Id, String)>) {
        let said =
            plan.unplanned_leases().map(|lease| (lease.id.clone(), plan.unplanned(&lease.id).unwrap().to_owned()));
        (entries(plan), said.collect())
    }

    /// The number of the subnet, the last byte of the address, the age, and the last byte of the MAC.
    type Claim = (u32, u8, u64, u8);

    fn put(plan: &mut Plan, (number, last, stamp, mac): Claim) {
        let mut record = of_one_mac(number, last, stamp);
        let data = format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:{mac:02x}"}}"#);
        record.lease.as_mut().unwrap().attrs.backend_data = Some(data.into());
        plan.put(record);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// There are more leases with one MAC than the index keeps, with few addresses and ages. They arrive in two orders, and other leases
        /// come before that change or go.
        #[test]
        fn the_order_of_arrival_does_not_matter_for_a_shared_mac(
            (claims, shuffled) in proptest::collection::btree_map(0u32..24, (100u8..103, 0u64..30, 9u8..11), 0..24).prop_flat_map(|claims| {
                let claims: Vec<Claim> = claims.into_iter().map(|(n, (last, stamp, mac))| (n, last, stamp, mac)).collect();
                (Just(claims.clone()), Just(claims).prop_shuffle())
            }),
            before in proptest::collection::vec((0u32..36, 100u8..103, 0u64..30, 9u8..11), 0..24),
            assigned in any::<bool>(),
        ) {
            let mut straight = plan().with_assigned_subnets(assigned);
            claims.iter().for_each(|claim| put(&mut straight, *claim));
            let mut other = plan().with_assigned_subnets(assigned);
            before.iter().for_each(|claim| put(&mut other, *claim));
            let gone = before.iter().filter(|(number, ..)| !claims.iter().any(|(n, ..)| n == number));
            let gone: Vec<Id> = gone.map(|(number, ..)| of_one_mac(*number, 1, 1).id).collect();
            for claim in shuffled {
                put(&mut other, claim);
            }
            for id in gone {
                other.remove(&id);
            }
            prop_assert_eq!(outcome(&straight), outcome(&other));
            again(&mut other);
            prop_assert_eq!(outcome(&straight), outcome(&other), "planned again");
        }
    }
}

mod probes {
    use super::*;
    use crate::probe::Target;

    #[test]
    fn results_of_a_peer_that_moved_do_not_count_any_more() {
        let mut plan = plan();
        plan.put(record(2, 1));
        let target = |plan: &Plan| plan.probe_target(plan.peers().get(&lease(2, 1).id).unwrap(), Family::V4).unwrap();
        let before = target(&plan);
        assert_eq!(u32::from(before.mtu), plan.mtu(), "what pods may send is what must arrive");
        plan.put(record(3, 1));
        assert_eq!(target(&plan), before, "another lease changes nothing");
        let mut moved = lease(2, 1);
        moved.attrs.public_ip = Some([192, 168, 0, 22].into());
        plan.put(Record { id: moved.id.clone(), lease: Ok(moved) });
        let after = target(&plan);
        assert_eq!((after.place, after.published), (before.place, Some([192, 168, 0, 22].into())));
        assert_ne!(after.tag, before.tag);
    }

    /// A person looks for a firewall that drops these packets.
    #[test]
    fn the_packets_to_a_peer_are_named_by_what_carries_them() {
        let (vxlan, ipip, udp) = ("UDP port 8472", "IP protocol 4 (ipip)", "UDP port 8285");
        // Our backend, that of the peer, and what a firewall would have to let pass.
        for (ours, theirs, wanted) in [
            ("vxlan", "vxlan", vxlan),
            ("vxlan", "ipip", ipip),
            ("ipip", "ipip", ipip),
            ("ipip", "vxlan", vxlan),
            // A lease of udp names no type.
            ("udp", "", udp),
            ("udp", "vxlan", vxlan),
        ] {
            let mut plan = plan_of(ours);
            let mut peer = lease(2, 1);
            if theirs != "vxlan" {
                (peer.attrs.backend_type, peer.attrs.backend_data) = (theirs.into(), None);
            }
            plan.put(Record { id: peer.id.clone(), lease: Ok(peer.clone()) });
            assert_eq!(
                (plan.unplanned(&peer.id), plan.outer_protocol(&peer, Family::V4).as_str()),
                (None, wanted),
                "{ours} {theirs}"
            );
        }
    }

    #[test]
    fn the_published_address_is_of_the_family_of_the_tunnel() {
        let v6: std::net::Ipv6Addr = "fd00:1::1".parse().unwrap();
        let asked = |has_v4: bool| {
            let config = format!(
                r#"{{"EnableIPv4":{has_v4},"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{{"Type":"vxlan"}}}}"#
            );
            let net_conf = NetConf::parse(&config).unwrap();
            let of = |third: u8| {
                let data = format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:{third:02x}"}}"#);
                let attrs = Attrs {
                    public_ip: Some([192, 168, 0, third].into()),
                    public_ipv6: format!("fd00:1::{third}").parse().ok(),
                    backend_type: "vxlan".into(),
                    backend_data: has_v4.then(|| data.as_str().into()),
                    backend_v6_data: Some(data.as_str().into()),
                    ..Attrs::default()
                };
                let v4 = has_v4.then(|| format!("10.5.{third}.0/24").parse().unwrap());
                let subnets = Subnets { v4, v6: format!("fd00:5:0:{third}::/64").parse().ok() };
                let age = Age { stamp: third.into(), tie: "".into() };
                Lease { id: subnets.to_key().into(), subnets, attrs, age }
            };
            let here = plan().host().clone();
            let v4 = here.uplink.v4.filter(|_| has_v4);
            let uplink = Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4, v6: Some(v6) };
            let host = Host { uplink, public_v4: v4, public_v6: Some(v6), ..here };
            let mut plan = Plan::new(net_conf.clone(), make(&net_conf).unwrap(), host, of(1));
            plan.put(Record { id: of(2).id, lease: Ok(of(2)) });
            assert_eq!(plan.unplanned(&of(2).id), None);
            let text = |target: Target| format!("{} by {}", target.address, target.published.unwrap());
            plan.probe_targets(&of(2)).map(text).collect::<Vec<_>>()
        };
        assert_eq!(asked(false), ["fd00:5:0:2:: by fd00:1::2"]);
        assert_eq!(asked(true), ["10.5.2.0 by 192.168.0.2", "fd00:5:0:2:: by fd00:1::2"]);
    }
}

/// Our lease names this backend from now on, and packets go by it.
fn changes_to(plan: &mut Plan, options: &str, before: &str) {
    let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"vxlan"{options}}}}}"#);
    plan.prepare(ExtraBackend::new(ParsedConf::parse(&text).unwrap(), plan.host().clone()));
    plan.switch_to_next(before.to_owned()).unwrap();
    plan.send_current();
}

#[test]
fn the_latest_of_the_earlier_backends_comes_first_and_one_that_is_back_is_none_of_them() {
    let mut plan = plan();
    plan.put(record(2, 1));
    let texts = |plan: &Plan| plan.earlier().map(|(_, text)| text.to_owned()).collect::<Vec<_>>();
    changes_to(&mut plan, r#","VNI":7"#, "VNI 1");
    changes_to(&mut plan, r#","VNI":9"#, "VNI 7");
    assert_eq!(texts(&plan), ["VNI 7", "VNI 1"]);
    changes_to(&mut plan, r#","VNI":7"#, "VNI 9");
    assert_eq!(texts(&plan), ["VNI 9", "VNI 1"]);
}

/// A plan with a peer of vxlan, which was the backend of this node, too, until net-conf changed to host-gw.
fn changed_to_host_gw() -> Plan {
    let mut plan = plan();
    plan.put(record(2, 1));
    let conf = ParsedConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#).unwrap();
    plan.prepare(ExtraBackend::new(conf, plan.host().clone()));
    plan.switch_to_next("vxlan".to_owned()).unwrap();
    plan.send_current();
    plan
}

/// The node of this lease is reached by this type, too, which its lease prefers.
fn changed_first(third: u8, kind: &str) -> Record {
    let mut lease = lease(third, 1);
    let vxlan = lease.attrs.clone();
    (lease.attrs.backend_type, lease.attrs.backend_data) = (kind.into(), None);
    lease.attrs = lease.attrs.with_other_ways(&[vxlan]);
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

#[test]
fn a_peer_that_follows_a_change_before_this_node_is_reached_by_its_other_way() {
    let mut plan = plan();
    plan.put(changed_first(2, "ipip"));
    let id = lease(2, 1).id;
    assert_eq!((plan.unplanned(&id), plan.other_backend(&id), plan.devices().count()), (None, None, 1));
}

/// It has no address on a link of this node, so host-gw does not reach it.
#[test]
fn a_peer_that_its_first_way_does_not_reach_is_reached_by_another_one() {
    let mut plan = changed_to_host_gw();
    plan.put(changed_first(2, "host-gw"));
    let id = lease(2, 1).id;
    assert_eq!((plan.unplanned(&id), plan.other_backend(&id)), (None, Some("vxlan")));
}

#[test]
fn a_peer_that_leaves_needs_no_earlier_backend_and_keeps_no_mtu_small() {
    let mut plan = changed_to_host_gw();
    let number = plan.earlier().next().unwrap().0;
    assert_eq!((plan.is_earlier_used(number), plan.mtu()), (true, 1450));
    plan.remove(&lease(2, 1).id);
    assert_eq!((plan.is_earlier_used(number), plan.mtu()), (false, 1500));
}

#[test]
fn a_peer_that_leaves_without_a_word_about_its_packets_lets_the_guard_work() {
    let mut plan = plan().with_tunnel_guard(true);
    plan.put(record(2, 1));
    assert!(plan.guard().unwrap().starts_with("off: 1 of 1 leases"), "{:?}", plan.guard());
    plan.remove(&lease(2, 1).id);
    assert!(plan.guard().unwrap().starts_with("on: "), "{:?}", plan.guard());
}

#[test]
fn a_device_of_another_program_leaves_its_room_to_a_lease_that_waits() {
    let mut plan = plan();
    for third in 2..=MAX_DEVICES as u8 {
        plan.put(record(third, 100 + u32::from(third)));
    }
    plan.put(record(200, 77));
    let waiting = lease(200, 77).id;
    assert!(plan.unplanned(&waiting).is_some_and(|reason| reason.contains("needs a device of its own")));
    assert!(plan.set_foreign_devices(&[Name::new("flannel.102").unwrap()].into()));
    assert_eq!(plan.unplanned(&waiting), None);
}

#[test]
fn exceptions_from_the_fence_that_are_missing_are_reported_while_they_are() {
    let mut plan = plan().with_fences(Fences { fail_closed: true, blackhole: false });
    let (of, age) =
        (|number: u32| Id::from(number.to_string()), |number: u32| Age { stamp: number.into(), tie: "".into() });
    for number in 0..=4096 {
        let attrs = Attrs { public_ip: Some((0x0a05_0000 + number).into()), ..Attrs::default() };
        assert_eq!(plan.problems(), [""; 0], "{number}");
        plan.plan_fence_exceptions(&of(number), &age(number), Some(&attrs));
    }
    let [problem] = &plan.problems()[..] else { panic!("{:?}", plan.problems()) };
    assert!(problem.starts_with("--fail-closed: 4097 nodes have addresses inside Network"), "{problem}");
    plan.plan_fence_exceptions(&of(7), &age(7), None);
    assert_eq!(plan.problems(), [""; 0]);
}
