// SPDX-License-Identifier: Apache-2.0
//! Names of devices, numbered, so that an entry names its device in four bytes instead of sixteen. A handful are in use, but a
//! lease that changes its VNI brings a new one each time: what nothing uses is forgotten.

use std::collections::{HashMap, HashSet};

use crate::state::Name;

/// The number of a device.
pub(crate) type Number = u32;

/// So many names are kept without a look at which of them are in use: twice as many as devices are wanted at once.
const FEW: usize = 64;

/// The devices that entries name.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    numbers: HashMap<Name, Number>,
    names: Vec<Option<Name>>,
    free: Vec<Number>,
    /// Names that were in use when that was looked at last.
    in_use: usize,
}

impl Devices {
    /// The number of this device, a new one if it has none yet.
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

    /// The number of this device, if it has one.
    pub(crate) fn find(&self, name: Name) -> Option<Number> {
        self.numbers.get(&name).copied()
    }

    /// The device of this number.
    pub(crate) fn name(&self, number: Number) -> Option<Name> {
        self.names.get(number as usize).copied().flatten()
    }

    /// True when there are so many names that it is worth to forget those that nothing uses: each such look at all entries is paid
    /// for by as many new names as are in use, [`FEW`] at least.
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

    /// How many are known.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }
}
