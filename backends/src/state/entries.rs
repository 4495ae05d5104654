// SPDX-License-Identifier: Apache-2.0
//! Entries of the kernel by key, in one sorted vector, which is small for a few entries and for hundreds of thousands.

use super::Key;

/// Entries, each key once, in the order of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entries<V>(Vec<(Key, V)>);

impl<V> Default for Entries<V> {
    fn default() -> Entries<V> {
        Entries(Vec::new())
    }
}

impl<V: Clone> Entries<V> {
    /// Returns a collection without entries.
    pub fn new() -> Entries<V> {
        Entries::default()
    }

    /// Returns the value of this key.
    pub fn get(&self, key: &Key) -> Option<&V> {
        self.place(key).ok().map(|at| &self.0[at].1)
    }

    /// Returns true if this key has a value.
    pub fn contains_key(&self, key: &Key) -> bool {
        self.place(key).is_ok()
    }

    /// Sets the value of a key, and returns the value before. The cost grows with the number of entries after it in the order of keys.
    pub fn insert(&mut self, key: Key, value: V) -> Option<V> {
        match self.place(&key) {
            Ok(at) => Some(std::mem::replace(&mut self.0[at].1, value)),
            Err(at) => {
                self.0.insert(at, (key, value));
                None
            }
        }
    }

    /// Removes the value of this key, and returns it. The cost is that of [`Entries::insert`].
    pub fn remove(&mut self, key: &Key) -> Option<V> {
        self.place(key).ok().map(|at| self.0.remove(at).1)
    }

    /// Keeps the entries for which `keep` returns true.
    pub fn retain(&mut self, keep: impl Fn(&Key, &V) -> bool) {
        self.0.retain(|(key, value)| keep(key, value));
    }

    /// Removes all entries.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the keys in their order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &Key> {
        self.0.iter().map(|(key, _)| key)
    }

    /// Returns the entries in the order of keys.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&Key, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    fn place(&self, key: &Key) -> Result<usize, usize> {
        self.0.binary_search_by(|(there, _)| there.cmp(key))
    }

    /// Sorts the entries. If a key occurs more than once, its last value counts. Entries that are already in order need no further memory.
    fn put_in_order(&mut self) {
        if self.0.is_sorted_by(|(a, _), (b, _)| a < b) {
            return;
        }
        self.0.sort_by_key(|(key, _)| *key);
        self.0.dedup_by(|last, first| {
            let same = last.0 == first.0;
            if same {
                std::mem::swap(&mut first.1, &mut last.1);
            }
            same
        });
    }
}

impl<V: Clone> Extend<(Key, V)> for Entries<V> {
    /// Adds entries. If a key occurs more than once, its last value counts.
    fn extend<I: IntoIterator<Item = (Key, V)>>(&mut self, entries: I) {
        self.0.extend(entries);
        self.put_in_order();
    }
}

impl<V: Clone> FromIterator<(Key, V)> for Entries<V> {
    fn from_iter<I: IntoIterator<Item = (Key, V)>>(entries: I) -> Entries<V> {
        let mut made = Entries(Vec::from_iter(entries));
        made.put_in_order();
        made
    }
}

impl<V: Clone, const N: usize> From<[(Key, V); N]> for Entries<V> {
    fn from(entries: [(Key, V); N]) -> Entries<V> {
        entries.into_iter().collect()
    }
}

impl<V> IntoIterator for Entries<V> {
    type Item = (Key, V);
    type IntoIter = std::vec::IntoIter<(Key, V)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn key(number: u8) -> Key {
        Key::Peer([192, 168, 0, number].into())
    }

    #[test]
    fn it_is_a_map_in_order_of_which_the_last_value_counts() {
        let given: Vec<(Key, u32)> = (0..600).map(|n| (key((n * 37 % 251) as u8), n)).collect();
        let mut map: BTreeMap<Key, u32> = given.iter().copied().collect();
        let mut entries: Entries<u32> = given.into_iter().collect();
        let pairs = |entries: &Entries<u32>| entries.iter().map(|(key, value)| (*key, *value)).collect::<Vec<_>>();
        assert!(pairs(&entries).into_iter().eq(map.clone()));
        for n in (0..=255).step_by(3) {
            assert_eq!(entries.get(&key(n)), map.get(&key(n)));
            assert_eq!(entries.insert(key(n), 7), map.insert(key(n), 7));
            assert_eq!(entries.remove(&key(n / 2)), map.remove(&key(n / 2)));
            assert_eq!(entries.contains_key(&key(n / 2)), map.contains_key(&key(n / 2)));
        }
        entries.extend([(key(9), 1), (key(3), 2), (key(9), 3)]);
        map.extend([(key(9), 1), (key(3), 2), (key(9), 3)]);
        assert_eq!(entries.get(&key(9)), Some(&3));
        let twice = Entries::from([(key(1), 1), (key(1), 2), (key(2), 3)]);
        assert_eq!(pairs(&twice), [(key(1), 2), (key(2), 3)], "also where the keys are in order");
        entries.retain(|_, value| *value < 300);
        map.retain(|_, value| *value < 300);
        assert!(pairs(&entries).into_iter().eq(map.clone()) && entries.len() == map.len());
        entries.clear();
        assert!(entries.is_empty());
    }
}
