// SPDX-License-Identifier: Apache-2.0
//! One node: what it knows (plan, own lease, leases of the peers), and what each event leads to.
//!
//! An event is a change in the store or in the kernel, an answer about the own lease, or a timer. The node decides
//! whether to write single entries or to run a full pass, and [`crate::pass`] does it.

mod audit;
mod change;
mod clear_text;
mod data_path;
mod event;
mod extension;
mod host;
mod key_change;
mod mesh;
mod net_conf;
mod own_lease;
mod passes;
mod peers;
mod port;
mod probes;
mod rate_limit;
mod rules;
mod saved;
mod schedule;
mod status;
mod store;
mod subnet_file;
mod sysctls;
mod wireguard;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use tokio::time::Instant;
use weft_subnet::saved_peers::ClearText;
use weft_subnet::source::Source;

use crate::conflist::Conflist;
use crate::data_path::DataPath;
use crate::extension::{Extension, memory};
use crate::kernel::Kernel;
use crate::lease::acquire::{SecretFiles, Started};
use crate::lease::tasks::LeaseTasks;
use crate::observe::history::recorder::Recorder;
use crate::observe::report::Reporter;
use crate::observe::socket;
use crate::options::Options;
use crate::pass::takeover::Takeover;
use crate::pass::{Cause, Passer, Trigger};
use crate::plan::Plan;
use crate::saved::Saver;
use change::Change;
use clear_text::ClearTextTime;
use host::UplinkState;
use key_change::KeyChange;
use net_conf::{NetConfInForce, log_ignored_names};
use own_lease::OwnLease;
use passes::PassStatistics;
use peers::PeerLeases;
use probes::Probes;
use rules::TrafficRules;
use schedule::Schedule;
use store::StoreState;
use sysctls::Sysctls;
use wireguard::WireguardAudit;

/// What a node works with besides its kernel.
pub struct NodeContext {
    /// What the flags say.
    pub options: Options,
    /// The store.
    pub store: Rc<dyn Source>,
    /// Where the state of the node is shown.
    pub reporter: Reporter,
    /// Saves the leases for the next start.
    pub saver: Saver,
    /// The CNI configuration of the container runtime.
    pub conflist: Conflist,
    /// Where backends keep their secrets.
    pub secrets: SecretFiles,
    /// The history of what this node changed in the kernel.
    pub recorder: Recorder,
}

/// What the agent does after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStep {
    /// It waits for the next event.
    Continue,
    /// It ends: the own lease is lost and `--on-lost-lease=exit` was given.
    Exit,
}

/// A node that has a lease.
pub struct Node<K> {
    context: NodeContext,
    passer: Passer<K>,
    plan: Plan,
    own_lease: OwnLease,
    peers: PeerLeases,
    store: StoreState,
    net_conf: NetConfInForce,
    change: Change,
    uplink: UplinkState,
    sysctls: Sysctls,
    rules: TrafficRules,
    data_path: DataPath,
    extension: Extension,
    /// `None` if `--probe=off` was given.
    probes: Option<Probes>,
    schedule: Schedule,
    wireguard: WireguardAudit,
    key_change: Option<KeyChange>,
    statistics: PassStatistics,
    /// Why subnet.env could not be written.
    subnet_file_problem: Option<String>,
    /// Why the kernel's tables could not be read.
    kernel_problem: Option<String>,
}

impl<K: Kernel> Node<K> {
    /// Creates a node that has just got its lease. Nothing is written to the kernel yet.
    pub fn new(mut context: NodeContext, mut passer: Passer<K>, mut tasks: LeaseTasks, started: Started) -> Node<K> {
        let Started { net_conf, config, backend, host, own, author, chosen, saved, wanted, clear_text, .. } = started;
        log_ignored_names(&net_conf);
        passer.takeover = Takeover::new(author);
        if saved.is_none() {
            tracing::info!(subnet = %own.subnets, backend = backend.kind(), uplink = %host.uplink.name, "lease acquired");
            tasks.renew(own.clone());
        }
        let (now, options) = (Instant::now(), &context.options);
        let ids = |of: fn(&ClearText) -> &Vec<String>| clear_text.iter().flat_map(of).map(|id| id.as_str().into());
        let plan = Plan::new(net_conf, backend, host, own)
            .with_earlier(started.earlier, started.sends_earlier)
            .with_clear_text(ids(|saved| &saved.leases), ids(|saved| &saved.followed))
            .with_assigned_subnets(context.store.capabilities().assigned)
            .with_fences(options.rules.fences)
            .with_tunnel_guard(options.rules.guard);
        let state_dir = options.state_dir.as_deref();
        let remembered = state_dir.map(|dir| memory::file(dir, &options.subnet_file));
        let mut node = Node {
            passer,
            plan,
            own_lease: OwnLease::new(tasks),
            peers: PeerLeases::new(options.hold_removals, now),
            store: StoreState::new(now),
            net_conf: NetConfInForce::new(config, chosen),
            change: Change::at_start(wanted, clear_text.map(|saved| ClearTextTime::resume(&saved, now))),
            uplink: UplinkState::default(),
            sysctls: Sysctls::new(options, now),
            rules: TrafficRules::default(),
            data_path: data_path::at_start(&mut context.reporter.notify),
            extension: Extension::new(remembered),
            probes: None,
            schedule: Schedule::new(options.resync, context.reporter.notify.watchdog_interval(), now),
            wireguard: WireguardAudit::default(),
            key_change: None,
            statistics: PassStatistics::default(),
            subnet_file_problem: None,
            kernel_problem: None,
            context,
        };
        node.find_left_key_change();
        match saved {
            Some(saved) => node.resume(saved),
            None => node.end_left_key_change(),
        }
        node
    }

    /// Returns the path of subnet.env.
    pub fn subnet_file(&self) -> PathBuf {
        self.context.options.subnet_file.clone()
    }

    /// Returns the file from which the CNI configuration is made, if the agent writes one.
    pub fn conflist_source(&self) -> Option<&Path> {
        self.context.conflist.source()
    }

    /// Takes notice that the file from which the CNI configuration is made has changed.
    pub fn conflist_source_changed(&mut self) {
        self.context.conflist.look_again();
    }

    /// Returns when to call [`Node::tick`].
    pub fn next_wake(&self) -> Option<Instant> {
        let now = Instant::now();
        let times = [
            self.schedule.next(),
            self.passer.next_retry(),
            self.peers.next(now),
            self.plan.lease_log.next(),
            self.rules.next(),
            self.context.reporter.notify.next(),
            self.next_saving(now),
            self.sysctls.next(),
            self.uplink.next(),
            self.own_lease.next(),
            self.next_step_of_change(),
            self.wireguard.next(),
            self.key_change.as_ref().and_then(KeyChange::next),
            self.context.recorder.next(),
            self.data_path.next(),
            self.extension.next(),
            self.next_probe(),
            // While the node is not ready, this time may be in the past. Then it is no reason to wake up.
            self.context.conflist.next().filter(|at| *at > now),
        ];
        times.into_iter().flatten().min()
    }

    /// Does what is due: the watchdog, removals that were held, leases that were delayed, retries, and the audit.
    pub async fn tick(&mut self) {
        let now = Instant::now();
        if self.schedule.ping_due(now) {
            self.context.reporter.notify.ping();
        }
        self.remove_held_peers(now).await;
        self.plan.lease_log.log_left_out(now);
        self.apply_delayed(now).await;
        self.update_rules();
        self.save(now);
        self.context.recorder.save(now);
        self.continue_contest(now);
        self.probe(now);
        self.key_change_due(now);
        if self.sysctls.is_due(now) {
            self.check_sysctls();
            // A host without free inotify instances announces no change of the file, so it is compared here, too.
            self.write_subnet_file();
        }
        let uplink_changes = self.uplink.take_due(now);
        self.take_turn(now);
        self.continue_change(now);
        if self.schedule.audit_due(now) || uplink_changes {
            let early = self.schedule.take_event();
            let event = if uplink_changes { Some("the uplink was gone for too long") } else { early };
            self.full_pass(event.map_or(Cause::Audit.into(), |event| Trigger::new(Cause::Audit, event))).await;
            return;
        }
        self.audit_wireguard(now).await;
        self.retry(now).await;
    }

    /// Answers a command. The client may be gone already.
    pub fn answer(&mut self, request: socket::Request) {
        match request {
            socket::Request::Status(reply) => drop(reply.send(self.status())),
            socket::Request::Mesh(reply) => drop(reply.send(self.mesh_row())),
            socket::Request::Plan(reply) => drop(reply.send(self.preview().map_err(socket::NoPlan::Kernel))),
            socket::Request::RotateKey(reply) => self.begin_key_change(reply),
            socket::Request::History(query, reply) => drop(reply.send(self.context.recorder.query(&query))),
        }
    }

    /// Ends the node with the agent. Routes, devices and rules stay, so that pods keep their network. Only a tunnel ends, because the agent itself
    /// carries its packets, and commands that run are killed.
    pub async fn stopping(&mut self) {
        self.data_path.stop();
        self.extension.stop().await;
        self.context.reporter.notify.stopping();
        self.context.recorder.close().await;
        tracing::info!("weft ends; routes and devices stay as they are");
    }
}

#[cfg(test)]
mod tests;
