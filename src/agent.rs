// SPDX-License-Identifier: Apache-2.0
//! The agent: wires store, kernel and reporting together, and runs the loop. Every event only says where to look again;
//! [`crate::node`] looks.

use std::future::Future;
use std::path::Path;
use std::pin::pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::{mpsc, watch};
use tokio::task::LocalSet;
use weft_backends::backend::TYPES;
use weft_backends::owner::PROTOCOL;
use weft_subnet::dir::DirStore;
use weft_subnet::etcd::EtcdStore;
use weft_subnet::source::{Event, Source};

use crate::conflist::Conflist;
use crate::files::FileWatch;
use crate::firewall;
use crate::firewall::reconciler::Handle;
use crate::instance::{self, Instance};
use crate::kernel::linux::{LinuxKernel, LinuxOptions};
use crate::kernel::monitor::{LinuxMonitor, MonitorOptions};
use crate::kernel::{Kernel, Monitor, Notice};
use crate::lease::acquire::{self, EarlierRun, SecretFiles, StartContext, Waiting};
use crate::lease::keep::{Answer, Keeper};
use crate::log::Reminder;
use crate::node::{Node, Verdict, World};
use crate::observe::health::{self, Readiness};
use crate::observe::metrics::Metrics;
use crate::observe::node_condition::ConditionReporter;
use crate::observe::socket::{self, Admin};
use crate::observe::systemd::Notify;
use crate::options::{Options, Store};
use crate::pass::Passer;
use crate::pass::old_routes;
use crate::saved::{SavedFile, Saver};

/// Events of the store that may wait while a pass runs.
const QUEUE: usize = 1024;
/// The longest sleep of the loop: clocks of status and watchdog are read at least so often.
const LONGEST: Duration = Duration::from_secs(3600);

/// Opens the store that the options name.
pub fn open_store(store: &Store) -> anyhow::Result<Box<dyn Source>> {
    Ok(match store {
        Store::Etcd(options) => Box::new(EtcdStore::new(options.clone()).context("etcd store")?),
        Store::Dir(path) => Box::new(DirStore::new(path.clone(), TYPES)),
        #[cfg(feature = "kube")]
        Store::Kube(options) => {
            Box::new(weft_subnet::kube::KubeStore::new((**options).clone()).context("kubernetes store")?)
        }
    })
}

/// Opens a store for a command that is no agent: a directory must be there, for a typing error must not make one.
pub fn open_existing_store(store: &Store) -> anyhow::Result<Box<dyn Source>> {
    if let Store::Dir(path) = store {
        anyhow::ensure!(path.is_dir(), "--store dir:{0}: {0} is no directory", path.display());
    }
    open_store(store)
}

/// Opens the kernel of this network namespace, with nexthop objects. The instance is named after the subnet file.
pub fn open_kernel(subnet_file: &Path) -> anyhow::Result<LinuxKernel> {
    LinuxKernel::open(kernel_options(subnet_file, true)).context("open netlink (are you root?)")
}

fn kernel_options(subnet_file: &Path, nexthop_objects: bool) -> LinuxOptions {
    let instance = instance::hash(subnet_file).to_be_bytes()[0];
    LinuxOptions { nexthop_objects, instance, protocol: PROTOCOL, alias: format!("weft {}", subnet_file.display()) }
}

/// Runs the agent until `shutdown`. Returns an error only when it cannot begin at all (options, netlink, socket taken).
pub async fn run(options: Options, shutdown: impl Future<Output = ()>) -> anyhow::Result<ExitCode> {
    let store: Rc<dyn Source> = Rc::from(open_store(&options.store)?);
    let kernel_options = kernel_options(&options.subnet_file, options.nexthop_objects);
    let alias = kernel_options.alias.clone();
    let kernel = LinuxKernel::open(kernel_options).context("open netlink (are you root?)")?;
    let watched = MonitorOptions::new(PROTOCOL, kernel.shared()).watch_fence(&alias);
    let watched = if options.rules.guard { watched.watch_guard(&alias) } else { watched };
    let monitor = LinuxMonitor::open(watched).context("open the netlink monitor")?;
    LocalSet::new().run_until(serve(options, store, kernel, monitor, shutdown)).await
}

/// The agent with its store, kernel and monitor handed in, so that a test can put its own in their place. Must run inside a
/// [`LocalSet`]. Ends when `shutdown` does.
///
/// # Errors
/// The socket of `options` cannot be bound.
pub async fn serve<K: Kernel + 'static, M: Monitor + 'static>(
    options: Options,
    store: Rc<dyn Source>,
    mut kernel: K,
    monitor: M,
    shutdown: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    let mut shutdown = pin!(shutdown);
    let (readiness, metrics) = (Readiness::new(), Arc::new(Metrics::new()));
    let admin = Admin::bind(&options.socket).with_context(|| format!("socket {}", options.socket.display()))?;
    let (requests, mut asked) = mpsc::channel(16);
    let mut helpers = tokio::task::JoinSet::new();
    if let Some(address) = options.health {
        helpers.spawn_local(health::serve(address, readiness.clone(), metrics.clone()));
    }
    let ready = readiness.clone();
    helpers.spawn_local(async move { admin.serve(requests, ready).await });
    let mut notify = Notify::new();
    tracing::info!(version = env!("CARGO_PKG_VERSION"), store = store.describe(), "weft starts");

    old_routes::replace(&mut kernel, &options.subnet_file, options.rules.fences);
    let condition = ConditionReporter::new(store.clone(), options.unwell_after);
    let identity = tokio::select! {
        // The API server may be away, and then this answer takes its time.
        () = &mut shutdown => return Ok(ended_early()),
        identity = store.identity() => identity,
    };
    let saved_file = SavedFile::new(options.state_dir.as_deref(), &options.subnet_file, identity);
    // Programs are asked while the lease is waited for.
    let survey = firewall::choice::Survey::begin(options.rules.firewall);
    let started = {
        let (choice, subnet_file) = (&options.uplink, options.subnet_file.as_path());
        let guard = options.rules.guard;
        let memory = EarlierRun::new(saved_file.clone());
        let secrets = SecretFiles::new(options.state_dir.as_deref());
        let place = StartContext { store: &*store, kernel: &mut kernel, choice, subnet_file, guard, memory, secrets };
        let starting = acquire::start(place, Waiting::new(&mut notify, readiness.clone(), &condition));
        let mut starting = pin!(starting);
        loop {
            tokio::select! {
                () = &mut shutdown => return Ok(ended_early()),
                started = &mut starting => break started,
                Some(request) = asked.recv() => answer_early(request, &*store, &readiness),
            }
        }
    };
    let (events, received) = mpsc::channel(QUEUE);
    let (keeper, answers) = Keeper::new(store.clone(), events.clone());
    let watcher = store.clone();
    helpers.spawn_local(async move { watcher.watch(events).await });
    let rules = firewall::Task {
        instance: Instance::new(&options.subnet_file),
        choice: options.rules.firewall,
        resync: options.rules.resync,
        survey,
    };
    let (handle, port) = Handle::new();
    let ruled = handle.state.clone();
    let nftables = started.network.nftables;
    helpers.spawn_local(async move { rules.run(nftables, port).await });
    // The store's admin may have chosen another uplink than the flags.
    let options = Options { uplink: started.uplink.clone(), ..options };
    let saver = Saver::new(saved_file);
    let conflist = Conflist::new(options.cni.clone(), &options.subnet_file);
    let world = World { options, store, readiness, metrics, notify, condition, saver, conflist };
    let mut node = Node::new(world, Passer::new(kernel), keeper, started);
    node.carry(handle);
    turn(node, monitor, Inputs { received, answers, asked, ruled }, shutdown).await
}

fn ended_early() -> ExitCode {
    tracing::info!("weft ends; it had no lease yet");
    ExitCode::SUCCESS
}

/// What reaches the loop from other tasks.
struct Inputs {
    received: mpsc::Receiver<Event>,
    answers: mpsc::UnboundedReceiver<Answer>,
    asked: mpsc::Receiver<socket::Request>,
    ruled: watch::Receiver<firewall::reconciler::State>,
}

/// The loop: dirty, tick or shutdown, then a pass.
async fn turn<K: Kernel, M: Monitor>(
    mut node: Node<K>,
    mut monitor: M,
    mut inputs: Inputs,
    mut shutdown: std::pin::Pin<&mut impl Future<Output = ()>>,
) -> anyhow::Result<ExitCode> {
    let mut file = FileWatch::new(node.subnet_file());
    let mut conf = node.world.conflist.source().map(FileWatch::new);
    let mut deaf = Reminder::default();
    // The watch begins with the list that brought us our lease: what it says belongs to the first look.
    tokio::task::yield_now().await;
    node.begin(waiting(&mut inputs.received)).await;
    node.report();
    loop {
        let wake = node.next_wake().unwrap_or_else(|| Instant::now() + LONGEST);
        tokio::select! {
            () = &mut shutdown => {
                node.stopping();
                return Ok(ExitCode::SUCCESS);
            }
            notices = monitor.next() => match notices {
                Ok(notices) => node.noticed(notices).await,
                Err(error) => {
                    if deaf.due(&error.to_string(), Instant::now()) {
                        tracing::error!("read the netlink monitor: {error}: everything is looked at instead");
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    node.noticed(vec![Notice::Lost]).await;
                }
            },
            Some(event) = inputs.received.recv() => {
                let mut events = vec![event];
                events.extend(waiting(&mut inputs.received));
                node.stored(events).await;
            }
            Some(answer) = inputs.answers.recv() => if node.answered(answer).await == Verdict::Exit {
                return Ok(ExitCode::FAILURE);
            },
            Some(request) = inputs.asked.recv() => node.answer(request),
            Ok(()) = inputs.ruled.changed() => node.ruled(),
            () = file.changed() => node.publish_env(),
            () = changed(&mut conf) => node.world.conflist.look_again(),
            () = tokio::time::sleep_until(wake.into()) => node.tick().await,
        }
        node.report();
    }
}

/// Events that are there already.
fn waiting(received: &mut mpsc::Receiver<Event>) -> Vec<Event> {
    std::iter::from_fn(|| received.try_recv().ok()).collect()
}

/// The file changed; never, where there is none to watch.
async fn changed(file: &mut Option<FileWatch>) {
    match file {
        Some(file) => file.changed().await,
        None => std::future::pending().await,
    }
}

/// Before there is a lease, status says what is known.
fn answer_early(request: socket::Request, store: &dyn Source, readiness: &Readiness) {
    let socket::Request::Status(reply) = request;
    let status = crate::observe::status::Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        node: crate::observe::report::node_name(),
        problems: readiness.reasons(),
        store: store.describe(),
        ..Default::default()
    };
    // The client may be gone already.
    drop(reply.send(status));
}
