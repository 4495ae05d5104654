// SPDX-License-Identifier: Apache-2.0
//! One node: what it knows (plan, held removals, own lease) and how each kind of news leads to a pass.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_backends::index::Changed;
use weft_backends::state::{Key, Seen};
use weft_subnet::attrs::Attrs;
use weft_subnet::hold::Hold;
use weft_subnet::lease::{Id, Lease, Record};
use weft_subnet::source::{Claim, Event, Source};

use crate::admin;
use crate::files;
use crate::health::Readiness;
use crate::kernel::{Kernel, Notice};
use crate::metrics::Metrics;
use crate::notify::Notify;
use crate::options::{OnLostLease, Options};
use crate::own::{Answer, Keeper};
use crate::pass::{Cause, Passer, Report};
use crate::plan::Plan;
use crate::report;
use crate::say::Patience;
use crate::start::{self, Started};
use crate::status::Pass;
use crate::sysctls;

/// Audits may use one part in this many of a core.
const AUDIT_SHARE: u32 = 400;
/// More entries than this in one look are a reason to look at everything.
const MANY: usize = 256;

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
    keeper: Keeper,
    config: String,
    /// A change of net-conf that only a restart applies.
    pub(crate) restart_wanted: Option<String>,
    /// Someone else owns our subnet: for people.
    pub(crate) lost: Option<String>,
    pub(crate) snapshot_applied: bool,
    pub(crate) env_problem: Option<String>,
    pub(crate) host_problem: Option<String>,
    pub(crate) kernel_problem: Option<String>,
    pub(crate) sysctl_problems: Vec<String>,
    pub(crate) store_trouble: Option<String>,
    pub(crate) last_word: Instant,
    pub(crate) ttl: Option<(Instant, Duration)>,
    pub(crate) last_pass: Option<Pass>,
    pub(crate) last_error: Option<String>,
    pub(crate) audit_interval: Duration,
    next_audit: Instant,
    next_ping: Option<Instant>,
    trouble_said: Patience,
}

impl<K: Kernel> Node<K> {
    /// A node that has just got its lease; nothing is written yet.
    pub fn new(world: World, mut passer: Passer<K>, mut keeper: Keeper, started: Started) -> Node<K> {
        let Started { network, config, backend, host, own, flannel_was_here } = started;
        tracing::info!(subnet = %own.subnets, backend = backend.kind(), uplink = %host.uplink.name, "lease acquired");
        passer.flannel_was_here = flannel_was_here;
        keeper.keep(own.clone());
        let now = Instant::now();
        Node {
            hold: Hold::new(world.options.hold_removals),
            audit_interval: world.options.resync,
            next_ping: world.notify.watchdog_interval().map(|_| now),
            plan: Plan::new(network, backend, host, own),
            world,
            passer,
            keeper,
            config,
            restart_wanted: None,
            lost: None,
            snapshot_applied: false,
            env_problem: None,
            host_problem: None,
            kernel_problem: None,
            sysctl_problems: Vec::new(),
            store_trouble: None,
            last_word: now,
            ttl: None,
            last_pass: None,
            last_error: None,
            next_audit: now,
            trouble_said: Patience::default(),
        }
    }

    /// Where subnet.env stands.
    pub fn subnet_file(&self) -> PathBuf {
        self.world.options.subnet_file.clone()
    }

    /// When [`Node::tick`] has something to do.
    pub fn next_wake(&self) -> Option<Instant> {
        let times = [Some(self.next_audit), self.passer.next_retry(), self.hold.next(), self.next_ping];
        times.into_iter().flatten().min()
    }

    /// Timers: held removals, retries, the audit, the watchdog.
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
        if self.next_audit <= now {
            self.full(Cause::Audit).await;
            return;
        }
        match self.passer.retry(&self.plan).await {
            Some(Ok(report)) => self.passed(report),
            Some(Err(_)) => self.full(Cause::Retry).await,
            None => {}
        }
    }

    /// Looks at the host and at everything we want in the kernel, and writes the difference; then subnet.env.
    pub async fn full(&mut self, cause: Cause) {
        self.look_at_host();
        // Before the first snapshot nothing says which peers are stale: own devices only.
        self.passer.keep_all(!self.snapshot_applied);
        match self.passer.full(&self.plan, cause).await {
            Ok(report) => {
                self.kernel_problem = None;
                self.audit_interval = self.world.options.resync.max(report.took * AUDIT_SHARE);
                self.passed(report);
            }
            Err(error) => {
                let text = format!("read the kernel's tables: {error}");
                tracing::error!("{text}");
                (self.last_error, self.kernel_problem) = (Some(text.clone()), Some(text));
            }
        }
        self.next_audit = Instant::now() + self.audit_interval;
        self.sysctl_problems = sysctls::ensure(&self.plan, self.world.options.manage_sysctls);
        self.publish_env();
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
                Notice::Routes => routes = true,
            }
        }
        entries.retain(|key, seen| match (self.plan.desired(key), seen) {
            (Some(desired), Some(seen)) => desired != seen.value,
            (Some(_), None) | (None, Some(_)) => true,
            (None, None) => false,
        });
        if all || entries.len() > MANY {
            return self.full(Cause::Kernel).await;
        }
        if routes && self.look_at_host() {
            return self.full(Cause::Kernel).await;
        }
        if entries.is_empty() {
            return;
        }
        if let Some(report) = self.passer.noticed(&self.plan, entries).await {
            self.passed(report);
        }
    }

    /// The store told us something.
    pub async fn stored(&mut self, events: Vec<Event>) {
        let mut changed = Vec::new();
        let mut full = false;
        self.last_word = Instant::now();
        self.world.metrics.store_word(self.last_word);
        for event in events {
            if !matches!(event, Event::Trouble(_) | Event::Kept(_)) && self.store_trouble.take().is_some() {
                tracing::info!("the store answers again");
            }
            match event {
                Event::Snapshot { records, reset } => {
                    full |= !self.snapshot_applied;
                    changed.extend(self.snapshot(records, reset));
                }
                Event::Changes(changes) => changed.extend(self.changes(changes)),
                Event::Config(text) => full |= self.configured(&text),
                Event::Word => {}
                Event::Trouble(text) => {
                    if self.trouble_said.due(&text, self.last_word) {
                        tracing::warn!("store: {text}");
                    }
                    self.store_trouble = Some(text);
                }
                Event::Kept(ttl) => {
                    self.ttl = ttl.map(|ttl| (self.last_word, ttl));
                    self.world.metrics.lease_kept(self.last_word, ttl);
                }
            }
        }
        if full {
            self.full(Cause::Start).await;
        } else {
            self.write(changed).await;
        }
    }

    /// A call to the store for our lease was answered.
    pub async fn answered(&mut self, answer: Answer) -> Verdict {
        match answer {
            Answer::Held(lease) => {
                let moved = lease.subnets != self.plan.own().subnets;
                let same = !moved && lease.attrs == self.plan.own().attrs && lease.id == self.plan.own().id;
                tracing::info!(subnet = %lease.subnets, moved, "own lease held");
                self.lost = None;
                self.keeper.keep(lease.clone());
                if !same {
                    self.rebase(lease);
                    self.full(Cause::Start).await;
                }
            }
            Answer::Taken(text) => return self.lost(text),
            Answer::Trouble(text) => {
                if self.trouble_said.due(&text, Instant::now()) {
                    tracing::warn!("own lease: {text}");
                }
                self.store_trouble = Some(text);
            }
        }
        Verdict::Stay
    }

    /// `weft status`.
    pub fn answer(&self, request: admin::Request) {
        let admin::Request::Status(reply) = request;
        // The client may be gone already.
        drop(reply.send(report::status(self)));
    }

    /// Writes subnet.env when it does not say what it should: only while our device is up.
    pub fn publish_env(&mut self) {
        if report::device_problem(self).is_some() || self.kernel_problem.is_some() {
            return;
        }
        let file = &self.world.options.subnet_file;
        match files::write(file, self.plan.env().render().as_bytes()) {
            Ok(true) => {
                tracing::info!(file = %file.display(), mtu = self.plan.mtu(), "subnet.env written");
                self.env_problem = None;
            }
            Ok(false) => self.env_problem = None,
            Err(error) => {
                let text = format!("write {}: {error}", file.display());
                tracing::error!("{text}");
                self.env_problem = Some(text);
            }
        }
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

    async fn write(&mut self, changed: Vec<Changed>) {
        if changed.is_empty() || !self.snapshot_applied {
            return;
        }
        let mtu_or_links = changed.iter().any(|(key, ..)| matches!(key, Key::Link(_)));
        if mtu_or_links {
            return self.full(Cause::Lease).await;
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
            self.last_error = Some(error.clone());
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

    fn snapshot(&mut self, records: Vec<Record>, reset: bool) -> Vec<Changed> {
        if reset {
            tracing::warn!("this is another store than before (wiped, restored or another cluster)");
        }
        let own = self.plan.own().id.clone();
        let there: HashSet<Id> = records.iter().map(|record| record.id.clone()).collect();
        let gone: Vec<Id> = self.plan.peers().ids().filter(|id| !there.contains(*id)).cloned().collect();
        let first = !self.snapshot_applied;
        self.snapshot_applied = true;
        let alone = !there.iter().any(|id| *id != own);
        if first && alone && !self.world.options.hold_removals.is_zero() {
            self.passer.keep_stale_until = Some(Instant::now() + self.world.options.hold_removals);
        } else if !alone {
            self.passer.keep_stale_until = None;
        }
        if !there.contains(&own) {
            self.own_gone();
        }
        let mut changed = self.remove(gone);
        for record in records {
            changed.extend(self.put(record));
        }
        changed
    }

    fn changes(&mut self, changes: Vec<Result<Record, Id>>) -> Vec<Changed> {
        let mut gone: HashSet<Id> = HashSet::new();
        let mut changed = Vec::new();
        for change in changes {
            match change {
                Ok(record) => {
                    gone.remove(&record.id);
                    changed.extend(self.put(record));
                }
                Err(id) if id == self.plan.own().id => self.own_gone(),
                Err(id) => {
                    gone.insert(id);
                }
            }
        }
        changed.extend(self.remove(gone.into_iter().collect()));
        changed
    }

    fn put(&mut self, record: Record) -> Vec<Changed> {
        if record.id == self.plan.own().id {
            self.own_put(&record);
            return Vec::new();
        }
        if self.hold.back(&record.id) {
            tracing::info!(lease = %record.id, "held lease is back");
        }
        self.plan.put(record)
    }

    fn remove(&mut self, ids: Vec<Id>) -> Vec<Changed> {
        if ids.is_empty() {
            return Vec::new();
        }
        let asked = ids.len();
        let now = self.hold.remove(ids, self.plan.peers().len(), Instant::now());
        if now.len() < asked {
            let grace_s = self.world.options.hold_removals.as_secs();
            tracing::warn!(
                held = asked - now.len(),
                grace_s,
                "many leases vanished at once: their peers are kept for now"
            );
        }
        now.iter().flat_map(|id| self.plan.remove(id)).collect()
    }

    /// Our own record is not in the store any more: written back at once.
    fn own_gone(&mut self) {
        if self.lost.is_none() && !self.keeper.busy() {
            tracing::warn!(subnet = %self.plan.own().subnets, "own lease is gone from the store: taking it again");
            let own = self.plan.own().clone();
            let attrs = own.attrs.clone();
            self.keeper.retake(own, attrs);
        }
    }

    /// Someone put our own record: ourselves, an operator, or another node that owns it now.
    fn own_put(&mut self, record: &Record) {
        let own = self.plan.own();
        let ours = |attrs: &Attrs| match own.attrs.public_ip {
            Some(ip) => attrs.public_ip == Some(ip),
            None => attrs.public_ipv6 == own.attrs.public_ipv6,
        };
        match &record.lease {
            Ok(lease) if lease.attrs == own.attrs => self.lost = None,
            Ok(lease) if ours(&lease.attrs) && start::macs(&lease.attrs) != start::macs(&own.attrs) => {
                tracing::warn!("the VTEP MAC in our own lease was changed: the device follows it");
                self.rebase(lease.clone());
                self.next_audit = Instant::now();
            }
            // Another owner, an unreadable value, or other parameters: the store decides by compare-and-swap.
            _ if !self.keeper.busy() && self.lost.is_none() => {
                let own = own.clone();
                let attrs = own.attrs.clone();
                self.keeper.retake(own, attrs);
            }
            _ => {}
        }
    }

    fn lost(&mut self, text: String) -> Verdict {
        let action = self.world.options.on_lost_lease;
        tracing::error!(?action, "own lease lost: {text}");
        self.last_error = Some(text.clone());
        self.lost = Some(text);
        match action {
            OnLostLease::Exit => return Verdict::Exit,
            OnLostLease::Reacquire => {
                let network = self.plan.network().clone();
                let attrs = self.plan.own().attrs.clone();
                self.keeper.acquire(Claim { network, attrs, previous: None });
            }
            OnLostLease::Hold => {}
        }
        Verdict::Stay
    }

    /// The lease says something else than the plan was made with: plan again.
    fn rebase(&mut self, own: Lease) {
        let mut host = self.plan.host().clone();
        let (v4, v6) = start::macs(&own.attrs);
        host.vtep_mac_v4 = v4.unwrap_or(host.vtep_mac_v4);
        host.vtep_mac_v6 = v6.unwrap_or(host.vtep_mac_v6);
        // The text was parsed before: it cannot fail now.
        if let Ok((network, backend)) = start::parse(&self.config) {
            self.plan.rebase(network, backend, host, own);
        }
    }

    fn configured(&mut self, text: &str) -> bool {
        if text == self.config {
            return false;
        }
        let (network, backend) = match start::parse(text) {
            Ok(parsed) => parsed,
            Err(reason) => {
                tracing::error!("the new {reason}; the old one stays in force");
                self.restart_wanted = Some(format!("the new {reason}"));
                return false;
            }
        };
        let now = self.plan.network();
        if network.networks != now.networks || network.backend_type != now.backend_type {
            let text = "net-conf: Network, the families and Backend.Type are applied by a restart of the agent";
            tracing::warn!("{text}");
            self.restart_wanted = Some(text.to_owned());
            return false;
        }
        tracing::info!("net-conf changed: applied");
        (self.restart_wanted, self.config) = (None, text.to_owned());
        let (host, own) = (self.plan.host().clone(), self.plan.own().clone());
        self.plan.rebase(network, backend, host, own);
        self.republish();
        true
    }

    /// Reads links, addresses and foreign routes; plans again and publishes when they matter. True when they did.
    fn look_at_host(&mut self) -> bool {
        let machine = match self.passer.kernel().machine() {
            Ok(machine) => machine,
            Err(error) => {
                tracing::error!("{}", start::unreadable(&error));
                return false;
            }
        };
        let choice = report::sticky(&self.world.options.uplink, &machine, self.plan.host());
        let picked = start::pick(&choice, &machine, self.plan.network()).and_then(|picked| {
            match picked.gives_up(&self.plan.host().uplink) {
                Some(lost) => Err(format!("{} lost {lost} and has only a link-local address", picked.uplink.name)),
                None => Ok(picked),
            }
        });
        let picked = match picked {
            Ok(picked) => picked,
            Err(problem) => {
                if self.host_problem.as_ref() != Some(&problem) {
                    tracing::warn!("uplink: {problem}");
                }
                self.host_problem = Some(problem);
                return false;
            }
        };
        self.host_problem = None;
        let now = self.plan.host();
        let host = start::host(&picked, &machine, (now.vtep_mac_v4, now.vtep_mac_v6));
        if host == *now {
            return false;
        }
        if host.uplink != now.uplink || host.public_v4 != now.public_v4 || host.public_v6 != now.public_v6 {
            tracing::info!(uplink = ?host.uplink, "the uplink changed");
        }
        let own = self.plan.own().clone();
        if let Ok((network, backend)) = start::parse(&self.config) {
            self.plan.rebase(network, backend, host, own);
        }
        self.republish();
        true
    }

    /// What we publish follows the host: the lease is rewritten when it says something else.
    fn republish(&mut self) {
        match self.plan.advertise(self.plan.host()) {
            Ok(attrs) if attrs != self.plan.own().attrs && self.lost.is_none() => {
                self.keeper.retake(self.plan.own().clone(), attrs);
            }
            Ok(_) => {}
            Err(skip) => {
                tracing::error!("{skip}");
                self.host_problem = Some(skip.0);
            }
        }
    }
}
