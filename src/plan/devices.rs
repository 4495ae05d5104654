// SPDX-License-Identifier: Apache-2.0
//! The devices in the plan: how many there may be, and which names are taken by devices that somebody else made.

use std::collections::BTreeSet;
use std::rc::Rc;

use weft_backends::diff;
use weft_backends::index::{Changed, OWN};
use weft_backends::state::{Key, Name, State, Value};
use weft_subnet::lease::{Id, Lease};

use super::Plan;

/// Leases of other VNIs and types bring devices; whoever writes leases must not fill the kernel with them.
pub const MOST_DEVICES: usize = 18;

impl Plan {
    /// The devices in the plan.
    pub fn devices(&self) -> impl Iterator<Item = Name> {
        self.devices.iter().copied()
    }

    /// The devices to look at: those in the plan, and those that peers would need if nobody else had made them.
    pub fn watched(&self) -> impl Iterator<Item = Name> {
        self.devices().chain(self.strangers.iter().copied())
    }

    /// True for the entries of our own device, without which the node is not ready.
    pub fn is_own_device(&self, key: &Key) -> bool {
        self.index.owner(key).is_some_and(|id| &**id == OWN)
    }

    /// These devices were made by somebody else: a lease that needs one of them is set aside, and one that needed a device that is
    /// no longer among them is planned again. True when the plan is another now: look at everything again.
    pub fn bar(&mut self, strangers: &BTreeSet<Name>) -> bool {
        // Our own name on somebody else's device is a fault of this node, not of its peers.
        let now: BTreeSet<Name> =
            strangers.iter().copied().filter(|name| !self.is_own_device(&Key::Link(*name))).collect();
        if now == self.strangers {
            return false;
        }
        self.strangers = now;
        let barred: Vec<Name> = self.strangers.intersection(&self.devices).copied().collect();
        for name in barred {
            // Without this device in its plan a lease no longer contributes to it: the next one is asked.
            while let Some(lease) = self.index.owner(&Key::Link(name)).and_then(|id| self.peers.get(id)).cloned() {
                self.plan_peer(&lease);
            }
        }
        let waiting: Vec<Rc<Lease>> = self.barred.keys().filter_map(|id| self.peers.get(id).cloned()).collect();
        for lease in waiting {
            self.plan_peer(&lease);
        }
        self.use_room();
        let needed: BTreeSet<Name> = self.barred.values().flatten().copied().collect();
        self.strangers.retain(|name| needed.contains(name));
        self.plan_guard();
        true
    }

    /// Leaves out of a peer's entries what must not be: what stands on somebody else's device, and all of it when there is no room
    /// for the device that it needs. Why, for people.
    pub(super) fn admit(&mut self, lease: &Lease, state: &mut State) -> Vec<String> {
        let mut reasons = Vec::new();
        self.barred.remove(&lease.id);
        self.no_room.remove(&lease.id);
        let links = |state: &State| -> Vec<Name> {
            state.keys().filter_map(|key| if let Key::Link(name) = key { Some(*name) } else { None }).collect()
        };
        let taken: Vec<Name> = links(state).into_iter().filter(|name| self.strangers.contains(name)).collect();
        if !taken.is_empty() {
            let stands = |key: &Key, value: &Value| diff::device(key, value).is_some_and(|name| taken.contains(&name));
            state.retain(|key, value| !stands(key, value));
            reasons.extend(taken.iter().map(|name| {
                format!("needs the device {name}, and there is one that was not made by this agent: it is not touched")
            }));
            self.barred.insert(lease.id.clone(), taken);
        }
        let new: Vec<Name> = links(state).into_iter().filter(|name| !self.devices.contains(name)).collect();
        if !self.has_room(&new) {
            self.no_room.insert(lease.id.clone(), new);
            state.clear();
            reasons.push(format!("needs a device of its own, and there are {} already", self.devices.len()));
        }
        reasons
    }

    /// A device went: leases that found no room for theirs are planned again, by id until the room is used up. The others are only
    /// looked at, because anybody who writes leases can make thousands of them wait.
    pub(super) fn use_room(&mut self) -> Vec<Changed> {
        let waiting: Vec<Id> = self.no_room.keys().cloned().collect();
        let mut changed = Vec::new();
        for id in waiting {
            if self.no_room.get(&id).is_some_and(|needed| self.has_room(needed))
                && let Some(lease) = self.peers.get(&id).cloned()
            {
                changed.extend(self.plan_peer(&lease));
            }
        }
        changed
    }

    /// Whether those of these devices that are not in the plan yet may be added to it.
    fn has_room(&self, needed: &[Name]) -> bool {
        let new = needed.iter().filter(|name| !self.devices.contains(name)).count();
        new == 0 || self.devices.len() + new <= MOST_DEVICES
    }

    pub(super) fn note_devices(&mut self, changed: &[Changed]) {
        for (key, _, after) in changed {
            if let Key::Link(name) = key {
                match after {
                    Some(_) => self.devices.insert(*name),
                    None => self.devices.remove(name),
                };
            }
        }
    }
}
