// SPDX-License-Identifier: Apache-2.0
//! The agent: connects the store, the kernel and the reports, and runs the loop. An event only says what may have changed.
//! [`crate::node`] compares, and decides what to do.

use std::future::Future;
use std::path::Path;
use std::pin::{Pin, pin};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::Instant;
use weft_backends::owner::PROTOCOL;
use weft_subnet::outside::is_simulated;
use weft_subnet::source::{Event, Source};

use crate::conflist::{self, Conflist};
use crate::extension::FirstCommand;
use crate::files::watch::FileWatch;
use crate::files::{self, leftovers};
use crate::firewall;
use crate::firewall::reconciler::Handle;
use crate::instance::{self, Instance};
use crate::kernel::linux::{LinuxKernel, LinuxOptions};
use crate::kernel::monitor::{LinuxMonitor, MonitorOptions};
use crate::kernel::{Kernel, Monitor, Notice};
use crate::lease::acquire::{self, EarlierRun, SecretFiles, StartContext, Waiting};
use crate::lease::tasks::{LeaseAnswer, LeaseTasks};
use crate::log::Reminder;
use crate::node::{NextStep, Node, NodeContext};
use crate::observe::fault_events::EventReporter;
use crate::observe::health::mesh_page::MeshPage;
use crate::observe::health::{self, Pages};
use crate::observe::history::recorder::{self, EARLIER_WAS_KILLED, Recorder};
use crate::observe::mesh::row::{Row, RowAnswer};
use crate::observe::metrics::Metrics;
use crate::observe::node_condition::ConditionReporter;
use crate::observe::readiness::Readiness;
use crate::observe::report::{self, Reporter};
use crate::observe::socket::{self, AgentSocket};
use crate::observe::status::now_ms;
use crate::observe::systemd::Notify;
use crate::options::Options;
use crate::pass::Passer;
use crate::pass::old_routes;
use crate::saved::{SavedFile, Saver};

/// Number of events of the store that may wait while a pass runs.
const MAX_QUEUED_EVENTS: usize = 1024;
/// Longest time for which the loop sleeps.
const MAX_SLEEP: Duration = Duration::from_secs(3600);

/// Opens the kernel of this network namespace, with nexthop objects. The path of the subnet file names the instance.
pub fn open_kernel(subnet_file: &Path) -> anyhow::Result<LinuxKernel> {
    LinuxKernel::open(kernel_options(subnet_file, true)).context("open netlink (are you root?)")
}

fn kernel_options(subnet_file: &Path, nexthop_objects: bool) -> LinuxOptions {
    let instance = instance::hash(subnet_file).to_be_bytes()[0];
    LinuxOptions { nexthop_objects, instance, protocol: PROTOCOL, alias: Instance::new(subnet_file).alias() }
}

/// Runs the agent until `shutdown`.
///
/// # Errors
/// The agent cannot start: the store's options are wrong, netlink cannot be opened, or the socket is in use.
pub async fn run(options: Options, shutdown: impl Future<Output = ()>) -> anyhow::Result<ExitCode> {
    let store: Rc<dyn Source> = Rc::from(options.store.open()?);
    let kernel_options = kernel_options(&options.subnet_file, options.nexthop_objects);
    let alias = kernel_options.alias.clone();
    let kernel = LinuxKernel::open(kernel_options).context("open netlink (are you root?)")?;
    let watched = MonitorOptions::new(PROTOCOL, kernel.shared()).watch_fence(&alias);
    let watched = if options.rules.guard { watched.watch_guard(&alias) } else { watched };
    let watched = if options.uplink.can_reach.is_some() { watched.watch_policy() } else { watched };
    let monitor = LinuxMonitor::open(watched).context("open the netlink monitor")?;
    LocalSet::new().run_until(serve(options, store, kernel, monitor, shutdown)).await
}

/// Runs the agent with this store, kernel and monitor until `shutdown`. Tests pass their own. This must run in a
/// [`LocalSet`].
///
/// # Errors
/// The socket of `options` is in use or cannot be created.
pub async fn serve<K: Kernel + 'static, M: Monitor + 'static>(
    options: Options,
    store: Rc<dyn Source>,
    kernel: K,
    monitor: M,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    let (readiness, metrics) = (Readiness::new(), Arc::new(Metrics::new()));
    let mut socket =
        AgentSocket::bind(&options.socket).with_context(|| format!("socket {}", options.socket.display()))?;
    let was_killed = socket.was_left();
    let (requests, received_requests) = mpsc::channel(16);
    let mut helpers = JoinSet::new();
    if let Some(address) = options.health {
        let mesh = MeshPage::new(requests.clone());
        let pages = Pages { readiness: readiness.clone(), metrics: metrics.clone(), mesh };
        helpers.spawn_local(health::serve(address, pages));
    }
    let ready = readiness.clone();
    helpers.spawn_local(async move { socket.serve(requests, ready).await });
    let surroundings =
        Surroundings { requests: received_requests, readiness, metrics, traffic_rules: true, was_killed };
    serve_in(surroundings, options, store, (kernel, monitor), shutdown).await
}

/// What surrounds an agent besides its store and its kernel.
#[derive(Debug)]
pub struct Surroundings {
    /// The questions of commands.
    pub requests: mpsc::Receiver<socket::Request>,
    /// Where the agent says whether it is ready.
    pub readiness: Readiness,
    /// The counters of the agent.
    pub metrics: Arc<Metrics>,
    /// The agent writes traffic rules into nftables or iptables. Otherwise it has no task for them, and must want none.
    pub traffic_rules: bool,
    /// The agent before this one left its socket.
    pub was_killed: bool,
}

/// Runs the agent as [`serve`] does, without a socket and an HTTP server of its own.
///
/// # Errors
/// The loop cannot run.
pub async fn serve_in<K: Kernel + 'static, M: Monitor + 'static>(
    surroundings: Surroundings,
    options: Options,
    store: Rc<dyn Source>,
    (mut kernel, monitor): (K, M),
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    let mut shutdown = pin!(shutdown);
    let Surroundings { requests: mut received_requests, readiness, metrics, traffic_rules, was_killed } = surroundings;
    let mut helpers = JoinSet::new();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), store = store.describe(), "weft starts");

    prepare_files(&options);
    let recorder = open_history(&options, was_killed).await;
    old_routes::replace(&mut kernel, &options.subnet_file, options.rules.fences);
    let condition = ConditionReporter::new(store.clone(), options.unwell_after);
    let (notify, events) = (Notify::new(), EventReporter::new(store.clone()));
    let mut reporter = Reporter { readiness: readiness.clone(), metrics, notify, condition, events };
    let find_saved_file = || SavedFile::of(&*store, options.state_dir.as_deref(), &options.subnet_file);
    // If the API server does not answer, this takes long.
    let Some(saved_file) = unless(shutdown.as_mut(), find_saved_file()).await else { return Ok(ended_early()) };
    // Finding out which packet filter the node uses runs programs. They run while the agent waits for its lease.
    let survey = traffic_rules.then(|| firewall::choice::Survey::begin(options.rules.firewall));
    let secrets = SecretFiles::new(options.state_dir.as_deref())
        .with_wireguard_keys(&options.wireguard_key, &options.subnet_file);
    let started = {
        let context = StartContext {
            store: &*store,
            kernel: &mut kernel,
            choice: &options.uplink,
            subnet_file: &options.subnet_file,
            guard: options.rules.guard,
            memory: EarlierRun::new(saved_file.clone()),
            secrets: secrets.clone(),
            first_command: FirstCommand::new(options.net_conf_commands),
        };
        let waiting = Waiting::new(&mut reporter.notify, readiness.clone(), (&reporter.condition, &reporter.events));
        let mut starting = pin!(acquire::start(context, waiting));
        loop {
            tokio::select! {
                () = &mut shutdown => return Ok(ended_early()),
                started = &mut starting => break started,
                Some(request) = received_requests.recv() => answer_early(request, &*store, &readiness, &recorder),
            }
        }
    };
    // A kubeconfig that was not there at first is there now.
    let known = async { if saved_file.is_some() { saved_file } else { find_saved_file().await } };
    let Some(saved_file) = unless(shutdown.as_mut(), known).await else { return Ok(ended_early()) };
    let (events, received) = mpsc::channel(MAX_QUEUED_EVENTS);
    let (lease_tasks, answers) = LeaseTasks::new(store.clone(), events.clone());
    let watcher = store.clone();
    helpers.spawn_local(async move { watcher.watch(events).await });
    let (handle, rules) = start_rules(&mut helpers, &options, survey, started.net_conf.nftables);
    // The store may name another uplink than the flags.
    let options = Options { uplink: started.uplink.clone(), ..options };
    let (saver, conflist) = (Saver::new(saved_file), Conflist::new(options.cni.clone(), &options.subnet_file));
    let context = NodeContext { options, store, reporter, saver, conflist, secrets, recorder };
    let mut node = Node::new(context, Passer::new(kernel), lease_tasks, started);
    if let Some(handle) = handle {
        node.attach_rules(handle);
    }
    let inputs = Inputs { events: received, answers, requests: received_requests, rules };
    run_loop(node, monitor, inputs, shutdown).await
}

/// Returns what the future gives, or `None` if the agent is ended before.
async fn unless<T>(shutdown: Pin<&mut impl Future<Output = ()>>, future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        () = shutdown => None,
        value = future => Some(value),
    }
}

/// Goes on with the history of an earlier run, and records there how that run ended if it was killed.
async fn open_history(options: &Options, was_killed: bool) -> Recorder {
    let file = options.state_dir.as_deref().map(|dir| recorder::file(dir, &options.subnet_file));
    let mut recorder = Recorder::open(file).await;
    if was_killed {
        tracing::warn!("{EARLIER_WAS_KILLED}");
        recorder.add_kill().await;
    }
    recorder
}

/// Brings files of an earlier run in order.
fn prepare_files(options: &Options) {
    conflist::withdraw_after_boot(options.cni.as_ref(), &options.subnet_file);
    remove_leftovers(options);
}

/// Removes what interrupted writes left in the state directory. This goes on beside the loop, because the disk may hang.
fn remove_leftovers(options: &Options) {
    // A simulated disk leaves nothing.
    let Some(directory) = options.state_dir.clone().filter(|_| !is_simulated()) else { return };
    files::spawn_blocking(move || match leftovers::remove(&directory) {
        Ok(removed) => removed.iter().for_each(|file| {
            tracing::info!(file = %file.display(), "removed a temporary file of an interrupted write");
        }),
        Err(error) => tracing::debug!(%error, directory = %directory.display(), "look for temporary files"),
    });
}

/// Starts the task that keeps the traffic rules, if there is a survey for it. Returns how the node speaks to it, and where it shows its
/// state.
fn start_rules(
    helpers: &mut JoinSet<()>,
    options: &Options,
    survey: Option<firewall::choice::Survey>,
    nftables: Option<bool>,
) -> (Option<Handle>, watch::Receiver<firewall::reconciler::State>) {
    let (handle, port) = Handle::new();
    let rules = handle.state.clone();
    let handle = survey.map(|survey| {
        let (choice, resync) = (options.rules.firewall, options.rules.resync);
        let task = firewall::Task { instance: Instance::new(&options.subnet_file), choice, resync, survey };
        helpers.spawn_local(async move { task.run(nftables, port).await });
        handle
    });
    (handle, rules)
}

fn ended_early() -> ExitCode {
    tracing::info!("weft ends; it had no lease yet");
    ExitCode::SUCCESS
}

/// What other tasks send to the loop.
struct Inputs {
    events: mpsc::Receiver<Event>,
    answers: mpsc::UnboundedReceiver<LeaseAnswer>,
    requests: mpsc::Receiver<socket::Request>,
    rules: watch::Receiver<firewall::reconciler::State>,
}

/// Runs the loop: waits for an event, hands it to the node, and shows the node's state.
async fn run_loop<K: Kernel, M: Monitor>(
    mut node: Node<K>,
    mut monitor: M,
    mut inputs: Inputs,
    mut shutdown: Pin<&mut impl Future<Output = ()>>,
) -> anyhow::Result<ExitCode> {
    let mut subnet_file = FileWatch::new(node.subnet_file());
    let mut conflist_source = node.conflist_source().map(FileWatch::new);
    let mut log_limit = Reminder::default();
    let (tunnel_ended, command_ended) = (node.tunnel_ended(), node.command_ended());
    let mut probed = node.start_probes();
    // The watch begins with the list that was read for our lease. The first pass uses it, so the watch must get a chance to send it.
    tokio::task::yield_now().await;
    node.start(queued(&mut inputs.events)).await;
    node.update_data_path();
    node.update_extension();
    node.report();
    loop {
        let wake = node.next_wake().unwrap_or_else(|| Instant::now() + MAX_SLEEP);
        tokio::select! {
            () = &mut shutdown => {
                node.stopping().await;
                return Ok(ExitCode::SUCCESS);
            }
            notices = monitor.next() => match notices {
                Ok(notices) => node.kernel_changed(notices).await,
                Err(error) => {
                    if log_limit.due(&error.to_string(), Instant::now()) {
                        tracing::error!("read the netlink monitor: {error}: everything is compared instead");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    node.kernel_changed(vec![Notice::Lost]).await;
                }
            },
            Some(event) = inputs.events.recv() => {
                let mut events = vec![event];
                events.extend(queued(&mut inputs.events));
                node.store_changed(events).await;
            }
            Some(answer) = inputs.answers.recv() => if node.lease_answered(answer).await == NextStep::Exit {
                return Ok(ExitCode::FAILURE);
            },
            Some(request) = inputs.requests.recv() => node.answer(request),
            Some(first) = probed.recv() => {
                // The packets of a burst that nobody answers end together.
                let others = std::iter::from_fn(|| probed.try_recv().ok());
                std::iter::once(first).chain(others).for_each(|probed| node.probe_ended(probed));
            }
            Ok(()) = inputs.rules.changed() => node.rules_changed(),
            () = subnet_file.changed() => node.write_subnet_file(),
            () = changed(&mut conflist_source) => node.conflist_source_changed(),
            // The data path and the commands are updated below.
            () = tunnel_ended.notified() => {}
            () = command_ended.notified() => {}
            () = tokio::time::sleep_until(wake) => node.tick().await,
        }
        node.update_data_path();
        node.update_extension();
        node.report();
    }
}

/// Returns the events that are in the queue now.
fn queued(events: &mut mpsc::Receiver<Event>) -> Vec<Event> {
    std::iter::from_fn(|| events.try_recv().ok()).collect()
}

/// Waits until the file changes. Without a file this waits for ever.
async fn changed(file: &mut Option<FileWatch>) {
    match file {
        Some(file) => file.changed().await,
        None => std::future::pending().await,
    }
}

/// Answers a command before the agent has a lease. The client may be gone already.
fn answer_early(request: socket::Request, store: &dyn Source, readiness: &Readiness, recorder: &Recorder) {
    let starting = || {
        let remarks = recorder.remark(now_ms()).into_iter().collect();
        report::starting(store.describe(), readiness.reasons(), remarks)
    };
    match request {
        socket::Request::Status(reply) => drop(reply.send(starting())),
        socket::Request::Mesh(reply) => {
            drop(reply.send(RowAnswer { row: Row::of(starting()), readers: Vec::new() }));
        }
        socket::Request::Plan(reply) => {
            let reasons = readiness.reasons().join("; ");
            drop(reply.send(Err(socket::NoPlan::NoLease(reasons))));
        }
        socket::Request::RotateKey(reply) => drop(reply.send(Err(socket::NoNewKey::NoLease))),
        socket::Request::History(query, reply) => drop(reply.send(recorder.query(&query))),
    }
}

#[cfg(test)]
mod tests;
