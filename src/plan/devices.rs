// SPDX-License-Identifier: Apache-2.0
//! The devices in the plan: how many there may be, and which names are taken by devices of other programs.

use std::collections::BTreeSet;
use std::sync::Arc;

use weft_backends::diff;
use weft_backends::index::{Changed, OWN};
use weft_backends::link::Link;
use weft_backends::state::{Key, Name, State, Value};
use weft_backends::wireguard::WireGuardLink;
use weft_backends::wireguard_key::DeviceSecrets;
use weft_subnet::lease::{Id, Lease};

use super::Plan;

/// Maximum number of devices in the plan. A lease of another VNI or backend type needs a device of its own, and whoever can write leases
/// must not be able to fill the kernel with devices.
pub const MAX_DEVICES: usize = 18;

/// Why entries of a lease are left out of the plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceProblem {
    /// Another program made a device of this name.
    #[error("needs the device {0}, and there is one that was not made by this agent: it is not touched")]
    Foreign(Name),
    /// There are this many devices in the plan, and no more are allowed.
    #[error("needs a device of its own, and there are {0} already")]
    NoRoom(usize),
}

impl Plan {
    /// Iterates over the devices in the plan.
    pub fn devices(&self) -> impl Iterator<Item = Name> {
        self.devices.iter().copied()
    }

    /// Iterates over the WireGuard devices in the plan. The kernel does not announce changes of their entries.
    pub fn wireguard_devices(&self) -> impl Iterator<Item = Name> {
        self.devices().filter(|name| {
            let link = self.index.desired(&Key::Link(*name));
            matches!(link, Some(Value::Link(link)) if link.kind.of::<WireGuardLink>().is_some())
        })
    }

    /// Returns the secrets of this node's WireGuard devices, if one of its backends has any.
    pub fn secrets(&self) -> Option<DeviceSecrets> {
        self.backend.secrets(&self.host).or_else(|| self.extra_backends.secrets())
    }

    /// Returns the entries of WireGuard devices.
    pub fn wireguard_entries(&self) -> impl Iterator<Item = (Key, Value)> {
        self.index.iter().filter(|(key, _)| key.is_of_wireguard())
    }

    /// Iterates over the devices in the plan, as they should be.
    pub fn links(&self) -> impl Iterator<Item = (Name, Arc<Link>)> {
        self.devices.iter().filter_map(|name| match self.index.desired(&Key::Link(*name)) {
            Some(Value::Link(link)) => Some((*name, link)),
            _ => None,
        })
    }

    /// Iterates over the devices that a full pass reads: those in the plan, and those that peers need but other programs made.
    pub fn watched_devices(&self) -> impl Iterator<Item = Name> {
        self.devices().chain(self.foreign_devices.iter().copied())
    }

    /// Returns true for an entry of this node's own device. Without that device the node is not ready.
    pub fn is_own_device(&self, key: &Key) -> bool {
        self.index.winner(key).is_some_and(|id| &**id == OWN)
    }

    /// Sets which devices other programs made. A lease that needs one of them gets no entries on it. A lease that needed a device which
    /// is no longer among them is planned again. Returns true if the plan changed, so that a full pass is necessary.
    pub fn set_foreign_devices(&mut self, foreign: &BTreeSet<Name>) -> bool {
        // If this node's own device belongs to another program, that is a problem of this node and not of its peers.
        let now: BTreeSet<Name> =
            foreign.iter().copied().filter(|name| !self.is_device_of_ours(&Key::Link(*name))).collect();
        if now == self.foreign_devices {
            return false;
        }
        self.foreign_devices = now;
        let lost: Vec<Name> = self.foreign_devices.intersection(&self.devices).copied().collect();
        for name in lost {
            // A lease that is planned again no longer contributes to this device. Then the next lease that needs it owns it.
            while let Some(lease) = self.index.winner(&Key::Link(name)).and_then(|id| self.peers.get(id)).cloned() {
                self.plan_peer(&lease);
            }
        }
        let blocked: Vec<Id> = self.blocked.keys().cloned().collect();
        self.plan_again(&blocked);
        self.plan_waiting_leases();
        let needed: BTreeSet<Name> = self.blocked.values().flatten().copied().collect();
        self.foreign_devices.retain(|name| needed.contains(name));
        self.plan_guard();
        true
    }

    /// Removes from the entries of a lease those that must not be written, and returns the reasons.
    pub(super) fn remove_unwanted_devices(&mut self, lease: &Lease, state: &mut State) -> Vec<DeviceProblem> {
        let mut problems = self.remove_foreign_devices(lease, state);
        problems.extend(self.wait_for_room(lease, state));
        problems
    }

    /// Removes the entries on devices that other programs made.
    fn remove_foreign_devices(&mut self, lease: &Lease, state: &mut State) -> Vec<DeviceProblem> {
        self.blocked.remove(&lease.id);
        let foreign: Vec<Name> = links(state).into_iter().filter(|name| self.foreign_devices.contains(name)).collect();
        if foreign.is_empty() {
            return Vec::new();
        }
        state.retain(|key, value| diff::device(key, value).is_none_or(|name| !foreign.contains(&name)));
        self.blocked.insert(lease.id.clone(), foreign.clone());
        foreign.into_iter().map(DeviceProblem::Foreign).collect()
    }

    /// Removes all entries if there is no room for the new devices of this lease. Then the lease waits.
    fn wait_for_room(&mut self, lease: &Lease, state: &mut State) -> Option<DeviceProblem> {
        self.waiting.remove(&lease.id);
        let needed = links(state);
        let new = needed.iter().filter(|name| !self.devices.contains(name)).count();
        if new <= self.room() {
            return None;
        }
        self.waiting.insert(lease.id.clone(), needed);
        state.clear();
        Some(DeviceProblem::NoRoom(self.devices.len()))
    }

    /// Returns how many more devices the plan may have.
    fn room(&self) -> usize {
        MAX_DEVICES.saturating_sub(self.devices.len())
    }

    /// Plans leases that waited for room, until there is no more room for one of them. This is called when a device was removed from the
    /// plan.
    pub(super) fn plan_waiting_leases(&mut self) -> Vec<Changed> {
        let mut changed = Vec::new();
        while let Some(id) = self.waiting.first_that_fits(&self.devices, self.room()).cloned() {
            let new: Vec<Name> =
                self.waiting.devices(&id).iter().copied().filter(|name| !self.devices.contains(name)).collect();
            self.waiting.remove(&id);
            changed.extend(self.plan_again(std::slice::from_ref(&id)));
            if self.waiting.contains(&id) {
                break;
            }
            // Other leases may have waited for the same devices.
            let ready = self.waiting.ready(&new, &self.devices);
            changed.extend(self.plan_again(&ready));
        }
        changed
    }

    /// Plans these leases again.
    pub(super) fn plan_again(&mut self, ids: &[Id]) -> Vec<Changed> {
        let leases: Vec<Arc<Lease>> = ids.iter().filter_map(|id| self.peers.get(id).cloned()).collect();
        leases.iter().flat_map(|lease| self.plan_peer(lease)).collect()
    }

    /// Updates the set of devices after these changes of the plan.
    pub(super) fn update_devices(&mut self, changed: &[Changed]) {
        for Changed { key, after, .. } in changed {
            if let Key::Link(name) = key {
                match after {
                    Some(_) => self.devices.insert(*name),
                    None => self.devices.remove(name),
                };
            }
        }
    }
}

/// Returns the devices among these entries.
fn links(state: &State) -> Vec<Name> {
    state.keys().filter_map(|key| if let Key::Link(name) = key { Some(*name) } else { None }).collect()
}
