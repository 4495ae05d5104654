// SPDX-License-Identifier: Apache-2.0
//! The difference between what should be in the kernel and what is there, as one ordered list of operations.

use std::collections::BTreeSet;
use std::fmt;

use crate::link::Difference;
use crate::owner::PROTOCOL;
use crate::state::{Key, Name, Observed, ObservedValue, State, Value};

/// One write to the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Op {
    /// Create this entry, or change it in place.
    Ensure(Key, Value),
    /// Delete the link and create it again, because an attribute differs that cannot be changed. Another pass follows.
    Recreate(Key, Value),
    /// Delete the entry. The value is the observed one, which the kernel needs for FDB entries and routes.
    Remove(Key, Value),
}

impl Op {
    /// Returns the key of the entry.
    pub fn key(&self) -> Key {
        match self {
            Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _) => *key,
        }
    }
}

impl fmt::Display for Op {
    /// Writes text for logs, such as `add route 10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink`.
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

/// Returns what must be written to make `observed` equal to `desired`, in a safe order: first what is created or changed, in the order of
/// keys, which begins with links, and then removals in the opposite order. Observed entries that are not desired are removed only if `ours`
/// returns true. The entries of a link that is created again go with the old link, so none of them is removed here. The next pass finds that
/// they are missing.
pub fn diff(desired: &State, observed: &Observed, ours: impl Fn(&Key, &ObservedValue) -> bool) -> Vec<Op> {
    let all = desired.iter().map(|(key, value)| (*key, value.clone()));
    difference(all, |key| desired.contains_key(key), observed, ours)
}

/// Does the same as [`diff`] for a desired state in another form: all entries in any order, and a function that returns one.
pub fn difference(
    desired: impl Iterator<Item = (Key, Value)>,
    is_desired: impl Fn(&Key) -> bool,
    observed: &Observed,
    ours: impl Fn(&Key, &ObservedValue) -> bool,
) -> Vec<Op> {
    let wanted = |(key, value)| change(key, Some(value), observed.get(&key).cloned(), false);
    let mut ops: Vec<Op> = desired.filter_map(wanted).collect();
    ops.sort_unstable_by_key(Op::key);
    let recreated: BTreeSet<Name> = ops.iter().filter_map(recreated).collect();
    let stale = |(key, seen): (&Key, &ObservedValue)| {
        if is_desired(key) || !ours(key, seen) {
            return None;
        }
        let gone = device(key, &seen.value).is_some_and(|name| recreated.contains(&name));
        if gone { None } else { change(*key, None, Some(seen.clone()), true) }
    };
    ops.extend(observed.iter().rev().filter_map(stale));
    ops
}

/// Puts operations in the order in which they are written: first what is created or changed, in the order of keys, and then removals in the
/// opposite order.
pub fn put_in_order(ops: &mut [Op]) {
    let is_removal = |op: &Op| matches!(op, Op::Remove(..));
    ops.sort_unstable_by(|one, two| match (is_removal(one), is_removal(two)) {
        (true, true) => two.key().cmp(&one.key()),
        (false, false) => one.key().cmp(&two.key()),
        (one, two) => one.cmp(&two),
    });
}

/// Applies the same rules to one key: returns what must be written if its value should be `desired` and is `seen`. `ours` is true if an entry
/// that is not desired may be removed.
pub fn change(key: Key, desired: Option<Value>, seen: Option<ObservedValue>, ours: bool) -> Option<Op> {
    match (desired, seen) {
        (None, None) => None,
        (None, Some(seen)) => ours.then_some(Op::Remove(key, seen.value)),
        (Some(value), None) => Some(Op::Ensure(key, value)),
        (Some(value), Some(seen)) => match compare(&value, &seen) {
            Difference::None => None,
            Difference::Alter => Some(Op::Ensure(key, value)),
            Difference::Recreate => Some(Op::Recreate(key, value)),
        },
    }
}

/// Compares what is wanted with what was observed. A route with another protocol number and a link without our mark differ. They are
/// written again, so that they are known as ours when they are stale one day. Whether a route uses a nexthop object makes no difference.
fn compare(want: &Value, seen: &ObservedValue) -> Difference {
    let equal = match (want, &seen.value) {
        (Value::Link(want), Value::Link(have)) => match want.compare(have) {
            Difference::None => seen.mark,
            difference => return difference,
        },
        (Value::WgPeer(want), Value::WgPeer(have)) => want.agrees(have),
        (Value::Route(want), Value::Route(have)) => want == have && seen.protocol == PROTOCOL,
        (want, have) => want == have,
    };
    if equal { Difference::None } else { Difference::Alter }
}

/// Returns true if the observed entry is as it is wanted.
pub fn agrees(want: &Value, seen: &ObservedValue) -> bool {
    compare(want, seen) == Difference::None
}

fn recreated(op: &Op) -> Option<Name> {
    match op {
        Op::Recreate(Key::Link(name), _) => Some(*name),
        _ => None,
    }
}

/// Returns the interface with which the entry is deleted.
pub fn device(key: &Key, value: &Value) -> Option<Name> {
    key.device().or(value.device()).copied()
}

#[cfg(test)]
mod tests;
