// SPDX-License-Identifier: Apache-2.0
//! The agents that run in our network namespace. `weft cleanup` and `weft release` must not work beside the agent whose entries or lease
//! they remove.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cli;
use crate::observe::socket;
use crate::processes::{AgentProcess, agent_processes};

/// An agent that runs in our network namespace, and its subnet file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// The command and the process id, for people.
    pub what: String,
    /// Its subnet file; `None` when its command line cannot be understood.
    pub subnet_file: Option<PathBuf>,
    /// Its working directory, which a relative path of a subnet file starts from.
    dir: PathBuf,
}

impl Running {
    /// False when the agent certainly has another subnet file, so that nothing that it wrote is ours.
    pub fn may_have(&self, subnet_file: &Path) -> bool {
        let Some(its) = &self.subnet_file else { return true };
        let ours = std::path::absolute(subnet_file);
        its == subnet_file || ours.is_ok_and(|ours| self.dir.join(its) == ours)
    }
}

impl From<AgentProcess> for Running {
    fn from(agent: AgentProcess) -> Running {
        Running { what: agent.to_string(), subnet_file: subnet_file_of(&agent.cmdline, &agent.environ), dir: agent.dir }
    }
}

/// The subnet file of an agent with this command line and environment, both as /proc shows them.
fn subnet_file_of(cmdline: &[u8], environ: &[u8]) -> Option<PathBuf> {
    let words = cmdline.strip_suffix(b"\0").unwrap_or(cmdline).split(|b| *b == 0);
    let words = words.map(|word| OsStr::from_bytes(word).to_owned());
    let environ = String::from_utf8_lossy(environ);
    let env = |name: &str| {
        let mut values = environ.split('\0').filter_map(|variable| variable.strip_prefix(name)?.strip_prefix('='));
        values.next().map(str::to_owned)
    };
    match cli::parse_from(words, env) {
        Ok(cli::Task::Agent(task)) => Some(task.options.subnet_file),
        _ => None,
    }
}

/// Returns the agents of other subnet files that run.
///
/// # Errors
/// The agent of this subnet file runs. `why` says what it would do.
pub fn other_agents(socket: &Path, subnet_file: &Path, why: &str) -> anyhow::Result<Vec<Running>> {
    check(socket, subnet_file, why, |_| true)
}

/// Checks that no agent of weft with this subnet file runs. flannel's own agent may run.
///
/// # Errors
/// As [`other_agents`].
pub fn no_agent_of_weft(socket: &Path, subnet_file: &Path, why: &str) -> anyhow::Result<()> {
    check(socket, subnet_file, why, |agent| !agent.is_flannels_own()).map(|_| ())
}

/// Returns the agents that count and have other subnet files, or an error if one of them may have this subnet file.
fn check(
    socket: &Path,
    subnet_file: &Path,
    why: &str,
    counts: impl Fn(&AgentProcess) -> bool,
) -> anyhow::Result<Vec<Running>> {
    if socket::answers(socket) {
        anyhow::bail!("an agent answers on {}: stop it first, {why}", socket.display());
    }
    let agents = agent_processes().context("look for running agents")?.into_iter().filter(counts);
    let agents: Vec<Running> = agents.map(Running::from).collect();
    if let Some(agent) = agents.iter().find(|agent| agent.may_have(subnet_file)) {
        anyhow::bail!("{} runs with the subnet file {}: stop it first, {why}", agent.what, subnet_file.display());
    }
    Ok(agents)
}

/// Returns the processes of flannel that run beside the agent on this socket and may have the same subnet file. weft may run under flannel's
/// name, so the agent itself is left out, and without its process ID nothing is certain.
pub fn flannel_agents(socket: &Path, subnet_file: &Path) -> Vec<String> {
    let Some(agent) = socket::agent_pid(socket) else { return Vec::new() };
    let others = agent_processes().unwrap_or_default().into_iter();
    let others = others.filter(|other| other.pid != agent && other.is_flanneld());
    others.map(Running::from).filter(|other| other.may_have(subnet_file)).map(|other| other.what).collect()
}

/// Returns all agents in our network namespace that may have this subnet file.
pub fn agents_with(subnet_file: &Path) -> Vec<String> {
    let all = agent_processes().unwrap_or_default().into_iter().map(Running::from);
    all.filter(|agent| agent.may_have(subnet_file)).map(|agent| agent.what).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_known_by_its_subnet_file() {
        let usual = "/run/flannel/subnet.env";
        for (cmdline, environ, wanted) in [
            ("weft agent", "", Some(usual)),
            ("/usr/bin/weft agent --subnet-file=/run/flannel/b.env -v=1", "", Some("/run/flannel/b.env")),
            ("/opt/bin/flanneld -subnet-file /run/b.env --ip-masq", "PATH=/bin", Some("/run/b.env")),
            ("weft agent", "PATH=/bin FLANNELD_SUBNET_FILE=/run/c.env", Some("/run/c.env")),
            ("weft agent --flag-of-another-version", "", None),
        ] {
            let zeros = |text: &str| format!("{text}\0").replace(' ', "\0").into_bytes();
            let file = subnet_file_of(&zeros(cmdline), &zeros(environ));
            assert_eq!(file.as_deref(), wanted.map(Path::new), "{cmdline} {environ}");
            let agent = Running { what: "weft (pid 7)".to_owned(), subnet_file: file, dir: "/run".into() };
            assert_eq!(agent.may_have(Path::new(usual)), wanted.is_none_or(|wanted| wanted == usual), "{cmdline}");
        }
        let relative = Running { what: String::new(), subnet_file: Some("b.env".into()), dir: "/run".into() };
        assert!(relative.may_have(Path::new("/run/b.env")) && !relative.may_have(Path::new("/run/c.env")));
    }
}
