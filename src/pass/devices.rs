// SPDX-License-Identifier: Apache-2.0
//! Which devices a pass may change. This is decided from what the last full pass found in the kernel, without any effects.

use std::collections::{BTreeMap, BTreeSet};

use weft_backends::diff::{self, Op};
use weft_backends::owner::{Ownership, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_subnet::old_defects::{Defect, is_back};

use crate::plan::{MAX_DEVICES, Plan};

/// The devices that the last full pass found.
#[derive(Debug, Default)]
pub(super) struct Devices {
    /// All devices that the kernel reported.
    present: BTreeSet<Name>,
    /// The devices that bear our mark.
    marked: BTreeSet<Name>,
    /// The devices that have a name which the plan needs, but that weft must not change: another program made a device that a peer
    /// needs, or this node's own device belongs to another agent.
    foreign: BTreeSet<Name>,
}

impl Devices {
    /// Sorts out the devices in `observed`: those that this plan is about, and those that bear our mark. What flannel left is neither.
    pub fn of(plan: &Plan, observed: &Observed) -> Devices {
        let mut devices = Devices::default();
        let watched: BTreeSet<Name> = plan.watched_devices().collect();
        for (key, seen) in observed.iter() {
            let Key::Link(name) = key else { break };
            devices.present.insert(*name);
            if seen.mark {
                devices.marked.insert(*name);
            } else if watched.contains(name) && !may_be_taken_over(plan, key, seen) {
                devices.foreign.insert(*name);
            }
        }
        devices
    }

    /// Returns the rules that tell our entries from those of other programs. An entry on a foreign device is not ours, whatever the name
    /// of the device.
    pub fn ownership(&self, plan: &Plan) -> Ownership {
        let mut ownership = plan.ownership(self.marked.iter().copied());
        ownership.devices.retain(|name| !self.foreign.contains(name));
        ownership
    }

    /// Returns the devices that weft must not change.
    pub fn foreign(&self) -> &BTreeSet<Name> {
        &self.foreign
    }

    /// Returns the UDP ports on which the WireGuard devices of this plan listen. A foreign device is not ours.
    pub fn listening(&self, plan: &Plan, observed: &Observed) -> BTreeMap<Name, u16> {
        let port = |name: Name| match &observed.get(&Key::Link(name))?.value {
            Value::Link(link) => Some((name, link.listening_port()?)),
            _ => None,
        };
        plan.wireguard_devices().filter(|name| !self.foreign.contains(name)).filter_map(port).collect()
    }

    /// Returns false for an operation on a foreign device.
    pub fn permit(&self, op: &Op) -> bool {
        self.foreign.is_empty() || on(op).is_none_or(|name| !self.foreign.contains(&name))
    }

    /// Returns new devices of peers for which there is no room: together with all devices that bear our mark, also those that are no
    /// longer needed, there would be more than [`MAX_DEVICES`]. This node's own devices come first.
    pub fn crowded(&self, plan: &Plan, ops: &[Op]) -> BTreeSet<Name> {
        let new = ops.iter().filter_map(|op| match op {
            Op::Ensure(Key::Link(name), _) if !self.present.contains(name) => Some(*name),
            _ => None,
        });
        let (own, peers): (Vec<Name>, Vec<Name>) = new.partition(|name| plan.is_device_of_ours(&Key::Link(*name)));
        let room = MAX_DEVICES.saturating_sub(self.marked.len() + own.len());
        peers.into_iter().skip(room).collect()
    }

    /// Returns how many devices bear our mark.
    pub fn len(&self) -> usize {
        self.marked.len()
    }
}

/// Returns true for a device without our mark that weft may take over. That is this node's own device, because flannel may have made it.
/// flannel makes no device of another VNI. A device with the mark of another agent is never taken over.
fn may_be_taken_over(plan: &Plan, key: &Key, seen: &ObservedValue) -> bool {
    is_back(Defect::ForeignDevicesSeized) || (plan.is_device_of_ours(key) && seen.protocol != PROTOCOL)
}

/// Returns the device that an operation changes, or on which its entry is.
pub(super) fn on(op: &Op) -> Option<Name> {
    let (Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value)) = op;
    diff::device(key, value)
}
