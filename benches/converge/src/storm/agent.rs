// SPDX-License-Identifier: Apache-2.0
//! A node of weft as a member: the agent's own start, plan and store, with a kernel in memory. The parts of the agent that many agents
//! of one host cannot have are left out: its sockets, the watches of files, and the traffic rules. None of them asks the store for anything.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::mpsc;
use tokio::time::Instant;
use weft::conflist::Conflist;
use weft::extension::FirstCommand;
use weft::lease::acquire::{self, EarlierRun, SecretFiles, StartContext, Started, Waiting};
use weft::lease::tasks::LeaseTasks;
use weft::node::{Node, NodeContext};
use weft::observe::fault_events::EventReporter;
use weft::observe::history::recorder::Recorder;
use weft::observe::metrics::Metrics;
use weft::observe::node_condition::ConditionReporter;
use weft::observe::readiness::Readiness;
use weft::observe::report::Reporter;
use weft::observe::systemd::Notify;
use weft::options::{Options, Store};
use weft::pass::Passer;
use weft::saved::Saver;
use weft_backends::register::TYPES;
use weft_subnet::etcd::{EtcdOptions, EtcdStore};
use weft_subnet::lease::Lease;
use weft_subnet::source::{Event, Source};

use super::fleet::{Member, Order, PeerCount, Reached, Shared};
use super::kernel::CountingKernel;
use crate::store::url;

/// An agent of weft.
pub struct Agent;

impl Member for Agent {
    async fn run(number: usize, shared: Shared, mut orders: mpsc::UnboundedReceiver<Order>) -> Result<()> {
        let etcd = EtcdStore::new(etcd_options()).context("the options of etcd")?;
        let store: Rc<dyn Source> = Rc::new(etcd);
        let (mut kernel, peers) = CountingKernel::new(number)?;
        let options = options(&shared.dir, number);
        let mut reporter = Reporter {
            readiness: Readiness::new(),
            metrics: Arc::new(Metrics::new()),
            notify: Notify::new(),
            condition: ConditionReporter::new(store.clone(), options.unwell_after),
            events: EventReporter::new(store.clone()),
        };
        let started = start(&store, &mut kernel, &options, &mut reporter).await;
        shared.reached(Reached::Lease);
        let lease = started.own.clone();
        let (events, mut received) = mpsc::channel(1024);
        let (tasks, mut answers) = LeaseTasks::new(store.clone(), events.clone());
        let mut watches = tokio::task::JoinSet::new();
        let watcher = store.clone();
        watches.spawn_local(async move { watcher.watch(events).await });
        let mut node = Node::new(context(options, &store, reporter), Passer::new(kernel), tasks, started);
        let mut count = PeerCount::new(&shared);
        // The watch begins with the list that was read for our lease.
        tokio::task::yield_now().await;
        node.start(queued(&mut received)).await;
        node.report();
        count.is(peers.get());
        loop {
            let wake = node.next_wake().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                Some(event) = received.recv() => {
                    let mut all = vec![event];
                    all.extend(queued(&mut received));
                    node.store_changed(all).await;
                }
                Some(answer) = answers.recv() => drop(node.lease_answered(answer).await),
                () = tokio::time::sleep_until(wake) => node.tick().await,
                order = orders.recv() => match order {
                    Some(Order::Renew) => renew(&*store, &lease, &shared).await,
                    Some(Order::Leave) => break,
                    None => return Ok(()),
                },
            }
            node.report();
            count.is(peers.get());
        }
        // The agent ends first, because it would take its lease again.
        watches.shutdown().await;
        drop(node);
        store.release(&lease).await.context("release the lease")?;
        shared.reached(Reached::End);
        Ok(())
    }
}

async fn start(
    store: &Rc<dyn Source>,
    kernel: &mut CountingKernel,
    options: &Options,
    reporter: &mut Reporter,
) -> Started {
    let context = StartContext {
        store: &**store,
        kernel,
        choice: &options.uplink,
        subnet_file: &options.subnet_file,
        guard: false,
        memory: EarlierRun::new(None),
        first_command: FirstCommand::default(),
        secrets: SecretFiles::default(),
    };
    let waiting =
        Waiting::new(&mut reporter.notify, reporter.readiness.clone(), (&reporter.condition, &reporter.events));
    acquire::start(context, waiting).await
}

fn context(options: Options, store: &Rc<dyn Source>, reporter: Reporter) -> NodeContext {
    NodeContext {
        options,
        store: store.clone(),
        reporter,
        saver: Saver::default(),
        conflist: Conflist::default(),
        secrets: SecretFiles::default(),
        recorder: Recorder::default(),
    }
}

fn queued(events: &mut mpsc::Receiver<Event>) -> Vec<Event> {
    std::iter::from_fn(|| events.try_recv().ok()).collect()
}

/// Renews the lease as the agent does when it is time for it.
async fn renew(store: &dyn Source, lease: &Lease, shared: &Shared) {
    let (out, mut events) = mpsc::channel(8);
    let renewed = async {
        while let Some(event) = events.recv().await {
            if matches!(event, Event::Renewed(Some(_))) {
                return shared.reached(Reached::Renewal);
            }
        }
    };
    tokio::select! {
        () = store.keep(lease, out) => {}
        () = renewed => {}
    }
}

fn etcd_options() -> EtcdOptions {
    EtcdOptions {
        endpoints: vec![url()],
        prefix: "/coreos.com/network".into(),
        key_file: None,
        cert_file: None,
        ca_file: None,
        username: None,
        password: None,
        lease_ttl: Duration::from_secs(86_400),
        renew_margin: Duration::from_secs(3_600),
        types: TYPES,
    }
}

fn options(dir: &Path, number: usize) -> Options {
    Options {
        store: Store::Etcd(etcd_options()),
        subnet_file: dir.join(format!("{number}.env")),
        resync: Duration::from_secs(300),
        // The removal is measured, and not the grace time before it.
        hold_removals: Duration::ZERO,
        ..Options::minimal(dir)
    }
}
