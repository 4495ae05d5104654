// SPDX-License-Identifier: Apache-2.0
//! The desired state, as contributions of leases to keys: adding or removing one lease re-evaluates its keys only.
//! Law: add A, add B, remove B = add A. Newest lease wins a link-layer entry (FDB, neighbour), oldest wins a route.
//!
//! Nearly every key has one contributor, which is stored inline; 50,000 peers of three keys each are what the layout is made for.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};

use weft_subnet::lease::{Age, Id};

use crate::state::{Key, Link, Route, State, Value};

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
    slots: HashMap<Key, Slot>,
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
    keys: Box<[Key]>,
}

#[derive(Debug)]
enum Slot {
    One(u32, Compact),
    /// Two or more; a shared device has as many as there are peers on it.
    Many(BTreeMap<Rank, (u32, Compact)>),
}

/// A [`Value`] with the big and rare one boxed.
#[derive(Debug, Clone, PartialEq)]
enum Compact {
    Link(Box<Link>),
    Addr,
    Fdb(std::net::IpAddr),
    Neigh(crate::state::Mac),
    Route(Route),
}

impl From<Value> for Compact {
    fn from(value: Value) -> Compact {
        match value {
            Value::Link(link) => Compact::Link(Box::new(link)),
            Value::Addr => Compact::Addr,
            Value::Fdb(ip) => Compact::Fdb(ip),
            Value::Neigh(mac) => Compact::Neigh(mac),
            Value::Route(route) => Compact::Route(route),
        }
    }
}

impl From<&Compact> for Value {
    fn from(compact: &Compact) -> Value {
        match compact {
            Compact::Link(link) => Value::Link(**link),
            Compact::Addr => Value::Addr,
            Compact::Fdb(ip) => Value::Fdb(*ip),
            Compact::Neigh(mac) => Value::Neigh(*mac),
            Compact::Route(route) => Value::Route(*route),
        }
    }
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
    fn winner(&self, key: &Key) -> Option<(u32, &Compact)> {
        let all = match self {
            Slot::One(number, value) => return Some((*number, value)),
            Slot::Many(all) => all,
        };
        let (number, value) = match key {
            Key::Fdb(..) | Key::Neigh(..) => all.last_key_value()?.1,
            Key::Route(..) | Key::Link(_) | Key::Addr(..) => all.first_key_value()?.1,
        };
        Some((*number, value))
    }
}

impl Index {
    /// Replaces what this contributor wants (empty = removes it) and returns the keys whose winning value changed,
    /// with the value before and after.
    pub fn set(&mut self, id: &Id, age: &Age, state: State) -> Vec<Changed> {
        let rank = (**id != *OWN, age.clone(), id.clone());
        let old_keys = self.contributors.row(id).map(|row| row.keys.clone()).unwrap_or_default();
        let mut before: BTreeMap<Key, Option<Value>> =
            old_keys.iter().chain(state.keys()).map(|key| (*key, self.desired(key))).collect();
        self.withdraw(id, &old_keys);
        if !state.is_empty() {
            let keys = state.keys().copied().collect();
            let number = self.contributors.add(Contributor { rank, keys });
            for (key, value) in state {
                self.contribute(number, key, value.into());
            }
        }
        before.retain(|key, value| *value != self.desired(key));
        before.into_iter().map(|(key, value)| (key, value, self.desired(&key))).collect()
    }

    fn withdraw(&mut self, id: &Id, keys: &[Key]) {
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

    fn contribute(&mut self, number: u32, key: Key, value: Compact) {
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
                    let theirs = (*other, std::mem::replace(theirs, Compact::Addr));
                    let both = BTreeMap::from([(rank_of(theirs.0), theirs), (rank_of(number), (number, value))]);
                    slot.insert(Slot::Many(both));
                }
            },
        }
    }

    /// The winning value of a key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.slots.get(key)?.winner(key).map(|(_, value)| value.into())
    }

    /// Who wins this key: for status and errors.
    pub fn owner(&self, key: &Key) -> Option<&Id> {
        let (number, _) = self.slots.get(key)?.winner(key)?;
        self.contributors.rank(number).map(|(_, _, id)| id)
    }

    /// All keys that this contributor wants.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        self.contributors.row(id).map(|row| row.keys.to_vec()).unwrap_or_default()
    }

    /// Everything, in key order.
    pub fn state(&self) -> State {
        self.slots.iter().filter_map(|(key, slot)| Some((*key, slot.winner(key)?.1.into()))).collect()
    }
}

#[cfg(test)]
mod tests;
