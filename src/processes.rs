// SPDX-License-Identifier: Apache-2.0
//! The agents that run in our network namespace, by what /proc shows of them.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use weft_doctor::processes::{self, net_namespace};

/// A process of weft or flanneld.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentProcess {
    /// The name of the command.
    pub command: String,
    /// The process id.
    pub pid: u32,
    /// The command line, as in /proc: each word ends with a zero byte.
    pub cmdline: Vec<u8>,
    /// The file of its program. Empty if it cannot be read.
    pub program: PathBuf,
    /// The environment, as in /proc. Empty if it cannot be read.
    pub environ: Vec<u8>,
    /// Its working directory. Empty if it cannot be read.
    pub dir: PathBuf,
}

impl AgentProcess {
    /// Returns true for flannel's own program, and for weft under its name.
    pub fn is_flanneld(&self) -> bool {
        self.command.starts_with("flanneld")
    }

    /// Returns true for flannel's own program. Under flannel's name, weft is a link to the file `weft`.
    pub fn is_flannels_own(&self) -> bool {
        let program = self.program.file_name();
        self.is_flanneld() && program.is_some_and(|name| name != "weft")
    }
}

impl fmt::Display for AgentProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.command, self.pid)
    }
}

/// Returns all agents in our network namespace, except this process. An agent whose namespace cannot be read counts as one of them. This
/// reads /proc and blocks.
///
/// # Errors
/// /proc cannot be read.
pub fn agent_processes() -> io::Result<Vec<AgentProcess>> {
    let ours = net_namespace(Path::new("/proc/self"))?;
    let mut found = Vec::new();
    for process in processes::all()?.into_iter().filter(|process| process.pid != std::process::id()) {
        let (pid, path) = (process.pid, &process.dir);
        // A process may end while it is examined.
        let Ok(cmdline) = fs::read(path.join("cmdline")) else { continue };
        let command = process.name();
        let may_be_here = || match net_namespace(path) {
            Ok(namespace) => namespace == ours,
            // If it is no agent of this namespace, old rules stay that could have been removed. If it is one, its rules must stay.
            Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        };
        if is_agent(&command, &cmdline) && may_be_here() {
            let environ = fs::read(path.join("environ")).unwrap_or_default();
            let dir = fs::read_link(path.join("cwd")).unwrap_or_default();
            let program = fs::read_link(path.join("exe")).unwrap_or_default();
            found.push(AgentProcess { command, pid, cmdline, program, environ, dir });
        }
    }
    Ok(found)
}

/// Returns true if a process is stopped, as after SIGSTOP. It does nothing until it gets SIGCONT.
pub fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name of the command, in parentheses, may contain anything.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with("T "))
}

fn is_agent(comm: &str, cmdline: &[u8]) -> bool {
    let mut words = cmdline.split(|b| *b == 0);
    let program = words.next().and_then(|word| Path::new(std::str::from_utf8(word).ok()?).file_name()?.to_str());
    let argument = words.next();
    comm == "flanneld" || program == Some("flanneld") || (program == Some("weft") && argument == Some(b"agent"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::{AgentProcess, agent_processes, is_agent};

    #[test]
    fn agents_are_known_by_their_command() {
        assert!(is_agent("flanneld", b"/opt/bin/flanneld\0--iface=eth0\0"));
        assert!(is_agent("flanneld", b""), "its command line cannot be read any more");
        assert!(is_agent("exe", b"/opt/bin/flanneld\0--iface=eth0\0"), "it was started by /proc/self/exe");
        assert!(is_agent("weft", b"/usr/bin/weft\0agent\0-v\0"));
        assert!(!is_agent("weft", b"/usr/bin/weft\0cleanup\0"));
        assert!(!is_agent("weft", b"/usr/bin/weft\0"));
        assert!(!is_agent("other", b"/usr/bin/other\0agent\0"));
        assert!(!is_agent("sh", b"sh\0-c\0weft agent\0"));
    }

    /// Flannel's own agent may run beside `weft cleanup --only`, and weft under its name may not.
    #[test]
    fn flannels_own_program_is_told_from_weft_under_its_name() {
        let is_flannels = |command: &str, program: &str| {
            let (command, program) = (command.to_owned(), PathBuf::from(program));
            let (cmdline, environ, dir) = (Vec::new(), Vec::new(), PathBuf::new());
            AgentProcess { command, pid: 7, cmdline, program, environ, dir }.is_flannels_own()
        };
        assert!(is_flannels("flanneld", "/opt/bin/flanneld"));
        assert!(!is_flannels("flanneld", "/usr/bin/weft"));
        assert!(!is_flannels("weft", "/usr/bin/weft-0.2"));
        assert!(!is_flannels("flanneld", ""), "its program cannot be read");
    }

    /// An agent that bears the name of flannel's program removes flannel's rules only if no other process with that name runs.
    #[test]
    fn a_process_does_not_find_itself() {
        let comm = "/proc/self/comm";
        let before = fs::read_to_string(comm).unwrap();
        fs::write(comm, "flanneld").unwrap();
        let (name, found) = (fs::read_to_string(comm).unwrap(), agent_processes());
        fs::write(comm, before).unwrap();
        assert_eq!(name.trim_end(), "flanneld");
        let pids: Vec<u32> = found.unwrap().iter().map(|agent| agent.pid).collect();
        assert!(!pids.contains(&std::process::id()), "{pids:?}");
    }
}
