// SPDX-License-Identifier: Apache-2.0
//! `weft cleanup`: removes all that is ours from the kernel, and nothing else.

use std::fs;
use std::io;
use std::path::Path;

use weft_backends::diff::Op;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, Name, Observed, Seen};
use weft_subnet::cidr::Subnets;

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
            Outcome::Retry(text) | Outcome::Fatal(text) => report.failed.push(text),
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
            // The guard's table goes with the rules.
            Key::Addr(..) | Key::Fdb(..) | Key::Neigh(..) | Key::Peer(_) | Key::Guard(_) => false,
        };
        if ours {
            ops.push(Op::Remove(*key, seen.value));
        }
    }
    (ops, left)
}

fn device(name: Name, seen: &Seen, scope: &Scope, left: &mut Vec<Name>) -> bool {
    let flannels = is_flannels(name.as_str());
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

/// A flanneld or weft agent in our network namespace: pid and command, for people. Reads /proc.
pub fn running_agent() -> io::Result<Option<String>> {
    let ours = fs::read_link("/proc/self/ns/net")?;
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        let pid = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<u32>().ok());
        let Some(pid) = pid.filter(|pid| *pid != std::process::id()) else { continue };
        // A process may end while we look at it.
        let Ok(cmdline) = fs::read(path.join("cmdline")) else { continue };
        let comm = fs::read_to_string(path.join("comm")).unwrap_or_default();
        if is_agent(comm.trim_end(), &cmdline) && fs::read_link(path.join("ns/net")).is_ok_and(|ns| ns == ours) {
            return Ok(Some(format!("{} (pid {pid})", comm.trim_end())));
        }
    }
    Ok(None)
}

fn is_agent(comm: &str, cmdline: &[u8]) -> bool {
    let mut words = cmdline.split(|b| *b == 0);
    let program = words.next().and_then(|word| Path::new(std::str::from_utf8(word).ok()?).file_name()?.to_str());
    let command = words.next();
    comm == "flanneld" || program == Some("flanneld") || (program == Some("weft") && command == Some(b"agent"))
}

#[cfg(test)]
mod tests {
    use weft_backends::state::{Link, LinkKind, Route, Value};

    use super::*;

    fn link(name: &str, mark: bool) -> (Key, Seen) {
        let link = Link { kind: LinkKind::Other, mtu: 1450, mac: None, up: true, learning: false };
        (Key::Link(Name::new(name).unwrap()), Seen { value: Value::Link(link), protocol: 0, mark })
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
}
