// SPDX-License-Identifier: Apache-2.0
//! The difference between what should be in the kernel and what is there, as a value: one ordered list of operations.

use crate::state::{Key, Observed, Seen, State, Value};

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

/// What must be written to make `observed` equal to `desired`, in a safe order: links first and upwards in key order for
/// everything that is ensured, then removals downwards. Observed entries that are not desired are removed only where `ours` says so.
pub fn diff(desired: &State, observed: &Observed, ours: impl Fn(&Key, &Seen) -> bool) -> Vec<Op> {
    let _ = (desired, observed, ours);
    Vec::new()
}
