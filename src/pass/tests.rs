// SPDX-License-Identifier: Apache-2.0
//! Passes about devices, on a kernel in memory.

use std::sync::Arc;
use weft_backends::backend::make;
use weft_backends::host::{Host, Uplink};

use weft_backends::link::{Foreign, Link};
use weft_backends::state::{Mac, Route};
use weft_subnet::connected::Connected;
use weft_subnet::network::Network;

use super::*;
use crate::kernel::Machine;
use crate::kernel::fake::FakeKernel;
use crate::plan::tests::{lease, record};

const PROTOCOL: u8 = weft_backends::owner::PROTOCOL;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// Our own device is flannel.1.
fn bench() -> (Plan, Passer<FakeKernel>, FakeKernel) {
    let network = Network::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#).unwrap();
    let uplink = Uplink { name: name("eth0"), mtu: 1500, v4: Some([192, 168, 0, 1].into()), v6: None };
    let mac = Mac([2, 0, 0, 0, 0, 1]);
    let (public_v4, routes) = (uplink.v4, OnLink::default());
    let (vtep_mac_v4, vtep_mac_v6, connected) = (mac, mac, Connected::default());
    let host = Host { uplink, public_v4, public_v6: None, vtep_mac_v4, vtep_mac_v6, routes, connected };
    let backend = make(&network).unwrap();
    let kernel = FakeKernel::new(Machine::default(), PROTOCOL);
    (Plan::new(network, backend, host, lease(1, 1)), Passer::new(kernel.clone()), kernel)
}

fn links(kernel: &FakeKernel) -> Vec<String> {
    kernel.entries().keys().filter(|key| matches!(key, Key::Link(_))).map(Key::to_string).collect()
}

#[tokio::test]
async fn devices_in_the_kernel_stay_few_while_nothing_may_be_removed() {
    let (mut plan, mut passer, kernel) = bench();
    passer.keep_all(true);
    for vni in 100..160 {
        plan.put(record(2, vni));
        passer.full(&plan, Cause::Lease).await.unwrap();
        assert!(links(&kernel).len() <= MOST_DEVICES, "{:?}", links(&kernel));
    }
    let waits = passer.pending().get(&Key::Link(name("flannel.159"))).unwrap();
    assert!(waits.retry && waits.reason.contains("18 devices"), "{waits:?}");
    assert!(kernel.entries().iter().all(|(key, seen)| diff::device(key, &seen.value) != Some(name("flannel.159"))));
    passer.keep_all(false);
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert_eq!(links(&kernel), ["link flannel.1", "link flannel.159"], "there is room again, in the same pass");
    assert!(passer.pending().is_empty());
}

#[tokio::test]
async fn our_own_device_finds_room_whatever_peers_ask_for() {
    let (mut plan, mut passer, kernel) = bench();
    passer.keep_all(true);
    for vni in 100..140 {
        plan.put(record(2, vni));
        passer.full(&plan, Cause::Lease).await.unwrap();
    }
    kernel.disturb(Key::Link(name("flannel.1")), None, false);
    plan.put(record(2, 140));
    passer.full(&plan, Cause::Kernel).await.unwrap();
    assert!(links(&kernel).contains(&"link flannel.1".to_owned()), "{:?}", links(&kernel));
}

#[tokio::test]
async fn nothing_is_done_to_a_device_of_somebody_else_on_any_path() {
    let (mut plan, mut passer, kernel) = bench();
    let dev = name("flannel.7");
    let link = Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true };
    let neigh = Key::Neigh(dev, "10.77.0.1".parse().unwrap());
    kernel.disturb(Key::Link(dev), Some(Seen { value: Value::link(link), protocol: 0, mark: false }), false);
    kernel.disturb(neigh, Some(Seen { value: Value::Neigh(Mac([2; 6])), protocol: 0, mark: false }), false);
    plan.put(record(2, 7));
    passer.full(&plan, Cause::Lease).await.unwrap();
    let on_it = |kernel: &FakeKernel| {
        kernel.take_ops().iter().filter(|op| on(op) == Some(dev)).map(Op::to_string).collect::<Vec<_>>()
    };
    assert_eq!(on_it(&kernel), [""; 0], "a look at everything");
    assert_eq!(passer.strangers().iter().copied().collect::<Vec<_>>(), [dev]);
    // The plan has not heard of it yet.
    let changed = plan.put(record(3, 7));
    passer.changed(changed).await;
    let seen = HashMap::from([(neigh, None), (Key::Neigh(dev, "10.5.2.0".parse().unwrap()), None)]);
    passer.noticed(&plan, seen).await;
    assert_eq!(on_it(&kernel), [""; 0], "changes of leases, and news of the kernel");
    assert!(plan.bar(passer.strangers()));
    passer.full(&plan, Cause::Lease).await.unwrap();
    assert_eq!(on_it(&kernel), [""; 0]);
    assert!(passer.pending().is_empty(), "why is the plan's to say: {:?}", plan.skipped(&lease(2, 7).id));
}

#[tokio::test]
async fn a_device_that_lacks_an_attribute_carries_entries() {
    let (mut plan, mut passer, kernel) = bench();
    let own = Key::Link(name("flannel.1"));
    plan.put(record(2, 1));
    kernel.fail(own, Some(Outcome::Partly { missing: "mtu 1450: EINVAL".into(), retry: false }));
    passer.full(&plan, Cause::Start).await.unwrap();
    assert_eq!(kernel.entries().len(), 5, "link, address, neighbour, FDB entry, route: {:?}", kernel.entries());
    assert_eq!(passer.pending().iter().map(|(key, _)| *key).collect::<Vec<_>>(), [own]);
    // One that is not there holds everything back.
    kernel.disturb(own, None, false);
    kernel.fail(own, Some(Outcome::Fatal("not supported".into())));
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert_eq!(kernel.take_ops().iter().filter(|op| matches!(op.key(), Key::Fdb(..))).count(), 1, "of the first pass");
}

#[tokio::test]
async fn what_flannel_left_is_removed_although_the_kernel_refuses_it_once() {
    let (plan, mut passer, kernel) = bench();
    let (key, via) = (Key::Route("10.5.9.0/24".parse().unwrap(), 0), [192, 168, 0, 9].into());
    let value = Value::Route(Route::Unicast { via, dev: name("eth0"), onlink: false });
    let flannels = Seen { value: value.clone(), protocol: 3, mark: false };
    kernel.disturb(key, Some(flannels.clone()), false);
    passer.takeover = Takeover::Left(HashMap::from([(key, value)]));
    kernel.fail(key, Some(Outcome::Retry("not now".into())));
    passer.full(&plan, Cause::Start).await.unwrap();
    assert!(kernel.entries().contains_key(&key));
    kernel.fail(key, None);
    passer.full(&plan, Cause::Retry).await.unwrap();
    assert!(!kernel.entries().contains_key(&key), "the removal is tried again");
    // The next look finds nothing of flannel's, and that was the takeover: the same route is somebody's own now.
    passer.full(&plan, Cause::Audit).await.unwrap();
    kernel.disturb(key, Some(flannels), false);
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert!(kernel.entries().contains_key(&key));
}
