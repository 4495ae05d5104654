// SPDX-License-Identifier: Apache-2.0
//! The laws of index and difference, each tested with random entries. CONTRIBUTING.md lists them ("What must always hold").

// Helpers outside test functions panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use proptest::collection::{btree_map, vec};
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof, proptest};
use proptest::{prop_assert, prop_assert_eq};
use weft_backends::diff::{Op, change, device, diff};
use weft_backends::index::{Changed, Contributor, Index, OWN};
use weft_backends::link::{Foreign, Link, LinkKind};
use weft_backends::owner::{Ownership, PROTOCOL};
use weft_backends::state::{Key, Mac, Name, Observed, ObservedValue, Route, State, Value};
use weft_backends::vxlan::VxlanLink;
use weft_backends::wireguard_key::PublicKey;
use weft_backends::wireguard_peer::WgPeer;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Id};

fn name() -> impl Strategy<Value = Name> {
    prop_oneof![Just("flannel.1"), Just("flannel.2"), Just("eth0")].prop_map(|text| Name::new(text).unwrap())
}

fn ip() -> impl Strategy<Value = IpAddr> {
    (0..4u8, 0..4u8).prop_map(|(a, b)| IpAddr::V4(Ipv4Addr::new(10, 4 + a, b, 0)))
}

fn net() -> impl Strategy<Value = IpNet> {
    (ip(), prop_oneof![Just(16), Just(24), Just(32)]).prop_map(|(ip, len)| IpNet::new(ip, len).unwrap().trunc())
}

fn mac() -> impl Strategy<Value = Mac> {
    (0..4u8).prop_map(|last| Mac([2, 0, 0, 0, 0, last]))
}

/// Two of these keys agree in their first half.
fn key() -> impl Strategy<Value = PublicKey> {
    (1..3u8, 0..2u8).prop_map(|(first, last)| {
        let mut key = [first; 32];
        key[31] = last;
        PublicKey(key)
    })
}

fn link() -> impl Strategy<Value = Value> {
    let vxlan = (1..3u32, ip(), any::<bool>(), name(), any::<bool>(), 0..2u8).prop_map(
        |(vni, local, gbp, parent, learning, ttl)| {
            Arc::new(VxlanLink { vni, port: 8472, parent, local, gbp, learning, ttl }) as Arc<dyn LinkKind>
        },
    );
    let foreign = Just(()).prop_map(|()| Arc::new(Foreign) as Arc<dyn LinkKind>);
    (prop_oneof![vxlan, foreign], 1449..1451u32, mac(), any::<bool>())
        .prop_map(|(kind, mtu, mac, up)| Value::link(Link { kind, mtu, mac: Some(mac), up }))
}

fn route() -> impl Strategy<Value = Value> {
    let unicast = (ip(), name(), any::<bool>()).prop_map(|(via, dev, onlink)| Route::Unicast { via, dev, onlink });
    let device = name().prop_map(|dev| Route::Device { dev });
    prop_oneof![unicast, device, Just(Route::Blackhole), Just(Route::Unreachable)].prop_map(Value::Route)
}

fn entry() -> impl Strategy<Value = (Key, Value)> {
    prop_oneof![
        (name(), link()).prop_map(|(dev, link)| (Key::Link(dev), link)),
        (name(), net()).prop_map(|(dev, net)| (Key::Addr(dev, net), Value::Addr)),
        (name(), mac(), ip()).prop_map(|(dev, mac, to)| (Key::Fdb(dev, mac), Value::Fdb(to))),
        (name(), ip(), mac()).prop_map(|(dev, ip, mac)| (Key::Neigh(dev, ip), Value::Neigh(mac))),
        (name(), key(), 1..3u16, 0..2u16, any::<bool>()).prop_map(|(dev, key, port, keepalive, preshared)| {
            let endpoint = Some(([192, 0, 2, 1], port).into());
            let assumes_port = false;
            let peer = WgPeer { key, endpoint, keepalive, preshared, assumes_port, is_live: false, written: None };
            (Key::WgPeer(dev, key.id()), Value::peer(peer))
        }),
        (name(), net(), key()).prop_map(|(dev, net, key)| (Key::AllowedIp(dev, net), Value::AllowedIp(Arc::new(key)))),
        (net(), 0..2u32, route()).prop_map(|(net, metric, route)| (Key::Route(net, metric), route)),
    ]
}

fn state(most: usize) -> impl Strategy<Value = State> {
    vec(entry(), 0..most).prop_map(State::from_iter)
}

fn observed() -> impl Strategy<Value = Observed> {
    vec((entry(), prop_oneof![Just(PROTOCOL), Just(2), Just(3), Just(4)], any::<bool>()), 0..24).prop_map(|entries| {
        let seen = |((key, value), protocol, mark)| (key, ObservedValue { value, protocol, mark });
        entries.into_iter().map(seen).collect()
    })
}

/// Applies operations as the kernel does: the entries of a link that is created again or removed go with it.
fn apply(kernel: &mut Observed, ops: &[Op]) {
    for op in ops {
        match op.clone() {
            Op::Ensure(key, value) => {
                kernel.insert(key, ObservedValue { value, protocol: PROTOCOL, mark: true });
            }
            Op::Recreate(key, value) => {
                drop_link(kernel, key);
                kernel.insert(key, ObservedValue { value, protocol: PROTOCOL, mark: true });
            }
            Op::Remove(key, _) => {
                kernel.remove(&key);
                drop_link(kernel, key);
            }
        }
    }
}

fn drop_link(kernel: &mut Observed, key: Key) {
    if let Key::Link(gone) = key {
        kernel.retain(|key, seen| device(key, &seen.value) != Some(gone));
    }
}

fn us() -> Ownership {
    Ownership {
        devices: BTreeSet::from([Name::new("flannel.1").unwrap()]),
        networks: Subnets { v4: Some("10.5.0.0/16".parse::<Ipv4Net>().unwrap()), v6: None },
        own: Subnets { v4: Some("10.5.1.0/24".parse::<Ipv4Net>().unwrap()), v6: None },
    }
}

/// Returns contributions: an id, an age and a state for each. Ids are unique, and several contributions may have one age.
fn leases() -> impl Strategy<Value = BTreeMap<String, (u64, State)>> {
    btree_map(prop_oneof!["[a-h]", Just(OWN.to_owned())], (0..4u64, state(6)), 0..8)
}

fn put(index: &mut Index, id: &str, stamp: u64, state: State) -> Vec<Changed> {
    index.set(&Id::from(id), &Age { stamp, ..Age::default() }, state)
}

fn all(leases: &BTreeMap<String, (u64, State)>) -> Index {
    filled(leases, false)
}

fn filled(leases: &BTreeMap<String, (u64, State)>, oldest_wins: bool) -> Index {
    let mut index = Index::new(oldest_wins);
    for (id, (stamp, state)) in leases {
        put(&mut index, id, *stamp, state.clone());
    }
    index
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_to_do_writes_nothing(desired in state(24)) {
        let kernel: Observed =
            desired.iter().map(|(key, value)| (*key, ObservedValue { value: value.clone(), protocol: PROTOCOL, mark: true })).collect();
        prop_assert_eq!(diff(&desired, &kernel, |_, _| true), vec![]);
    }

    #[test]
    fn two_passes_converge(desired in state(24), mut kernel in observed()) {
        let ours = |key: &Key, seen: &ObservedValue| us().ours(key, seen);
        for _ in 0..2 {
            let ops = diff(&desired, &kernel, ours);
            apply(&mut kernel, &ops);
        }
        prop_assert_eq!(diff(&desired, &kernel, ours), vec![]);
        for (key, value) in desired.iter() {
            prop_assert_eq!(kernel.get(key).map(|seen| &seen.value), Some(value));
        }
    }

    #[test]
    fn only_ours_is_removed(desired in state(24), kernel in observed()) {
        let us = us();
        for op in diff(&desired, &kernel, |key, seen| us.ours(key, seen)) {
            let Op::Remove(key, value) = op.clone() else { continue };
            let seen = kernel.get(&key).unwrap();
            prop_assert!(desired.get(&key).is_none() && seen.value == value);
            let on_ours = device(&key, &value) == Name::new("flannel.1");
            let tagged = matches!(key, Key::Route(net, _) if seen.protocol == PROTOCOL
                && "10.5.0.0/16".parse::<IpNet>().unwrap().contains(&net));
            prop_assert!(on_ours || tagged, "{}", op);
            prop_assert!(!matches!(key, Key::Route(..)) || seen.protocol != 2);
        }
    }

    #[test]
    fn one_key_follows_the_same_rules(desired in state(24), kernel in observed()) {
        let whole: BTreeSet<String> = diff(&desired, &kernel, |_, _| true).iter().map(Op::to_string).collect();
        let keys: BTreeSet<Key> = desired.keys().chain(kernel.keys()).copied().collect();
        let single: BTreeSet<String> = keys
            .into_iter()
            .filter_map(|key| change(key, desired.get(&key).cloned(), kernel.get(&key).cloned(), true))
            .map(|op| op.to_string())
            .collect();
        // The difference of all keys leaves out the entries that go with a link that is created again.
        prop_assert!(whole.is_subset(&single));
        let extra = single.difference(&whole).all(|op| op.starts_with("remove ") && whole.iter().any(|op| op.starts_with("recreate ")));
        prop_assert!(extra);
    }

    /// A contribution is beaten exactly if it is not in force. The answer is the same before the contribution is added and after it.
    #[test]
    fn a_beaten_contribution_is_not_in_force(leases in leases(), oldest_wins in any::<bool>()) {
        let index = filled(&leases, oldest_wins);
        for (id, (stamp, state)) in &leases {
            let others: BTreeMap<_, _> = leases.iter().filter(|(other, _)| *other != id).map(|(k, v)| (k.clone(), v.clone())).collect();
            let before = filled(&others, oldest_wins);
            let (name, age) = (Id::from(id.as_str()), Age { stamp: *stamp, ..Age::default() });
            for (key, value) in state.iter() {
                let beaten = index.beaten_by((key, value), &name, &age);
                prop_assert_eq!(beaten.is_none(), index.first(key, None).contains(&Contributor { id: name.clone(), is_in_force: true }));
                prop_assert_eq!(index.first(key, Some(&name)), before.first(key, None));
                prop_assert!(beaten.is_some() || index.desired(key).as_ref() == Some(value));
                prop_assert_eq!(beaten, before.beaten_by((key, value), &name, &age));
            }
        }
    }

    #[test]
    fn order_of_arrival_decides_nothing(leases in leases(), oldest_wins in any::<bool>()) {
        let forward = filled(&leases, oldest_wins);
        let mut backward = Index::new(oldest_wins);
        for (id, (stamp, state)) in leases.iter().rev() {
            put(&mut backward, id, *stamp, state.clone());
        }
        prop_assert_eq!(forward.state(), backward.state());
        for key in forward.state().keys() {
            prop_assert_eq!(forward.winner(key), backward.winner(key));
        }
    }

    #[test]
    fn add_then_remove_is_nothing(leases in leases(), stamp in 0..4u64, wanted in state(6), other in state(6)) {
        let mut index = all(&leases);
        let before = index.state();
        let put_in = put(&mut index, "x", stamp, wanted);
        put(&mut index, "x", stamp + 1, other);
        let taken = put(&mut index, "x", stamp + 1, State::new());
        prop_assert_eq!(index.state(), before);
        prop_assert!(index.keys(&Id::from("x")).is_empty());
        for Changed { before, after, .. } in put_in.into_iter().chain(taken) {
            prop_assert!(before != after);
        }
    }

    #[test]
    fn the_returned_changes_are_all_changes(leases in leases()) {
        let (mut index, mut mirror) = (Index::default(), State::new());
        for (id, (stamp, state)) in &leases {
            for Changed { key, before, after } in put(&mut index, id, *stamp, state.clone()) {
                prop_assert_eq!(mirror.remove(&key), before);
                after.and_then(|value| mirror.insert(key, value));
            }
            prop_assert_eq!(&mirror, &index.state());
        }
    }
}
