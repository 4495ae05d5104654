// SPDX-License-Identifier: Apache-2.0
//! A pass: observe, diff, apply, report. The only caller of [`Kernel::apply`]; what failed is pending and tried again with back-off.

mod devices;
mod pending;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use weft_backends::diff::{self, Op};
use weft_backends::host::{OnLink, Reach};
use weft_backends::index::Changed;
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Key, Name, Seen, Value};
use weft_subnet::cidr::Subnets;
use weft_subnet::connected::Connected;

use crate::conflicts::Conflicts;
use crate::kernel::{Kernel, Machine, Outcome};
use crate::plan::{MOST_DEVICES, Plan};
use crate::takeover::Takeover;
use devices::{Devices, on};

pub use pending::{Pending, Pendings};

/// Operations between two looks at the rest of the world (health, signals).
const SLICE: usize = 2048;
/// A pass that re-creates links runs again, at most so often.
const ROUNDS: usize = 3;
/// Failures of one pass that are logged one by one; status and metrics have the rest.
const FAILURES_SAID: usize = 10;

/// Why a pass ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The first one, or after a change of our own lease, host or configuration.
    Start,
    /// Leases changed.
    Lease,
    /// The kernel changed.
    Kernel,
    /// The timer.
    Audit,
    /// Something pending was due.
    Retry,
}

impl Cause {
    /// As in metrics and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Start => "start",
            Cause::Lease => "lease",
            Cause::Kernel => "kernel",
            Cause::Audit => "audit",
            Cause::Retry => "retry",
        }
    }
}

/// What a pass did.
#[derive(Debug)]
pub struct Report {
    /// Why it ran.
    pub cause: Cause,
    /// How long it took.
    pub took: Duration,
    /// Operations and their outcome, by kind: `route`, `fdb`, ...; `true` = done.
    pub operations: HashMap<(&'static str, bool), usize>,
    /// The last failure's text.
    pub error: Option<String>,
}

impl Report {
    fn new(cause: Cause) -> Report {
        Report { cause, took: Duration::ZERO, operations: HashMap::new(), error: None }
    }

    /// Operations tried.
    pub fn writes(&self) -> usize {
        self.operations.values().sum()
    }

    /// Operations that failed.
    pub fn failed(&self) -> usize {
        self.operations.iter().filter(|((_, done), _)| !done).map(|(_, count)| count).sum()
    }
}

/// Carries passes out, and remembers what failed.
pub struct Passer<K> {
    kernel: K,
    pending: Pendings,
    conflicts: Conflicts,
    /// Removals of peers' leftovers wait until then: the store came up empty.
    pub keep_stale_until: Option<Instant>,
    keep_all: bool,
    /// What flannel left on this node.
    pub takeover: Takeover,
    /// As the last dump showed them.
    devices: Devices,
}

impl<K: Kernel> Passer<K> {
    /// Around a kernel.
    pub fn new(kernel: K) -> Passer<K> {
        Passer {
            kernel,
            pending: Pendings::default(),
            conflicts: Conflicts::default(),
            keep_stale_until: None,
            keep_all: false,
            takeover: Takeover::default(),
            devices: Devices::default(),
        }
    }

    /// While true nothing is removed: nothing says yet which peers are stale.
    pub fn keep_all(&mut self, keep: bool) {
        self.keep_all = keep;
    }

    /// The kernel, for snapshots of the machine.
    pub fn kernel(&mut self) -> &mut K {
        &mut self.kernel
    }

    /// Devices with names that the plan needs, made by somebody else, as the last look at everything showed them.
    pub fn strangers(&self) -> &BTreeSet<Name> {
        self.devices.strangers()
    }

    /// What failed, by key.
    pub fn pending(&self) -> &Pendings {
        &self.pending
    }

    /// When to call [`Self::retry`].
    pub fn next_retry(&self) -> Option<Instant> {
        self.pending.next()
    }

    /// Compares everything with a dump and writes the difference.
    pub async fn full(&mut self, plan: &Plan, cause: Cause) -> io::Result<Report> {
        let started = Instant::now();
        let mut report = Report::new(cause);
        for _ in 0..ROUNDS {
            let observed = self.kernel.observe(&plan.watched().collect::<Vec<_>>())?;
            self.devices = Devices::of(plan, &observed);
            self.takeover.look(&observed, plan);
            let (ownership, takeover) = (self.devices.ownership(plan), &self.takeover);
            let ops = plan.difference(&observed, |key, seen| ownership.ours(key, seen) || takeover.left(key, seen));
            drop(observed);
            let ops = self.without_kept(ops, started);
            let crowded = self.devices.crowded(plan, &ops);
            let makes_room = ops.iter().any(|op| matches!(op, Op::Remove(Key::Link(_), _)));
            let again = ops.iter().any(|op| matches!(op, Op::Recreate(..))) || (makes_room && !crowded.is_empty());
            let ops = self.permitted(ops, plan, &crowded, &mut report);
            if !self.pending.is_empty() {
                // What needs no write any more, whoever mended it, is no longer pending.
                let waiting = crowded.iter().copied().map(Key::Link);
                let needed: HashSet<Key> = ops.iter().map(Op::key).chain(waiting).collect();
                self.pending.retain(|key| needed.contains(key));
            }
            self.write_in_stages(ops, plan, &mut report).await;
            if !again {
                break;
            }
        }
        report.took = started.elapsed();
        Ok(report)
    }

    /// Writes what changed in the plan, without a dump.
    pub async fn changed(&mut self, changed: Vec<Changed>) -> Report {
        let started = Instant::now();
        let mut report = Report::new(Cause::Lease);
        // One key may have changed twice: the first "before" and the last "after" count.
        let mut net: HashMap<Key, (Option<Value>, Option<Value>)> = HashMap::with_capacity(changed.len());
        for (key, before, after) in changed {
            net.entry(key).and_modify(|entry| entry.1.clone_from(&after)).or_insert((before, after));
        }
        // What is added goes first, all in one batch.
        let (mut ops, mut remove) = (Vec::with_capacity(net.len()), Vec::new());
        for (key, change) in net {
            match change {
                (before, Some(after)) if before.as_ref() == Some(&after) => {}
                (_, Some(after)) => ops.push(Op::Ensure(key, after)),
                (Some(before), None) => remove.push(Op::Remove(key, before)),
                (None, None) => {}
            }
            self.pending.remove(&key);
        }
        ops.sort_unstable_by_key(Op::key);
        remove.sort_unstable_by_key(|op| std::cmp::Reverse(op.key()));
        ops.append(&mut remove);
        ops.retain(|op| self.devices.permit(op));
        self.write(&ops, &mut report).await;
        report.took = started.elapsed();
        report
    }

    /// Compares entries that the kernel announced (`None` = gone) with the plan, and mends them. Returns `None` when all is well.
    pub async fn noticed(&mut self, plan: &Plan, seen: HashMap<Key, Option<Seen>>) -> Option<Report> {
        let started = Instant::now();
        let ownership = self.devices.ownership(plan);
        let mut ops = Vec::new();
        for (key, seen) in seen {
            let ours = seen.as_ref().is_some_and(|seen| ownership.ours(&key, seen));
            let Some(op) = diff::change(key, plan.desired(&key), seen.clone(), ours) else { continue };
            if (self.keep_all || self.keep_stale_until.is_some()) && matches!(op, Op::Remove(..)) {
                continue;
            }
            if self.devices.permit(&op) && self.conflicts.allow(key, seen, started) {
                ops.push(op);
            }
        }
        if ops.is_empty() {
            return None;
        }
        let mut report = Report::new(Cause::Kernel);
        ops.sort_unstable_by_key(Op::key);
        self.write(&ops, &mut report).await;
        report.took = started.elapsed();
        Some(report)
    }

    /// Tries again what is due. An entry for which `waits` is true is left to the next look at everything, which is announced.
    pub async fn retry(&mut self, plan: &Plan, waits: impl Fn(&Key, &Value) -> bool) -> Retried {
        let started = Instant::now();
        let mut retried = Retried::default();
        let mut ops = Vec::new();
        for key in self.pending.due(started) {
            match (key, plan.desired(&key)) {
                (Key::Link(name) | Key::Addr(name, _), Some(_)) if !plan.is_own_device(&key) => {
                    retried.peers_devices.insert(name);
                    self.pending.postpone(&key, started);
                }
                (Key::Link(_) | Key::Addr(..), Some(_)) => {
                    retried.own_device = true;
                    self.pending.postpone(&key, started);
                }
                (_, None) => {
                    retried.removals = true;
                    self.pending.postpone(&key, started);
                }
                (_, Some(value)) if waits(&key, &value) => self.pending.postpone(&key, started),
                (_, Some(value)) => ops.push(Op::Ensure(key, value)),
            }
        }
        ops.retain(|op| self.devices.permit(op));
        if ops.is_empty() {
            return retried;
        }
        ops.sort_unstable_by_key(Op::key);
        let mut report = Report::new(Cause::Retry);
        self.write(&ops, &mut report).await;
        report.took = started.elapsed();
        retried.report = Some(report);
        retried
    }

    /// Leaves out what would be done to somebody else's devices, and new devices that there is no room for. An operation on our own
    /// device stays: when another agent has it, the kernel's side says so, and status shows why.
    fn permitted(&mut self, mut ops: Vec<Op>, plan: &Plan, crowded: &BTreeSet<Name>, report: &mut Report) -> Vec<Op> {
        if crowded.is_empty() && self.devices.strangers().is_empty() {
            return ops;
        }
        let (now, ours) = (Instant::now(), self.devices.len());
        ops.retain(|op| {
            let key = op.key();
            if !self.devices.permit(op) {
                return matches!(key, Key::Link(_)) && plan.is_own_device(&key);
            }
            let makes = !matches!(op, Op::Remove(..)) && on(op).is_some_and(|name| crowded.contains(&name));
            if makes && matches!(key, Key::Link(_)) {
                let reason =
                    format!("{ours} devices of this agent are in the kernel already, and {MOST_DEVICES} is the limit");
                self.note(op, Outcome::Retry(reason), now, report);
            }
            !makes
        });
        ops
    }

    fn without_kept(&mut self, mut ops: Vec<Op>, now: Instant) -> Vec<Op> {
        if self.keep_stale_until.is_some_and(|until| now >= until) {
            self.keep_stale_until = None;
        }
        if self.keep_all || self.keep_stale_until.is_some() {
            ops.retain(|op| !matches!(op, Op::Remove(..)));
        } else {
            self.takeover.removing(&ops);
        }
        ops
    }

    /// Links and addresses first; entries on a device that could not be made are left out: the retry of the link brings them. One that
    /// is there and only lacks an attribute carries entries as well as any.
    async fn write_in_stages(&mut self, ops: Vec<Op>, plan: &Plan, report: &mut Report) {
        let on_device = |op: &Op| matches!(op.key(), Key::Link(_) | Key::Addr(..)) && !matches!(op, Op::Remove(..));
        let (devices, entries) = ops.split_at(ops.partition_point(on_device));
        self.write(devices, report).await;
        let broken: BTreeSet<Name> = devices
            .iter()
            .filter_map(|op| match op.key() {
                Key::Link(name) if self.pending.get(&op.key()).is_some_and(|pending| !pending.stands) => Some(name),
                _ => None,
            })
            .filter(|name| plan.desired(&Key::Link(*name)).is_some())
            .collect();
        if broken.is_empty() {
            return self.write(entries, report).await;
        }
        let stands = |op: &Op| matches!(op, Op::Remove(..)) || on(op).is_none_or(|name| !broken.contains(&name));
        let entries: Vec<Op> = entries.iter().filter(|op| stands(op)).cloned().collect();
        self.write(&entries, report).await;
    }

    async fn write(&mut self, ops: &[Op], report: &mut Report) {
        for slice in ops.chunks(SLICE) {
            let outcomes = self.kernel.apply(slice);
            let now = Instant::now();
            for (op, outcome) in slice.iter().zip(outcomes) {
                self.note(op, outcome, now, report);
            }
            if ops.len() > SLICE {
                tokio::task::yield_now().await;
            }
        }
    }

    fn note(&mut self, op: &Op, outcome: Outcome, now: Instant, report: &mut Report) {
        let key = op.key();
        let done = outcome == Outcome::Done;
        *report.operations.entry((kind(&key), done)).or_default() += 1;
        let stands = if let Outcome::Partly { works, .. } = outcome { Some(works) } else { None };
        let (retry, reason) = match outcome {
            Outcome::Done => {
                self.pending.remove(&key);
                if matches!(op, Op::Remove(..)) {
                    self.takeover.removed(&key);
                }
                tracing::trace!(%op, "done");
                return;
            }
            Outcome::Retry(reason) => (true, reason),
            Outcome::Fatal(reason) => (false, reason),
            Outcome::Partly { missing, retry, .. } => (retry, missing),
        };
        report.error = Some(reason.clone());
        let first = self.pending.failed(key, reason, retry, now);
        if let Some(works) = stands {
            self.pending.stands(&key, works);
        }
        // A device that vanished fails every peer's entries: a few lines say it as well as 50,000.
        if let (true, Some(reason)) = (first && report.failed() <= FAILURES_SAID, &report.error) {
            tracing::warn!(%op, retry, reason, "kernel refused");
        }
    }
}

/// What was tried again, and what only a look at everything can mend.
#[derive(Debug, Default)]
pub struct Retried {
    /// What was written, if anything was.
    pub report: Option<Report>,
    /// Our own device or one of its addresses is not in place.
    pub own_device: bool,
    /// Devices of peers that are not in place.
    pub peers_devices: BTreeSet<Name>,
    /// Something is still there that should not be.
    pub removals: bool,
}

/// Kind of an entry, as in metrics.
pub fn kind(key: &Key) -> &'static str {
    match key {
        Key::Link(_) => "link",
        Key::Addr(..) => "address",
        Key::Fdb(..) => "fdb",
        Key::Neigh(..) => "neighbour",
        Key::Route(..) => "route",
        Key::Peer(_) | Key::Guard(_) => "guard",
        Key::Open(_) | Key::Fence(_) => "fence",
    }
}

/// The addresses and the directly connected networks of a machine, as far as they lie inside Network.
pub fn connected(machine: &Machine, networks: &Subnets) -> Connected {
    let name = |index: u32| machine.links.iter().find(|link| link.index == index).map(|link| link.name);
    let addrs = machine.addrs.iter().filter(|addr| networks.iter().any(|all| all.contains(&addr.net.addr())));
    let addrs = addrs.filter_map(|addr| Some((addr.net, name(addr.index)?)));
    let of_addrs = addrs.flat_map(|(net, link)| [(net, link), (IpNet::from(net.addr()), link)]);
    let of_routes = machine.routes.iter().filter_map(|route| match route.reach {
        Reach::Link(link) if route.protocol == KERNEL_PROTOCOL => Some((route.net, link)),
        Reach::Link(_) | Reach::Gateway => None,
    });
    Connected::new(networks, of_addrs.chain(of_routes).map(|(net, link)| (net, link.text().into())))
}

/// The table of what is on the link, from a machine's routes.
pub fn on_link(machine: &Machine) -> OnLink {
    OnLink::new(machine.routes.iter().map(|route| (route.net, route.metric, route.reach)))
}

#[cfg(test)]
mod tests;
