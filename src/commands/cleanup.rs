// SPDX-License-Identifier: Apache-2.0
//! `weft cleanup`: removes every entry of ours from the kernel, the traffic rules, the files of the agent, and its changes of sysctls. It
//! removes nothing that another program made.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use weft_backends::diff::Op;
use weft_backends::owner::{self, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, ObservedValue};
use weft_subnet::cidr::Subnets;
use weft_subnet::env::SubnetEnv;

use super::Answer;
use super::other_agents::{no_agent_of_weft, other_agents};
use crate::cli;
use crate::cli::cleanup::{CleanupTask, Part};
use crate::instance::Instance;
use crate::kernel::{Kernel, Outcome};
use crate::lease::acquire::kept_wireguard_key;
use crate::log::text::printable;
use crate::observe::history;
use crate::offload::ChecksumOffload;
use crate::sysctls::loosened::Loosened;
use crate::{agent, conflist, extension, files, firewall, saved};

/// What is to be removed.
#[derive(Debug, Clone, Default)]
struct Scope {
    /// Our routes inside these networks are removed. Without any network (no subnet.env), all of our routes are removed.
    networks: Subnets,
    /// Devices with flannel's names are removed too, though they do not have our mark.
    flannel_devices: bool,
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct CleanupReport {
    /// Devices and routes removed.
    removed: usize,
    /// What the kernel refused to remove, one sentence each.
    failed: Vec<String>,
    /// Devices with flannel's names that were not removed, because weft did not make them.
    left: Vec<Name>,
}

/// Why the agent must not run.
const AGAIN: &str = "it would write everything again";

/// Removes what the agent of this subnet file wrote: entries of the kernel, traffic rules, sysctls and files. With `--only`, some parts of
/// that.
///
/// # Errors
/// This agent runs, or what is its own cannot be told from that of another agent. If single entries cannot be removed, they are named on
/// standard error, and the exit code is that of a failure.
pub async fn run(task: &CleanupTask) -> anyhow::Result<Answer> {
    if !task.only.is_empty() {
        return remove_parts(task).await;
    }
    let scope = scope(task)?;
    let mut kernel = agent::open_kernel(&task.subnet_file)?;
    let mut report = remove_entries(&mut kernel, &scope).context("clean up")?;
    let rules = report.remove_rules(task).await;
    let guard = report.remove_guard(task);
    let unpublished = conflist::remove(&task.cni_conf_dir, &task.subnet_file).unwrap_or_else(|error| {
        report.failed.push(format!("remove the CNI configuration from {}: {error}", task.cni_conf_dir.display()));
        false
    });
    let loosened = Loosened::new(&task.subnet_file).ensure(None, true);
    let offload = ChecksumOffload::new(&task.subnet_file, false).ensure(std::iter::empty());
    report.failed.extend(loosened.into_iter().chain(offload).map(|problem| problem.text));
    if let Err(error) = saved::remove(&task.state_dir, &task.subnet_file) {
        report.failed.push(format!("remove the saved peers: {error}"));
    }
    if let Err(error) = history::recorder::remove(&task.state_dir, &task.subnet_file) {
        report.failed.push(format!("remove the history: {error}"));
    }
    if let Err(error) = extension::memory::remove(&task.state_dir, &task.subnet_file) {
        report.failed.push(format!("remove the peers of the commands of extension: {error}"));
    }
    report.say_what_stays(task);
    let also = [(rules || guard, " and the traffic rules"), (unpublished, " and the CNI configuration")];
    let also: String = also.iter().filter(|(done, _)| *done).map(|(_, text)| *text).collect();
    Ok(report.answer(format!("removed {} entries{also}\n", report.removed)))
}

/// Removes the parts that `--only` names. They are told from those of flannel by their names, so flanneld may run.
async fn remove_parts(task: &CleanupTask) -> anyhow::Result<Answer> {
    no_agent_of_weft(&task.socket, &task.subnet_file, AGAIN)?;
    let mut report = CleanupReport::default();
    let mut removed = Vec::new();
    if task.only.contains(&Part::Fence) {
        let mut kernel = agent::open_kernel(&task.subnet_file)?;
        let fence = kernel.fence().context("read the fence")?;
        let ops: Vec<Op> = fence.into_iter().rev().map(|(key, seen)| Op::Remove(key, seen.value)).collect();
        report.apply(&mut kernel, &ops);
        removed.extend((report.removed > 0).then_some("the fence"));
    }
    if task.only.contains(&Part::Guard) {
        removed.extend(report.remove_guard(task).then_some("the tunnel guard"));
    }
    if task.only.contains(&Part::Rules) {
        removed.extend(report.remove_rules(task).await.then_some("the traffic rules"));
    }
    let removed = if removed.is_empty() { "nothing".to_owned() } else { removed.join(", ") };
    Ok(report.answer(format!("removed {removed}\n")))
}

/// Returns what is to be removed, if that can be told from what other agents wrote.
fn scope(task: &CleanupTask) -> anyhow::Result<Scope> {
    let others = other_agents(&task.socket, &task.subnet_file, AGAIN)?;
    let env = files::read_text(&task.subnet_file).ok().and_then(|text| SubnetEnv::parse(&text));
    let networks = env.map(|env| env.networks).unwrap_or_default();
    if let Some(other) = others.first() {
        let (file, other) = (task.subnet_file.display(), &other.what);
        // Without a network, the routes of all agents would be removed.
        if networks == Subnets::default() {
            anyhow::bail!(
                "{file} names no network, so the routes of {other} cannot be told from those to remove: stop it first"
            );
        }
        if task.flannel_devices {
            anyhow::bail!("--flannel-devices would take the devices of {other}: stop it first");
        }
    }
    Ok(Scope { networks, flannel_devices: task.flannel_devices })
}

impl CleanupReport {
    /// Removes entries of the kernel.
    fn apply(&mut self, kernel: &mut impl Kernel, ops: &[Op]) {
        for outcome in kernel.apply(ops) {
            match outcome {
                Outcome::Done => self.removed += 1,
                Outcome::Retry(text) | Outcome::Fatal(text) | Outcome::Partly { missing: text, .. } => {
                    self.failed.push(text);
                }
            }
        }
    }

    /// Removes the traffic rules. Returns true if some were removed.
    async fn remove_rules(&mut self, task: &CleanupTask) -> bool {
        let (removed, errors) = firewall::remove_rules(&Instance::new(&task.subnet_file)).await;
        self.failed.extend(errors.iter().map(ToString::to_string));
        removed
    }

    /// Removes the tunnel guard. Returns true if there was one.
    fn remove_guard(&mut self, task: &CleanupTask) -> bool {
        firewall::remove_guard(&Instance::new(&task.subnet_file)).unwrap_or_else(|error| {
            self.failed.push(error.to_string());
            false
        })
    }

    /// Says on standard error what was not removed on purpose.
    fn say_what_stays(&self, task: &CleanupTask) {
        for name in &self.left {
            eprintln!(
                "weft: {name} was not made by this agent and stays: give --flannel-devices to remove it if flanneld made it"
            );
        }
        if let Some(file) = conflist::left(&task.cni_conf_dir, &task.subnet_file) {
            let text = format!(
                "{} stays, because no agent has published it since the last boot: remove it if no other program needs it",
                file.display()
            );
            eprintln!("weft: {}", printable(&text));
        }
        if let Some(text) = key_that_stays(&task.state_dir, &task.subnet_file) {
            eprintln!("weft: {}", printable(&text));
        }
    }

    /// Says on standard error what failed, and returns the answer with the exit code.
    fn answer(&self, text: String) -> Answer {
        self.failed.iter().for_each(|text| eprintln!("weft: {}", printable(text)));
        let code = if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(cli::exit::FAILURE) };
        Answer { text, code }
    }
}

/// Names the private key of WireGuard, if there is one. It is kept, because a node that starts again must have the key that its peers know.
fn key_that_stays(state_dir: &Path, subnet_file: &Path) -> Option<String> {
    let key = kept_wireguard_key(state_dir, subnet_file);
    let what =
        "stays for the next start of this node, whose WireGuard key it is: remove it if weft will not run here again";
    key.exists().then(|| format!("{} {what}", key.display()))
}

/// Removes our routes and then our devices. Addresses, neighbours and FDB entries go with their device. What the kernel refuses to remove
/// is in the report.
fn remove_entries(kernel: &mut impl Kernel, scope: &Scope) -> io::Result<CleanupReport> {
    let links: Vec<Name> = kernel.machine()?.links.iter().map(|link| link.name).collect();
    let observed = kernel.observe(&links)?;
    let (ops, left) = select(&observed, scope);
    let mut report = CleanupReport { left, ..CleanupReport::default() };
    report.apply(kernel, &ops);
    Ok(report)
}

/// Returns the removals, routes first, and the devices that only have flannel's names.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::{Route, Value};

    use super::*;
    use crate::kernel::fake::FakeKernel;
    use crate::kernel::fake::tests::machine;

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
    fn a_key_that_stays_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let subnet_file = Path::new("/run/flannel/subnet.env");
        assert_eq!(key_that_stays(dir.path(), subnet_file), None);
        std::fs::write(dir.path().join("weft.wireguard.key"), "").unwrap();
        let text = key_that_stays(dir.path(), subnet_file).unwrap();
        assert!(text.contains("weft.wireguard.key stays"), "{text}");
    }

    #[test]
    fn what_the_kernel_refuses_to_remove_is_named_and_is_a_failure() {
        let kernel = FakeKernel::new(machine(&["192.168.0.1/24"]), PROTOCOL);
        let routes = [route("10.5.1.0/24", PROTOCOL), route("10.5.2.0/24", PROTOCOL), route("10.5.3.0/24", PROTOCOL)];
        let [_, second, third] = routes.each_ref().map(|(key, _)| *key);
        routes.into_iter().for_each(|(key, seen)| kernel.disturb(key, Some(seen), false));
        kernel.fail(second, Some(Outcome::Fatal("not permitted".to_owned())));
        kernel.fail(third, Some(Outcome::Retry("busy".to_owned())));
        let report = remove_entries(&mut kernel.clone(), &Scope::default()).unwrap();
        assert_eq!(report.failed, ["busy", "not permitted"]);
        assert_eq!(report.removed, 1);
        assert_eq!(kernel.entries().keys().copied().collect::<Vec<_>>(), [second, third]);
        let code = |report: &CleanupReport| report.answer(String::new()).code;
        assert_eq!(code(&report), ExitCode::from(cli::exit::FAILURE));
        assert_eq!(code(&CleanupReport { failed: Vec::new(), ..report }), ExitCode::SUCCESS);
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
}
