// SPDX-License-Identifier: Apache-2.0
//! The keys of a network configuration that this plugin reads (docs/flannel-formats.md, "The CNI plugin").
//!
//! Names at the top level are matched without regard to case, as in flannel's plugin. The contents of `delegate` and
//! `ipam` are passed on unchanged.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::spec::{Error, code};
use crate::{DATA_DIR, SUBNET_FILE};

/// Upper limit and default of `waitSeconds`.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// A network configuration, with defaults filled in.
#[derive(Debug, Clone, PartialEq)]
pub struct Conf {
    /// `subnetFile`: path of subnet.env.
    pub subnet_file: PathBuf,
    /// `dataDir`: directory of the records, see [`crate::record`].
    pub data_dir: PathBuf,
    /// `socket`: the agent's; it follows from `subnetFile` ([`weft_subnet::env::socket`]).
    pub socket: PathBuf,
    /// `waitSeconds`: how long ADD waits for the agent, 0 to 10 s. The default is 10 s.
    pub wait: Duration,
    /// `delegate`: the delegate's configuration, as far as the user gives it.
    pub delegate: Map<String, Value>,
    /// `ipam`: the IPAM plugin's configuration, as far as the user gives it.
    pub ipam: Map<String, Value>,
    /// `runtimeConfig`: the runtime's values for capabilities.
    pub runtime_config: Option<Value>,
}

impl Conf {
    /// Reads a configuration.
    ///
    /// # Errors
    /// [`code::CONFIG`]. The message lists everything that is wrong.
    pub fn read(all: &Map<String, Value>) -> Result<Conf, Error> {
        let mut wrong = Vec::new();
        let subnet_file = PathBuf::from(text(all, "subnetFile", &mut wrong).unwrap_or(SUBNET_FILE));
        let conf = Conf {
            data_dir: PathBuf::from(text(all, "dataDir", &mut wrong).unwrap_or(DATA_DIR)),
            socket: text(all, "socket", &mut wrong)
                .map_or_else(|| weft_subnet::env::socket(&subnet_file), PathBuf::from),
            wait: wait(all, &mut wrong),
            delegate: object(all, "delegate", &mut wrong),
            ipam: object(all, "ipam", &mut wrong),
            runtime_config: get(all, "runtimeConfig").cloned(),
            subnet_file,
        };
        let kind = conf.delegate.get("type");
        if kind.is_some_and(|kind| !kind.is_string()) {
            wrong.push("'delegate' dictionary, if present, must have (string) 'type' field".to_owned());
        }
        for key in ["name", "ipam"] {
            if conf.delegate.contains_key(key) {
                wrong.push(format!("'delegate' dictionary must not have '{key}' field, it'll be set by flannel"));
            }
        }
        if wrong.is_empty() { Ok(conf) } else { Err(Error::new(code::CONFIG, wrong.join("; "))) }
    }

    /// Reads only the paths and ignores all other keys. DEL uses this for a configuration that has become invalid since
    /// ADD.
    ///
    /// # Errors
    /// As [`Conf::read`].
    pub fn paths(all: &Map<String, Value>) -> Result<Conf, Error> {
        let keys = ["subnetFile", "dataDir", "socket"];
        let ours = |key: &&str| get(all, key).map(|value| ((*key).to_owned(), value.clone()));
        Conf::read(&keys.iter().filter_map(ours).collect())
    }
}

/// Returns the value of a key. The exact name is preferred to one that differs in case; null counts as absent.
fn get<'a>(all: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    let other_case = || all.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, value)| value);
    all.get(key).or_else(other_case).filter(|value| !value.is_null())
}

fn text<'a>(all: &'a Map<String, Value>, key: &str, wrong: &mut Vec<String>) -> Option<&'a str> {
    let value = get(all, key)?;
    if !value.is_string() {
        wrong.push(format!("'{key}' is {value}: it must be a string"));
    }
    value.as_str()
}

fn object(all: &Map<String, Value>, key: &str, wrong: &mut Vec<String>) -> Map<String, Value> {
    match get(all, key) {
        None => Map::new(),
        Some(Value::Object(map)) => map.clone(),
        Some(value) => {
            wrong.push(format!("'{key}' is {value}: it must be a dictionary"));
            Map::new()
        }
    }
}

fn wait(all: &Map<String, Value>, wrong: &mut Vec<String>) -> Duration {
    let Some(value) = get(all, "waitSeconds") else { return LONGEST_WAIT };
    let wait = value.as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match wait.filter(|wait| *wait <= LONGEST_WAIT) {
        Some(wait) => wait,
        None => {
            wrong.push(format!("'waitSeconds' is {value}: it must be 0 to {}", LONGEST_WAIT.as_secs()));
            LONGEST_WAIT
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Conf, Error> {
        Conf::read(value.as_object().unwrap())
    }

    #[test]
    fn defaults_are_those_of_flannels_plugin() {
        let conf = read(json!({"name": "cbr0", "delegate": null, "dataDir": null})).unwrap();
        assert_eq!(conf.subnet_file, PathBuf::from("/run/flannel/subnet.env"));
        assert_eq!(conf.data_dir, PathBuf::from("/var/lib/cni/flannel"));
        assert_eq!(conf.socket, PathBuf::from("/run/flannel/weft.sock"));
        assert_eq!(conf.wait, Duration::from_secs(10));
        assert!(conf.delegate.is_empty() && conf.ipam.is_empty() && conf.runtime_config.is_none());
        let other = read(json!({"SUBNETFILE": "/a/b.env", "waitSeconds": 0.5})).unwrap();
        assert_eq!(other.subnet_file, PathBuf::from("/a/b.env"));
        assert_eq!((other.socket, other.wait), (PathBuf::from("/a/weft-b.env.sock"), Duration::from_millis(500)));
    }

    #[test]
    fn both_ends_of_the_range_of_the_wait_are_allowed() {
        for (seconds, wanted) in [(json!(0), 0), (json!(10), 10_000), (json!(0.001), 1), (Value::Null, 10_000)] {
            let conf = read(json!({"waitSeconds": seconds.clone()})).unwrap();
            assert_eq!(conf.wait, Duration::from_millis(wanted), "{seconds}");
        }
        for seconds in [json!(10.001), json!("5"), json!(1e300)] {
            assert!(read(json!({"waitSeconds": seconds.clone()})).is_err(), "{seconds}");
        }
    }

    #[test]
    fn the_exact_name_of_a_key_is_preferred_to_one_in_another_case() {
        let conf = read(json!({"SubnetFile": "/a.env", "subnetFile": "/b.env", "subnetfile": "/c.env"})).unwrap();
        assert_eq!(conf.subnet_file, PathBuf::from("/b.env"));
    }

    /// A pod must be removable although its configuration has become invalid since ADD.
    #[test]
    fn only_the_paths_of_a_configuration_count_for_a_removal() {
        let all = json!({
            "subnetFile": "/a/b.env", "DATADIR": "/data", "socket": "/s",
            "waitSeconds": -1, "delegate": {"name": "x"}, "ipam": [],
        });
        assert!(read(all.clone()).is_err());
        let conf = Conf::paths(all.as_object().unwrap()).unwrap();
        let wanted = ["/a/b.env", "/data", "/s"].map(PathBuf::from);
        assert_eq!([conf.subnet_file, conf.data_dir, conf.socket], wanted);
        assert!(Conf::paths(json!({"dataDir": 1}).as_object().unwrap()).is_err());
    }

    #[test]
    fn one_error_names_everything_that_is_wrong() {
        let rows = [
            (json!({"delegate": {"type": 1}}), "must have (string) 'type' field"),
            (json!({"delegate": {"name": "x"}}), "must not have 'name' field"),
            (json!({"delegate": {"ipam": {}}}), "must not have 'ipam' field"),
            (json!({"delegate": "bridge"}), "'delegate' is \"bridge\""),
            (json!({"ipam": []}), "'ipam' is []"),
            (json!({"subnetFile": 1}), "'subnetFile' is 1"),
            (json!({"waitSeconds": 11}), "'waitSeconds' is 11"),
            (json!({"waitSeconds": -1}), "'waitSeconds' is -1"),
        ];
        for (value, text) in &rows {
            let error = read(value.clone()).unwrap_err();
            assert_eq!(error.code, code::CONFIG, "{value}");
            assert!(error.msg.contains(text), "{value}: {error}");
        }
        let error = read(json!({"delegate": {"type": 1, "name": "x", "ipam": {}}, "dataDir": 1})).unwrap_err();
        assert_eq!(error.msg.split("; ").count(), 4, "{error}");
    }
}
