// SPDX-License-Identifier: Apache-2.0
//! Compares the kernel in memory, which the tests of the agent use, with Linux. Both carry out the same random operations, and must give the
//! same answers.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use weft::kernel::fake::FakeKernel;
use weft::kernel::{Kernel, Outcome};
use weft_backends::diff::Op;
use weft_backends::link::Difference;
use weft_backends::state::{Guard, Key, LAST_METRIC, Name, Observed, Route, Value};
use weft_subnet::cidr::Family;

use super::adapter_net::{PROTOCOL, fdb, in_namespace, kernel, name, neigh, via, vxlan_with};

const DEVICES: [&str; 2] = ["flannel.1", "flannel-v6.1"];
/// The number of cases. Each has a new namespace and takes about 50 ms.
const CASES: u32 = 40;

/// A random operation. There are few different entries, so that operations often concern the same one. `what` is the type of the entry,
/// `which` chooses one of this type, and `value` its value.
#[derive(Debug, Clone, Copy)]
struct Step {
    remove: bool,
    what: u8,
    which: u8,
    value: u8,
    v6: bool,
}

fn steps() -> impl Strategy<Value = Vec<Vec<Step>>> {
    let step = (prop::bool::weighted(0.3), 0..10_u8, 0..3_u8, 0..2_u8, any::<bool>());
    let step = step.prop_map(|(remove, what, which, value, v6)| Step { remove, what, which, value, v6 });
    prop::collection::vec(prop::collection::vec(step, 1..12), 1..6)
}

/// Returns the entry of an operation.
fn entry(step: Step) -> (Key, Value) {
    let Step { which, value, v6, .. } = step;
    let dev = DEVICES[usize::from(v6)];
    let public = if v6 { format!("fd00::{}", 2 + value) } else { format!("10.0.0.{}", 2 + value) };
    let first = if v6 { format!("fd00:{}::", 2 + which) } else { format!("10.1.{}.0", 2 + which) };
    let net = if v6 { format!("{first}/64") } else { format!("{first}/24") };
    let last = |route| (Key::Route(net.parse().unwrap(), LAST_METRIC), Value::Route(route));
    match step.what {
        0 => link(step),
        1 => {
            let own = if v6 { format!("fd00:1::{which}/128") } else { format!("10.1.0.{which}/32") };
            (Key::Addr(name(dev), own.parse().unwrap()), Value::Addr)
        }
        2 => fdb(dev, 70 + u32::from(which), &public),
        3 => neigh(dev, &first, 80 + u32::from(value)),
        4 if value == 0 => via(&net, &first, dev),
        4 => via(&net, &public, "up0"),
        5 => {
            let (Key::Route(net, metric), _) = via(&net, &public, "up0") else { panic!("not a route") };
            (Key::Route(net, metric), Value::Route(Route::Device { dev: name("up0") }))
        }
        6 => last(Route::Blackhole),
        7 => last(Route::Unreachable),
        8 => (Key::Peer(public.parse::<IpAddr>().unwrap()), Value::Peer),
        _ => {
            let family = if v6 { Family::V6 } else { Family::V4 };
            let ports = if value == 0 { [0, 8472] } else { [4789, 8472] };
            (Key::Guard(family), Value::Guard(Guard { ports, ipip: !v6 && which == 0 }))
        }
    }
}

/// Returns a device. `value` decides about attributes that can be changed in place, `which` about those that need a new device.
fn link(step: Step) -> (Key, Value) {
    vxlan_with(step.v6, |link, vxlan| {
        link.mtu -= 10 * u32::from(step.value);
        vxlan.learning = step.value == 1;
        vxlan.ttl = step.value;
        vxlan.port += u16::from(step.which == 2);
    })
}

/// Returns the operation as the plan would make it: a link with other fixed attributes is re-created, and an entry is removed with the
/// value that it has.
fn op(step: Step, there: &BTreeMap<Key, Value>) -> Op {
    let (key, value) = entry(step);
    let found = there.get(&key).cloned();
    match (step.remove, &value, found) {
        (true, _, found) => Op::Remove(key, found.unwrap_or(value)),
        (false, Value::Link(new), Some(Value::Link(old))) if new.compare(&old) == Difference::Recreate => {
            Op::Recreate(key, value)
        }
        _ => Op::Ensure(key, value),
    }
}

/// Returns what is the same in both. Linux adds connected routes, and marks routes with nexthop objects.
fn comparable(seen: &Observed) -> BTreeMap<Key, (Value, u8, bool)> {
    let ours = seen.iter().filter(|(key, seen)| !matches!(key, Key::Route(..)) || seen.protocol == PROTOCOL);
    ours.map(|(key, seen)| (*key, (seen.value.clone(), seen.protocol, seen.mark && matches!(key, Key::Link(_)))))
        .collect()
}

/// Returns the kinds of the outcomes. Their texts are for people and may differ.
fn kinds(outcomes: &[Outcome]) -> Vec<&'static str> {
    let kind = |outcome: &Outcome| match outcome {
        Outcome::Done => "done",
        Outcome::Retry(_) => "retry",
        Outcome::Fatal(_) => "fatal",
        Outcome::Partly { .. } => "partly",
    };
    outcomes.iter().map(kind).collect()
}

fn compare(lists: &[Vec<Step>], objects: bool) -> Result<(), TestCaseError> {
    let mut result = Ok(());
    in_namespace(|| async { result = compare_here(lists, objects) });
    result
}

fn compare_here(lists: &[Vec<Step>], objects: bool) -> Result<(), TestCaseError> {
    let devices: Vec<Name> = DEVICES.map(name).to_vec();
    let mut linux = kernel(objects);
    let fake = FakeKernel::new(linux.machine().unwrap(), PROTOCOL);
    let mut fake = if objects { fake } else { fake.without_nexthop_objects() };
    for list in lists {
        // The operations of a list are made from the entries before it, as those of a pass are.
        let there: BTreeMap<Key, Value> = fake.entries().iter().map(|(key, seen)| (*key, seen.value.clone())).collect();
        let mut ops: Vec<Op> = Vec::new();
        for step in list {
            // A plan has at most one operation for each entry.
            let op = op(*step, &there);
            if !ops.iter().any(|other| other.key() == op.key()) {
                ops.push(op);
            }
        }
        let (real, made_up) = (linux.apply(&ops), fake.apply(&ops));
        prop_assert_eq!(kinds(&real), kinds(&made_up), "{:?} of Linux, {:?} in memory: {:#?}", real, made_up, ops);
        let (real, made_up) = (linux.observe(&devices).unwrap(), fake.observe(&devices).unwrap());
        prop_assert_eq!(comparable(&real), comparable(&made_up), "after {:#?}", ops);
    }
    Ok(())
}

/// A failure prints its seed. `WEFT_SEED=N` runs its operations again.
#[test]
fn the_same_operations_leave_the_same_entries_in_linux_and_in_memory() {
    let given = std::env::var_os("WEFT_SEED").and_then(|text| text.to_str()?.parse().ok());
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
    let seed: u32 = given.unwrap_or_else(now);
    println!("WEFT_SEED={seed}");
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config { cases: CASES, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, rng);
    let done = runner.run(&(steps(), any::<bool>()), |(lists, objects)| compare(&lists, objects));
    if let Err(error) = done {
        panic!("WEFT_SEED={seed}: {error}");
    }
}
