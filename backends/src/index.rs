// SPDX-License-Identifier: Apache-2.0
//! The desired state, as contributions of leases to keys: adding or removing one lease re-evaluates its keys only.
//! Law: add A, add B, remove B = add A. Newest lease wins a link-layer entry (FDB, neighbour), oldest wins a route.

use weft_subnet::lease::{Age, Id};

use crate::state::{Key, State, Value};

/// `Key -> contributions, ordered by lease age`.
#[derive(Debug, Default)]
pub struct Index {}

impl Index {
    /// Replaces what this contributor wants (empty = removes it) and returns the keys whose winning value changed,
    /// with the value before and after.
    pub fn set(&mut self, id: &Id, age: &Age, state: State) -> Vec<(Key, Option<Value>, Option<Value>)> {
        let _ = (id, age, state);
        Vec::new()
    }

    /// The winning value of a key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        let _ = key;
        None
    }

    /// Who wins this key: for status and errors.
    pub fn owner(&self, key: &Key) -> Option<&Id> {
        let _ = key;
        None
    }

    /// All keys that this contributor wants.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        let _ = id;
        Vec::new()
    }

    /// Everything, in key order.
    pub fn state(&self) -> State {
        State::new()
    }
}
