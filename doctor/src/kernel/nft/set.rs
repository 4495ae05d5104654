// SPDX-License-Identifier: Apache-2.0
//! Sets and maps of nftables.

use super::instruction::Verdict;

/// What a map has for a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// A set has nothing.
    Nothing,
    /// A verdict.
    Verdict(Verdict),
    /// A value.
    Value(Vec<u8>),
}

/// An element as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Element {
    /// Its key, or `None` for the element that matches everything else.
    pub key: Option<Vec<u8>>,
    /// The last key of a range, if the set joins several fields.
    pub last: Option<Vec<u8>>,
    /// The key is the first one behind a range.
    pub is_end: bool,
    /// What belongs to it.
    pub data: Data,
}

/// A set or a map.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Set {
    /// Its elements, in any order.
    pub elements: Vec<Element>,
    /// Its elements are the ends of ranges.
    pub has_ranges: bool,
    /// The lengths in bytes of the fields that form a key. Empty if there is one field.
    pub fields: Vec<usize>,
}

/// The result of a lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// The key is in the set.
    Yes(Data),
    /// It is not.
    No,
    /// Part of the key is not known: it may be in the set, for example as the element with this data.
    Maybe(Data),
}

impl Set {
    /// Looks up a key, of which some bytes may not be known.
    pub fn find(&self, key: &[Option<u8>]) -> Found {
        let is_known = key.iter().all(Option::is_some);
        let known: Vec<u8> = key.iter().map_while(|byte| *byte).collect();
        if self.has_ranges && self.fields.len() < 2 && !is_known && !known.is_empty() {
            // All keys that begin with these bytes are in the same range, or in none.
            let with = |rest: u8| {
                let mut whole = known.clone();
                whole.resize(key.len(), rest);
                whole
            };
            if self.boundary(&with(0)) == self.boundary(&with(0xff)) {
                return self.find(&with(0).into_iter().map(Some).collect::<Vec<_>>());
            }
        }
        let found = if self.has_ranges && self.fields.len() < 2 {
            if is_known { self.in_range(&known) } else { self.elements.iter().find(|element| !element.is_end) }
        } else {
            self.elements.iter().find(|element| self.may_be(element, key))
        };
        match found {
            Some(element) if is_known => Found::Yes(element.data.clone()),
            Some(element) => Found::Maybe(element.data.clone()),
            None => match self.elements.iter().find(|element| element.key.is_none()) {
                Some(element) => Found::Yes(element.data.clone()),
                None => Found::No,
            },
        }
    }

    /// Returns the range with this key: it begins at the largest boundary that is not larger than the key.
    fn in_range(&self, key: &[u8]) -> Option<&Element> {
        self.boundary(key).filter(|nearest| !nearest.is_end)
    }

    /// Returns the largest boundary of a range that is not larger than the key.
    fn boundary(&self, key: &[u8]) -> Option<&Element> {
        let boundary = |element: &&Element| element.key.as_ref().is_some_and(|start| start.as_slice() <= key);
        // Where a range ends and the next one begins, the beginning counts.
        self.elements.iter().filter(boundary).max_by_key(|element| (&element.key, !element.is_end))
    }

    /// Returns true if every byte of the key that is known agrees with the element.
    fn may_be(&self, element: &Element, key: &[Option<u8>]) -> bool {
        let Some(first) = &element.key else { return false };
        if first.len() != key.len() {
            return false;
        }
        let Some(last) = element.last.as_ref().filter(|last| last.len() == first.len()) else {
            return first.iter().zip(key).all(|(wanted, byte)| byte.is_none_or(|byte| byte == *wanted));
        };
        let mut at = 0;
        let whole = [first.len()];
        let fields = if self.fields.is_empty() { &whole[..] } else { &self.fields };
        fields.iter().all(|len| {
            // Each field begins at a multiple of four bytes.
            let end = (at + len).min(key.len());
            let field = at.min(end)..end;
            at += len.next_multiple_of(4);
            let known: Option<Vec<u8>> = key[field.clone()].iter().copied().collect();
            known.is_none_or(|known| first[field.clone()] <= known[..] && known[..] <= last[field])
        })
    }
}
