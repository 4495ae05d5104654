// SPDX-License-Identifier: Apache-2.0
//! What every plugin does around its own work: reads the call, answers VERSION, judges the version, prints result or error.

use std::io::{self, Read, Write};
use std::process::ExitCode;

use serde_json::{Map, Value, json};

use crate::env::{Request, Verb, is_name};
use crate::spec::{Error, VERSIONS, Version, code};

/// A call that is well formed.
#[derive(Debug, Clone)]
pub struct Call {
    /// What shall be done, to which pod.
    pub request: Request,
    /// Of the configuration.
    pub version: Version,
    /// Name of the network.
    pub name: String,
    /// The whole configuration.
    pub conf: Map<String, Value>,
}

/// A plugin's own work: what goes to standard output, mostly nothing.
pub type Work = fn(&Call) -> Result<Vec<u8>, Error>;

/// Runs a plugin from its start to its end.
pub fn main(about: &str, work: Work) -> ExitCode {
    let mut version = Version::NEWEST;
    let answer = Request::from_env().and_then(|request| match request {
        Some(request) => answer(request, work, &mut version),
        None => {
            let known: Vec<_> = VERSIONS.iter().map(Version::to_string).collect();
            note!("{about}\nCNI protocol versions supported: {}", known.join(", "));
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

/// `version` becomes the configuration's, once it is known: errors are printed in it.
fn answer(request: Request, work: Work, version: &mut Version) -> Result<Vec<u8>, Error> {
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text).map_err(|error| Error::io("read the configuration", error))?;
    if request.verb == Verb::Version {
        return Ok(versions(&text));
    }
    let call = read(request, &text, version)?;
    work(&call)
}

/// The same for a plugin that is called by another one in the same process.
///
/// # Errors
/// Its own.
pub fn within(request: Request, conf: &Value, work: Work) -> Result<Vec<u8>, Error> {
    let text = conf.to_string().into_bytes();
    if request.verb == Verb::Version {
        return Ok(versions(&text));
    }
    work(&read(request, &text, &mut Version::NEWEST.clone())?)
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
            .ok_or_else(|| Error::new(code::DECODE, format!("cniVersion {value} is no version")))?,
    };
    if !VERSIONS.contains(&given) {
        let known: Vec<_> = VERSIONS.iter().map(Version::to_string).collect();
        return Err(Error::new(code::INCOMPATIBLE_VERSION, "incompatible CNI versions")
            .details(format!("config is {given}, plugin supports [{}]", known.join(" "))));
    }
    *version = given;
    let name = conf.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
    if !is_name(&name) {
        let text =
            if name.is_empty() { "missing network name".to_owned() } else { format!("invalid network name {name:?}") };
        return Err(Error::new(code::CONFIG, text));
    }
    let since = match request.verb {
        Verb::Check => Version(0, 4, 0),
        Verb::Gc | Verb::Status => Version(1, 1, 0),
        Verb::Add | Verb::Del | Verb::Version => Version::OLDEST,
    };
    if given < since {
        let verb = request.verb.name();
        return Err(Error::new(code::INCOMPATIBLE_VERSION, format!("config version {given} does not allow {verb}")));
    }
    Ok(Call { request, version: given, name, conf })
}

/// The answer to VERSION: in the version that was asked in, where that can be read.
fn versions(text: &[u8]) -> Vec<u8> {
    let asked: Option<Value> = serde_json::from_slice(text).ok();
    let asked = asked.as_ref().and_then(|conf| conf.get("cniVersion")?.as_str().and_then(Version::parse));
    let known: Vec<_> = VERSIONS.iter().map(Version::to_string).collect();
    let version = asked.filter(|version| VERSIONS.contains(version)).unwrap_or(Version::NEWEST);
    json!({"cniVersion": version.to_string(), "supportedVersions": known}).to_string().into_bytes()
}
