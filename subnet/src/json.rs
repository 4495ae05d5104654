// SPDX-License-Identifier: Apache-2.0
//! Reads the members of a JSON object as flannel does. Names are matched without regard to case, and the last of several
//! equal names counts. `null` says nothing about a plain field, so the member before it counts, or the field is absent. It
//! makes a pointer absent. These are the rules of Go's encoding/json, which flannel uses for the net-conf and for lease values. flannel itself
//! refuses `null` in IPv4 addresses and networks, whose types parse it as a text. There weft accepts more than flannel.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::text::{Shown, shown};

/// Maximum number of unknown names that are returned.
const MOST_UNKNOWN: usize = 3;

/// The members of an object in the order of the text, including those with equal names. By default the values are not parsed yet.
#[derive(Debug)]
pub struct Members<V = Box<RawValue>>(Vec<(String, V)>);

impl<V> Default for Members<V> {
    fn default() -> Members<V> {
        Members(Vec::new())
    }
}

impl<V> Members<V> {
    /// Returns the last member of this name, in any case, whose value is accepted.
    fn last(&self, name: &str, is_accepted: impl Fn(&V) -> bool) -> Option<&V> {
        let wanted = |(key, value): &&(String, V)| key.eq_ignore_ascii_case(name) && is_accepted(value);
        self.0.iter().rev().find(wanted).map(|(_, value)| value)
    }
}

struct Collect<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for Collect<V> {
    type Value = Members<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Members<V>, M::Error> {
        let mut members = Vec::new();
        while let Some(entry) = map.next_entry()? {
            members.push(entry);
        }
        Ok(Members(members))
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Members<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Members<V>, D::Error> {
        deserializer.deserialize_map(Collect(PhantomData))
    }
}

impl<V: Serialize> Serialize for Members<V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<V> Members<V> {
    /// Returns the first names that are none of these in any case, shortened for messages.
    pub fn unknown(&self, known: &[impl AsRef<str>]) -> Vec<String> {
        let is_known = |name: &&String| known.iter().any(|known| known.as_ref().eq_ignore_ascii_case(name));
        self.0
            .iter()
            .map(|(name, _)| name)
            .filter(|name| !is_known(name))
            .take(MOST_UNKNOWN)
            .map(|name| shown(name))
            .collect()
    }
}

impl Members<Value> {
    /// Returns the last value of this name that is not `null`.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.last(name, |value| !value.is_null())
    }
}

impl Members {
    /// Returns the raw text of a member, which may be `null`.
    pub(crate) fn raw(&self, name: &str) -> Option<&str> {
        self.last(name, |_| true).map(|value| value.get())
    }

    /// Parses the last value of this name that is not `null`. The error names the member.
    pub(crate) fn get<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, serde_json::Error> {
        self.last(name, |value| !is_null(value)).map(|value| parse(name, value)).transpose()
    }

    /// Parses a member's value that is a pointer in flannel. If the last value of this name is `null`, it is absent. The error names the
    /// member.
    pub(crate) fn get_pointer<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, serde_json::Error> {
        let last = self.last(name, |_| true).filter(|value| !is_null(value));
        last.map(|value| parse(name, value)).transpose()
    }

    /// Removes the members of these names, in any case. Returns false if there were none.
    pub fn remove(&mut self, names: &[&str]) -> bool {
        let before = self.0.len();
        self.0.retain(|(key, _)| !names.iter().any(|name| key.eq_ignore_ascii_case(name)));
        self.0.len() < before
    }

    /// Returns each member once, with the name in lower case and the value that `get` parses, so that two objects can be
    /// compared.
    pub(crate) fn canonical(&self) -> std::collections::BTreeMap<String, &str> {
        let present = self.0.iter().filter(|(_, value)| !is_null(value));
        present.map(|(key, value)| (key.to_ascii_lowercase(), value.get())).collect()
    }

    /// Returns a member's name as it is written in the text, fit for people.
    pub(crate) fn spelling(&self, lower: &str) -> Option<String> {
        self.0.iter().rev().find(|(key, _)| key.eq_ignore_ascii_case(lower)).map(|(key, _)| shown(key))
    }
}

fn is_null(value: &RawValue) -> bool {
    value.get() == "null"
}

fn parse<T: DeserializeOwned>(name: &str, value: &RawValue) -> Result<T, serde_json::Error> {
    serde_json::from_str(value.get()).map_err(|cause| {
        // The cause may quote the text, too.
        let cause = shown(&cause.to_string());
        serde_json::Error::custom(format_args!("{name} = {}: {cause}", Shown(value.get())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_says_nothing_about_a_plain_field_and_makes_a_pointer_absent() {
        let both = |text: &str| {
            let (raw, values): (Members, Members<Value>) =
                (serde_json::from_str(text).unwrap(), serde_json::from_str(text).unwrap());
            let plain: Option<u64> = raw.get("VNI").unwrap();
            assert_eq!(values.get("VNI").and_then(Value::as_u64), plain, "{text}");
            let pointer: Option<u64> = raw.get_pointer("VNI").unwrap();
            (plain, pointer)
        };
        assert_eq!(both(r#"{"VNI":1,"vni":2,"Vni": null }"#), (Some(2), None));
        assert_eq!(both(r#"{"VNI":null,"vni":2}"#), (Some(2), Some(2)));
        assert_eq!(both(r#"{"VNI":null}"#), (None, None));
        assert_eq!(both("{}"), (None, None));
    }
}
