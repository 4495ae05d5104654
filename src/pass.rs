// SPDX-License-Identifier: Apache-2.0
//! A pass reads the kernel, compares it with the plan, writes the difference, and reports what it did. Only this module calls
//! [`Kernel::apply`]. An entry that the kernel refused is pending: it is tried again after a delay that grows.

mod devices;
mod difference;
pub mod old_routes;
mod pending;
mod report;
pub mod takeover;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::io;

use tokio::time::Instant;
use weft_backends::diff::{self, Op};
use weft_backends::index::Changed;
use weft_backends::state::{Key, Name, ObservedValue, Value};

use crate::conflicts::Conflicts;
use crate::kernel::{Kernel, Outcome};
use crate::observe::history::MAX_LISTED;
use crate::plan::{MAX_DEVICES, Plan};
use devices::{Devices, on};
use difference::Difference;
use takeover::Takeover;

pub use difference::wireguard_difference;
pub use pending::{Pending, Pendings};
use report::Before;
pub use report::{Cause, PassReport, Trigger, kind};

/// Number of operations after which other tasks (health checks, signals) get a turn.
const SLICE: usize = 2048;
/// A pass that creates a link again, or that makes room for another one, is repeated at most this often.
const ROUNDS: usize = 3;
/// Number of failures of one pass that are logged one by one. Status and metrics have all of them.
const MAX_LOGGED_FAILURES: usize = 10;

/// Carries out passes, and remembers which entries failed.
pub struct Passer<K> {
    kernel: K,
    pending: Pendings,
    conflicts: Conflicts,
    /// Nothing is removed before this time, because the store contained no other lease when the agent started.
    pub keep_stale_until: Option<Instant>,
    keep_all: bool,
    /// What flannel left on this node.
    pub takeover: Takeover,
    /// The devices, as the last full pass found them.
    devices: Devices,
    /// See [`Passer::listening`].
    listening: BTreeMap<Name, u16>,
}

impl<K: Kernel> Passer<K> {
    /// Returns a passer that reads and writes this kernel.
    pub fn new(kernel: K) -> Passer<K> {
        Passer {
            kernel,
            pending: Pendings::default(),
            conflicts: Conflicts::default(),
            keep_stale_until: None,
            keep_all: false,
            takeover: Takeover::default(),
            devices: Devices::default(),
            listening: BTreeMap::new(),
        }
    }

    /// Sets whether passes remove nothing. This is so while it is not known yet which peers are gone.
    pub fn keep_all(&mut self, keep: bool) {
        self.keep_all = keep;
    }

    /// Returns true for a removal that waits until it is known which peers are gone.
    fn holds(&self, op: &Op, plan: &Plan) -> bool {
        let is_unknown = self.keep_all || self.keep_stale_until.is_some();
        is_unknown && matches!(op, Op::Remove(..)) && !plan.ends_clear_text(op)
    }

    /// Returns the kernel, for snapshots of the machine.
    pub fn kernel(&mut self) -> &mut K {
        &mut self.kernel
    }

    /// Returns the devices whose names the plan needs, but which another program or another agent made. The last full pass found them.
    pub fn foreign_devices(&self) -> &BTreeSet<Name> {
        self.devices.foreign()
    }

    /// Returns the UDP ports on which our WireGuard devices listen, as the last full pass found or changed them. A device that was down is
    /// left out.
    pub fn listening(&self) -> &BTreeMap<Name, u16> {
        &self.listening
    }

    /// Returns the entries that failed, by key.
    pub fn pending(&self) -> &Pendings {
        &self.pending
    }

    /// Returns which entries another program deletes or replaces again and again, as one sentence. An entry that the kernel refuses is
    /// pending, and is written again and again for this reason.
    pub fn fights(&self) -> Option<String> {
        self.conflicts.fights(Instant::now(), |key| self.pending.get(key).is_none())
    }

    /// Returns true if an entry was left to the audit since the last call, because another program repeatedly changed it.
    pub fn take_left_to_audit(&mut self) -> bool {
        self.conflicts.take_left()
    }

    /// Returns the time at which [`Self::retry`] has something to do.
    pub fn next_retry(&self) -> Option<Instant> {
        self.pending.next()
    }

    /// Runs a full pass: reads the kernel, compares everything with the plan, and writes the difference.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub async fn full(&mut self, plan: &Plan, cause: Cause) -> io::Result<PassReport> {
        let started = Instant::now();
        let mut report = PassReport::new(cause);
        self.kernel.set_secrets(plan.secrets());
        for _ in 0..ROUNDS {
            let Difference { ops, observed, crowded, again } = self.compare(plan, started)?;
            self.listening = self.devices.listening(plan, &observed);
            report.remember(&ops, |key| observed.get(key).cloned().map(Before::Observed));
            drop(observed);
            let ops = self.permitted(ops, plan, &crowded, &mut report);
            if !self.pending.is_empty() {
                // An entry that needs no write any more is not pending, even if another program repaired it.
                let waiting = crowded.iter().copied().map(Key::Link);
                let needed: HashSet<Key> = ops.iter().map(Op::key).chain(waiting).collect();
                self.pending.retain(|key| needed.contains(key));
            }
            self.write_in_stages(ops, &mut report).await;
            if !again {
                break;
            }
        }
        report.took = started.elapsed();
        Ok(report)
    }

    /// Writes changes of the plan without reading the kernel.
    pub async fn changed(&mut self, changed: Vec<Changed>) -> PassReport {
        let started = Instant::now();
        let mut report = PassReport::new(Cause::Lease);
        let changed = Changed::joined(changed);
        let mut ops = Vec::with_capacity(changed.len());
        let few = changed.len() <= MAX_LISTED;
        for Changed { key, before, after } in changed {
            self.pending.remove(&key);
            if let (true, Some(value)) = (few, &before) {
                report.before.insert(key, Before::written(value.clone()));
            }
            match after {
                Some(after) => ops.push(Op::Ensure(key, after)),
                None => ops.extend(before.map(|before| Op::Remove(key, before))),
            }
        }
        ops.retain(|op| self.devices.permit(op));
        diff::put_in_order(&mut ops);
        self.write(&ops, &mut report).await;
        report.took = started.elapsed();
        report
    }

    /// Compares the entries of WireGuard devices with the kernel, and repairs them. Returns `None` if there was nothing to write.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub async fn wireguard(&mut self, plan: &Plan) -> io::Result<Option<PassReport>> {
        let devices: Vec<Name> = plan.wireguard_devices().collect();
        let observed = self.kernel.wireguard(&devices)?;
        Ok(self.noticed(plan, wireguard_difference(plan, &observed)).await)
    }

    /// Compares entries that the kernel announced with the plan, and repairs them. `None` says that an entry is gone. Returns `None` if
    /// there was nothing to write.
    pub async fn noticed(&mut self, plan: &Plan, seen: HashMap<Key, Option<ObservedValue>>) -> Option<PassReport> {
        let started = Instant::now();
        let ownership = self.devices.ownership(plan);
        let mut ops = Vec::new();
        let mut report = PassReport::new(Cause::Kernel);
        for (key, seen) in seen {
            let ours = seen.as_ref().is_some_and(|seen| ownership.ours(&key, seen));
            let Some(op) = diff::change(key, plan.desired(&key), seen.clone(), ours) else { continue };
            if self.holds(&op, plan) {
                continue;
            }
            if self.devices.permit(&op) && self.conflicts.allow(key, seen.clone(), started) {
                report.before.insert(key, seen.map_or(Before::Deleted, Before::Observed));
                ops.push(op);
            }
        }
        if ops.is_empty() {
            return None;
        }
        diff::put_in_order(&mut ops);
        self.write(&ops, &mut report).await;
        report.took = started.elapsed();
        Some(report)
    }

    /// Tries those pending entries again whose time has come. If `waits` returns true for an entry, the caller has planned a full pass
    /// that writes it.
    pub async fn retry(&mut self, plan: &Plan, waits: impl Fn(&Key, &Value) -> bool) -> Retried {
        let started = Instant::now();
        let mut retried = Retried::default();
        let mut ops = Vec::new();
        for key in self.pending.due(started) {
            match (key, plan.desired(&key)) {
                (Key::Link(name) | Key::Addr(name, _), Some(_)) if !plan.is_device_of_ours(&key) => {
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
        let mut report = PassReport::new(Cause::Retry);
        self.write(&ops, &mut report).await;
        report.took = started.elapsed();
        retried.report = Some(report);
        retried
    }

    /// Leaves out operations on devices of other programs, and new devices for which there is no room. A device that is left out for lack
    /// of room is pending.
    fn permitted(
        &mut self,
        mut ops: Vec<Op>,
        plan: &Plan,
        crowded: &BTreeSet<Name>,
        report: &mut PassReport,
    ) -> Vec<Op> {
        if crowded.is_empty() && self.devices.foreign().is_empty() {
            return ops;
        }
        let (now, ours) = (Instant::now(), self.devices.len());
        ops.retain(|op| {
            let may_write = self.may_write(op, plan, crowded);
            if !may_write && self.devices.permit(op) && matches!(op.key(), Key::Link(_)) {
                let reason =
                    format!("{ours} devices of this agent are in the kernel already, and {MAX_DEVICES} is the limit");
                self.note(op, Outcome::Retry(reason), now, report);
            }
            may_write
        });
        ops
    }

    /// Writes links and addresses first. If a device could not be made, entries on it are left out, because the retry of the link
    /// brings them. A device that exists and only lacks an attribute carries entries.
    async fn write_in_stages(&mut self, ops: Vec<Op>, report: &mut PassReport) {
        let is_device_part =
            |op: &Op| matches!(op.key(), Key::Link(_) | Key::Addr(..)) && !matches!(op, Op::Remove(..));
        let (devices, entries) = ops.split_at(ops.partition_point(is_device_part));
        self.write(devices, report).await;
        let missing: BTreeSet<Name> = devices
            .iter()
            .filter_map(|op| match op.key() {
                Key::Link(name) if self.pending.get(&op.key()).is_some_and(|pending| !pending.stands) => Some(name),
                _ => None,
            })
            .collect();
        if missing.is_empty() {
            return self.write(entries, report).await;
        }
        let has_device = |op: &Op| matches!(op, Op::Remove(..)) || on(op).is_none_or(|name| !missing.contains(&name));
        let entries: Vec<Op> = entries.iter().filter(|op| has_device(op)).cloned().collect();
        self.write(&entries, report).await;
    }

    async fn write(&mut self, ops: &[Op], report: &mut PassReport) {
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

    /// Records the outcome of an operation.
    fn note(&mut self, op: &Op, outcome: Outcome, now: Instant, report: &mut PassReport) {
        let key = op.key();
        let done = outcome == Outcome::Done;
        *report.operations.entry((kind(&key), done)).or_default() += 1;
        let exists = if let Outcome::Partly { works, .. } = outcome { Some(works) } else { None };
        let (retry, reason) = match outcome {
            Outcome::Done => {
                self.pending.remove(&key);
                self.takeover.applied(op);
                self.conflicts.applied(op, now);
                if let (Key::Link(name), Some(port)) = (key, listening_after(op)) {
                    self.listening.insert(name, port);
                }
                report.note(op, None);
                tracing::trace!(%op, "done");
                return;
            }
            Outcome::Retry(reason) => (true, reason),
            Outcome::Fatal(reason) => (false, reason),
            Outcome::Partly { missing, retry, .. } => (retry, missing),
        };
        let first = self.pending.failed(key, reason.clone(), retry, now);
        if first {
            report.note(op, Some(&reason));
        }
        report.error = Some(reason);
        if let Some(works) = exists {
            self.pending.stands(&key, works);
        }
        // If a device vanished, the entries of every peer fail. A few lines in the log are enough.
        if let (true, Some(reason)) = (first && report.failed() <= MAX_LOGGED_FAILURES, &report.error) {
            tracing::warn!(%op, retry, reason, "kernel refused");
        }
    }
}

/// Returns the port on which a device listens after this operation, if it is one on a WireGuard device.
fn listening_after(op: &Op) -> Option<u16> {
    match op {
        Op::Ensure(_, Value::Link(link)) | Op::Recreate(_, Value::Link(link)) => link.listening_port(),
        _ => None,
    }
}

/// What [`Passer::retry`] wrote, and what only a full pass can repair.
#[derive(Debug, Default)]
pub struct Retried {
    /// What was written, if anything was.
    pub report: Option<PassReport>,
    /// This node's own device, or one of its addresses, is not in place.
    pub own_device: bool,
    /// Devices of peers that are not in place.
    pub peers_devices: BTreeSet<Name>,
    /// An entry is still in the kernel that should be removed.
    pub removals: bool,
}

#[cfg(test)]
mod tests;
