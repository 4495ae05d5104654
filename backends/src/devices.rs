// SPDX-License-Identifier: Apache-2.0
//! Numbers for the names of devices, so that an entry names its device in four bytes instead of sixteen. Few devices are in use. But a lease
//! that changes its VNI brings a new one each time, so names that nothing uses are forgotten.

use std::collections::{HashMap, HashSet};

use crate::name::Name;

/// The number of a device.
pub(crate) type Number = u32;

/// The number of names that are kept without a check of which of them are in use.
const FEW: usize = 64;

/// The devices that entries name.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    numbers: HashMap<Name, Number>,
    names: Vec<Option<Name>>,
    free: Vec<Number>,
    /// The number of names that were in use at the last check.
    in_use: usize,
}

impl Devices {
    /// Returns the number of this device. It gets one if it has none.
    pub(crate) fn number(&mut self, name: Name) -> Number {
        if let Some(number) = self.numbers.get(&name) {
            return *number;
        }
        let number = self.free.pop().unwrap_or(self.names.len() as Number);
        match self.names.get_mut(number as usize) {
            Some(place) => *place = Some(name),
            None => self.names.push(Some(name)),
        }
        self.numbers.insert(name, number);
        number
    }

    /// Returns the number of this device, if it has one.
    pub(crate) fn find(&self, name: Name) -> Option<Number> {
        self.numbers.get(&name).copied()
    }

    /// Returns the device with this number.
    pub(crate) fn name(&self, number: Number) -> Option<Name> {
        self.names.get(number as usize).copied().flatten()
    }

    /// Returns true if there are so many names that those which nothing uses should be forgotten. Each such check of all entries comes only
    /// after as many new names as are in use, and at least [`FEW`].
    pub(crate) fn are_crowded(&self) -> bool {
        self.numbers.len() > FEW.max(2 * self.in_use)
    }

    /// Forgets all devices but these.
    pub(crate) fn keep(&mut self, used: &HashSet<Number>) {
        self.numbers.retain(|_, number| used.contains(number));
        for (number, place) in (0..).zip(&mut self.names) {
            if !used.contains(&number) && place.take().is_some() {
                self.free.push(number);
            }
        }
        self.in_use = self.numbers.len();
    }

    /// Returns the number of names.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }
}
