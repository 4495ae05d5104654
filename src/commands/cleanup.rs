// SPDX-License-Identifier: Apache-2.0
//! `weft cleanup`: removes every entry of ours from the kernel, and nothing else.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use weft_backends::diff::Op;
use weft_backends::owner::{self, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, ObservedValue};
use weft_subnet::cidr::Subnets;

use crate::cli;
use crate::kernel::{Kernel, Outcome};
use crate::running::{AgentProcess, agent_processes};

/// What is to be removed.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Our routes inside these networks are removed. Without any network (no subnet.env), all of our routes are removed.
    pub networks: Subnets,
    /// Devices with flannel's names are removed too, though they do not have our mark.
    pub flannel_devices: bool,
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CleanupReport {
    /// Devices and routes removed.
    pub removed: usize,
    /// What the kernel refused to remove, one sentence each.
    pub failed: Vec<String>,
    /// Devices with flannel's names that were not removed, because weft did not make them.
    pub left: Vec<Name>,
}

/// Removes our routes and then our devices. Addresses, neighbours and FDB entries go with their device.
///
/// # Errors
/// The kernel cannot be read. What it refuses to remove is in the report.
pub fn cleanup(kernel: &mut impl Kernel, scope: &Scope) -> io::Result<CleanupReport> {
    let links: Vec<Name> = kernel.machine()?.links.iter().map(|link| link.name).collect();
    let observed = kernel.observe(&links)?;
    let (ops, left) = select(&observed, scope);
    let mut report = CleanupReport { left, ..CleanupReport::default() };
    for outcome in kernel.apply(&ops) {
        match outcome {
            Outcome::Done => report.removed += 1,
            Outcome::Retry(text) | Outcome::Fatal(text) | Outcome::Partly { missing: text, .. } => {
                report.failed.push(text);
            }
        }
    }
    Ok(report)
}

/// The removals, routes first, and the devices that only have flannel's names.
fn select(observed: &Observed, scope: &Scope) -> (Vec<Op>, Vec<Name>) {
    let mut left = Vec::new();
    let mut ops = Vec::new();
    // In reverse order of keys: routes come last among them, and links first.
    for (key, seen) in observed.iter().rev() {
        let ours = match key {
            Key::Route(net, _) => {
                let inside = scope.networks.iter().any(|network| network.contains(net));
                seen.protocol == PROTOCOL && (inside || scope.networks == Subnets::default())
            }
            Key::Link(name) => device(*name, seen, scope, &mut left),
            // These stand in tables that no other agent uses.
            Key::Open(_) | Key::Fence(_) => true,
            // The table of the tunnel guard is removed together with the traffic rules.
            Key::Addr(..) | Key::Fdb(..) | Key::Neigh(..) | Key::Peer(_) | Key::Guard(_) => false,
            Key::WgPeer(..) | Key::AllowedIp(..) => false,
        };
        if ours {
            ops.push(Op::Remove(*key, seen.value.clone()));
        }
    }
    (ops, left)
}

fn device(name: Name, seen: &ObservedValue, scope: &Scope, left: &mut Vec<Name>) -> bool {
    let flannels = owner::is_flannels_device(name);
    if flannels && !seen.mark && !scope.flannel_devices {
        left.push(name);
    }
    seen.mark || (flannels && scope.flannel_devices)
}

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

/// All agents in our network namespace, except this process.
///
/// # Errors
/// /proc cannot be read.
pub fn running_agents() -> io::Result<Vec<Running>> {
    let running = |agent: AgentProcess| Running {
        what: agent.to_string(),
        subnet_file: subnet_file_of(&agent.cmdline, &agent.environ),
        dir: agent.dir,
    };
    Ok(agent_processes()?.into_iter().map(running).collect())
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::{Route, Value};

    use super::*;

    fn link(name: &str, mark: bool) -> (Key, ObservedValue) {
        let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
        (Key::Link(Name::new(name).unwrap()), ObservedValue { value: Value::link(link), protocol: 0, mark })
    }

    fn route(net: &str, protocol: u8) -> (Key, ObservedValue) {
        let seen = ObservedValue { value: Value::Route(Route::Blackhole), protocol, mark: false };
        (Key::Route(net.parse().unwrap(), 0), seen)
    }

    fn removed(scope: &Scope) -> (Vec<String>, Vec<String>) {
        let observed = Observed::from([
            link("eth0", false),
            link("flannel.1", true),
            link("flannel.7", false),
            link("flannel.foo", false),
            link("mine", true),
            route("10.5.1.0/24", PROTOCOL),
            route("10.5.2.0/24", 3),
            route("172.16.0.0/24", PROTOCOL),
        ]);
        let (ops, left) = select(&observed, scope);
        let name = |op: &Op| match op {
            Op::Remove(Key::Link(name), _) => name.to_string(),
            Op::Remove(Key::Route(net, _), _) => net.to_string(),
            other => panic!("{other:?}"),
        };
        (ops.iter().map(name).collect(), left.iter().map(Name::to_string).collect())
    }

    #[test]
    fn only_what_is_ours_routes_first() {
        let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
        let (ops, left) = removed(&Scope { networks, flannel_devices: false });
        assert_eq!(ops, ["10.5.1.0/24", "mine", "flannel.1"]);
        assert_eq!(left, ["flannel.7"]);
        let (ops, left) = removed(&Scope { networks: Subnets::default(), flannel_devices: true });
        assert_eq!(ops, ["172.16.0.0/24", "10.5.1.0/24", "mine", "flannel.7", "flannel.1"]);
        assert!(left.is_empty());
    }

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
