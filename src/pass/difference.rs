// SPDX-License-Identifier: Apache-2.0
//! The first half of a full pass: it reads the kernel and compares it with the plan. Nothing is written here, so `weft plan` uses the
//! same code to show what the next full pass would write.

use std::collections::{BTreeSet, HashMap};
use std::io;

use tokio::time::Instant;
use weft_backends::diff::{self, Op};
use weft_backends::state::{Key, Name, Observed, ObservedValue};

use super::Passer;
use super::devices::{Devices, on};
use crate::kernel::Kernel;
use crate::observe::preview::PreviewOp;
use crate::plan::Plan;

/// How the kernel differs from the plan.
pub(super) struct Difference {
    /// The operations that remove the difference, in the order in which they are written.
    pub ops: Vec<Op>,
    /// What the kernel contained.
    pub observed: Observed,
    /// New devices for which there is no room.
    pub crowded: BTreeSet<Name>,
    /// The comparison must be repeated after these operations, because they also remove or allow other entries.
    pub again: bool,
}

/// Returns the entries of WireGuard devices that are not as the plan wants them, with what the kernel has instead. `None` says that it has no such
/// entry.
pub fn wireguard_difference(plan: &Plan, observed: &Observed) -> HashMap<Key, Option<ObservedValue>> {
    let mut differing = HashMap::new();
    // Both are nearly always equal and in the same order, and this is compared every few seconds: so the next entry is tried first.
    let (mut next, mut found) = (observed.iter().peekable(), 0);
    for (key, value) in plan.wireguard_entries() {
        let seen = next.next_if(|(there, _)| **there == key).map(|(_, seen)| seen).or_else(|| observed.get(&key));
        found += usize::from(seen.is_some());
        if !seen.is_some_and(|seen| diff::agrees(&value, seen)) {
            differing.insert(key, seen.cloned());
        }
    }
    if found < observed.len() {
        for (key, seen) in observed.iter().filter(|(key, _)| plan.desired(key).is_none()) {
            differing.insert(*key, Some(seen.clone()));
        }
    }
    differing
}

impl<K: Kernel> Passer<K> {
    /// Returns what a full pass would write now, without writing it. A device that is created again takes its entries along; that a
    /// pass writes these entries again afterwards is not listed.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub fn preview(&mut self, plan: &Plan) -> io::Result<Vec<PreviewOp>> {
        let Difference { ops, observed, crowded, .. } = self.compare(plan, Instant::now())?;
        let ops = ops.into_iter().filter(|op| self.may_write(op, plan, &crowded));
        Ok(ops.map(|op| PreviewOp { before: observed.get(&op.key()).cloned(), op }).collect())
    }

    /// Reads the kernel and compares everything with the plan.
    pub(super) fn compare(&mut self, plan: &Plan, now: Instant) -> io::Result<Difference> {
        let mut watched: Vec<Name> = plan.watched_devices().collect();
        watched.extend(self.takeover.devices(&mut self.kernel)?);
        let observed = self.kernel.observe(&watched)?;
        self.devices = Devices::of(plan, &observed);
        self.takeover.update(&observed, plan);
        let (ownership, takeover) = (self.devices.ownership(plan), &self.takeover);
        let ops = plan.difference(&observed, |key, seen| ownership.ours(key, seen) || takeover.contains(key, seen));
        let ops = self.without_held_removals(ops, plan, now);
        let crowded = self.devices.crowded(plan, &ops);
        let makes_room = ops.iter().any(|op| matches!(op, Op::Remove(Key::Link(_), _)));
        let again = ops.iter().any(|op| matches!(op, Op::Recreate(..))) || (makes_room && !crowded.is_empty());
        Ok(Difference { ops, observed, crowded, again })
    }

    fn without_held_removals(&mut self, mut ops: Vec<Op>, plan: &Plan, now: Instant) -> Vec<Op> {
        if self.keep_stale_until.is_some_and(|until| now >= until) {
            self.keep_stale_until = None;
        }
        ops.retain(|op| !self.holds(op, plan));
        ops
    }

    /// Returns false for an operation on a device of another program, and on a device for which there is no room. An operation on this
    /// node's own device is always tried: if another agent has that device, [`Kernel::apply`] refuses the operation with a reason that
    /// status shows.
    pub(super) fn may_write(&self, op: &Op, plan: &Plan, crowded: &BTreeSet<Name>) -> bool {
        if !self.devices.permit(op) {
            return matches!(op.key(), Key::Link(_)) && plan.is_device_of_ours(&op.key());
        }
        matches!(op, Op::Remove(..)) || on(op).is_none_or(|name| !crowded.contains(&name))
    }
}
