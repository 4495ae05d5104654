// SPDX-License-Identifier: Apache-2.0
//! The desired state, as contributions of leases to keys: adding or removing one lease re-evaluates its keys only.
//! Law: add A, add B, remove B = add A. The newest lease wins a link-layer entry (FDB, neighbour), since a node that came back
//! has a newer lease; the oldest wins a route. Where the store assigns subnets, a node that comes back has the lease that it had:
//! there the oldest wins everything.
//!
//! 50,000 peers of three keys each are what the layout is made for.

use std::collections::{BTreeMap, HashMap};

use weft_subnet::lease::{Age, Id};

use crate::packed::{Names, PackedKey, PackedValue};
use crate::slots::{Rank, Slot, Slots};
use crate::state::{Key, State, Value};

/// The contributor of what is not a peer's: our own device, addresses and routes. It wins links and addresses. The slash keeps it
/// apart from every id of a store.
pub const OWN: &str = "/own";

/// A changed key: value before, value after.
pub type Changed = (Key, Option<Value>, Option<Value>);

/// `Key -> contributions, ordered by lease age`.
#[derive(Debug, Default)]
pub struct Index {
    slots: Slots,
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

impl Index {
    /// An empty index; `oldest_wins` = the oldest lease wins link-layer entries, too.
    pub fn new(oldest_wins: bool) -> Index {
        let mut index = Index::default();
        index.slots.oldest_wins = oldest_wins;
        index
    }

    /// Replaces what this contributor wants (empty = removes it) and returns the keys whose winning value changed,
    /// with the value before and after.
    pub fn set(&mut self, id: &Id, age: &Age, state: State) -> Vec<Changed> {
        if self.names.is_crowded() {
            self.names.keep(&self.slots.devices());
        }
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
            if before.is_none() {
                self.slots.put(packed, Slot::One(number, own));
                changed.push((key, None, Some(value)));
                continue;
            }
            self.contribute(number, packed, own);
            let after = self.winner(&packed);
            if before != after {
                changed.push((key, before, after));
            }
        }
        changed
    }

    fn withdraw(&mut self, id: &Id, keys: &[PackedKey]) {
        let Some(row) = self.contributors.remove(id) else { return };
        for key in keys {
            let Some(Slot::Many(mut all)) = self.slots.take(key) else { continue };
            all.remove(&row.rank);
            let slot = match all.len() {
                1 => all.pop_first().map(|(_, (number, value))| Slot::One(number, value)),
                _ => Some(Slot::Many(all)),
            };
            if let Some(slot) = slot {
                self.slots.put(*key, slot);
            }
        }
    }

    fn contribute(&mut self, number: u32, key: PackedKey, value: PackedValue) {
        let contributors = &self.contributors;
        let rank_of = |number: u32| contributors.rank(number).cloned().unwrap_or_default();
        let slot = match self.slots.take(&key) {
            None => Slot::One(number, value),
            Some(Slot::Many(mut all)) => {
                all.insert(rank_of(number), (number, value));
                Slot::Many(all)
            }
            Some(Slot::One(other, theirs)) => {
                Slot::Many(BTreeMap::from([(rank_of(other), (other, theirs)), (rank_of(number), (number, value))]))
            }
        };
        self.slots.put(key, slot);
    }

    /// The winning value of a key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.winner(&self.names.find(key)?)
    }

    fn winner(&self, key: &PackedKey) -> Option<Value> {
        let (_, value) = self.slots.winner(key)?;
        self.names.unpack_value(&value)
    }

    /// Who wins this key: for status and errors.
    pub fn owner(&self, key: &Key) -> Option<&Id> {
        let key = self.names.find(key)?;
        let (number, _) = self.slots.winner(&key)?;
        self.contributors.rank(number).map(|(_, _, id)| id)
    }

    /// Who keeps such a contribution of `id` from being the one that counts: another contributor who counts before it, and wants
    /// another value. Asked before or after it was made.
    pub fn beaten_by(&self, (key, value): (&Key, Value), id: &Id, age: &Age) -> Option<&Id> {
        let key = self.names.find(key)?;
        for (number, theirs) in self.slots.best_two(&key).into_iter().flatten() {
            let rank = self.contributors.rank(number)?;
            if rank.2 == *id {
                continue;
            }
            let ours = (**id != *OWN, age, id);
            let older = (rank.0, &rank.1, &rank.2) < ours;
            let counts = older != self.slots.newest_wins(&key);
            return (counts && self.names.unpack_value(&theirs)? != value).then_some(&rank.2);
        }
        None
    }

    /// Who else than `id` contributes one of these two values to a key; asked when the value that counts has changed.
    pub fn holders(&self, key: &Key, values: [Value; 2], id: &Id) -> Vec<Id> {
        let Some(key) = self.names.find(key) else { return Vec::new() };
        let packed = values.map(|value| self.names.find_value(value));
        let [Some(one), Some(two)] = &packed else { return Vec::new() };
        let ids = self.slots.holders(&key, [one, two]).into_iter().filter_map(|n| Some(&self.contributors.rank(n)?.2));
        ids.filter(|other| *other != id).cloned().collect()
    }

    /// All keys that this contributor wants.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        let Some(row) = self.contributors.row(id) else { return Vec::new() };
        row.keys.iter().filter_map(|key| self.names.unpack(key)).collect()
    }

    /// Everything, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (Key, Value)> {
        self.slots.iter().filter_map(|(key, value)| Some((self.names.unpack(&key)?, self.names.unpack_value(&value)?)))
    }

    /// Everything, in key order.
    pub fn state(&self) -> State {
        self.iter().collect()
    }
}

#[cfg(test)]
mod tests;
