// SPDX-License-Identifier: Apache-2.0
//! Our keys of a network configuration (flannel-compat.md section 12).
//!
//! Keys of ours are found whatever their case, as flannel finds them; what is inside `delegate` and `ipam` is taken as it is.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::spec::{Error, code};
use crate::{DATA_DIR, SUBNET_FILE};

/// Longest time that ADD waits for the agent.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// What a configuration says to us.
#[derive(Debug, Clone, PartialEq)]
pub struct Conf {
    /// `subnetFile`.
    pub subnet_file: PathBuf,
    /// `dataDir`.
    pub data_dir: PathBuf,
    /// `socket`: the agent's; `weft.sock` beside `subnetFile`.
    pub socket: PathBuf,
    /// `waitSeconds`: how long ADD waits for the agent, 0 to 10 (the default).
    pub wait: Duration,
    /// `delegate`: what the user wants of the plugin that does the work.
    pub delegate: Map<String, Value>,
    /// `ipam`: what the user wants of the one that gives addresses.
    pub ipam: Map<String, Value>,
    /// `runtimeConfig`: values of capabilities.
    pub runtime_config: Option<Value>,
}

impl Conf {
    /// Reads it.
    ///
    /// # Errors
    /// [`code::CONFIG`], with everything that is wrong at once.
    pub fn read(all: &Map<String, Value>) -> Result<Conf, Error> {
        let mut wrong = Vec::new();
        let subnet_file = PathBuf::from(text(all, "subnetFile", &mut wrong).unwrap_or(SUBNET_FILE));
        let beside = subnet_file.with_file_name("weft.sock");
        let conf = Conf {
            data_dir: PathBuf::from(text(all, "dataDir", &mut wrong).unwrap_or(DATA_DIR)),
            socket: text(all, "socket", &mut wrong).map_or(beside, PathBuf::from),
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

    /// Only where things are: enough to take something back with a configuration that is wrong by now.
    ///
    /// # Errors
    /// As [`Conf::read`].
    pub fn places(all: &Map<String, Value>) -> Result<Conf, Error> {
        let keys = ["subnetFile", "dataDir", "socket"];
        let ours = |key: &&str| get(all, key).map(|value| ((*key).to_owned(), value.clone()));
        Conf::read(&keys.iter().filter_map(ours).collect())
    }
}

/// The value of a key: as it is written, else in whatever case; null is no value.
fn get<'a>(all: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
    let other_case = || all.iter().find(|(name, _)| name.eq_ignore_ascii_case(key)).map(|(_, value)| value);
    all.get(key).or_else(other_case).filter(|value| !value.is_null())
}

fn text<'a>(all: &'a Map<String, Value>, key: &str, wrong: &mut Vec<String>) -> Option<&'a str> {
    let value = get(all, key)?;
    if !value.is_string() {
        wrong.push(format!("'{key}' is {value}: a string is wanted"));
    }
    value.as_str()
}

fn object(all: &Map<String, Value>, key: &str, wrong: &mut Vec<String>) -> Map<String, Value> {
    match get(all, key) {
        None => Map::new(),
        Some(Value::Object(map)) => map.clone(),
        Some(value) => {
            wrong.push(format!("'{key}' is {value}: a dictionary is wanted"));
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
            wrong.push(format!("'waitSeconds' is {value}: 0 to {} is wanted", LONGEST_WAIT.as_secs()));
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
    fn defaults_are_flannels() {
        let conf = read(json!({"name": "cbr0", "delegate": null, "dataDir": null})).unwrap();
        assert_eq!(conf.subnet_file, PathBuf::from("/run/flannel/subnet.env"));
        assert_eq!(conf.data_dir, PathBuf::from("/var/lib/cni/flannel"));
        assert_eq!(conf.socket, PathBuf::from("/run/flannel/weft.sock"));
        assert_eq!(conf.wait, Duration::from_secs(10));
        assert!(conf.delegate.is_empty() && conf.ipam.is_empty() && conf.runtime_config.is_none());
        let other = read(json!({"SUBNETFILE": "/a/b.env", "waitSeconds": 0.5})).unwrap();
        assert_eq!(other.subnet_file, PathBuf::from("/a/b.env"));
        assert_eq!((other.socket, other.wait), (PathBuf::from("/a/weft.sock"), Duration::from_millis(500)));
    }

    #[test]
    fn everything_wrong_is_named_at_once() {
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
