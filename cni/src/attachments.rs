// SPDX-License-Identifier: Apache-2.0
//! The attachments that the runtime knows, as GC is told them: all else goes, so a list that is missing is an error.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::spec::{Error, code};

/// What the runtime knows; the second is the name in an earlier text of the specification.
pub const KEYS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// An attachment that the runtime knows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Attachment {
    /// Id of the container.
    #[serde(rename = "containerID")]
    pub container: String,
    /// Name of its interface.
    pub ifname: String,
}

/// What must stay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    attachments: BTreeSet<Attachment>,
}

impl Known {
    /// Reads the list from the configuration.
    ///
    /// # Errors
    /// [`code::CONFIG`] without one: nobody were known, and every pod of the node would lose its network. [`code::DECODE`] when it
    /// cannot be read.
    pub fn read(conf: &Map<String, Value>) -> Result<Known, Error> {
        let Some((key, list)) = KEYS.iter().find_map(|key| conf.get(*key).map(|list| (key, list))) else {
            return Err(Error::new(code::CONFIG, format!("{} is missing: nothing was removed", KEYS[0])));
        };
        // null is how Go prints an empty list.
        let list: Option<BTreeSet<Attachment>> =
            Deserialize::deserialize(list).map_err(|error| Error::new(code::DECODE, format!("read {key}: {error}")))?;
        Ok(Known { attachments: list.unwrap_or_default() })
    }

    /// Is this one known? Without an interface: any of the container's.
    pub fn has(&self, container: &str, ifname: Option<&str>) -> bool {
        let same = |known: &Attachment| known.container == container && ifname.is_none_or(|name| known.ifname == name);
        self.attachments.iter().any(same)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Attachment> {
        self.attachments.iter()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_keys_are_read_and_only_a_missing_list_is_none() {
        let read = |conf: Value| Known::read(conf.as_object().unwrap());
        let one = json!([{"containerID": "a", "ifname": "eth0"}]);
        for key in KEYS {
            let known = read(json!({key: one})).unwrap();
            assert!(known.has("a", None) && known.has("a", Some("eth0")), "{key}");
            assert!(!known.has("a", Some("net1")) && !known.has("b", None), "{key}");
            for none in [Value::Null, json!([])] {
                assert_eq!(read(json!({key: none})).unwrap().iter().count(), 0, "{key} {none}");
            }
            let error = read(json!({key: [{"containerID": "a"}]})).unwrap_err();
            assert!(error.code == code::DECODE && error.msg.contains(key), "{error}");
        }
        assert_eq!(read(json!({})).unwrap_err().code, code::CONFIG);
    }
}
