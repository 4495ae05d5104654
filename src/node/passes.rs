// SPDX-License-Identifier: Apache-2.0
//! What leads to a pass over single entries, and what leads to a full pass, which compares everything with a dump of the
//! kernel.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::index::Changed;
use weft_backends::state::{Key, ObservedValue};

use super::status::FailureCounts;
use super::{Node, audit};
use crate::kernel::{Kernel, Notice};
use crate::observe::preview::PreviewOp;
use crate::observe::status::{Failure, Pass, now_ms};
use crate::pass::{Cause, PassReport, Trigger};

/// If the kernel announces changes of more entries than this at once, a full pass follows.
pub(super) const MAX_SINGLE_ENTRIES: usize = 256;
/// Time after which a dump that failed is tried again.
const DUMP_RETRY: Duration = Duration::from_secs(1);

/// What the passes so far have done, for `weft status` and metrics.
#[derive(Debug, Default)]
pub(super) struct PassStatistics {
    /// The last pass that wrote something.
    pub(super) last_pass: Option<Pass>,
    pub(super) last_error: Option<Failure>,
    /// Number of full passes, by cause.
    pub(super) full_passes: BTreeMap<&'static str, u64>,
    pub(super) failure_counts: FailureCounts,
}

impl<K: Kernel> Node<K> {
    /// Compares the facts of the host and everything in the kernel with what is wanted, and writes the difference. Then it
    /// does the same with subnet.env.
    pub async fn full_pass(&mut self, trigger: impl Into<Trigger>) {
        let trigger = trigger.into();
        let cause = trigger.cause;
        let (started, cost) = (Instant::now(), audit::Cost::begin());
        self.peers.rate_limit.clear_delayed_devices();
        self.refresh_host();
        // Before the first list, nothing tells which peers are stale, so nothing of peers is removed.
        self.passer.keep_all(!self.has_list());
        match self.compare_everything(&trigger).await {
            Ok(report) => {
                self.kernel_problem = None;
                *self.statistics.full_passes.entry(cause.as_str()).or_default() += 1;
                self.context.reporter.metrics.full_pass(cause.as_str());
                // Writes are not a cost of auditing, unless the kernel refuses them again and again.
                if report.writes() == report.failed() {
                    self.schedule.audit_interval = audit::interval(self.context.options.resync, cost.so_far());
                }
                self.record(report, &trigger.event);
                self.schedule.plan_audit(Instant::now());
                if let Some(until) = self.passer.keep_stale_until {
                    self.schedule.audit_by(until, "the grace time after the first list is over");
                }
            }
            Err(error) => {
                let text = format!("read the kernel's tables: {error}");
                tracing::error!("{text}");
                self.statistics.last_error = Some(Failure::now(text.clone()));
                self.kernel_problem = Some(text);
                self.schedule.retry_audit(Instant::now() + DUMP_RETRY);
            }
        }
        self.check_sysctls();
        self.update_rules();
        self.write_subnet_file();
        self.publish_ports();
        self.pass_ended_in_change();
        self.schedule.full_pass_ended(started);
    }

    /// Returns what the next full pass would write, without writing it. The facts of the host (uplink, addresses, other routes) are those
    /// that were read last, because a change of them leads to a full pass by itself. So does the first list of leases, before which nothing is
    /// removed.
    ///
    /// # Errors
    /// The kernel's tables cannot be read.
    pub(super) fn preview(&mut self) -> io::Result<Vec<PreviewOp>> {
        self.passer.preview(&self.plan)
    }

    async fn compare_everything(&mut self, trigger: &Trigger) -> io::Result<PassReport> {
        let result = self.passer.full(&self.plan, trigger.cause).await;
        // A device that peers need may have become another program's, or may be free again. Then the plan is another one.
        if !self.plan.set_foreign_devices(self.passer.foreign_devices()) {
            return result;
        }
        let second = self.passer.full(&self.plan, trigger.cause).await;
        if let Ok(first) = result {
            self.record(first, &trigger.event);
        }
        second
    }

    /// Handles changes that the kernel announced.
    pub async fn kernel_changed(&mut self, notices: Vec<Notice>) {
        let mut entries: HashMap<Key, Option<ObservedValue>> = HashMap::new();
        let (mut everything, mut routes) = (None, false);
        for notice in notices {
            match notice {
                Notice::Entry(key, seen) => {
                    entries.insert(key, seen);
                }
                Notice::Links => everything = Some("a link or an address changed"),
                Notice::Lost => everything = everything.or(Some("notifications of the kernel were lost")),
                Notice::Guard => self.observe_guard(&mut entries),
                Notice::Fence => self.observe_fence(&mut entries),
                Notice::Routes => routes = true,
            }
        }
        entries.retain(|key, seen| self.differs(key, seen.as_ref()));
        if entries.len() > MAX_SINGLE_ENTRIES {
            everything = everything.or(Some("many entries changed at once"));
        }
        let now = Instant::now();
        let other_routes = "routes of other programs changed";
        if let Some(event) = everything.or(routes.then_some(other_routes))
            && now < self.schedule.paused_until
        {
            self.schedule.audit_by(self.schedule.paused_until, event);
        } else if let Some(event) = everything {
            return self.full_pass(Trigger::new(Cause::Kernel, event)).await;
        } else if routes {
            let changed = self.refresh_host();
            self.schedule.full_pass_ended(now);
            if changed {
                return self.full_pass(Trigger::new(Cause::Kernel, other_routes)).await;
            }
        }
        if entries.is_empty() {
            return;
        }
        if let Some(report) = self.passer.noticed(&self.plan, entries).await {
            self.record(report, "entries are not as this agent wrote them");
        }
        self.audit_after_conflict();
    }

    /// Lets an audit come soon if entries were left to it.
    pub(super) fn audit_after_conflict(&mut self) {
        if self.passer.take_left_to_audit() {
            self.schedule.audit_after_conflict(Instant::now());
        }
    }

    /// Returns true if an entry that the kernel announced (`None` if it is gone) is not as it should be. The kernel also
    /// announces what this node has just written.
    fn differs(&self, key: &Key, seen: Option<&ObservedValue>) -> bool {
        match (self.plan.desired(key), seen) {
            (Some(desired), _) if self.peers.rate_limit.is_delayed(key, &desired) => false,
            (Some(desired), Some(seen)) => desired != seen.value,
            (Some(_), None) | (None, Some(_)) => true,
            (None, None) => false,
        }
    }

    /// Tries again what the kernel refused. If that needs a full pass because of a peer, the pass counts like one for a
    /// change of that peer's lease.
    pub(super) async fn retry(&mut self, now: Instant) {
        let limit = &self.peers.rate_limit;
        let retried = self.passer.retry(&self.plan, |key, value| limit.is_delayed(key, value)).await;
        if let Some(report) = retried.report {
            self.record(report, &Trigger::from(Cause::Retry).event);
        }
        let for_peers = retried.removals || !retried.peers_devices.is_empty();
        if retried.own_device {
            self.full_pass(Cause::Retry).await;
        } else if for_peers && self.peers.rate_limit.allows_full_pass(now) {
            self.full_pass_for_devices(Cause::Retry, now).await;
        } else if for_peers {
            self.peers.rate_limit.request_full_pass(retried.peers_devices);
        }
    }

    /// Writes what changed in the plan. Changes of devices need a full pass, which may be delayed.
    /// `event` led to the changes.
    pub(super) async fn write(&mut self, changed: Vec<Changed>, event: String) {
        if changed.is_empty() || !self.has_list() {
            return;
        }
        let now = Instant::now();
        let has_devices = changed.iter().any(|one| matches!(one.key, Key::Link(_)));
        if has_devices && self.peers.rate_limit.allows_full_pass(now) {
            return self.full_pass_for_devices(Trigger::new(Cause::Lease, event), now).await;
        }
        let has_delayed = has_devices || self.peers.rate_limit.has_delayed_devices();
        let changed = if has_delayed { self.peers.rate_limit.delay_devices(changed) } else { changed };
        if changed.is_empty() {
            return;
        }
        let report = self.passer.changed(changed).await;
        self.record(report, &event);
    }

    /// Runs a full pass because of a device of a peer.
    pub(super) async fn full_pass_for_devices(&mut self, trigger: impl Into<Trigger>, now: Instant) {
        self.full_pass(trigger).await;
        self.peers.rate_limit.full_pass_ended(now.elapsed(), now);
    }

    /// Records a pass for metrics, status and the history. `event` led to it.
    pub(super) fn record(&mut self, report: PassReport, event: &str) {
        if let Some(record) = report.record(event) {
            self.context.recorder.add(record);
        }
        let metrics = &self.context.reporter.metrics;
        metrics.pass(report.cause.as_str(), report.took);
        for ((kind, done), count) in &report.operations {
            metrics.operations(kind, if *done { "done" } else { "failed" }, *count as u64);
        }
        if let Some(error) = &report.error {
            self.statistics.last_error = Some(Failure::now(error.clone()));
        }
        if report.writes() == 0 {
            return;
        }
        if matches!(report.cause, Cause::Kernel | Cause::Audit) {
            metrics.repairs(report.cause.as_str(), (report.writes() - report.failed()) as u64);
        }
        let (cause, writes, failed) = (report.cause.as_str().to_owned(), report.writes(), report.failed());
        let took_us = u64::try_from(report.took.as_micros()).unwrap_or(u64::MAX);
        tracing::debug!(cause, writes, failed, took_us, "pass");
        self.statistics.last_pass = Some(Pass { at_ms: now_ms(), took_us, writes, failed, cause });
    }
}
