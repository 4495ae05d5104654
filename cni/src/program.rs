// SPDX-License-Identifier: Apache-2.0
//! Runs another CNI plugin, which is a program in a directory of CNI_PATH.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;

use crate::env::{Request, Verb};
use crate::spec::{Error, code};
use crate::wait::pause;

/// How long to wait for a program that is being written. The library of CNI, with which flannel's plugin calls its delegate, waits as long.
const WRITTEN_WITHIN: Duration = Duration::from_secs(5);

/// Finds the executable of a plugin. The directories of CNI_PATH are searched in order.
///
/// # Errors
/// [`code::CONFIG`] if the type is not a file name, [`code::OTHER`] if no directory contains it.
pub fn find(kind: &str, path: &str) -> Result<PathBuf, Error> {
    if kind.is_empty() || kind.contains('/') {
        return Err(Error::new(code::CONFIG, format!("{kind:?} is not the name of a plugin")));
    }
    let dirs = path.split(':').filter(|dir| !dir.is_empty());
    dirs.map(|dir| PathBuf::from(dir).join(kind))
        .find(|file| file.is_file())
        .ok_or_else(|| Error::new(code::OTHER, format!("failed to find plugin {kind:?} in path [{path}]")))
}

/// Runs the program of the plugin `kind` and returns its standard output.
///
/// The plugin gets `conf` on its standard input and the variables of `request`, with `verb` as CNI_COMMAND. Its
/// standard error is copied to ours.
///
/// # Errors
/// The plugin's own error, unchanged; or an error that says that the plugin cannot be found or started, or that its
/// answer cannot be read.
pub fn run(kind: &str, conf: &Value, verb: Verb, request: &Request) -> Result<Vec<u8>, Error> {
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
    let output = output(&mut command).map_err(|error| Error::io(format!("start {}", program.display()), error))?;
    // The output is meant for the runtime's log. A failed write cannot be reported anywhere.
    let _ = io::stderr().write_all(&output.stderr);
    if output.status.success() { Ok(output.stdout) } else { Err(failure(kind, verb, &output)) }
}

/// Runs a command. While an installer copies a newer version over the program, the kernel refuses to start it.
fn output(command: &mut Command) -> io::Result<Output> {
    let begin = Instant::now();
    let mut noted = false;
    loop {
        match command.output() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && begin.elapsed() < WRITTEN_WITHIN => {}
            output => return output,
        }
        if !noted {
            note!("waiting until {} is written", command.get_program().to_string_lossy());
            noted = true;
        }
        pause();
    }
}

/// Returns the plugin's standard input. It is a file in memory, because a plugin that does not read a pipe would block
/// this process.
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
    let cause = match (output.status.code(), output.status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "no exit code".to_owned(),
    };
    let output_text = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).trim().to_owned());
    let output_text = output_text.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
    Error::new(code::OTHER, format!("{kind} {} failed: {cause}", verb.name())).details(output_text)
}
