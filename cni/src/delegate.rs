// SPDX-License-Identifier: Apache-2.0
//! Calls another plugin: finds it in CNI_PATH, gives it its configuration, takes its answer.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::{Value, json};

use crate::env::{Request, Verb};
use crate::spec::{Error, Version, code};
use crate::{plugin, veth};

/// The delegate that is this very program: called without starting it again.
const OURS: &str = "weft-veth";

/// The file of a plugin, searched in the directories of CNI_PATH in order.
///
/// # Errors
/// When its type is no file name, or no directory has it.
pub fn find(kind: &str, path: &str) -> Result<PathBuf, Error> {
    if kind == OURS {
        return Ok(PathBuf::from("/proc/self/exe"));
    }
    if kind.is_empty() || kind.contains('/') {
        return Err(Error::new(code::CONFIG, format!("{kind:?} is not the name of a plugin")));
    }
    let dirs = path.split(':').filter(|dir| !dir.is_empty());
    dirs.map(|dir| PathBuf::from(dir).join(kind))
        .find(|file| file.is_file())
        .ok_or_else(|| Error::new(code::OTHER, format!("failed to find plugin {kind:?} in path [{path}]")))
}

/// Calls the plugin `kind` with `conf` on its standard input and the variables of `request`, `verb` in place of its own; what
/// it printed. All of its standard error goes to ours.
///
/// # Errors
/// The plugin's own error unchanged; or that it cannot be found, started, or understood.
pub fn call(kind: &str, conf: &Value, verb: Verb, request: &Request) -> Result<Vec<u8>, Error> {
    if kind == OURS {
        return plugin::within(Request { verb, ..request.clone() }, conf, veth::answer);
    }
    let program = find(kind, &request.path)?;
    let text = serde_json::to_vec(conf).map_err(|error| Error::new(code::OTHER, format!("render {kind}: {error}")))?;
    let input = input(&text).map_err(|error| Error::io("pass a configuration on", error))?;
    let mut command = Command::new(&program);
    command.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("CNI_COMMAND", verb.name());
    let vars = [
        ("CNI_CONTAINERID", &request.container),
        ("CNI_NETNS", &request.netns),
        ("CNI_IFNAME", &request.ifname),
        ("CNI_ARGS", &request.args),
        ("CNI_PATH", &request.path),
    ];
    for (name, value) in vars {
        if value.is_empty() {
            command.env_remove(name);
        } else {
            command.env(name, value);
        }
    }
    let output = command.output().map_err(|error| Error::io(format!("start {}", program.display()), error))?;
    // It belongs to the runtime's log; nobody is there to hear that this failed.
    let _ = io::stderr().write_all(&output.stderr);
    if output.status.success() { Ok(output.stdout) } else { Err(failure(kind, verb, &output)) }
}

/// True when the plugin says that it knows a version of the specification.
///
/// # Errors
/// As [`call`].
pub fn speaks(kind: &str, version: Version, request: &Request) -> Result<bool, Error> {
    let answer = call(kind, &json!({"cniVersion": version.to_string()}), Verb::Version, request)?;
    let answer: Value = serde_json::from_slice(&answer)
        .map_err(|error| Error::new(code::DECODE, format!("read the answer of {kind} to VERSION: {error}")))?;
    Ok(answer["supportedVersions"].as_array().is_some_and(|all| all.contains(&json!(version.to_string()))))
}

/// A file in memory rather than a pipe: a plugin that reads late, or never, cannot block us.
fn input(text: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create(c"cni-conf", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(text)?;
    file.rewind()?;
    Ok(file)
}

fn failure(kind: &str, verb: Verb, output: &Output) -> Error {
    if let Ok(error) = serde_json::from_slice::<Error>(&output.stdout) {
        return error;
    }
    let how = match (output.status.code(), output.status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "no exit code".to_owned(),
    };
    let said = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).trim().to_owned());
    let said = said.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
    Error::new(code::OTHER, format!("{kind} {} failed: {how}", verb.name())).details(said)
}
