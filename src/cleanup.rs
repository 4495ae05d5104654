// SPDX-License-Identifier: Apache-2.0
//! `weft cleanup`: removes all that is ours from the kernel, and nothing else.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use weft_backends::diff::Op;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, Name, Observed, Seen};
use weft_subnet::cidr::Subnets;

use crate::cli;
use crate::kernel::{Kernel, Outcome};

/// What is to go.
#[derive(Debug, Clone, Default)]
pub struct Scope {
    /// Routes of ours are removed inside these networks; without any (no subnet.env) wherever they lead.
    pub networks: Subnets,
    /// Also devices with flannel's names that do not bear our mark.
    pub flannel_devices: bool,
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Devices and routes removed.
    pub removed: usize,
    /// What the kernel refused, as sentences.
    pub failed: Vec<String>,
    /// Devices with flannel's names that were left, because weft did not make them.
    pub left: Vec<Name>,
}

/// Removes our routes, then our devices (their addresses, neighbours and forwarding entries go with them).
pub fn cleanup(kernel: &mut impl Kernel, scope: &Scope) -> io::Result<Report> {
    let links: Vec<Name> = kernel.machine()?.links.iter().map(|link| link.name).collect();
    let observed = kernel.observe(&links)?;
    let (ops, left) = select(&observed, scope);
    let mut report = Report { left, ..Report::default() };
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

/// The removals, routes first, and the devices that only look like ours.
fn select(observed: &Observed, scope: &Scope) -> (Vec<Op>, Vec<Name>) {
    let mut left = Vec::new();
    let mut ops = Vec::new();
    // Downwards: routes are the last variant of Key, links the first.
    for (key, seen) in observed.iter().rev() {
        let ours = match key {
            Key::Route(net, _) => {
                let inside = scope.networks.iter().any(|network| network.contains(net));
                seen.protocol == PROTOCOL && (inside || scope.networks == Subnets::default())
            }
            Key::Link(name) => device(*name, seen, scope, &mut left),
            // They stand in tables of this agent alone.
            Key::Open(_) | Key::Fence(_) => true,
            // The guard's table goes with the rules.
            Key::Addr(..) | Key::Fdb(..) | Key::Neigh(..) | Key::Peer(_) | Key::Guard(_) => false,
        };
        if ours {
            ops.push(Op::Remove(*key, seen.value.clone()));
        }
    }
    (ops, left)
}

fn device(name: Name, seen: &Seen, scope: &Scope, left: &mut Vec<Name>) -> bool {
    let flannels = is_flannels(&name.text());
    if flannels && !seen.mark && !scope.flannel_devices {
        left.push(name);
    }
    seen.mark || (flannels && scope.flannel_devices)
}

/// `flannel.<VNI>`, `flannel-v6.<VNI>`, `flannel.ipip`.
fn is_flannels(name: &str) -> bool {
    let rest = name.strip_prefix("flannel.").or_else(|| name.strip_prefix("flannel-v6."));
    rest.is_some_and(|rest| rest == "ipip" || (!rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit())))
}

/// An agent that runs in our network namespace: weft or flanneld.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// Command and pid, for people.
    pub what: String,
    /// Its subnet file; `None` when its command line cannot be understood.
    pub subnet_file: Option<PathBuf>,
    /// Where it runs: a relative subnet file is meant from there.
    dir: PathBuf,
}

impl Running {
    /// True for flannel's own program, or weft under its name.
    pub fn is_flanneld(&self) -> bool {
        self.what.starts_with("flanneld")
    }

    /// False when it is surely the agent of another subnet file: whatever that one wrote is not ours.
    pub fn may_have(&self, subnet_file: &Path) -> bool {
        let Some(its) = &self.subnet_file else { return true };
        let ours = std::path::absolute(subnet_file);
        its == subnet_file || ours.is_ok_and(|ours| self.dir.join(its) == ours)
    }
}

/// All agents in our network namespace, but this process. Reads /proc.
pub fn running_agents() -> io::Result<Vec<Running>> {
    let ours = fs::read_link("/proc/self/ns/net")?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<u32>().ok());
        let Some(pid) = pid.filter(|pid| *pid != std::process::id()) else { continue };
        // A process may end while we look at it.
        let Ok(cmdline) = fs::read(path.join("cmdline")) else { continue };
        let comm = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if is_agent(comm.trim_end(), &cmdline) && fs::read_link(path.join("ns/net")).is_ok_and(|ns| ns == ours) {
            let environ = fs::read(path.join("environ")).unwrap_or_default();
            found.push(Running {
                what: format!("{} (pid {pid})", comm.trim_end()),
                subnet_file: subnet_file_of(&cmdline, &environ),
                dir: fs::read_link(path.join("cwd")).unwrap_or_default(),
            });
        }
    }
    Ok(found)
}

/// The subnet file of an agent with this command line and environment, each as /proc shows it.
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

fn is_agent(comm: &str, cmdline: &[u8]) -> bool {
    let mut words = cmdline.split(|b| *b == 0);
    let program = words.next().and_then(|word| Path::new(std::str::from_utf8(word).ok()?).file_name()?.to_str());
    let command = words.next();
    comm == "flanneld" || program == Some("flanneld") || (program == Some("weft") && command == Some(b"agent"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::{Route, Value};

    use super::*;

    fn link(name: &str, mark: bool) -> (Key, Seen) {
        let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
        (Key::Link(Name::new(name).unwrap()), Seen { value: Value::link(link), protocol: 0, mark })
    }

    fn route(net: &str, protocol: u8) -> (Key, Seen) {
        let seen = Seen { value: Value::Route(Route::Blackhole), protocol, mark: false };
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
    fn agents_are_told_by_command() {
        assert!(is_agent("flanneld", b"/opt/bin/flanneld\0--iface=eth0\0"));
        assert!(is_agent("weft", b"/usr/bin/weft\0agent\0-v\0"));
        assert!(!is_agent("weft", b"/usr/bin/weft\0cleanup\0"));
        assert!(!is_agent("sh", b"sh\0-c\0weft agent\0"));
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
