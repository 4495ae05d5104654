// SPDX-License-Identifier: Apache-2.0
//! CNI plugins that are there and cannot run: a copy that was cut off, one for another architecture, or a file system that forbids programs.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::errno::Errno;
use serde_json::Value;
use weft_subnet::env::USUAL_FILE;

use super::base::SubnetFile;
use super::cni_files::{Conf, OURS};
use super::finding::{NodeFinding, finding};
use super::node::{AgentAnswer, NodeFacts};
use super::programs::{ProgramError, output};

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

/// Plugins that cannot run.
pub(super) fn broken(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |(path, why): &(PathBuf, String)| {
        let remedy = "install it again, for the architecture of this node; if the file system is mounted with noexec, mount it without; \
                      `CNI_COMMAND=VERSION` and that program show the error";
        finding(format!("{} cannot run: {why}: no pod can start", path.display()), remedy.to_owned())
    };
    facts.cni.broken.iter().map(one).collect()
}

/// The plugins of weft and flannel read another subnet file than the one that the agent writes.
pub(super) fn other_subnet_file(facts: &NodeFacts) -> Option<NodeFinding> {
    let runs = matches!(facts.agent, AgentAnswer::Problems(_)) && matches!(facts.subnet_file, SubnetFile::Good(_));
    let own = facts.path.as_path();
    let read = |conf: &Conf| conf.subnet_files.iter().any(|file| is_same(file, own));
    let first = facts.cni.confs.iter().find(|conf| !conf.subnet_files.is_empty())?;
    if !runs || facts.cni.confs.iter().any(read) {
        return None;
    }
    let (dir, name, file) = (facts.cni.conf_dir.display(), &first.name, first.subnet_files.first()?.display());
    let evidence = format!(
        "{dir}/{name}: the plugin reads {file}, the agent writes {}: new pods get no address, or one of another subnet",
        own.display()
    );
    let remedy = format!(
        "set `subnetFile` of the plugin in that file to {}, or start the agent with --subnet-file={file}",
        own.display()
    );
    Some(finding(evidence, remedy))
}

/// Returns the subnet file that a plugin reads, if it is one of weft or flannel.
pub(super) fn subnet_file(plugin: &Value) -> Option<PathBuf> {
    let is_ours = plugin["type"].as_str().is_some_and(|kind| OURS.contains(&kind));
    let named = plugin["subnetFile"].as_str().filter(|file| !file.is_empty());
    is_ours.then(|| PathBuf::from(named.unwrap_or(USUAL_FILE)))
}

/// Returns true for two paths of one file. /var/run is a link to /run.
fn is_same(one: &Path, other: &Path) -> bool {
    one == other || fs::canonicalize(one).is_ok_and(|one| fs::canonicalize(other).is_ok_and(|other| one == other))
}
