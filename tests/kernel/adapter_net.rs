// SPDX-License-Identifier: Apache-2.0
//! A namespace with an uplink, and the entries that the tests write.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value as Json;
use weft::kernel::{Kernel, LinuxKernel, LinuxOptions, Outcome};
use weft_backends::diff::Op;
use weft_backends::link::Link;
use weft_backends::state::{Key, Mac, Name, Route, Value};
use weft_backends::vxlan::VxlanLink;

pub use crate::namespace::{add_uplink, alone, bridge, ip, run};
use crate::patience::PATIENCE;

pub const PROTOCOL: u8 = 90;
pub const ALIAS: &str = "weft test";

/// Runs a test in a new namespace with lo, and the veth pair up0 (10.0.0.1/24, fd00::1/64) and far0. All are up.
pub fn in_namespace<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send) {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    });
}

/// Waits until the kernel has finished with the link-local address of up0, which takes a second or two. Until then the monitor reports at
/// any moment that the address has changed.
pub fn settled() {
    let deadline = Instant::now() + PATIENCE;
    // This route comes after the notification of the address.
    let is_local = || ip("-6 route show table local dev up0").contains("local fe80::");
    while !is_local() || ip("-6 addr show dev up0").contains("tentative") {
        assert!(Instant::now() < deadline, "{}", ip("-6 addr show dev up0"));
    }
}

pub fn json(program: &str, line: &str) -> Json {
    let text = run(program, line);
    if text.trim().is_empty() { Json::Array(Vec::new()) } else { serde_json::from_str(&text).unwrap() }
}

pub fn kernel(nexthop_objects: bool) -> LinuxKernel {
    let options = LinuxOptions { nexthop_objects, instance: 7, protocol: PROTOCOL, alias: ALIAS.into() };
    LinuxKernel::open(options).unwrap()
}

pub fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

pub fn mac(n: u32) -> Mac {
    let [a, b, c, d] = n.to_be_bytes();
    Mac([2, 0, a, b, c, d])
}

pub fn vxlan(v6: bool) -> (Key, Value) {
    vxlan_with(v6, |_, _| {})
}

/// Returns the device of [`vxlan`] with some changes.
pub fn vxlan_with(v6: bool, change: impl FnOnce(&mut Link, &mut VxlanLink)) -> (Key, Value) {
    let local = if v6 { "fd00::1" } else { "10.0.0.1" }.parse().unwrap();
    let mut kind = VxlanLink { vni: 1, port: 8472, parent: name("up0"), local, gbp: !v6, learning: false, ttl: 0 };
    let mtu = if v6 { 1430 } else { 1450 };
    let mut link = Link { kind: Arc::new(kind), mtu, mac: Some(mac(if v6 { 6 } else { 4 })), up: true };
    change(&mut link, &mut kind);
    link.kind = Arc::new(kind);
    (Key::Link(name(if v6 { "flannel-v6.1" } else { "flannel.1" })), Value::link(link))
}

/// Returns the attributes of an observed vxlan device.
pub fn seen_vxlan(value: &Value) -> (Link, VxlanLink) {
    let Value::Link(link) = value else { panic!("{value:?} is no device") };
    let kind = link.kind.of::<VxlanLink>().unwrap_or_else(|| panic!("{link} is no vxlan device"));
    (Link::clone(link), *kind)
}

pub fn fdb(dev: &str, n: u32, dst: &str) -> (Key, Value) {
    (Key::Fdb(name(dev), mac(n)), Value::Fdb(dst.parse().unwrap()))
}

pub fn neigh(dev: &str, addr: &str, n: u32) -> (Key, Value) {
    (Key::Neigh(name(dev), addr.parse().unwrap()), Value::Neigh(mac(n)))
}

pub fn via(net: &str, gateway: &str, dev: &str) -> (Key, Value) {
    let metric = if net.contains(':') { 1024 } else { 0 };
    let route = Route::Unicast { via: gateway.parse().unwrap(), dev: name(dev), onlink: true };
    (Key::Route(net.parse().unwrap(), metric), Value::Route(route))
}

/// Writes all entries, and asserts that all operations succeed.
pub fn put(kernel: &mut LinuxKernel, entries: &[(Key, Value)]) {
    let ops: Vec<Op> = entries.iter().map(|(k, v)| Op::Ensure(*k, v.clone())).collect();
    all_done(&ops, kernel.apply(&ops));
}

pub fn remove(kernel: &mut LinuxKernel, entries: &[(Key, Value)]) {
    let ops: Vec<Op> = entries.iter().map(|(k, v)| Op::Remove(*k, v.clone())).collect();
    all_done(&ops, kernel.apply(&ops));
}

pub fn all_done(ops: &[Op], outcomes: Vec<Outcome>) {
    assert_eq!(ops.len(), outcomes.len());
    for (op, outcome) in ops.iter().zip(outcomes) {
        assert_eq!(outcome, Outcome::Done, "{op:?}");
    }
}

pub fn nexthops() -> usize {
    json("ip", "-j nexthop").as_array().unwrap().len()
}
