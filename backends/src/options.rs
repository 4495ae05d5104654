// SPDX-License-Identifier: Apache-2.0
//! The members of the `Backend` object in net-conf, read as Go reads them: the case of names does not matter, the last of several members
//! with one name counts, one that is `null` counts as absent, and unknown names are ignored. A known name with an impossible value is
//! refused, with the remedy.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use serde_json::Value;
use weft_subnet::text::shown;

use crate::skip::Skip;

/// Why a `Backend` object of net-conf is refused. The text names the option and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadOption {
    /// It is not a JSON object.
    #[error("Backend in net-conf cannot be read ({0}): write it as a JSON object")]
    NoObject(String),
    /// An option is not a number, or is out of its range.
    #[error("Backend.{name} in net-conf is {value}: give a whole number from {low} to {high}, without quotes")]
    NoNumber {
        /// The option.
        name: String,
        /// Its value in net-conf.
        value: String,
        /// The smallest number.
        low: u32,
        /// The largest number.
        high: u32,
    },
    /// An option is neither true nor false.
    #[error("Backend.{name} in net-conf is {value}: give true or false, without quotes")]
    NoTruthValue {
        /// The option.
        name: String,
        /// Its value in net-conf.
        value: String,
    },
    /// An option is not a string.
    #[error("Backend.{name} in net-conf is no text: write it in quotes")]
    NoText {
        /// The option.
        name: String,
    },
    /// There is no backend of this type.
    #[error(transparent)]
    Type(#[from] BadType),
    /// A backend refuses its options for a reason of its own.
    #[error(transparent)]
    Backend(#[from] Skip),
}

/// Why a type of backend is refused, with what to use instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadType {
    /// net-conf names no type.
    #[error("no backend type is given (Backend.Type in net-conf); supported: {0}")]
    NotGiven(String),
    /// flannel has this type, and weft has another one for the same purpose.
    #[error("backend type {kind} is not supported by weft: {instead}")]
    Replaced {
        /// The type.
        kind: String,
        /// What to use instead.
        instead: &'static str,
    },
    /// Neither flannel nor weft has this type.
    #[error("unknown backend type \"{kind}\"; supported: {supported}")]
    Unknown {
        /// The type, shortened.
        kind: String,
        /// The types that weft has.
        supported: String,
    },
    /// A lease has no type.
    #[error(
        "the lease has no BackendType, as those of udp, of alloc, and of a removed cloud backend such as tencent-vpc, aws-vpc or gce: \
         this node does not reach it"
    )]
    LeaseWithout,
}

/// The members of a JSON object.
pub type Members = weft_subnet::json::Members<Value>;

/// The options of one backend.
#[derive(Debug, Default)]
pub struct Options {
    members: Members,
    /// The names that the backend has asked for, and `Type`.
    known: RefCell<Vec<String>>,
}

impl Options {
    /// Reads a `Backend` object. Empty text counts as an empty object.
    pub fn parse(raw: &str) -> Result<Options, BadOption> {
        if raw.trim().is_empty() {
            return Ok(Options::default());
        }
        let members =
            serde_json::from_str(raw).map_err(|e: serde_json::Error| BadOption::NoObject(shown(&e.to_string())))?;
        Ok(Options { members, known: RefCell::new(vec!["Type".to_owned()]) })
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.known.borrow_mut().push(name.to_owned());
        self.members.get(name)
    }

    /// Returns the first options for which nobody has asked, shortened for messages. They have no effect.
    pub fn unknown(&self) -> Vec<String> {
        self.members.unknown(&self.known.borrow())
    }

    /// Returns a whole number within `range`, or `default` if the option is absent.
    pub fn number(&self, name: &str, range: RangeInclusive<u32>, default: u32) -> Result<u32, BadOption> {
        let Some(value) = self.get(name) else { return Ok(default) };
        let number = value.as_u64().and_then(|n| u32::try_from(n).ok());
        number.filter(|n| range.contains(n)).ok_or_else(|| {
            let (low, high) = range.into_inner();
            BadOption::NoNumber { name: name.to_owned(), value: shown(&value.to_string()), low, high }
        })
    }

    /// Returns a boolean, which is false if the option is absent.
    pub fn flag(&self, name: &str) -> Result<bool, BadOption> {
        let Some(value) = self.get(name) else { return Ok(false) };
        value
            .as_bool()
            .ok_or_else(|| BadOption::NoTruthValue { name: name.to_owned(), value: shown(&value.to_string()) })
    }

    /// Returns a string, or `None` if the option is absent. It may be a secret, so the error does not quote it.
    pub fn text(&self, name: &str) -> Result<Option<&str>, BadOption> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| BadOption::NoText { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::Options;

    #[test]
    fn any_case_last_wins_null_is_absent() {
        let options =
            Options::parse(r#"{"Type":"vxlan","vni":5,"VNI":7,"Vni":null,"Directrouting":true,"other":[]}"#).unwrap();
        assert_eq!(options.number("VNI", 0..=100, 1), Ok(7));
        assert_eq!(options.flag("DirectRouting"), Ok(true));
        assert_eq!(options.flag("GBP"), Ok(false));
        assert_eq!(options.number("Port", 0..=65535, 9), Ok(9));
    }

    #[test]
    fn refusals_name_the_option_and_the_remedy() {
        let options = Options::parse(r#"{"VNI":"1","Port":65536,"MTU":-1,"GBP":1,"Learning":1.5}"#).unwrap();
        for name in ["VNI", "Port", "MTU", "Learning"] {
            let said = options.number(name, 0..=65535, 0).unwrap_err().to_string();
            assert!(said.contains(&format!("Backend.{name} ")) && said.contains("from 0 to 65535"), "{said}");
        }
        let said = options.flag("GBP").unwrap_err().to_string();
        assert!(said.contains("Backend.GBP") && said.contains("true or false"), "{said}");
        let said = options.text("Port").unwrap_err().to_string();
        assert_eq!(said, "Backend.Port in net-conf is no text: write it in quotes");
        assert!(Options::parse("[]").unwrap_err().to_string().contains("JSON object"));
    }
}
