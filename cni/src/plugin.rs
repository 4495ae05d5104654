// SPDX-License-Identifier: Apache-2.0
//! The part that is common to all plugins of this program: reads the call, answers VERSION, checks the version of the
//! configuration, and prints the result or the error.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use serde_json::{Map, Value, json};

use crate::env::{Request, Verb, is_name};
use crate::spec::{Error, VERSIONS, Version, code};

/// A valid call of a plugin.
#[derive(Debug, Clone)]
pub struct Call {
    /// The verb and the attachment.
    pub request: Request,
    /// The version of the specification that the configuration uses.
    pub version: Version,
    /// Name of the network (`name`).
    pub name: String,
    /// The whole configuration.
    pub conf: Map<String, Value>,
}

/// The function that handles a call. It returns what goes to standard output, which is empty for most verbs.
pub type Handler = fn(&Call) -> Result<Vec<u8>, Error>;

/// Runs a plugin as the main function of a process. `about` is printed if CNI_COMMAND is not set.
pub fn main(about: &str, handler: Handler) -> ExitCode {
    let mut version = Version::NEWEST;
    let answer = Request::from_env().and_then(|request| match request {
        Some(request) => answer(request, handler, &mut version),
        None => {
            let supported: Vec<_> = VERSIONS.iter().map(Version::to_string).collect();
            note!("{about}\nCNI protocol versions supported: {}", supported.join(", "));
            Ok(Vec::new())
        }
    });
    let (text, code) = match answer {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(error) => (error.render(version).into_bytes(), ExitCode::FAILURE),
    };
    let mut stdout = io::stdout();
    match stdout.write_all(&text).and_then(|()| stdout.flush()) {
        Ok(()) => code,
        Err(error) => {
            note!("write the answer: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Sets `version` to that of the configuration as soon as it is supported, because errors are printed in that version.
fn answer(request: Request, handler: Handler, version: &mut Version) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text).map_err(|error| Error::io("read the configuration", error))?;
    if request.verb == Verb::Version {
        return Ok(versions(&text));
    }
    let call = read(request, &text, version)?;
    handler(&call)
}

/// Runs a plugin inside the process of another one, with the configuration as a value.
///
/// # Errors
/// The plugin's own.
pub fn within(request: Request, conf: &Value, handler: Handler) -> Result<Vec<u8>, Error> {
    let text = conf.to_string().into_bytes();
    if request.verb == Verb::Version {
        return Ok(versions(&text));
    }
    handler(&read(request, &text, &mut Version::NEWEST.clone())?)
}

fn read(request: Request, text: &[u8], version: &mut Version) -> Result<Call, Error> {
    let wrong = |error| Error::new(code::DECODE, format!("read the network configuration: {error}"));
    let conf: Map<String, Value> = serde_json::from_slice(text).map_err(wrong)?;
    let given = match conf.get("cniVersion") {
        None => Version::OLDEST,
        Some(Value::String(text)) if text.is_empty() => Version::OLDEST,
        Some(value) => value
            .as_str()
            .and_then(Version::parse)
            .ok_or_else(|| Error::new(code::DECODE, format!("cniVersion {value} is not a version")))?,
    };
    if !VERSIONS.contains(&given) {
        let supported: Vec<_> = VERSIONS.iter().map(Version::to_string).collect();
        return Err(Error::new(code::INCOMPATIBLE_VERSION, "incompatible CNI versions")
            .details(format!("config is {given}, plugin supports [{}]", supported.join(" "))));
    }
    *version = given;
    let name = conf.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !is_name(&name) {
        let text =
            if name.is_empty() { "missing network name".to_owned() } else { format!("invalid network name {name:?}") };
        return Err(Error::new(code::CONFIG, text));
    }
    let needed = match request.verb {
        Verb::Check => Version(0, 4, 0),
        Verb::Gc | Verb::Status => Version(1, 1, 0),
        Verb::Add | Verb::Del | Verb::Version => Version::OLDEST,
    };
    if given < needed {
        let verb = request.verb.name();
        return Err(Error::new(code::INCOMPATIBLE_VERSION, format!("config version {given} does not allow {verb}")));
    }
    Ok(Call { request, version: given, name, conf })
}

/// Returns the answer to VERSION. It uses the version of the request if that is supported.
fn versions(text: &[u8]) -> Vec<u8> {
    let request: Option<Value> = serde_json::from_slice(text).ok();
    let request = request.as_ref().and_then(|conf| conf.get("cniVersion")?.as_str().and_then(Version::parse));
    let supported: Vec<_> = VERSIONS.iter().map(Version::to_string).collect();
    let version = request.filter(|version| VERSIONS.contains(version)).unwrap_or(Version::NEWEST);
    json!({"cniVersion": version.to_string(), "supportedVersions": supported}).to_string().into_bytes()
}
