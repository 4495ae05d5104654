// SPDX-License-Identifier: Apache-2.0
//! What is known about CNI plugins: whether they can run, and which subnet file they read.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use serde_json::Value;
use weft_subnet::env::USUAL_FILE;

use crate::programs::{ProgramError, output};

/// The plugins that connect pods to weft's network.
pub(crate) const OURS: [&str; 2] = ["flannel", "weft-veth"];
/// The time limit for one plugin.
const LIMIT: Duration = Duration::from_secs(2);
/// The question for the versions that a plugin knows. The specification of CNI lets it change nothing.
const QUESTION: &str = r#"{"cniVersion":"1.0.0"}"#;

/// Returns why a plugin cannot run, if it cannot. A plugin that runs answers with JSON, also if it refuses the question.
pub(super) fn why_not(path: &Path) -> Option<String> {
    let mut command = Command::new(path);
    command.env("CNI_COMMAND", "VERSION");
    let name = path.display().to_string();
    let why = match output(&name, command, QUESTION, LIMIT) {
        Ok(answer) if serde_json::from_slice::<Value>(&answer.stdout).is_ok_and(|value| value.is_object()) => {
            return None;
        }
        Ok(answer) if answer.status.success() => "it prints no version".to_owned(),
        Ok(answer) => {
            let errors = String::from_utf8_lossy(&answer.stderr).lines().next().unwrap_or_default().to_owned();
            format!("{}{}{errors}", answer.status, if errors.is_empty() { "" } else { ": " })
        }
        Err(ProgramError::Late { .. }) => format!("it does not answer within {} s", LIMIT.as_secs()),
        // Somebody writes the file just now.
        Err(ProgramError::Start { source, .. }) if source.kind() == ErrorKind::ExecutableFileBusy => return None,
        Err(ProgramError::Start { source, .. }) => {
            source.raw_os_error().map_or_else(|| source.to_string(), |errno| Errno::from_raw(errno).desc().to_owned())
        }
        // This may be a container that lacks libraries of the host.
        Err(_) => return None,
    };
    let size = fs::metadata(path).map_or(0, |about| about.len());
    Some(format!("{why} ({size} bytes)"))
}

/// Returns the subnet file that a plugin reads, if it is one of weft or flannel.
pub(super) fn subnet_file(plugin: &Value) -> Option<PathBuf> {
    let is_ours = plugin["type"].as_str().is_some_and(|kind| OURS.contains(&kind));
    let named = plugin["subnetFile"].as_str().filter(|file| !file.is_empty());
    is_ours.then(|| PathBuf::from(named.unwrap_or(USUAL_FILE)))
}
