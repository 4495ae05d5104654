// SPDX-License-Identifier: Apache-2.0
//! Which devices a pass may touch: what a look at the kernel says of them, and what follows from it. No effects.

use std::collections::BTreeSet;

use weft_backends::diff::{self, Op};
use weft_backends::owner::{Ownership, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, Seen};

use crate::plan::{MOST_DEVICES, Plan};

/// The devices of the last look.
#[derive(Debug, Default)]
pub(super) struct Devices {
    /// All that were seen.
    present: BTreeSet<Name>,
    /// Those that bear our mark.
    marked: BTreeSet<Name>,
    /// Those with a name that we want, but which are not ours to touch: a peer asks for a device that somebody else made, or our
    /// own name is on another agent's device.
    strangers: BTreeSet<Name>,
}

impl Devices {
    /// What was seen of the devices that this plan is about, and of those that bear our mark.
    pub fn of(plan: &Plan, observed: &Observed) -> Devices {
        let mut devices = Devices::default();
        for (key, seen) in observed.iter() {
            let Key::Link(name) = key else { break };
            devices.present.insert(*name);
            if seen.mark {
                devices.marked.insert(*name);
            } else if !may_be_taken_over(plan, key, seen) {
                devices.strangers.insert(*name);
            }
        }
        devices
    }

    /// Whose entries are whose. What stands on somebody else's device is not ours, whatever its name.
    pub fn ownership(&self, plan: &Plan) -> Ownership {
        let mut ownership = plan.ownership(self.marked.iter().copied());
        ownership.devices.retain(|name| !self.strangers.contains(name));
        ownership
    }

    /// The devices that are not ours to touch.
    pub fn strangers(&self) -> &BTreeSet<Name> {
        &self.strangers
    }

    /// False for what would be done to somebody else's device.
    pub fn permit(&self, op: &Op) -> bool {
        self.strangers.is_empty() || on(op).is_none_or(|name| !self.strangers.contains(&name))
    }

    /// New devices of peers that the kernel has no room for: with those that bear our mark there would be more than
    /// [`MOST_DEVICES`], stale ones included. Our own devices come first.
    pub fn crowded(&self, plan: &Plan, ops: &[Op]) -> BTreeSet<Name> {
        let new = ops.iter().filter_map(|op| match op {
            Op::Ensure(Key::Link(name), _) if !self.present.contains(name) => Some(*name),
            _ => None,
        });
        let (own, peers): (Vec<Name>, Vec<Name>) = new.partition(|name| plan.is_own_device(&Key::Link(*name)));
        let room = MOST_DEVICES.saturating_sub(self.marked.len() + own.len());
        peers.into_iter().skip(room).collect()
    }

    /// How many bear our mark.
    pub fn len(&self) -> usize {
        self.marked.len()
    }
}

/// A device without our mark: flannel made our own one, perhaps; it makes no other VNI's. Another agent's mark says that it is not.
fn may_be_taken_over(plan: &Plan, key: &Key, seen: &Seen) -> bool {
    plan.is_own_device(key) && seen.protocol != PROTOCOL
}

/// The device that an operation is about.
pub(super) fn on(op: &Op) -> Option<Name> {
    let (Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value)) = op;
    diff::device(key, value)
}
