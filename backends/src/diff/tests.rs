// SPDX-License-Identifier: Apache-2.0
//! Single rules of the difference. Its laws are in `tests/laws.rs`.

use std::sync::Arc;

use super::{Op, change, diff, difference, put_in_order};
use crate::ipip::IpipLink;
use crate::link::{Foreign, Link};
use crate::owner::PROTOCOL;
use crate::state::{Key, Mac, Name, Observed, ObservedValue, Route, State, Value};
use crate::vxlan::VxlanLink;
use crate::wireguard::WireGuardLink;
use crate::wireguard_key::PublicKey;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn vxlan() -> VxlanLink {
    let local = "192.168.64.1".parse().unwrap();
    VxlanLink { vni: 1, port: 8472, parent: name("eth0"), local, gbp: false, learning: false, ttl: 0 }
}

fn tunnel() -> Link {
    Link { kind: Arc::new(vxlan()), mtu: 1450, mac: Some(Mac([2, 0, 0, 0, 0, 1])), up: true }
}

fn route(net: &str, dev: &str) -> (Key, Value) {
    let net: ipnet::IpNet = net.parse().unwrap();
    let route = Route::Unicast { via: net.network(), dev: name(dev), onlink: true };
    (Key::Route(net, 0), Value::Route(route))
}

fn seen(value: Value) -> ObservedValue {
    let protocol = if matches!(value, Value::Route(_)) { PROTOCOL } else { 0 };
    let mark = matches!(value, Value::Link(_));
    ObservedValue { value, protocol, mark }
}

#[test]
fn each_attribute_of_a_link_counts() {
    let (key, want) = (Key::Link(name("flannel.1")), Value::link(tunnel()));
    let op = |have: Link| change(key, Some(want.clone()), Some(seen(Value::link(have))), true);
    let of = |kind: VxlanLink| Link { kind: Arc::new(kind), ..tunnel() };
    let ensure = Some(Op::Ensure(key, want.clone()));
    assert_eq!(op(tunnel()), None);
    let unmarked = ObservedValue { mark: false, ..seen(want.clone()) };
    assert_eq!(change(key, Some(want.clone()), Some(unmarked), true), ensure);
    assert_eq!(op(Link { mtu: 1500, ..tunnel() }), ensure);
    assert_eq!(op(Link { mac: Some(Mac([2; 6])), ..tunnel() }), ensure);
    assert_eq!(op(Link { mac: None, ..tunnel() }), ensure);
    assert_eq!(op(Link { up: false, ..tunnel() }), ensure);
    assert_eq!(op(of(VxlanLink { learning: true, ..vxlan() })), ensure);
    assert_eq!(op(of(VxlanLink { ttl: 1, ..vxlan() })), ensure);
    let recreate = Some(Op::Recreate(key, want.clone()));
    assert_eq!(op(of(VxlanLink { vni: 2, ..vxlan() })), recreate);
    assert_eq!(op(of(VxlanLink { port: 4789, ..vxlan() })), recreate);
    assert_eq!(op(of(VxlanLink { parent: name("eth1"), ..vxlan() })), recreate);
    assert_eq!(op(of(VxlanLink { local: "192.168.64.2".parse().unwrap(), ..vxlan() })), recreate);
    assert_eq!(op(of(VxlanLink { gbp: true, learning: true, ..vxlan() })), recreate);
    assert_eq!(op(Link { kind: Arc::new(Foreign), ..tunnel() }), recreate);
    assert_eq!(op(Link { kind: Arc::new(Foreign), mtu: 1, ..tunnel() }), recreate);
}

#[test]
fn an_ipip_device_that_is_bound_to_a_link_is_created_again() {
    let key = Key::Link(name("flannel.ipip"));
    let ipip = |bound, local: &str, mac| {
        let kind = Arc::new(IpipLink { local: local.parse().unwrap(), bound });
        Value::link(Link { kind, mtu: 1480, mac, up: true })
    };
    let want = ipip(false, "192.168.64.1", None);
    let op = |have| change(key, Some(want.clone()), Some(seen(have)), true);
    assert_eq!(op(ipip(false, "192.168.64.1", Some(Mac([9; 6])))), None, "so is flannel's device");
    assert_eq!(op(ipip(false, "192.168.64.2", None)), Some(Op::Recreate(key, want.clone())));
    assert_eq!(op(ipip(true, "192.168.64.1", None)), Some(Op::Recreate(key, want.clone())));
}

/// A device that is made again loses the sessions with its peers, and packets with them.
#[test]
fn a_wireguard_device_is_changed_in_place() {
    let key = Key::Link(name("flannel-wg"));
    let link = |kind: WireGuardLink| Link { kind: Arc::new(kind), mtu: 1420, mac: None, up: true };
    let wanted = WireGuardLink { public: Some(PublicKey([1; 32])), port: 51820 };
    let want = Value::link(link(wanted));
    let op = |have: Link| change(key, Some(want.clone()), Some(seen(Value::link(have))), true);
    let ensure = Some(Op::Ensure(key, want.clone()));
    assert_eq!(op(link(wanted)), None);
    let other_key = Some(PublicKey([2; 32]));
    for public in [other_key, None] {
        assert_eq!(op(link(WireGuardLink { public, ..wanted })), ensure, "{public:?}");
    }
    assert_eq!(op(link(WireGuardLink { port: 4500, ..wanted })), ensure);
    assert_eq!(op(Link { mtu: 1500, ..link(wanted) }), ensure);
    assert_eq!(op(Link { kind: Arc::new(Foreign), ..link(wanted) }), Some(Op::Recreate(key, want.clone())));
}

#[test]
fn a_route_with_another_protocol_number_is_taken_over() {
    let (key, value) = route("10.5.2.0/24", "flannel.1");
    let op = |protocol, mark| {
        change(key, Some(value.clone()), Some(ObservedValue { value: value.clone(), protocol, mark }), false)
    };
    assert_eq!(op(3, false), Some(Op::Ensure(key, value.clone())));
    assert_eq!(op(PROTOCOL, false), None, "plain instead of nexthop object is no difference");
    assert_eq!(op(PROTOCOL, true), None);
}

#[test]
fn only_entries_of_ours_are_removed() {
    let (key, value) = route("10.5.2.0/24", "flannel.1");
    assert_eq!(change(key, None, Some(seen(value.clone())), false), None);
    assert_eq!(change(key, None, Some(seen(value.clone())), true), Some(Op::Remove(key, value)));
    assert_eq!(change(key, None, None, true), None);
}

#[test]
fn creations_come_first_and_removals_follow_in_the_opposite_order() {
    let dev = name("flannel.1");
    let link = (Key::Link(dev), Value::link(tunnel()));
    let addr = (Key::Addr(dev, "10.5.1.0/32".parse().unwrap()), Value::Addr);
    let fdb = (Key::Fdb(dev, Mac([2; 6])), Value::Fdb("192.168.64.2".parse().unwrap()));
    let neigh = (Key::Neigh(dev, "10.5.2.0".parse().unwrap()), Value::Neigh(Mac([2; 6])));
    let state = State::from([route("10.5.2.0/24", "flannel.1"), neigh, fdb, addr, link]);
    let text = |ops: Vec<Op>| ops.iter().map(Op::to_string).collect::<Vec<_>>();
    let added = text(diff(&state, &Observed::new(), |_, _| true));
    assert_eq!(
        added,
        [
            "add link flannel.1 vxlan id 1 local 192.168.64.1 dev eth0 dstport 8472 nolearning mtu 1450 address 02:00:00:00:00:01 up",
            "add addr 10.5.1.0/32 dev flannel.1",
            "add fdb 02:02:02:02:02:02 dev flannel.1 dst 192.168.64.2",
            "add neigh 10.5.2.0 dev flannel.1 lladdr 02:02:02:02:02:02",
            "add route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink",
        ]
    );
    let backwards = state.iter().rev().map(|(key, value)| (*key, value.clone()));
    let of_any_order = difference(backwards, |_| true, &Observed::new(), |_, _| true);
    assert_eq!(text(of_any_order), added, "whatever comes first in the plan");
    let observed: Observed = state.iter().map(|(key, value)| (*key, seen(value.clone()))).collect();
    let removed = text(diff(&State::new(), &observed, |_, _| true));
    let mirrored: Vec<String> = added.iter().rev().map(|line| line.replacen("add", "remove", 1)).collect();
    assert_eq!(removed, mirrored);
    let [two, three] = ["10.5.2.0/24", "10.5.3.0/24"].map(|net| route(net, "flannel.1"));
    let (fdb, to) = (Key::Fdb(dev, Mac([3; 6])), Value::Fdb("192.168.64.3".parse().unwrap()));
    let sorted = [
        Op::Ensure(fdb, to.clone()),
        Op::Ensure(two.0, two.1.clone()),
        Op::Remove(three.0, three.1),
        Op::Remove(two.0, two.1),
        Op::Remove(fdb, to),
    ];
    let mut mixed = sorted.clone();
    mixed.reverse();
    put_in_order(&mut mixed);
    assert_eq!(mixed, sorted, "operations of single entries, too");
}

#[test]
fn the_entries_of_a_recreated_link_are_not_removed() {
    let dev = name("flannel.1");
    let desired = State::from([(Key::Link(dev), Value::link(tunnel()))]);
    let other = Value::link(Link { kind: Arc::new(Foreign), ..tunnel() });
    let (gone, stays) = (route("10.5.2.0/24", "flannel.1"), route("10.5.3.0/24", "flannel.2"));
    let observed =
        Observed::from([(Key::Link(dev), seen(other)), (gone.0, seen(gone.1)), (stays.0, seen(stays.1.clone()))]);
    let ops = diff(&desired, &observed, |_, _| true);
    assert_eq!(ops, [Op::Recreate(Key::Link(dev), Value::link(tunnel())), Op::Remove(stays.0, stays.1)]);
}
