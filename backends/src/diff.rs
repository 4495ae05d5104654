// SPDX-License-Identifier: Apache-2.0
//! The difference between what should be in the kernel and what is there, as a value: one ordered list of operations.

use std::collections::BTreeSet;
use std::fmt;

use crate::owner::PROTOCOL;
use crate::state::{Key, Link, LinkKind, Name, Observed, Seen, State, Value};

/// One write to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Make this entry so: create it, or replace/alter it in place.
    Ensure(Key, Value),
    /// Delete the link and create it anew: a fixed attribute differs. The pass runs again afterwards.
    Recreate(Key, Value),
    /// Delete the entry; the value is what was observed (a kernel needs it for FDB and routes).
    Remove(Key, Value),
}

impl Op {
    /// The entry that it is about.
    pub fn key(&self) -> Key {
        match self {
            Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _) => *key,
        }
    }
}

impl fmt::Display for Op {
    /// For logs: `add route 10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, key, value) = match self {
            Op::Ensure(key, value) => ("add", key, value),
            Op::Recreate(key, value) => ("recreate", key, value),
            Op::Remove(key, value) => ("remove", key, value),
        };
        match value {
            Value::Addr | Value::Peer | Value::Open => write!(f, "{verb} {key}"),
            value => write!(f, "{verb} {key} {value}"),
        }
    }
}

/// What must be written to make `observed` equal to `desired`, in a safe order: links first and upwards in key order for
/// everything that is ensured, then removals downwards. Observed entries that are not desired are removed only where `ours` says so.
/// A re-created link takes its entries along: nothing on it is removed here, and what it should carry is found missing by the
/// next pass.
pub fn diff(desired: &State, observed: &Observed, ours: impl Fn(&Key, &Seen) -> bool) -> Vec<Op> {
    let all = desired.iter().map(|(key, value)| (*key, *value));
    difference(all, |key| desired.contains_key(key), observed, ours)
}

/// [`diff`] for who has the desired state in another form: all entries in any order, and a way to ask for one.
pub fn difference(
    desired: impl Iterator<Item = (Key, Value)>,
    is_desired: impl Fn(&Key) -> bool,
    observed: &Observed,
    ours: impl Fn(&Key, &Seen) -> bool,
) -> Vec<Op> {
    let wanted = |(key, value)| change(key, Some(value), observed.get(&key).copied(), false);
    let mut ops: Vec<Op> = desired.filter_map(wanted).collect();
    ops.sort_unstable_by_key(Op::key);
    let recreated: BTreeSet<Name> = ops.iter().filter_map(recreated).collect();
    let stale = |(key, seen): (&Key, &Seen)| {
        if is_desired(key) || !ours(key, seen) {
            return None;
        }
        let gone = device(key, &seen.value).is_some_and(|name| recreated.contains(&name));
        if gone { None } else { change(*key, None, Some(*seen), true) }
    };
    ops.extend(observed.iter().rev().filter_map(stale));
    ops
}

/// The same rules for one key: what must be written when it should be `desired` and is `seen`. `ours` says whether an entry that is
/// not desired may be removed.
pub fn change(key: Key, desired: Option<Value>, seen: Option<Seen>, ours: bool) -> Option<Op> {
    match (desired, seen) {
        (None, None) => None,
        (None, Some(seen)) => ours.then_some(Op::Remove(key, seen.value)),
        (Some(value), None) => Some(Op::Ensure(key, value)),
        (Some(value), Some(seen)) if equal(&value, &seen) => None,
        (Some(Value::Link(want)), Some(Seen { value: Value::Link(have), .. }))
            if !same_kind(&want.kind, &have.kind) =>
        {
            Some(Op::Recreate(key, Value::Link(want)))
        }
        (Some(value), Some(_)) => Some(Op::Ensure(key, value)),
    }
}

/// A route that says the same under another protocol number, and a link without our mark, are not equal: they are taken over, so
/// that they can be told as ours when they are stale one day. Whether it goes through a nexthop object is no difference.
fn equal(want: &Value, seen: &Seen) -> bool {
    match (want, &seen.value) {
        (Value::Link(want), Value::Link(have)) => same_link(want, have) && seen.mark,
        (Value::Route(want), Value::Route(have)) => want == have && seen.protocol == PROTOCOL,
        (want, have) => want == have,
    }
}

fn same_link(want: &Link, have: &Link) -> bool {
    same_kind(&want.kind, &have.kind)
        && want.mtu == have.mtu
        && want.up == have.up
        && want.learning == have.learning
        && (want.mac.is_none() || want.mac == have.mac)
}

/// An ipip device is one without regard to its parent: flannel's has none, and the route to the peer decides anyway. A takeover
/// must not re-create it.
fn same_kind(want: &LinkKind, have: &LinkKind) -> bool {
    match (want, have) {
        (LinkKind::Ipip { local: want, .. }, LinkKind::Ipip { local: have, .. }) => want == have,
        (want, have) => want == have,
    }
}

fn recreated(op: &Op) -> Option<Name> {
    match op {
        Op::Recreate(Key::Link(name), _) => Some(*name),
        _ => None,
    }
}

/// The interface that an entry lives and dies with.
pub fn device(key: &Key, value: &Value) -> Option<Name> {
    match (key, value) {
        (Key::Link(name) | Key::Addr(name, _) | Key::Fdb(name, _) | Key::Neigh(name, _), _) => Some(*name),
        (Key::Route(..), Value::Route(route)) => route.dev(),
        (Key::Route(..) | Key::Peer(_) | Key::Guard(_) | Key::Open(_) | Key::Fence(_), _) => None,
    }
}

#[cfg(test)]
mod tests;
