// SPDX-License-Identifier: Apache-2.0
//! The desired state, as contributions of leases to keys: adding or removing one lease re-evaluates its keys only.
//! Law: add A, add B, remove B = add A. Newest lease wins a link-layer entry (FDB, neighbour), oldest wins a route.
//!
//! Nearly every key has one contributor, which is stored inline; 50,000 peers of three keys each are what the layout is made for.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use weft_subnet::lease::{Age, Id};

use crate::packed::{Names, PackedKey, PackedValue};
use crate::state::{Key, State, Value};

/// The contributor of what is not a peer's: our own device, addresses and routes. It wins links and addresses. The slash keeps it
/// apart from every id of a store.
pub const OWN: &str = "/own";

/// A changed key: value before, value after.
pub type Changed = (Key, Option<Value>, Option<Value>);

/// Ours (false) before peers', then by age, then by id: total, so that the order of arrival decides nothing.
type Rank = (bool, Age, Id);

/// `Key -> contributions, ordered by lease age`.
#[derive(Debug, Default)]
pub struct Index {
    slots: HashMap<PackedKey, Slot>,
    names: Names,
    contributors: Contributors,
}

/// Who contributes, numbered: four bytes per entry instead of sixteen.
#[derive(Debug, Default)]
struct Contributors {
    numbers: HashMap<Id, u32>,
    rows: Vec<Option<Contributor>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Contributor {
    rank: Rank,
    keys: Box<[PackedKey]>,
}

#[derive(Debug)]
enum Slot {
    One(u32, PackedValue),
    /// Two or more; a shared device has as many as there are peers on it.
    Many(BTreeMap<Rank, (u32, PackedValue)>),
}

impl Contributors {
    fn rank(&self, number: u32) -> Option<&Rank> {
        self.rows.get(number as usize)?.as_ref().map(|row| &row.rank)
    }

    fn row(&self, id: &Id) -> Option<&Contributor> {
        self.rows.get(*self.numbers.get(id)? as usize)?.as_ref()
    }

    /// A number that nobody has, its row filled.
    fn add(&mut self, row: Contributor) -> u32 {
        let id = row.rank.2.clone();
        let number = self.free.pop().unwrap_or(self.rows.len() as u32);
        if number as usize == self.rows.len() {
            self.rows.push(None);
        }
        self.rows[number as usize] = Some(row);
        self.numbers.insert(id, number);
        number
    }

    fn remove(&mut self, id: &Id) -> Option<Contributor> {
        let number = self.numbers.remove(id)?;
        self.free.push(number);
        self.rows.get_mut(number as usize)?.take()
    }
}

impl Slot {
    /// The contribution that counts.
    fn winner(&self, key: &PackedKey) -> Option<(u32, &PackedValue)> {
        let all = match self {
            Slot::One(number, value) => return Some((*number, value)),
            Slot::Many(all) => all,
        };
        let best = if key.newest_wins() { all.last_key_value() } else { all.first_key_value() };
        best.map(|(_, (number, value))| (*number, value))
    }
}

impl Index {
    /// Replaces what this contributor wants (empty = removes it) and returns the keys whose winning value changed,
    /// with the value before and after.
    pub fn set(&mut self, id: &Id, age: &Age, state: State) -> Vec<Changed> {
        let rank = (**id != *OWN, age.clone(), id.clone());
        let Some(row) = self.contributors.row(id) else { return self.add(rank, state) };
        let old_keys = row.keys.clone();
        let old = old_keys.iter().filter_map(|key| self.names.unpack(key));
        let mut before: BTreeMap<Key, Option<Value>> =
            old.chain(state.keys().copied()).map(|key| (key, self.desired(&key))).collect();
        self.withdraw(id, &old_keys);
        if !state.is_empty() {
            let keys = state.keys().filter_map(|key| self.names.key(key)).collect();
            let number = self.contributors.add(Contributor { rank, keys });
            for (key, value) in state {
                let value = self.names.value(value);
                if let Some(key) = self.names.find(&key) {
                    self.contribute(number, key, value);
                }
            }
        }
        before.retain(|key, value| *value != self.desired(key));
        before.into_iter().map(|(key, value)| (key, value, self.desired(&key))).collect()
    }

    /// The contributions of someone new, who can change a key only where he contributes to it.
    fn add(&mut self, rank: Rank, state: State) -> Vec<Changed> {
        if state.is_empty() {
            return Vec::new();
        }
        let keys: Box<[PackedKey]> = state.keys().filter_map(|key| self.names.key(key)).collect();
        let number = self.contributors.add(Contributor { rank, keys });
        let mut changed = Vec::with_capacity(state.len());
        for (key, value) in state {
            let Some(packed) = self.names.find(&key) else { continue };
            let before = self.winner(&packed);
            let own = self.names.value(value);
            self.contribute(number, packed, own);
            let after = if before.is_none() { Some(value) } else { self.winner(&packed) };
            if before != after {
                changed.push((key, before, after));
            }
        }
        changed
    }

    fn withdraw(&mut self, id: &Id, keys: &[PackedKey]) {
        let Some(row) = self.contributors.remove(id) else { return };
        for key in keys {
            let Entry::Occupied(mut slot) = self.slots.entry(*key) else { continue };
            let Slot::Many(all) = slot.get_mut() else {
                slot.remove();
                continue;
            };
            all.remove(&row.rank);
            if all.len() == 1
                && let Some((_, (number, value))) = all.pop_first()
            {
                slot.insert(Slot::One(number, value));
            }
        }
    }

    fn contribute(&mut self, number: u32, key: PackedKey, value: PackedValue) {
        let contributors = &self.contributors;
        let rank_of = |number: u32| contributors.rank(number).cloned().unwrap_or_default();
        match self.slots.entry(key) {
            Entry::Vacant(slot) => {
                slot.insert(Slot::One(number, value));
            }
            Entry::Occupied(mut slot) => match slot.get_mut() {
                Slot::Many(all) => {
                    all.insert(rank_of(number), (number, value));
                }
                Slot::One(other, theirs) => {
                    let theirs = (*other, std::mem::replace(theirs, PackedValue::Addr));
                    let both = BTreeMap::from([(rank_of(theirs.0), theirs), (rank_of(number), (number, value))]);
                    slot.insert(Slot::Many(both));
                }
            },
        }
    }

    /// The winning value of a key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.winner(&self.names.find(key)?)
    }

    fn winner(&self, key: &PackedKey) -> Option<Value> {
        let (_, value) = self.slots.get(key)?.winner(key)?;
        self.names.unpack_value(value)
    }

    /// Who wins this key: for status and errors.
    pub fn owner(&self, key: &Key) -> Option<&Id> {
        let key = self.names.find(key)?;
        let (number, _) = self.slots.get(&key)?.winner(&key)?;
        self.contributors.rank(number).map(|(_, _, id)| id)
    }

    /// All keys that this contributor wants.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        let Some(row) = self.contributors.row(id) else { return Vec::new() };
        row.keys.iter().filter_map(|key| self.names.unpack(key)).collect()
    }

    /// Everything, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (Key, Value)> {
        let entry = |(key, slot): (&PackedKey, &Slot)| {
            Some((self.names.unpack(key)?, self.names.unpack_value(slot.winner(key)?.1)?))
        };
        self.slots.iter().filter_map(entry)
    }

    /// Everything, in key order.
    pub fn state(&self) -> State {
        self.iter().collect()
    }
}

#[cfg(test)]
mod tests;
