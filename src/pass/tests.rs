// SPDX-License-Identifier: Apache-2.0
//! Tests of passes, mostly about devices, with a kernel in memory.

use std::sync::Arc;
use std::time::Duration;

use weft_backends::host::{Host, OnLink, Uplink};
use weft_backends::link::{Foreign, Link};
use weft_backends::register::make;
use weft_backends::state::{Mac, Route};
use weft_backends::vxlan::VtepMac;
use weft_subnet::connected::Connected;
use weft_subnet::net_conf::NetConf;

use super::*;
use crate::kernel::Machine;
use crate::kernel::fake::FakeKernel;
use crate::plan::tests::{lease, record};

mod wireguard;

const PROTOCOL: u8 = weft_backends::owner::PROTOCOL;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// Returns a plan whose own device is flannel.1, and a passer with its kernel.
fn bench() -> (Plan, Passer<FakeKernel>, FakeKernel) {
    let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#).unwrap();
    let uplink = Uplink { name: name("eth0"), mtu: 1500, v4: Some([192, 168, 0, 1].into()), v6: None };
    let mac = Mac([2, 0, 0, 0, 0, 1]);
    let (public_v4, routes) = (uplink.v4, OnLink::default());
    let (identities, connected) = (VtepMac::both(mac, mac), Connected::default());
    let (public_v6, wireguard_port, kept_ports) = Default::default();
    let host = Host { uplink, public_v4, public_v6, wireguard_port, kept_ports, identities, routes, connected };
    let backend = make(&net_conf).unwrap();
    let kernel = FakeKernel::new(Machine::default(), PROTOCOL);
    (Plan::new(net_conf, backend, host, lease(1, 1)), Passer::new(kernel.clone()), kernel)
}

fn links(kernel: &FakeKernel) -> Vec<String> {
    kernel.entries().keys().filter(|key| matches!(key, Key::Link(_))).map(Key::to_string).collect()
}

#[tokio::test]
async fn the_number_of_devices_is_limited_while_removals_are_held() {
    let (mut plan, mut passer, kernel) = bench();
    passer.keep_all(true);
    for vni in 100..160 {
        plan.put(record(2, vni));
        passer.full(&plan, Cause::Lease).await.unwrap();
        assert!(links(&kernel).len() <= MAX_DEVICES, "{:?}", links(&kernel));
    }
    let waits = passer.pending().get(&Key::Link(name("flannel.159"))).unwrap();
    assert!(waits.retry && waits.reason.contains("18 devices"), "{waits:?}");
    assert!(kernel.entries().iter().all(|(key, seen)| diff::device(key, &seen.value) != Some(name("flannel.159"))));
    passer.keep_all(false);
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert_eq!(links(&kernel), ["link flannel.1", "link flannel.159"], "the same pass must use the new room");
    assert!(passer.pending().is_empty());
}

#[tokio::test]
async fn the_own_device_has_room_whatever_peers_need() {
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
async fn no_operation_changes_a_device_of_another_program() {
    let (mut plan, mut passer, kernel) = bench();
    let dev = name("flannel.7");
    let link = Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true };
    let neigh = Key::Neigh(dev, "10.77.0.1".parse().unwrap());
    kernel.disturb(Key::Link(dev), Some(ObservedValue { value: Value::link(link), protocol: 0, mark: false }), false);
    kernel.disturb(neigh, Some(ObservedValue { value: Value::Neigh(Mac([2; 6])), protocol: 0, mark: false }), false);
    plan.put(record(2, 7));
    passer.full(&plan, Cause::Lease).await.unwrap();
    let on_it = |kernel: &FakeKernel| {
        kernel.take_ops().iter().filter(|op| on(op) == Some(dev)).map(Op::to_string).collect::<Vec<_>>()
    };
    assert_eq!(on_it(&kernel), [""; 0], "in a full pass");
    assert_eq!(passer.foreign_devices().iter().cloned().collect::<Vec<_>>(), [dev]);
    // The plan does not know yet that the device is foreign.
    let changed = plan.put(record(3, 7));
    passer.changed(changed).await;
    let seen = HashMap::from([(neigh, None), (Key::Neigh(dev, "10.5.2.0".parse().unwrap()), None)]);
    passer.noticed(&plan, seen).await;
    assert_eq!(on_it(&kernel), [""; 0], "in passes for changes of leases and of the kernel");
    assert!(plan.set_foreign_devices(passer.foreign_devices()));
    passer.full(&plan, Cause::Lease).await.unwrap();
    assert_eq!(on_it(&kernel), [""; 0]);
    assert!(passer.pending().is_empty(), "why is the plan's to say: {:?}", plan.unplanned(&lease(2, 7).id));
}

#[tokio::test]
async fn a_device_that_lacks_an_attribute_carries_entries() {
    let (mut plan, mut passer, kernel) = bench();
    let own = Key::Link(name("flannel.1"));
    plan.put(record(2, 1));
    kernel.fail(own, Some(Outcome::Partly { missing: "mtu 1450: EINVAL".into(), retry: false, works: false }));
    passer.full(&plan, Cause::Start).await.unwrap();
    assert_eq!(kernel.entries().len(), 5, "link, address, neighbour, FDB entry, route: {:?}", kernel.entries());
    assert_eq!(passer.pending().iter().map(|(key, _)| *key).collect::<Vec<_>>(), [own]);
    // If the device does not exist, no entries are written.
    kernel.disturb(own, None, false);
    kernel.fail(own, Some(Outcome::Fatal("not supported".into())));
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert_eq!(
        kernel.take_ops().iter().filter(|op| matches!(op.key(), Key::Fdb(..))).count(),
        1,
        "only the first pass may write it"
    );
}

#[tokio::test]
async fn a_route_of_flannel_is_removed_although_the_kernel_refuses_it_once() {
    let (plan, mut passer, kernel) = bench();
    let (key, via) = (Key::Route("10.5.9.0/24".parse().unwrap(), 0), [192, 168, 0, 9].into());
    let value = Value::Route(Route::Unicast { via, dev: name("eth0"), onlink: false });
    let flannels = ObservedValue { value: value.clone(), protocol: 3, mark: false };
    kernel.disturb(key, Some(flannels.clone()), false);
    passer.takeover = Takeover::Left(HashMap::from([(key, value)]));
    kernel.fail(key, Some(Outcome::Retry("not now".into())));
    passer.full(&plan, Cause::Start).await.unwrap();
    assert!(kernel.entries().contains_key(&key));
    kernel.fail(key, None);
    passer.full(&plan, Cause::Retry).await.unwrap();
    assert!(!kernel.entries().contains_key(&key), "the removal must be tried again");
    // The takeover is over. If the same route appears again, it belongs to another program.
    passer.full(&plan, Cause::Audit).await.unwrap();
    kernel.disturb(key, Some(flannels), false);
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert!(kernel.entries().contains_key(&key));
}

/// Without its device the node has no network, so each full pass repairs it. The conflict must be reported anyway.
#[tokio::test]
async fn a_program_that_fights_over_the_device_or_its_address_is_reported() {
    let (plan, mut passer, kernel) = bench();
    passer.full(&plan, Cause::Start).await.unwrap();
    let device = Key::Link(name("flannel.1"));
    let address = *kernel.entries().keys().find(|key| matches!(key, Key::Addr(..))).unwrap();
    let output = Output::default();
    let copy = output.clone();
    let lines = tracing_subscriber::fmt().with_writer(move || copy.clone()).finish();
    let _guard = tracing::subscriber::set_default(lines);
    let reported = |key: Key| {
        let text = String::from_utf8(output.0.lock().unwrap().clone()).unwrap();
        text.lines()
            .filter(|line| line.contains("another program repeatedly") && line.contains(&key.to_string()))
            .count()
    };
    for repair in 1..=20 {
        kernel.disturb(address, None, false);
        passer.full(&plan, if repair % 2 == 0 { Cause::Kernel } else { Cause::Audit }).await.unwrap();
        assert!(kernel.entries().contains_key(&address), "repair {repair}");
        assert_eq!(reported(address), usize::from(repair > 3), "repair {repair}");
    }
    assert_eq!(reported(device), 0);
    for repair in 1..=20 {
        kernel.disturb(device, None, false);
        passer.full(&plan, Cause::Kernel).await.unwrap();
        assert!(kernel.entries().contains_key(&device), "repair {repair}");
    }
    assert_eq!(reported(device), 1);
}

/// If a device vanishes, an entry of each peer fails.
#[tokio::test]
async fn of_many_entries_that_the_kernel_refuses_in_one_pass_the_first_ones_are_logged_once() {
    let (mut plan, mut passer, kernel) = bench();
    passer.full(&plan, Cause::Start).await.unwrap();
    let output = Output::default();
    let copy = output.clone();
    let lines = tracing_subscriber::fmt().with_writer(move || copy.clone()).finish();
    let _guard = tracing::subscriber::set_default(lines);
    let logged = || String::from_utf8(output.0.lock().unwrap().clone()).unwrap().matches("kernel refused").count();
    let mut changed = Vec::new();
    for third in 2..22 {
        kernel.fail(Key::Neigh(name("flannel.1"), [10, 5, third, 0].into()), Some(Outcome::Retry("busy".into())));
        changed.extend(plan.put(record(third, 1)));
    }
    let report = passer.changed(changed).await;
    assert_eq!((report.failed(), logged()), (20, MAX_LOGGED_FAILURES));
    let report = passer.full(&plan, Cause::Audit).await.unwrap();
    assert_eq!((report.failed(), logged()), (20, MAX_LOGGED_FAILURES), "they were refused before");
}

#[derive(Clone, Default)]
struct Output(Arc<std::sync::Mutex<Vec<u8>>>);

impl io::Write for Output {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(text)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn an_entry_that_another_program_deletes_repeatedly_is_left_to_the_audit() {
    let (mut plan, mut passer, kernel) = bench();
    plan.put(record(2, 1));
    plan.put(record(3, 1));
    passer.full(&plan, Cause::Start).await.unwrap();
    let neigh = |third: u8| Key::Neigh(name("flannel.1"), [10, 5, third, 0].into());
    for repair in 1..=3 {
        kernel.disturb(neigh(2), None, false);
        assert!(passer.noticed(&plan, HashMap::from([(neigh(2), None)])).await.is_some(), "repair {repair}");
        assert!(kernel.entries().contains_key(&neigh(2)), "repair {repair}");
    }
    for key in [neigh(2), neigh(3)] {
        kernel.disturb(key, None, false);
    }
    kernel.take_ops();
    passer.noticed(&plan, HashMap::from([(neigh(2), None), (neigh(3), None)])).await.unwrap();
    let written: Vec<Key> = kernel.take_ops().iter().map(Op::key).collect();
    assert_eq!(written, [neigh(3)], "the fourth repair of one entry waits, another entry does not");
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert!(kernel.entries().contains_key(&neigh(2)), "the audit repairs it");
}

#[tokio::test]
async fn an_event_removes_nothing_while_removals_are_held() {
    let (mut plan, mut passer, kernel) = bench();
    plan.put(record(2, 1));
    passer.full(&plan, Cause::Start).await.unwrap();
    let dev = name("flannel.1");
    let (stale, wanted) = (Key::Neigh(dev, [10, 5, 99, 0].into()), Key::Neigh(dev, [10, 5, 2, 0].into()));
    let seen = ObservedValue { value: Value::Neigh(Mac([2, 0, 0, 0, 0, 99])), protocol: 0, mark: false };
    kernel.disturb(stale, Some(seen.clone()), false);
    let news = || HashMap::from([(stale, Some(seen.clone())), (wanted, None)]);
    // Before the first list of leases, and after a first list without peers.
    for until in [None, Some(Instant::now() + Duration::from_secs(3600))] {
        passer.keep_all(until.is_none());
        passer.keep_stale_until = until;
        kernel.disturb(wanted, None, false);
        passer.noticed(&plan, news()).await.unwrap();
        assert!(kernel.entries().contains_key(&stale), "held, {until:?}");
        assert!(kernel.entries().contains_key(&wanted), "repaired anyway, {until:?}");
    }
    passer.keep_stale_until = None;
    passer.noticed(&plan, HashMap::from([(stale, Some(seen))])).await.unwrap();
    assert!(!kernel.entries().contains_key(&stale), "nothing is held any more");
}

#[tokio::test]
async fn entries_wait_for_a_device_that_is_broken_and_come_with_it() {
    let (mut plan, mut passer, kernel) = bench();
    let own = Key::Link(name("flannel.1"));
    plan.put(record(2, 1));
    // The device is there, so the kernel would take the entries.
    passer.full(&plan, Cause::Start).await.unwrap();
    let entry = Key::Fdb(name("flannel.1"), Mac([2, 0, 0, 0, 0, 2]));
    let Some(ObservedValue { value: Value::Link(link), .. }) = kernel.entries().get(&own).cloned() else {
        panic!("no device")
    };
    let broken =
        ObservedValue { value: Value::link(Link { up: false, ..Link::clone(&link) }), protocol: 0, mark: true };
    kernel.disturb(own, Some(broken), false);
    kernel.disturb(entry, None, false);
    kernel.fail(own, Some(Outcome::Retry("EADDRINUSE".into())));
    kernel.take_ops();
    passer.full(&plan, Cause::Kernel).await.unwrap();
    let written: Vec<Key> = kernel.take_ops().iter().map(Op::key).collect();
    assert_eq!(written, [own], "only the device must be tried");
    // A retry of the device asks for a full pass, which writes the entries as well.
    kernel.fail(own, None);
    tokio::time::sleep_until(passer.next_retry().expect("the device must be tried again")).await;
    let retried = passer.retry(&plan, |_, _| false).await;
    assert!(retried.own_device && retried.report.is_none(), "{retried:?}");
    assert!(
        passer.next_retry().is_some_and(|next| next > Instant::now()),
        "the device must be tried again if that pass fails"
    );
    passer.full(&plan, Cause::Retry).await.unwrap();
    assert!(kernel.entries().contains_key(&entry) && passer.pending().is_empty());
}

#[tokio::test]
async fn a_marked_device_that_is_not_in_the_plan_is_removed_with_its_entries() {
    let (plan, mut passer, kernel) = bench();
    // An earlier run made this device for a peer that is gone. It is not in the plan.
    let dev = name("flannel.7");
    let link = Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true };
    kernel.disturb(
        Key::Link(dev),
        Some(ObservedValue { value: Value::link(link), protocol: PROTOCOL, mark: true }),
        false,
    );
    let (via, net) = ([10, 5, 9, 0].into(), "10.5.9.0/24".parse().unwrap());
    let route = Value::Route(Route::Unicast { via, dev, onlink: true });
    kernel.disturb(Key::Route(net, 0), Some(ObservedValue { value: route, protocol: 3, mark: false }), false);
    passer.keep_all(true);
    passer.full(&plan, Cause::Start).await.unwrap();
    assert_eq!(links(&kernel), ["link flannel.1", "link flannel.7"], "removals are held");
    // An entry that appears on it meanwhile is removed as well, whichever program wrote it.
    passer.keep_all(false);
    let neigh = Key::Neigh(dev, [10, 5, 9, 0].into());
    let seen = ObservedValue { value: Value::Neigh(Mac([2; 6])), protocol: 0, mark: false };
    kernel.disturb(neigh, Some(seen.clone()), false);
    passer.noticed(&plan, HashMap::from([(neigh, Some(seen))])).await.unwrap();
    assert!(!kernel.entries().contains_key(&neigh));
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert_eq!(links(&kernel), ["link flannel.1"]);
}

#[tokio::test]
async fn a_device_that_is_created_again_gets_its_entries_in_the_same_pass() {
    let (mut plan, mut passer, kernel) = bench();
    plan.put(record(2, 1));
    let own = Key::Link(name("flannel.1"));
    // flannel made this device with other fixed attributes. When it is created again, the entries on it vanish.
    let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
    kernel.disturb(own, Some(ObservedValue { value: Value::link(link), protocol: 0, mark: false }), false);
    let entry = Key::Fdb(name("flannel.1"), Mac([2, 0, 0, 0, 0, 2]));
    let theirs = Value::Fdb([192, 168, 0, 2].into());
    kernel.disturb(entry, Some(ObservedValue { value: theirs, protocol: 0, mark: false }), false);
    passer.full(&plan, Cause::Start).await.unwrap();
    assert_eq!(kernel.entries().len(), 5, "link, address, neighbour, FDB entry, route: {:?}", kernel.entries());
    assert!(passer.pending().is_empty());
}

#[tokio::test]
async fn an_entry_that_another_program_repaired_is_not_pending() {
    let (mut plan, mut passer, kernel) = bench();
    plan.put(record(2, 1));
    let entry = Key::Neigh(name("flannel.1"), [10, 5, 2, 0].into());
    kernel.fail(entry, Some(Outcome::Fatal("not now".into())));
    passer.full(&plan, Cause::Start).await.unwrap();
    assert!(passer.pending().get(&entry).is_some_and(|pending| !pending.retry), "the kernel refused it for good");
    assert_eq!(passer.next_retry(), None, "only the audit must try it again");
    let seen = ObservedValue { value: Value::Neigh(Mac([2, 0, 0, 0, 0, 2])), protocol: 0, mark: false };
    kernel.disturb(entry, Some(seen), false);
    passer.full(&plan, Cause::Audit).await.unwrap();
    assert!(passer.pending().is_empty(), "{:?}", passer.pending());
}

#[tokio::test]
async fn a_change_that_is_taken_back_at_once_does_not_forget_a_failed_write() {
    let (mut plan, mut passer, kernel) = bench();
    passer.full(&plan, Cause::Start).await.unwrap();
    let entry = Key::Fdb(name("flannel.1"), Mac([2, 0, 0, 0, 0, 2]));
    let refuse = || kernel.fail(entry, Some(Outcome::Retry("not now".into())));
    refuse();
    let changed = plan.put(record(2, 1));
    passer.changed(changed).await;
    // The lease goes and comes back, and the loop finds both events in its queue.
    let mut changed = plan.remove(&lease(2, 1).id);
    changed.extend(plan.put(record(2, 1)));
    passer.changed(changed).await;
    assert!(passer.pending().get(&entry).is_some_and(|pending| pending.retry), "{:?}", passer.pending());
    kernel.fail(entry, None);
    tokio::time::sleep_until(passer.next_retry().expect("the entry must be tried again")).await;
    passer.retry(&plan, |_, _| false).await;
    assert!(kernel.entries().contains_key(&entry) && passer.pending().is_empty());
    // The same for a removal.
    refuse();
    let changed = plan.remove(&lease(2, 1).id);
    passer.changed(changed).await;
    let mut changed = plan.put(record(2, 1));
    changed.extend(plan.remove(&lease(2, 1).id));
    passer.changed(changed).await;
    assert!(passer.pending().get(&entry).is_some(), "{:?}", passer.pending());
}

#[tokio::test]
async fn additions_come_before_removals() {
    let (mut plan, mut passer, kernel) = bench();
    plan.put(record(2, 1));
    passer.full(&plan, Cause::Start).await.unwrap();
    kernel.take_ops();
    // One peer goes and another one comes. Entries are removed only when the new ones are written.
    let mut changed = plan.remove(&lease(2, 1).id);
    changed.extend(plan.put(record(3, 1)));
    passer.changed(changed).await;
    let removals: Vec<bool> = kernel.take_ops().iter().map(|op| matches!(op, Op::Remove(..))).collect();
    assert_eq!(removals, [false, false, false, true, true, true]);
}

#[tokio::test]
async fn devices_of_peers_leave_room_for_the_own_device() {
    let (mut plan, mut passer, kernel) = bench();
    passer.keep_all(true);
    // There is room for one device, and the plan needs two.
    let link = Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true };
    for n in 1..MAX_DEVICES {
        let seen = ObservedValue { value: Value::link(link.clone()), protocol: PROTOCOL, mark: true };
        kernel.disturb(Key::Link(name(&format!("flannel.{}", 200 + n))), Some(seen), false);
    }
    plan.put(record(2, 7));
    passer.full(&plan, Cause::Start).await.unwrap();
    let there = links(&kernel);
    assert!(there.contains(&"link flannel.1".to_owned()) && there.len() == MAX_DEVICES, "{there:?}");
}

/// The guard must not drop packets of a new peer, and no entry is removed before its replacement is written. This is true for changes of leases
/// and for full passes.
#[tokio::test]
async fn the_guard_accepts_a_new_peer_first_and_removals_come_last() {
    for by_full_pass in [false, true] {
        let (plan, mut passer, kernel) = bench();
        let mut plan = plan.with_tunnel_guard(true);
        plan.put(record(2, 1));
        passer.full(&plan, Cause::Start).await.unwrap();
        kernel.take_ops();
        let mut changed = plan.remove(&lease(2, 1).id);
        changed.extend(plan.put(record(3, 1)));
        if by_full_pass {
            passer.full(&plan, Cause::Audit).await.unwrap();
        } else {
            passer.changed(changed).await;
        }
        let ops = kernel.take_ops();
        let at = |wanted: &str| ops.iter().position(|op| op.to_string().starts_with(wanted));
        let kinds: Vec<&str> = ops.iter().map(|op| kind(&op.key())).collect();
        assert!(at("add fdb").is_some(), "{ops:?}");
        assert!(
            kinds.iter().position(|kind| *kind == "guard") < kinds.iter().position(|kind| *kind == "fdb"),
            "{ops:?}"
        );
        let removals: Vec<bool> = ops.iter().map(|op| matches!(op, Op::Remove(..))).collect();
        assert!(removals.is_sorted() && removals.contains(&true), "{ops:?}");
    }
}
