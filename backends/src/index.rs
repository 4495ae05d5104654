// SPDX-License-Identifier: Apache-2.0
//! The desired state, as contributions of leases to keys. When a lease is added or removed, only its own keys are evaluated again.
//!
//! One law holds: after A and B were added and B was removed, the state is the same as after A alone was added. The newest lease wins a
//! link-layer entry (FDB, neighbour), because a node that came back has a newer lease. The oldest lease wins a route. If the store assigns
//! subnets, a node that comes back has its old lease, so the oldest lease wins everything.
//!
//! 50,000 peers with three keys each are normal. So devices and contributors are numbers in here, and a key with one contributor, as nearly
//! all have, needs no extra memory.

use std::collections::{BTreeMap, HashMap};

use weft_subnet::lease::{Age, Id};
use weft_subnet::old_defects::{Defect, is_back};

use crate::devices::{Devices, Number};
use crate::state::{Key, State, Value};

/// The contributor of our own device, addresses and routes. It wins links and addresses. No lease has an id that begins with a slash.
pub const OWN: &str = "/own";

/// So many contributors of one key count, the first ones in their order. A node that got a new subnet has two leases for a while, perhaps
/// three. Without this bound, a hostile writer of leases could make each change of one of them a change of thousands.
pub const MOST_CONTRIBUTORS: usize = 8;

/// Why a contribution is not in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beaten<'a> {
    /// This contributor comes first, and wants another value.
    By(&'a Id),
    /// [`MOST_CONTRIBUTORS`] others come before it.
    Crowd,
}

/// A changed entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// Its key.
    pub key: Key,
    /// The value before. `None` if it is new.
    pub before: Option<Value>,
    /// The value after. `None` if it is gone.
    pub after: Option<Value>,
}

impl Changed {
    /// Returns the changes in the order of keys, one for each key. If a key changed several times, the first value before and the last value
    /// after count. A key whose value is the same as before has no change: nothing is written.
    pub fn joined(mut all: Vec<Changed>) -> Vec<Changed> {
        // The sort is stable, so the changes of one key stay in their order.
        all.sort_by_key(|one| one.key);
        all.dedup_by(|later, first| {
            let is_same = later.key == first.key;
            if is_same {
                first.after = later.after.take();
            }
            is_same
        });
        all.retain(|one| one.before != one.after);
        all
    }
}

/// A contributor of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contributor {
    /// Its id.
    pub id: Id,
    /// Its contribution is in force, because it wants the same as the first contributor.
    pub is_in_force: bool,
}

/// The order of contributors: our own first, then by age, then by id. It is a total order, so the order of arrival does not matter.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    is_other: bool,
    age: Age,
    id: Id,
}

/// A contribution: the number of its contributor, and the value.
type Contribution = (u32, Value<Number>);

/// The contributions to one key.
#[derive(Debug)]
enum Slot {
    One(Contribution),
    /// Two or more. A shared device has one from each peer that needs it.
    #[allow(clippy::box_collection, reason = "a third of its size, and nearly every slot is the other variant")]
    Many(Box<BTreeMap<Rank, Contribution>>),
}

impl Slot {
    /// Returns the contributions in their order.
    fn ranked(&self, newest: bool) -> Box<dyn Iterator<Item = &Contribution> + '_> {
        match self {
            Slot::One(one) => Box::new(std::iter::once(one)),
            Slot::Many(all) if newest => Box::new(all.values().rev()),
            Slot::Many(all) => Box::new(all.values()),
        }
    }

    /// Returns the first contribution, which is in force.
    fn winner(&self, newest: bool) -> Option<&Contribution> {
        match self {
            Slot::One(one) => Some(one),
            Slot::Many(all) if newest => all.values().next_back(),
            Slot::Many(all) => all.values().next(),
        }
    }
}

/// The contributions to each key.
#[derive(Debug, Default)]
pub struct Index {
    slots: BTreeMap<Key<Number>, Slot>,
    devices: Devices,
    contributors: Contributors,
    /// True if the oldest contribution wins everywhere, also link-layer entries.
    oldest_wins: bool,
}

/// The contributors with their numbers. An entry needs four bytes for a number, and sixteen for an id.
#[derive(Debug, Default)]
struct Contributors {
    numbers: HashMap<Id, u32>,
    rows: Vec<Option<Row>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Row {
    rank: Rank,
    keys: Box<[Key<Number>]>,
}

impl Contributors {
    fn rank(&self, number: u32) -> Option<&Rank> {
        self.rows.get(number as usize)?.as_ref().map(|row| &row.rank)
    }

    fn row(&self, id: &Id) -> Option<&Row> {
        self.rows.get(*self.numbers.get(id)? as usize)?.as_ref()
    }

    /// Adds a contributor, and returns its number.
    fn add(&mut self, row: Row) -> u32 {
        let id = row.rank.id.clone();
        let number = self.free.pop().unwrap_or(self.rows.len() as u32);
        if number as usize == self.rows.len() {
            self.rows.push(None);
        }
        self.rows[number as usize] = Some(row);
        self.numbers.insert(id, number);
        number
    }

    fn remove(&mut self, id: &Id) -> Option<Row> {
        let number = self.numbers.remove(id)?;
        self.free.push(number);
        self.rows.get_mut(number as usize)?.take()
    }
}

impl Index {
    /// Returns an empty index. With `oldest_wins`, the oldest lease wins link-layer entries, too.
    pub fn new(oldest_wins: bool) -> Index {
        Index { oldest_wins, ..Index::default() }
    }

    /// Replaces everything that this contributor wants, and returns the keys whose winning value changed, with the value before and after.
    /// An empty state removes the contributor.
    pub fn set(&mut self, id: &Id, age: &Age, state: State) -> Vec<Changed> {
        if self.devices.are_crowded() {
            self.forget_devices();
        }
        let rank = Rank { is_other: **id != *OWN, age: age.clone(), id: id.clone() };
        if self.contributors.row(id).is_none() {
            return self.add(rank, state);
        }
        let mut before: BTreeMap<Key, Option<Value>> =
            self.keys(id).into_iter().chain(state.keys().copied()).map(|key| (key, self.desired(&key))).collect();
        self.withdraw(id);
        self.add(rank, state);
        before.retain(|key, value| *value != self.desired(key));
        let changed = |(key, before)| Changed { key, before, after: self.desired(&key) };
        before.into_iter().map(changed).collect()
    }

    /// Adds the contributions of a new contributor, which can change only the keys of this state.
    fn add(&mut self, rank: Rank, state: State) -> Vec<Changed> {
        if state.is_empty() {
            return Vec::new();
        }
        let keys = state.keys().filter_map(|key| key.with_device(|dev| Some(self.devices.number(dev)))).collect();
        let number = self.contributors.add(Row { rank, keys });
        let mut changed = Vec::with_capacity(state.len());
        for (key, value) in state {
            let Some(at) = key.with_device(|dev| Some(self.devices.number(dev))) else { continue };
            let Some(own) = value.clone().with_device(|dev| Some(self.devices.number(dev))) else { continue };
            let before = self.desired_at(&at);
            self.contribute(number, at, own);
            match before {
                None => changed.push(Changed { key, before: None, after: Some(value) }),
                Some(before) => {
                    let after = self.desired_at(&at);
                    if after.as_ref() != Some(&before) {
                        changed.push(Changed { key, before: Some(before), after });
                    }
                }
            }
        }
        changed
    }

    fn withdraw(&mut self, id: &Id) {
        let Some(row) = self.contributors.remove(id) else { return };
        for key in &row.keys {
            let Some(Slot::Many(mut all)) = self.slots.remove(key) else { continue };
            all.remove(&row.rank);
            let slot = match all.len() {
                1 => all.pop_first().map(|(_, one)| Slot::One(one)),
                _ => Some(Slot::Many(all)),
            };
            if let Some(slot) = slot {
                self.slots.insert(*key, slot);
            }
        }
    }

    fn contribute(&mut self, number: u32, key: Key<Number>, value: Value<Number>) {
        let contributors = &self.contributors;
        let rank_of = |number: u32| contributors.rank(number).cloned().unwrap_or_default();
        let slot = match self.slots.remove(&key) {
            None => Slot::One((number, value)),
            Some(Slot::Many(mut all)) => {
                all.insert(rank_of(number), (number, value));
                Slot::Many(all)
            }
            Some(Slot::One(other)) => {
                let all = [(rank_of(other.0), other), (rank_of(number), (number, value))];
                Slot::Many(Box::new(BTreeMap::from(all)))
            }
        };
        self.slots.insert(key, slot);
    }

    /// Forgets the devices that no key and no value names. Contributions that are not in force count, too.
    fn forget_devices(&mut self) {
        let in_slot =
            |slot: &Slot| slot.ranked(false).filter_map(|(_, value)| value.device().copied()).collect::<Vec<_>>();
        let in_use = self.slots.iter().flat_map(|(key, slot)| in_slot(slot).into_iter().chain(key.device().copied()));
        let in_use = in_use.collect();
        self.devices.keep(&in_use);
    }

    fn newest_wins(&self, key: &Key<Number>) -> bool {
        (!self.oldest_wins || is_back(Defect::CopiedMacsBelieved)) && key.is_link_layer()
    }

    fn at(&self, key: &Key) -> Option<Key<Number>> {
        key.with_device(|dev| self.devices.find(dev))
    }

    fn named(&self, value: &Value<Number>) -> Option<Value> {
        value.clone().with_device(|number| self.devices.name(number))
    }

    /// Returns the winning value of a key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.desired_at(&self.at(key)?)
    }

    fn desired_at(&self, key: &Key<Number>) -> Option<Value> {
        let (_, value) = self.slots.get(key)?.winner(self.newest_wins(key))?;
        self.named(value)
    }

    /// Returns the first contributor of a key, whose value is the desired one.
    pub fn winner(&self, key: &Key) -> Option<&Id> {
        let key = self.at(key)?;
        let (number, _) = self.slots.get(&key)?.winner(self.newest_wins(&key))?;
        self.contributors.rank(*number).map(|rank| &rank.id)
    }

    /// Returns why such a contribution of `id` is not in force, or would not be. `None` if it is.
    pub fn beaten_by(&self, (key, value): (&Key, &Value), id: &Id, age: &Age) -> Option<Beaten<'_>> {
        if is_back(Defect::CopiedMacsBelieved) {
            return None;
        }
        let key = self.at(key)?;
        let newest = self.newest_wins(&key);
        let ours = (**id != *OWN, age, id);
        let mut before = Vec::new();
        for (number, theirs) in self.slots.get(&key)?.ranked(newest).take(MOST_CONTRIBUTORS + 1) {
            let rank = self.contributors.rank(*number)?;
            let older = (rank.is_other, &rank.age, &rank.id) < ours;
            if rank.id != *id && older != newest {
                before.push((&rank.id, theirs));
            }
        }
        let (winner, theirs) = before.first()?;
        if before.len() >= MOST_CONTRIBUTORS {
            return Some(Beaten::Crowd);
        }
        (self.named(theirs)? != *value).then_some(Beaten::By(winner))
    }

    /// Returns the first contributors of this key in their order, at most [`MOST_CONTRIBUTORS`]. The contributor `without` is left out, as
    /// if it had never been there.
    pub fn first(&self, key: &Key, without: Option<&Id>) -> Vec<Contributor> {
        let Some((key, slot)) = self.at(key).and_then(|key| Some((key, self.slots.get(&key)?))) else {
            return Vec::new();
        };
        let ranked = slot.ranked(self.newest_wins(&key)).filter_map(|(number, value)| {
            let id = &self.contributors.rank(*number)?.id;
            (Some(id) != without).then_some((id, value))
        });
        let mut first = ranked.take(MOST_CONTRIBUTORS).peekable();
        let winner = first.peek().map(|(_, value)| *value);
        first.map(|(id, value)| Contributor { id: id.clone(), is_in_force: Some(value) == winner }).collect()
    }

    /// Returns all keys that this contributor wants.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        let Some(row) = self.contributors.row(id) else { return Vec::new() };
        row.keys.iter().filter_map(|key| key.with_device(|number| self.devices.name(number))).collect()
    }

    /// Returns all entries. Keys of one kind follow each other.
    pub fn iter(&self) -> impl Iterator<Item = (Key, Value)> {
        self.slots.iter().filter_map(|(key, slot)| {
            let (_, value) = slot.winner(self.newest_wins(key))?;
            Some((key.with_device(|number| self.devices.name(number))?, self.named(value)?))
        })
    }

    /// Returns all entries in the order of keys.
    pub fn state(&self) -> State {
        self.iter().collect()
    }
}

#[cfg(test)]
mod tests;
