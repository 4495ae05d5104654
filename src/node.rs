// SPDX-License-Identifier: Apache-2.0
//! One node: what it knows (plan, held removals, own lease) and how each kind of news leads to a pass.

mod audit;
mod churn;
mod host;
mod own_lease;
mod peers;
mod rules;
mod saved;
mod store;
mod subnet_file;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::IpAddr;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_backends::index::Changed;
use weft_backends::state::{Key, Seen};
use weft_subnet::attrs::Attrs;
use weft_subnet::hold::Hold;
use weft_subnet::lease::Id;
use weft_subnet::source::Source;

use crate::lease::contest::Contest;
use churn::Churn;

use crate::conflist::Conflist;
use crate::firewall::reconciler::Handle;
use crate::kernel::{Kernel, Notice};
use crate::lease::acquire::Started;
use crate::lease::keep::Keeper;
use crate::log::Reminder;
use crate::observe::health::Readiness;
use crate::observe::metrics::Metrics;
use crate::observe::node_condition::ConditionReporter;
use crate::observe::report;
use crate::observe::socket;
use crate::observe::status::{Failure, Pass};
use crate::observe::systemd::Notify;
use crate::options::Options;
use crate::pass::takeover::Takeover;
use crate::pass::{Cause, Passer, Report};
use crate::plan::Plan;
use crate::saved::Saver;
use crate::sysctls::loosened::Loosened;

/// More entries than this in one look are a reason to look at everything.
const MANY: usize = 256;
/// So many looks at everything in [`LOOKS_IN`] follow news of the kernel at once. After more of them the next one waits
/// [`REST`] times as long as the last one took: a daemon that rewrites links or routes all the time gets a fifth of a core at most.
const LOOKS: usize = 6;
const LOOKS_IN: Duration = Duration::from_secs(10);
const REST: u32 = 4;
/// A dump that failed is tried again after this time.
const DUMP_AGAIN: Duration = Duration::from_secs(1);

/// What a node touches besides its kernel.
pub struct World {
    /// What we were told.
    pub options: Options,
    /// Where leases are.
    pub store: Rc<dyn Source>,
    /// For /readyz.
    pub readiness: Readiness,
    /// For /metrics.
    pub metrics: Arc<Metrics>,
    /// For systemd.
    pub notify: Notify,
    /// For whoever looks at the store.
    pub condition: ConditionReporter,
    /// For the next start.
    pub saver: Saver,
    /// For the container runtime.
    pub conflist: Conflist,
}

/// Go on, or end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Stay,
    /// The lease is lost and `--on-lost-lease=exit` was given.
    Exit,
}

/// A node that has a lease.
pub struct Node<K> {
    pub(crate) world: World,
    pub(crate) passer: Passer<K>,
    pub(crate) plan: Plan,
    pub(crate) hold: Hold,
    pub(crate) keeper: Keeper,
    /// What the open call for our lease asks the store to hold.
    asked: Option<Attrs>,
    /// Our lease changed while a call for it was open: look again at its answer.
    look_again: bool,
    /// Whether somebody else rewrites our lease again and again.
    contest: Contest,
    config: String,
    /// A change of net-conf that only a restart applies.
    pub(crate) restart_wanted: Option<String>,
    /// Someone else owns our subnet: for people.
    pub(crate) lost: Option<String>,
    /// The store said that our lease is not there, and has not given it back yet: for people.
    pub(crate) lease_gone: Option<&'static str>,
    /// Peers are those that were saved: for people.
    pub(crate) resumed: Option<String>,
    chosen: [Option<IpAddr>; 2],
    pub(crate) snapshot_applied: bool,
    pub(crate) env_problem: Option<String>,
    pub(crate) host_problem: Option<String>,
    /// Since when the uplink, or an address of it, is not there.
    uplink_gone: Option<Instant>,
    /// When another uplink takes its place.
    uplink_due: Option<Instant>,
    /// What was said last about the address that is published, in each family: it is said once.
    uplink_said: [Option<String>; 2],
    pub(crate) kernel_problem: Option<String>,
    pub(crate) sysctl_problems: Vec<String>,
    loosened: Loosened,
    /// The lease for which rp_filter is loosened: the one that is named stays the same while it is a reason.
    loosened_by: Option<Id>,
    pub(crate) store_trouble: Option<String>,
    /// The store refuses what we ask for our lease.
    pub(crate) lease_trouble: Option<String>,
    pub(crate) last_word: Instant,
    pub(crate) ttl: Option<(Instant, Duration)>,
    /// When our lease ends, as far as it was saved: `Some(None)`, never; `None`, the store has not said it yet.
    saved_expiry: Option<Option<Instant>>,
    pub(crate) last_pass: Option<Pass>,
    pub(crate) last_error: Option<Failure>,
    /// How often the whole plan was compared with a dump of the kernel, by cause.
    pub(crate) full_passes: BTreeMap<&'static str, u64>,
    /// Peers with entries that wait, and with entries that were refused, at a version of the pending entries.
    pub(crate) troubled: (u64, usize, usize),
    pub(crate) audit_interval: Duration,
    pub(crate) next_audit: Instant,
    /// Nothing announces a change of a sysctl: they are looked at by the clock.
    next_sysctls: Instant,
    /// When everything was looked at, of late.
    looks: VecDeque<Instant>,
    /// News of the kernel that ask for a look at everything wait until then.
    quiet_until: Instant,
    next_ping: Option<Instant>,
    /// What leases that change all the time may cost.
    churn: Churn,
    trouble_said: Reminder,
    /// Traffic rules, where they are looked after.
    rules: Option<Handle>,
    made: rules::Made,
    /// The rules were in place once: subnet.env may say IPMASQ=true.
    masquerading: bool,
}

impl<K: Kernel> Node<K> {
    /// A node that has just got its lease; nothing is written yet.
    pub fn new(world: World, mut passer: Passer<K>, mut keeper: Keeper, started: Started) -> Node<K> {
        let Started { network, config, backend, host, own, author, chosen, saved, .. } = started;
        passer.takeover = Takeover::new(author);
        if saved.is_none() {
            tracing::info!(subnet = %own.subnets, backend = backend.kind(), uplink = %host.uplink.name, "lease acquired");
            keeper.keep(own.clone());
        }
        let now = Instant::now();
        let mut node = Node {
            hold: Hold::new(world.options.hold_removals),
            loosened: Loosened::beside(&world.options.subnet_file),
            audit_interval: world.options.resync,
            next_ping: world.notify.watchdog_interval().map(|_| now),
            plan: Plan::new(network, backend, host, own)
                .with_assigned_subnets(world.store.capabilities().assigned)
                .with_fences(world.options.rules.fences)
                .with_tunnel_guard(world.options.rules.guard),
            world,
            passer,
            keeper,
            asked: None,
            look_again: false,
            contest: Contest::default(),
            config,
            restart_wanted: None,
            lost: None,
            lease_gone: None,
            resumed: None,
            chosen,
            snapshot_applied: false,
            env_problem: None,
            host_problem: None,
            uplink_gone: None,
            uplink_due: None,
            uplink_said: [None, None],
            kernel_problem: None,
            sysctl_problems: Vec::new(),
            loosened_by: None,
            store_trouble: None,
            lease_trouble: None,
            last_word: now,
            ttl: None,
            saved_expiry: None,
            last_pass: None,
            last_error: None,
            full_passes: BTreeMap::new(),
            troubled: (0, 0, 0),
            next_audit: now,
            next_sysctls: now,
            looks: VecDeque::new(),
            quiet_until: now,
            churn: Churn::new(now),
            trouble_said: Reminder::default(),
            rules: None,
            made: rules::Made::default(),
            masquerading: false,
        };
        if let Some(saved) = saved {
            node.resume(saved);
        }
        node
    }

    /// Where subnet.env stands.
    pub fn subnet_file(&self) -> PathBuf {
        self.world.options.subnet_file.clone()
    }

    /// When [`Node::tick`] has something to do.
    pub fn next_wake(&self) -> Option<Instant> {
        let now = Instant::now();
        let times = [
            Some(self.next_audit),
            self.passer.next_retry(),
            self.hold.next(),
            self.next_ping,
            self.churn.next(now),
            self.plan.lines.next(),
            self.made.due,
            self.world.notify.next(),
            self.next_saving(now),
            Some(self.next_sysctls),
            self.uplink_due,
            self.contest.next(),
            // Past, while the node is not ready: no reason to wake up.
            self.world.conflist.next().filter(|at| *at > now),
        ];
        times.into_iter().flatten().min()
    }

    /// Timers: held removals, retries, the audit, the watchdog, rules that wait.
    pub async fn tick(&mut self) {
        let now = Instant::now();
        if let Some(interval) = self.world.notify.watchdog_interval()
            && self.next_ping.is_some_and(|at| at <= now)
        {
            self.world.notify.ping();
            self.next_ping = Some(now + interval);
        }
        let due = self.hold.due(now);
        if !due.is_empty() {
            tracing::warn!(peers = due.len(), "the grace time of held removals is over: peers removed");
            let changed = due.iter().flat_map(|id| self.plan.remove(id)).collect();
            self.write(changed).await;
        }
        self.plan.lines.log_left_out(now);
        self.let_in(now).await;
        self.want_rules();
        self.save(now);
        self.contend(now);
        if self.next_sysctls <= now {
            self.look_at_sysctls();
            // Told of at once, too, unless the host is out of inotify instances.
            self.publish_env();
        }
        let moves = self.uplink_due.take_if(|due| *due <= now).is_some();
        if self.next_audit <= now || moves {
            self.full(Cause::Audit).await;
            return;
        }
        self.retry(now).await;
    }

    /// Tries again what the kernel refused. What peers are the reason for is paid for like their devices.
    async fn retry(&mut self, now: Instant) {
        let churn = &self.churn;
        let retried = self.passer.retry(&self.plan, |key, value| churn.is_late(key, value)).await;
        if let Some(report) = retried.report {
            self.passed(report);
        }
        let of_peers = retried.removals || !retried.peers_devices.is_empty();
        if retried.own_device {
            self.full(Cause::Retry).await;
        } else if of_peers && self.churn.may_look(now) {
            self.look_for_devices(Cause::Retry, now).await;
        } else if of_peers {
            self.churn.want_look(retried.peers_devices);
        }
    }

    /// Looks at the host and at everything we want in the kernel, and writes the difference; then subnet.env.
    pub async fn full(&mut self, cause: Cause) {
        let (started, cost) = (Instant::now(), audit::Cost::begin());
        self.churn.nothing_is_late();
        self.look_at_host();
        // Before the first snapshot nothing says which peers are stale: own devices only.
        self.passer.keep_all(!self.snapshot_applied);
        let mut result = self.passer.full(&self.plan, cause).await;
        // A device that a peer needs has become somebody else's, or is no longer: what is wanted is another now.
        if self.plan.set_foreign_devices(self.passer.foreign_devices()) {
            let again = self.passer.full(&self.plan, cause).await;
            if let Ok(first) = std::mem::replace(&mut result, again) {
                self.passed(first);
            }
        }
        match result {
            Ok(report) => {
                self.kernel_problem = None;
                *self.full_passes.entry(cause.as_str()).or_default() += 1;
                self.world.metrics.full_pass(cause.as_str());
                // What a pass writes is no cost of an audit; what is refused again and again is.
                if report.writes() == report.failed() {
                    self.audit_interval = audit::interval(self.world.options.resync, cost.so_far());
                }
                self.passed(report);
                let (next, stale) = (Instant::now() + self.audit_interval, self.passer.keep_stale_until);
                self.next_audit = stale.map_or(next, |until| next.min(until));
            }
            Err(error) => {
                let text = format!("read the kernel's tables: {error}");
                tracing::error!("{text}");
                (self.last_error, self.kernel_problem) = (Some(report::failure(text.clone())), Some(text));
                self.next_audit = Instant::now() + DUMP_AGAIN;
            }
        }
        self.look_at_sysctls();
        self.want_rules();
        self.publish_env();
        self.rest(started);
    }

    /// The kernel announced changes.
    pub async fn noticed(&mut self, notices: Vec<Notice>) {
        let mut entries: HashMap<Key, Option<Seen>> = HashMap::new();
        let (mut all, mut routes) = (false, false);
        for notice in notices {
            match notice {
                Notice::Entry(key, seen) => {
                    entries.insert(key, seen);
                }
                Notice::Links | Notice::Lost => all = true,
                Notice::Guard => self.look_at_guard(&mut entries),
                Notice::Fence => self.look_at_fence(&mut entries),
                Notice::Routes => routes = true,
            }
        }
        entries.retain(|key, seen| match (self.plan.desired(key), seen) {
            (Some(desired), _) if self.churn.is_late(key, &desired) => false,
            (Some(desired), Some(seen)) => desired != seen.value,
            (Some(_), None) | (None, Some(_)) => true,
            (None, None) => false,
        });
        let all = all || entries.len() > MANY;
        let now = Instant::now();
        if (all || routes) && now < self.quiet_until {
            self.next_audit = self.next_audit.min(self.quiet_until);
        } else if all {
            return self.full(Cause::Kernel).await;
        } else if routes {
            let changed = self.look_at_host();
            self.rest(now);
            if changed {
                return self.full(Cause::Kernel).await;
            }
        }
        if entries.is_empty() {
            return;
        }
        if let Some(report) = self.passer.noticed(&self.plan, entries).await {
            self.passed(report);
        }
    }

    /// `weft status`.
    pub fn answer(&self, request: socket::Request) {
        let socket::Request::Status(reply) = request;
        // The client may be gone already.
        drop(reply.send(report::status(self)));
    }

    /// Brings readiness, metrics and systemd's status up to date.
    pub fn report(&mut self) {
        report::publish(self);
    }

    /// SIGTERM: the data path stays as it is.
    pub fn stopping(&mut self) {
        self.world.notify.stopping();
        tracing::info!("weft ends; routes and devices stay as they are");
    }

    fn rest(&mut self, since: Instant) {
        let now = Instant::now();
        self.looks.retain(|at| now - *at < LOOKS_IN);
        self.looks.push_back(now);
        self.quiet_until = if self.looks.len() > LOOKS { now + (now - since) * REST } else { now };
    }

    async fn write(&mut self, changed: Vec<Changed>) {
        if changed.is_empty() || !self.snapshot_applied {
            return;
        }
        let now = Instant::now();
        let mtu_or_links = changed.iter().any(|(key, ..)| matches!(key, Key::Link(_)));
        if mtu_or_links && self.churn.may_look(now) {
            return self.look_for_devices(Cause::Lease, now).await;
        }
        let changed = self.churn.leave_late(changed);
        if changed.is_empty() {
            return;
        }
        let report = self.passer.changed(changed).await;
        self.passed(report);
    }

    fn passed(&mut self, report: Report) {
        self.world.metrics.pass(report.cause.as_str(), report.took);
        for ((kind, done), count) in &report.operations {
            let result = if *done { "done" } else { "failed" };
            self.world.metrics.operations(kind, result, *count as u64);
        }
        if let Some(error) = &report.error {
            self.last_error = Some(report::failure(error.clone()));
        }
        if report.writes() > 0 {
            tracing::debug!(
                cause = report.cause.as_str(),
                writes = report.writes(),
                failed = report.failed(),
                took_us = report.took.as_micros(),
                "pass"
            );
            self.last_pass = Some(report::pass(&report));
        }
    }
}

#[cfg(test)]
mod tests;
