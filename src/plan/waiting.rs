// SPDX-License-Identifier: Apache-2.0
//! Leases that wait because there is no room for their devices.
//!
//! Whoever can write leases can make thousands of them wait. So the next lease that fits is found without a look at the others.

use std::collections::{BTreeMap, BTreeSet};

use weft_backends::state::Name;
use weft_subnet::lease::Id;

/// The leases that wait, with the devices that each of them needs.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    needed: BTreeMap<Id, Vec<Name>>,
    /// The same leases by the number of devices that they need.
    by_count: BTreeMap<usize, BTreeSet<Id>>,
    /// The same leases by each of the devices that they need.
    by_device: BTreeMap<Name, BTreeSet<Id>>,
    /// Number of leases that were examined so far.
    #[cfg(test)]
    pub examined: std::cell::Cell<usize>,
}

impl Waiting {
    /// Lets a lease wait until there is room for these devices.
    pub fn insert(&mut self, id: Id, devices: Vec<Name>) {
        self.remove(&id);
        self.by_count.entry(devices.len()).or_default().insert(id.clone());
        for device in &devices {
            self.by_device.entry(*device).or_default().insert(id.clone());
        }
        self.needed.insert(id, devices);
    }

    /// Removes a lease, because it is gone or no longer waits.
    pub fn remove(&mut self, id: &Id) {
        let Some(devices) = self.needed.remove(id) else { return };
        remove_from(&mut self.by_count, &devices.len(), id);
        for device in &devices {
            remove_from(&mut self.by_device, device, id);
        }
    }

    /// Returns true if this lease waits.
    pub fn contains(&self, id: &Id) -> bool {
        self.needed.contains_key(id)
    }

    /// Removes all leases.
    pub fn clear(&mut self) {
        *self = Waiting::default();
    }

    /// Returns a lease that needs at most `room` devices besides those that are `present`: among such leases of one kind the first by
    /// id. The kinds are the leases that need the same number of devices, and those that need a present device.
    ///
    /// All leases whose devices are present must have been removed before ([`Waiting::ready`]).
    pub fn first_that_fits(&self, present: &BTreeSet<Name>, room: usize) -> Option<&Id> {
        if room == 0 {
            return None;
        }
        let whole = self.by_count.range(..=room).filter_map(|(_, ids)| ids.first());
        let fits = |id: &&Id| self.missing(id, present) <= room;
        let shared = present.iter().filter_map(|device| self.by_device.get(device)?.iter().find(fits));
        whole.chain(shared).min()
    }

    /// Returns the leases that need one of the `new` devices and whose devices are all `present`.
    pub fn ready(&self, new: &[Name], present: &BTreeSet<Name>) -> Vec<Id> {
        let candidates: BTreeSet<&Id> = new.iter().filter_map(|device| self.by_device.get(device)).flatten().collect();
        candidates.into_iter().filter(|id| self.missing(id, present) == 0).cloned().collect()
    }

    /// Returns the devices that this lease needs.
    pub fn devices(&self, id: &Id) -> &[Name] {
        self.needed.get(id).map_or(&[], Vec::as_slice)
    }

    fn missing(&self, id: &Id, present: &BTreeSet<Name>) -> usize {
        #[cfg(test)]
        self.examined.set(self.examined.get() + 1);
        self.devices(id).iter().filter(|device| !present.contains(device)).count()
    }
}

fn remove_from<K: Ord>(index: &mut BTreeMap<K, BTreeSet<Id>>, key: &K, id: &Id) {
    if let Some(ids) = index.get_mut(key) {
        ids.remove(id);
        if ids.is_empty() {
            index.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<Name> {
        names.iter().map(|name| Name::new(name).unwrap()).collect()
    }

    #[test]
    fn a_lease_fits_if_the_room_is_enough_for_the_devices_that_are_not_present() {
        let mut waiting = Waiting::default();
        for (id, devices) in
            [("a", &["x", "y"][..]), ("b", &["x", "z"]), ("c", &["z"]), ("d", &["y"]), ("e", &["y", "z"])]
        {
            waiting.insert(id.into(), names(devices));
        }
        let first = |waiting: &Waiting, present: &[&str], room| {
            waiting.first_that_fits(&names(present).into_iter().collect(), room).map(|id| id.to_string())
        };
        assert_eq!(first(&waiting, &[], 0), None);
        assert_eq!(first(&waiting, &[], 1).unwrap(), "c");
        assert_eq!(first(&waiting, &[], 2).unwrap(), "a");
        assert_eq!(first(&waiting, &["x"], 1).unwrap(), "a", "one of its two devices is present");
        let present = names(&["x", "z"]);
        let ready = waiting.ready(&names(&["z"]), &present.iter().copied().collect());
        assert_eq!(
            ready.iter().map(|id| &**id).collect::<Vec<_>>(),
            ["b", "c"],
            "the device y, which e needs, is missing"
        );
        for id in ["a", "b", "c", "d", "e"] {
            waiting.remove(&id.into());
        }
        assert!(waiting.needed.is_empty() && waiting.by_count.is_empty() && waiting.by_device.is_empty());
    }
}
