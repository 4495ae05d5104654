// SPDX-License-Identifier: Apache-2.0
//! Which contribution wins a key. The laws of the index are in `tests/laws.rs`.

use std::sync::Arc;

use weft_subnet::lease::{Age, Id};

use super::{Beaten, Changed, Contributor, Index, MOST_CONTRIBUTORS, OWN};
use crate::link::{Foreign, Link};
use crate::state::{Key, Mac, Name, Route, State, Value};

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn age(stamp: u64) -> Age {
    Age { stamp, ..Age::default() }
}

fn id(text: &str) -> Id {
    text.into()
}

fn link(mtu: u32) -> Value {
    Value::link(Link { kind: Arc::new(Foreign), mtu, mac: None, up: true })
}

fn changed(key: Key, before: Value, after: Option<Value>) -> Changed {
    Changed { key, before: Some(before), after }
}

fn contributor(text: &str, is_in_force: bool) -> Contributor {
    Contributor { id: id(text), is_in_force }
}

#[test]
fn the_newest_lease_wins_a_link_layer_entry_and_the_oldest_a_route() {
    let dev = name("flannel.1");
    let (fdb, subnet) = (Key::Fdb(dev, Mac([2; 6])), Key::Route("10.5.2.0/24".parse().unwrap(), 0));
    let to = |last: u8| Value::Fdb([192, 168, 0, last].into());
    let via = |last: u8| Value::Route(Route::Unicast { via: [192, 168, 0, last].into(), dev, onlink: true });
    let mut index = Index::default();
    assert_eq!(index.set(&id("old"), &age(1), State::from([(fdb, to(1)), (subnet, via(1))])).len(), 2);
    let changes = index.set(&id("new"), &age(2), State::from([(fdb, to(2)), (subnet, via(2))]));
    assert_eq!(changes, [changed(fdb, to(1), Some(to(2)))]);
    assert_eq!((index.winner(&fdb), index.winner(&subnet)), (Some(&id("new")), Some(&id("old"))));
    assert_eq!(index.keys(&id("new")), [fdb, subnet]);
    let changes = index.set(&id("old"), &age(1), State::new());
    assert_eq!(changes, [changed(subnet, via(1), Some(via(2)))]);
    let changes = index.set(&id("new"), &age(2), State::new());
    assert_eq!(changes, [changed(fdb, to(2), None), changed(subnet, via(2), None)]);
    assert_eq!((index.state(), index.keys(&id("new"))), (State::new(), vec![]));
}

/// An event may have several leases that change one key.
#[test]
fn of_several_changes_of_a_key_the_first_value_before_and_the_last_value_after_count() {
    let [kept, moved, new, short] = [1, 2, 3, 4].map(|last| Key::Fdb(name("flannel.1"), Mac([2, 0, 0, 0, 0, last])));
    let to = |last: u8| Some(Value::Fdb([192, 168, 0, last].into()));
    let change = |key, before, after| Changed { key, before, after };
    let joined = Changed::joined(vec![
        change(new, None, to(7)),
        change(moved, to(1), to(2)),
        change(kept, to(1), None),
        change(short, None, to(5)),
        change(moved, to(2), to(3)),
        change(kept, None, to(1)),
        change(short, to(5), None),
        change(moved, to(3), None),
    ]);
    assert_eq!(joined, [change(moved, to(1), None), change(new, None, to(7))]);
}

/// As with an FDB entry, a node that came back has the newer lease, and its new MAC must count.
#[test]
fn the_order_of_arrival_does_not_decide_who_wins_a_neighbour() {
    let key = Key::Neigh(name("flannel.1"), "10.5.2.0".parse().unwrap());
    let mac = |stamp: u64| Value::Neigh(Mac([2, 0, 0, 0, 0, stamp as u8]));
    for (oldest_wins, winner) in [(false, 2), (true, 1)] {
        for order in [[1, 2], [2, 1]] {
            let mut index = Index::new(oldest_wins);
            for stamp in order {
                index.set(&id(&format!("lease{stamp}")), &age(stamp), State::from([(key, mac(stamp))]));
            }
            assert_eq!(index.desired(&key), Some(mac(winner)));
            assert_eq!(index.winner(&key), Some(&id(&format!("lease{winner}"))));
        }
    }
}

#[test]
fn the_names_of_unused_devices_are_forgotten() {
    let subnet = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
    let state = |dev: Name| {
        let route = Value::Route(Route::Unicast { via: [10, 5, 2, 0].into(), dev, onlink: true });
        State::from([(Key::Link(dev), link(1450)), (subnet, route)])
    };
    let mut index = Index::default();
    let stays = State::from([(Key::Link(name("flannel.1")), link(1450))]);
    index.set(&id(OWN), &age(0), stays.clone());
    // Two older leases contribute to the same route, so that of the changing lease is not in force. It is kept nevertheless.
    let loser = name("flannel.2");
    index.set(&id("older"), &age(1), state(name("flannel.3")));
    index.set(&id("younger"), &age(2), state(loser));
    for vni in 0..10_000 {
        let dev = name(&format!("flannel.{}", 1000 + vni));
        index.set(&id("restless"), &age(3), state(dev));
        assert!(index.devices.len() <= 66, "{} names are known", index.devices.len());
        assert!(index.contributors.rows.len() <= 4, "{} places for four leases", index.contributors.rows.len());
        assert_eq!(index.desired(&Key::Link(dev)), Some(link(1450)));
    }
    index.set(&id("restless"), &age(3), State::new());
    index.set(&id("older"), &age(1), State::new());
    let mut wanted = state(loser);
    wanted.extend(stays);
    assert_eq!(index.state(), wanted);
}

#[test]
fn where_subnets_are_assigned_the_oldest_wins_the_link_layer_too() {
    let fdb = Key::Fdb(name("flannel.1"), Mac([2; 6]));
    let to = |last: u8| Value::Fdb([192, 168, 0, last].into());
    for (oldest_wins, first, loser, winner) in [(true, 1, "new", "old"), (false, 2, "old", "new")] {
        for order in [["old", "new"], ["new", "old"]] {
            let mut index = Index::new(oldest_wins);
            let stamp = |who: &str| if who == "old" { 1 } else { 2 };
            for who in order {
                index.set(&id(who), &age(stamp(who)), State::from([(fdb, to(stamp(who) as u8))]));
            }
            assert_eq!((index.desired(&fdb), index.winner(&fdb)), (Some(to(first)), Some(&id(winner))));
            let beaten_by = |who: &str| index.beaten_by((&fdb, &to(stamp(who) as u8)), &id(who), &age(stamp(who)));
            assert_eq!((beaten_by(loser), beaten_by(winner)), (Some(super::Beaten::By(&id(winner))), None));
            // A lease that wants the same value is not beaten. The answer is also known for a lease that is not in the index yet.
            assert_eq!(index.beaten_by((&fdb, &to(first)), &id("same"), &age(3)), None);
            let newcomer = index.beaten_by((&fdb, &to(9)), &id("third"), &age(3));
            assert_eq!(newcomer.is_some(), oldest_wins);
            assert_eq!(index.first(&fdb, None), [contributor(winner, true), contributor(loser, false)]);
            assert_eq!(index.first(&fdb, Some(&id(winner))), [contributor(loser, true)]);
            index.set(&id(winner), &age(0), State::new());
            assert_eq!(index.first(&fdb, None), [contributor(loser, true)]);
        }
    }
}

#[test]
fn of_many_leases_with_one_entry_only_eight_count() {
    let fdb = Key::Fdb(name("flannel.1"), Mac([2; 6]));
    let to = Value::Fdb([192, 168, 0, 1].into());
    let mut index = Index::new(true);
    let lease = |number: usize| (id(&format!("lease{number:02}")), age(number as u64));
    for number in 0..MOST_CONTRIBUTORS + 2 {
        let (id, age) = lease(number);
        index.set(&id, &age, State::from([(fdb, to.clone())]));
    }
    for (number, crowd) in
        [(0, false), (MOST_CONTRIBUTORS - 1, false), (MOST_CONTRIBUTORS, true), (MOST_CONTRIBUTORS + 1, true)]
    {
        let (id, age) = lease(number);
        assert_eq!(index.beaten_by((&fdb, &to), &id, &age), crowd.then_some(Beaten::Crowd), "lease {number}");
    }
    assert_eq!(index.first(&fdb, None).len(), MOST_CONTRIBUTORS);
    assert_eq!(
        index.first(&fdb, Some(&lease(0).0)).last(),
        Some(&Contributor { id: lease(MOST_CONTRIBUTORS).0, is_in_force: true })
    );
}

#[test]
fn our_own_device_wins_a_link() {
    let key = Key::Link(name("flannel.1"));
    let mut index = Index::default();
    index.set(&id("peer"), &age(0), State::from([(key, link(1400))]));
    let changes = index.set(&id(OWN), &age(9), State::from([(key, link(1450))]));
    assert_eq!(changes, [changed(key, link(1400), Some(link(1450)))]);
    assert_eq!(index.winner(&key).map(|id| &**id), Some(OWN));
    assert_eq!(index.set(&id("peer"), &age(0), State::new()), []);
}

#[test]
fn a_shared_device_is_removed_with_its_last_peer() {
    let key = Key::Link(name("flannel.2"));
    let mut index = Index::default();
    for n in 0..1000 {
        let changed = index.set(&id(&format!("peer{n}")), &age(n), State::from([(key, link(1450))]));
        assert_eq!(changed.len(), usize::from(n == 0));
    }
    for n in 0..1000 {
        let changed = index.set(&id(&format!("peer{n}")), &age(n), State::new());
        assert_eq!(changed.len(), usize::from(n == 999));
    }
    assert!(index.state().is_empty());
}

#[test]
fn a_contribution_that_is_set_again_changes_nothing() {
    let state = State::from([(Key::Link(name("flannel.2")), link(1450))]);
    let mut index = Index::default();
    index.set(&id("a"), &age(1), state.clone());
    assert_eq!(index.set(&id("a"), &age(1), state.clone()), []);
    assert_eq!(index.set(&id("a"), &age(7), state), [], "another age alone changes nothing, either");
}

#[test]
fn fifty_thousand_peers_need_little_memory() {
    let dev = name("flannel.1");
    let mut index = Index::default();
    for n in 0..50_000u32 {
        let subnet = std::net::Ipv4Addr::from(0x0a00_0000 + (n << 8));
        let mac = Mac([2, 0, 0, (n >> 16) as u8, (n >> 8) as u8, n as u8]);
        let net = ipnet::IpNet::new(subnet.into(), 24).unwrap();
        let via = Route::Unicast { via: subnet.into(), dev, onlink: true };
        let state = State::from([
            (Key::Fdb(dev, mac), Value::Fdb([192, 168, 0, 1].into())),
            (Key::Neigh(dev, subnet.into()), Value::Neigh(mac)),
            (Key::Route(net, 0), Value::Route(via)),
        ]);
        assert_eq!(index.set(&id(&net.to_string()), &age(n.into()), state).len(), 3);
    }
    assert_eq!(index.state().len(), 150_000);
    // A node of a B-tree is two thirds full when keys come in random order, and half full when they come in order.
    let slots = 2 * index.slots.len() * size_of::<(super::Key<super::Number>, super::Slot)>();
    let rows = index.contributors.rows.len() * size_of::<Option<super::Row>>();
    let numbers = index.contributors.numbers.capacity() / 7 * 8 * (size_of::<(Id, u32)>() + 1);
    let keys = 150_000 * size_of::<super::Key<super::Number>>();
    let total = slots + rows + numbers + keys;
    assert!(total <= 26_000_000, "{total} bytes: slots {slots}, rows {rows}, numbers {numbers}, keys {keys}");
}

#[test]
fn a_slot_and_its_key_are_small() {
    let sizes = (size_of::<super::Key<super::Number>>(), size_of::<super::Slot>());
    assert!(sizes.0 <= 24 && sizes.1 <= 32, "{sizes:?}");
}
