// SPDX-License-Identifier: Apache-2.0
//! The desired state, as contributions of leases to keys: adding or removing one lease re-evaluates its keys only.
//! Law: add A, add B, remove B = add A. The newest lease wins a link-layer entry (FDB, neighbour), since a node that came back
//! has a newer lease; the oldest wins a route. Where the store assigns subnets, a node that comes back has the lease that it had:
//! there the oldest wins everything.
//!
//! 50,000 peers of three keys each are normal. So devices are numbered in here, a contributor is a number, too, and nearly every key
//! has one contributor.

use std::collections::{BTreeMap, HashMap};

use weft_subnet::lease::{Age, Id};

use crate::devices::{Devices, Number};
use crate::state::{Key, State, Value};

/// The contributor of what is not a peer's: our own device, addresses and routes. It wins links and addresses. The slash keeps it
/// apart from every id of a store.
pub const OWN: &str = "/own";

/// So many leases at most share one entry. A node that got a new subnet has two leases for a while, perhaps three; without a bound
/// whoever writes leases could make every change of one of them a change of thousands.
pub const MOST_SHARERS: usize = 8;

/// Why a contribution is not in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beaten<'a> {
    /// This contributor counts first, and wants another value.
    By(&'a Id),
    /// [`MOST_SHARERS`] others count before it.
    Crowd,
}

/// A changed key: value before, value after.
pub type Changed = (Key, Option<Value>, Option<Value>);

/// Ours (false) before peers', then by age, then by id: total, so that the order of arrival decides nothing.
type Rank = (bool, Age, Id);

/// A contribution: the number of its contributor, and the value.
type Contribution = (u32, Value<Number>);

/// The contributions to one key.
#[derive(Debug)]
enum Slot {
    One(Contribution),
    /// Two or more; a shared device has as many as there are peers on it.
    #[allow(clippy::box_collection, reason = "a third of its size, and nearly every slot is the other variant")]
    Many(Box<BTreeMap<Rank, Contribution>>),
}

impl Slot {
    /// The contributions in the order in which they count.
    fn ranked(&self, newest: bool) -> Box<dyn Iterator<Item = &Contribution> + '_> {
        match self {
            Slot::One(one) => Box::new(std::iter::once(one)),
            Slot::Many(all) if newest => Box::new(all.values().rev()),
            Slot::Many(all) => Box::new(all.values()),
        }
    }

    /// The contribution that counts.
    fn winner(&self, newest: bool) -> Option<&Contribution> {
        match self {
            Slot::One(one) => Some(one),
            Slot::Many(all) if newest => all.values().next_back(),
            Slot::Many(all) => all.values().next(),
        }
    }
}

/// `Key -> contributions, ordered by lease age`.
#[derive(Debug, Default)]
pub struct Index {
    slots: BTreeMap<Key<Number>, Slot>,
    devices: Devices,
    contributors: Contributors,
    /// The oldest contribution counts everywhere, for link-layer entries, too.
    oldest_wins: bool,
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
    keys: Box<[Key<Number>]>,
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
        Index { oldest_wins, ..Index::default() }
    }

    /// Replaces what this contributor wants (empty = removes it) and returns the keys whose winning value changed,
    /// with the value before and after.
    pub fn set(&mut self, id: &Id, age: &Age, state: State) -> Vec<Changed> {
        if self.devices.are_crowded() {
            self.forget_devices();
        }
        let rank = (**id != *OWN, age.clone(), id.clone());
        if self.contributors.row(id).is_none() {
            return self.add(rank, state);
        }
        let mut before: BTreeMap<Key, Option<Value>> =
            self.keys(id).into_iter().chain(state.keys().copied()).map(|key| (key, self.desired(&key))).collect();
        self.withdraw(id);
        self.add(rank, state);
        before.retain(|key, value| *value != self.desired(key));
        before.into_iter().map(|(key, value)| (key, value, self.desired(&key))).collect()
    }

    /// The contributions of someone new, who can change a key only where he contributes to it.
    fn add(&mut self, rank: Rank, state: State) -> Vec<Changed> {
        if state.is_empty() {
            return Vec::new();
        }
        let keys = state.keys().filter_map(|key| key.with_device(|dev| Some(self.devices.number(dev)))).collect();
        let number = self.contributors.add(Contributor { rank, keys });
        let mut changed = Vec::with_capacity(state.len());
        for (key, value) in state {
            let Some(at) = key.with_device(|dev| Some(self.devices.number(dev))) else { continue };
            let Some(own) = value.clone().with_device(|dev| Some(self.devices.number(dev))) else { continue };
            let before = self.winner(&at);
            self.contribute(number, at, own);
            match before {
                None => changed.push((key, None, Some(value))),
                Some(before) => {
                    let after = self.winner(&at);
                    if after.as_ref() != Some(&before) {
                        changed.push((key, Some(before), after));
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

    /// Forgets the devices that no key and no value names, also of those that do not count now.
    fn forget_devices(&mut self) {
        let in_slot =
            |slot: &Slot| slot.ranked(false).filter_map(|(_, value)| value.device().copied()).collect::<Vec<_>>();
        let in_use = self.slots.iter().flat_map(|(key, slot)| in_slot(slot).into_iter().chain(key.device().copied()));
        let in_use = in_use.collect();
        self.devices.keep(&in_use);
    }

    fn newest_wins(&self, key: &Key<Number>) -> bool {
        !self.oldest_wins && key.is_link_layer()
    }

    fn at(&self, key: &Key) -> Option<Key<Number>> {
        key.with_device(|dev| self.devices.find(dev))
    }

    fn named(&self, value: &Value<Number>) -> Option<Value> {
        value.clone().with_device(|number| self.devices.name(number))
    }

    /// The winning value of a key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.winner(&self.at(key)?)
    }

    fn winner(&self, key: &Key<Number>) -> Option<Value> {
        let (_, value) = self.slots.get(key)?.winner(self.newest_wins(key))?;
        self.named(value)
    }

    /// Who wins this key: for status and errors.
    pub fn owner(&self, key: &Key) -> Option<&Id> {
        let key = self.at(key)?;
        let (number, _) = self.slots.get(&key)?.winner(self.newest_wins(&key))?;
        self.contributors.rank(*number).map(|(_, _, id)| id)
    }

    /// Who keeps such a contribution of `id` from being in force, if anybody does. Asked before or after the contribution was made.
    pub fn beaten_by(&self, (key, value): (&Key, &Value), id: &Id, age: &Age) -> Option<Beaten<'_>> {
        let key = self.at(key)?;
        let newest = self.newest_wins(&key);
        let ours = (**id != *OWN, age, id);
        let mut before = Vec::new();
        for (number, theirs) in self.slots.get(&key)?.ranked(newest).take(MOST_SHARERS + 1) {
            let rank = self.contributors.rank(*number)?;
            let older = (rank.0, &rank.1, &rank.2) < ours;
            if rank.2 != *id && older != newest {
                before.push((&rank.2, theirs));
            }
        }
        let (winner, theirs) = before.first()?;
        if before.len() >= MOST_SHARERS {
            return Some(Beaten::Crowd);
        }
        (self.named(theirs)? != *value).then_some(Beaten::By(winner))
    }

    /// The contributors who are looked at for this key, [`MOST_SHARERS`] at most, in the order in which they count, and whether each
    /// one's contribution is in force: it wants the same as the very first. With `without` it is as if this contributor had never
    /// been there.
    pub fn first(&self, key: &Key, without: Option<&Id>) -> Vec<(Id, bool)> {
        let Some((key, slot)) = self.at(key).and_then(|key| Some((key, self.slots.get(&key)?))) else {
            return Vec::new();
        };
        let ranked = slot.ranked(self.newest_wins(&key)).filter_map(|(number, value)| {
            let (_, _, id) = self.contributors.rank(*number)?;
            (Some(id) != without).then_some((id, value))
        });
        let mut first = ranked.take(MOST_SHARERS).peekable();
        let winner = first.peek().map(|(_, value)| *value);
        first.map(|(id, value)| (id.clone(), Some(value) == winner)).collect()
    }

    /// All keys that this contributor wants.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        let Some(row) = self.contributors.row(id) else { return Vec::new() };
        row.keys.iter().filter_map(|key| key.with_device(|number| self.devices.name(number))).collect()
    }

    /// Everything, in the order of kinds of keys.
    pub fn iter(&self) -> impl Iterator<Item = (Key, Value)> {
        self.slots.iter().filter_map(|(key, slot)| {
            let (_, value) = slot.winner(self.newest_wins(key))?;
            Some((key.with_device(|number| self.devices.name(number))?, self.named(value)?))
        })
    }

    /// Everything, in key order.
    pub fn state(&self) -> State {
        self.iter().collect()
    }
}

#[cfg(test)]
mod tests;
