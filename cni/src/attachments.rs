// SPDX-License-Identifier: Apache-2.0
//! The list of valid attachments that the runtime passes to GC. GC removes every other attachment, so a missing list is
//! an error.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::spec::{Error, code};

/// Keys of the list. The second one is the name in an earlier text of the specification.
pub const KEYS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

/// One interface of one container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct Attachment {
    /// ID of the container (`CNI_CONTAINERID`).
    #[serde(rename = "containerID")]
    pub container: String,
    /// Name of the interface inside the container (`CNI_IFNAME`).
    pub ifname: String,
}

/// The attachments that GC must keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidAttachments {
    attachments: BTreeSet<Attachment>,
}

impl ValidAttachments {
    /// Reads the list from the configuration of a GC call.
    ///
    /// # Errors
    /// [`code::CONFIG`] if the list is missing: treating that as an empty list would disconnect every pod of the node.
    /// [`code::DECODE`] if the list cannot be read.
    pub fn read(conf: &Map<String, Value>) -> Result<ValidAttachments, Error> {
        let Some((key, list)) = KEYS.iter().find_map(|key| conf.get(*key).map(|list| (key, list))) else {
            return Err(Error::new(code::CONFIG, format!("{} is missing: nothing was removed", KEYS[0])));
        };
        // Go encodes an empty list as null.
        let list: Option<BTreeSet<Attachment>> =
            Deserialize::deserialize(list).map_err(|error| Error::new(code::DECODE, format!("read {key}: {error}")))?;
        Ok(ValidAttachments { attachments: list.unwrap_or_default() })
    }

    /// Returns true if the list contains this attachment. Without `ifname`, any interface of the container matches.
    pub fn contains(&self, container: &str, ifname: Option<&str>) -> bool {
        // The list is sorted by container, then by interface. So the first attachment from here on decides.
        let from = Attachment { container: container.to_owned(), ifname: ifname.unwrap_or_default().to_owned() };
        let same = |known: &Attachment| known.container == container && ifname.is_none_or(|name| known.ifname == name);
        self.attachments.range(from..).next().is_some_and(same)
    }

    /// Iterates over all attachments of the list.
    pub fn iter(&self) -> impl Iterator<Item = &Attachment> {
        self.attachments.iter()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_keys_are_read_and_only_a_missing_list_is_an_error() {
        let read = |conf: Value| ValidAttachments::read(conf.as_object().unwrap());
        let one = json!([{"containerID": "a", "ifname": "eth0"}]);
        for key in KEYS {
            let known = read(json!({key: one})).unwrap();
            assert!(known.contains("a", None) && known.contains("a", Some("eth0")), "{key}");
            assert!(!known.contains("a", Some("net1")) && !known.contains("b", None), "{key}");
            assert!(
                !known.contains("a", Some("eth")) && !known.contains("", None) && !known.contains("aa", None),
                "{key}"
            );
            for none in [Value::Null, json!([])] {
                assert_eq!(read(json!({key: none})).unwrap().iter().count(), 0, "{key} {none}");
            }
            let error = read(json!({key: [{"containerID": "a"}]})).unwrap_err();
            assert!(error.code == code::DECODE && error.msg.contains(key), "{error}");
        }
        assert_eq!(read(json!({})).unwrap_err().code, code::CONFIG);
    }
}
