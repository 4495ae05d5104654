// SPDX-License-Identifier: Apache-2.0
//! Calls the delegate: another CNI plugin, or the one that this program implements itself.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::env::{Request, Verb};
use crate::record::Locked;
use crate::render::kind;
use crate::spec::{Error, Version, code};
use crate::{plugin, program, veth};

/// Finds the executable of the delegate. The directories of CNI_PATH are searched in order.
///
/// # Errors
/// As [`program::find`].
pub fn find(kind: &str, path: &str) -> Result<PathBuf, Error> {
    if kind == veth::TYPE {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    program::find(kind, path)
}

/// Checks the configuration for ADD if the plugin is the one that this program implements. Other plugins check their own.
///
/// # Errors
/// The error that ADD would return for this configuration.
pub fn validate(kind: &str, conf: &Value, request: &Request) -> Result<(), Error> {
    if kind == veth::TYPE {
        plugin::within(Request { verb: Verb::Add, ..request.clone() }, conf, veth::validate)?;
    }
    Ok(())
}

/// Runs the delegate `kind` and returns its standard output, as [`program::run`] does. The one that this program implements is called as a
/// function instead of starting another process.
///
/// # Errors
/// The plugin's own error, or as [`program::run`].
pub fn call(kind: &str, conf: &Value, verb: Verb, request: &Request) -> Result<Vec<u8>, Error> {
    if kind == veth::TYPE {
        return plugin::within(Request { verb, ..request.clone() }, conf, veth::answer);
    }
    program::run(kind, conf, verb, request)
}

/// Calls the delegate's DEL with the recorded configuration, and removes the record if it succeeds.
///
/// # Errors
/// The delegate's error, unchanged; [`code::IO`] if the record cannot be removed.
pub fn del_recorded(locked: Locked, request: &Request) -> Result<(), Error> {
    let Some(conf) = locked.record.conf.clone() else {
        note!("{} is not valid JSON: it is kept, and the delegate is not called", locked.record.path.display());
        return Ok(());
    };
    let name = kind(&conf).to_owned();
    call(&name, &Value::Object(conf), Verb::Del, request)?;
    locked.remove()
}

/// Returns true if the plugin supports a version of the specification, according to its answer to VERSION.
///
/// # Errors
/// As [`call`].
pub fn supports(kind: &str, version: Version, request: &Request) -> Result<bool, Error> {
    let answer = call(kind, &json!({"cniVersion": version.to_string()}), Verb::Version, request)?;
    let answer: Value = serde_json::from_slice(&answer)
        .map_err(|error| Error::new(code::DECODE, format!("read the answer of {kind} to VERSION: {error}")))?;
    Ok(answer["supportedVersions"].as_array().is_some_and(|all| all.contains(&json!(version.to_string()))))
}
