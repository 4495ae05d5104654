// SPDX-License-Identifier: Apache-2.0
//! A node with a scripted store and a kernel in memory. The store answers a call only when the test lets it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::LocalSet;
use weft_backends::state::{Key, Name, Route, Value};
use weft_backends::vxlan::VtepMac;
use weft_backends::wireguard_key::{KeyPair, Secret};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Age, Id, Lease, Record};
use weft_subnet::source::{Capabilities, Error, Event, LeaseRequest, Local, RecordChange, Source};

use super::{NextStep, Node, NodeContext};
use crate::conflist::Conflist;
use crate::kernel::Machine;
use crate::kernel::fake::{self, FakeKernel};
use crate::lease::acquire::tests::start_with;
use crate::lease::acquire::{self, Started};
use crate::lease::tasks::{LeaseAnswer, LeaseTasks};
use crate::observe::fault::FaultKind;
use crate::observe::fault_events::EventReporter;
use crate::observe::history::recorder::Recorder;
use crate::observe::metrics::Metrics;
use crate::observe::node_condition::ConditionReporter;
use crate::observe::readiness::Readiness;
use crate::observe::report::Reporter;
use crate::observe::systemd::Notify;
use crate::options::{OnLostLease, Options, RuleOptions};
use crate::pass::{Cause, Passer};
use crate::plan::ParsedConf;
use crate::saved::{SavedFile, Saver};

mod begin;
mod change;
mod claims;
mod clear_text;
mod config;
mod conflist;
mod data_path;
mod extension;
mod history;
mod lease;
mod passes;
mod peers;
mod plan;
mod probes;
mod problems;
mod rate_limit;
mod rules;
mod saved;
mod status;
mod subnet_file;
mod tick;
mod uplink;
mod wireguard;
mod wireguard_change;

const CONFIG: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
const VXLAN: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
const PROTOCOL: u8 = weft_backends::owner::PROTOCOL;

/// A store that answers a call for a lease when the test lets it, and records the calls.
struct ScriptedStore {
    /// Each permit lets one call be answered.
    gate: Semaphore,
    retakes: RefCell<Vec<Attrs>>,
    acquires: RefCell<usize>,
    /// What each call of `acquire` asked for.
    requests: RefCell<Vec<LeaseRequest>>,
    taken: RefCell<bool>,
    /// The published address that an administrator chose.
    overwrite: Cell<Option<std::net::Ipv4Addr>>,
    net_conf: RefCell<Option<String>>,
    is_assigned: Cell<bool>,
    /// Leases end by themselves.
    expires: Cell<bool>,
    /// See [`Source::remark`].
    remark: RefCell<Option<String>>,
    /// Number of tasks that renew the lease.
    renewals: Rc<Cell<usize>>,
    /// The lease of the task that began last.
    renewed: RefCell<Option<Id>>,
    /// Number of reports about the network of this node.
    reports: Cell<usize>,
}

/// Counts as one as long as it exists.
struct Counted(Rc<Cell<usize>>);

impl Counted {
    fn new(count: &Rc<Cell<usize>>) -> Counted {
        count.set(count.get() + 1);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl ScriptedStore {
    async fn wait_for_permit(&self) {
        if let Ok(permit) = self.gate.acquire().await {
            permit.forget();
        }
    }
}

fn missing<T>() -> Local<'static, Result<T, Error>> {
    Box::pin(async { Err(Error::Missing("the tests do not use this call".into())) })
}

impl Source for ScriptedStore {
    fn describe(&self) -> String {
        "script".into()
    }
    fn remark(&self) -> Option<String> {
        self.remark.borrow().clone()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: self.expires.get(), assigned: self.is_assigned.get() }
    }
    fn config(&self) -> Local<'_, Result<String, Error>> {
        let missing = || Error::NoNetConf { place: "script".into(), remedy: "write it".into() };
        Box::pin(async move { self.net_conf.borrow().clone().ok_or_else(missing) })
    }
    fn own<'a>(&'a self, _: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        missing()
    }
    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            *self.acquires.borrow_mut() += 1;
            self.requests.borrow_mut().push(request.clone());
            self.wait_for_permit().await;
            Ok(Lease { attrs: request.attrs.clone(), ..lease("10.5.9.0-24", "192.168.0.1") })
        })
    }
    fn retake<'a>(&'a self, subnets: &'a Subnets, _: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            self.retakes.borrow_mut().push(attrs.clone());
            self.wait_for_permit().await;
            if *self.taken.borrow() {
                return Err(Error::Taken { subnet: *subnets, owner: "192.168.0.7".into() });
            }
            let public_ip = self.overwrite.get().or(attrs.public_ip);
            Ok(Lease { attrs: Attrs { public_ip, ..attrs.clone() }, ..lease(&subnets.to_key(), "192.168.0.1") })
        })
    }
    fn release<'a>(&'a self, _: &'a Lease) -> Local<'a, Result<(), Error>> {
        missing()
    }
    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        missing()
    }
    fn remove<'a>(&'a self, _: &'a str) -> Local<'a, Result<(), Error>> {
        missing()
    }
    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()> {
        Box::pin(async move { out.closed().await })
    }
    fn keep<'a>(&'a self, lease: &'a Lease, out: mpsc::Sender<Event>) -> Local<'a, ()> {
        Box::pin(async move {
            let _one = Counted::new(&self.renewals);
            *self.renewed.borrow_mut() = Some(lease.id.clone());
            out.closed().await;
        })
    }
    fn health<'a>(&'a self, _fault: Option<&'a str>) -> Local<'a, Result<(), Error>> {
        self.reports.set(self.reports.get() + 1);
        Box::pin(async { Ok(()) })
    }
}

fn lease(key: &str, ip: &str) -> Lease {
    let attrs = Attrs { public_ip: ip.parse().ok(), backend_type: "host-gw".into(), ..Attrs::default() };
    Lease { id: key.into(), subnets: Subnets::from_key(key).unwrap(), attrs, age: Age { stamp: 1, tie: "".into() } }
}

/// Our lease on a node of vxlan, whose device is flannel.1.
fn vxlan_lease() -> Lease {
    let mut own = lease("10.5.1.0-24", "192.168.0.1");
    own.attrs.backend_type = "vxlan".into();
    own.attrs.backend_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#.into());
    own
}

fn stored(key: &str, ip: &str) -> Record {
    let lease = lease(key, ip);
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn put(key: &str, ip: &str) -> RecordChange {
    RecordChange::Written(stored(key, ip))
}

fn removed(id: &str) -> RecordChange {
    RecordChange::Removed(id.into())
}

/// A host with one uplink, which has this address in 192.168.0.0/24.
fn machine(ip: &str) -> Machine {
    fake::tests::machine(&[format!("{ip}/24").as_str()])
}

/// The host of a node with this net-conf. It has IPv6, too, if the pods have it.
fn host_of(config: &str) -> Machine {
    if !config.contains("IPv6Network") {
        return machine("192.168.0.1");
    }
    let mut host = fake::tests::machine(&["192.168.0.1/24", "fd00:1::1/64"]);
    let mut default = host.routes[0].clone();
    default.net = "::/0".parse().unwrap();
    host.routes.push(default);
    host
}

struct TestNode {
    node: Node<FakeKernel>,
    kernel: FakeKernel,
    store: Rc<ScriptedStore>,
    answers: mpsc::UnboundedReceiver<LeaseAnswer>,
    file: std::path::PathBuf,
    _dir: tempfile::TempDir,
    /// What the calls for the lease report, with what the watch reports.
    events: mpsc::Receiver<Event>,
    watch: mpsc::Sender<Event>,
}

impl TestNode {
    fn new(on_lost_lease: OnLostLease) -> TestNode {
        TestNode::with(on_lost_lease, RuleOptions::default())
    }

    fn with(on_lost_lease: OnLostLease, rules: RuleOptions) -> TestNode {
        TestNode::of((CONFIG, lease("10.5.1.0-24", "192.168.0.1")), on_lost_lease, rules)
    }

    /// A node of the vxlan backend with this lease.
    fn of_vxlan(own: Lease, on_lost_lease: OnLostLease) -> TestNode {
        TestNode::of((VXLAN, own), on_lost_lease, RuleOptions::default())
    }

    fn of(start: (&str, Lease), on_lost_lease: OnLostLease, rules: RuleOptions) -> TestNode {
        TestNode::altered(start, on_lost_lease, rules, |_| {})
    }

    /// A node that continues from what `alter` makes of a start with this net-conf and this lease.
    fn altered(
        (config, own): (&str, Lease),
        on_lost_lease: OnLostLease,
        rules: RuleOptions,
        alter: impl FnOnce(&mut Started),
    ) -> TestNode {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { on_lost_lease, rules, ..Options::minimal(dir.path()) };
        let file = options.subnet_file.clone();
        let store = Rc::new(ScriptedStore {
            gate: Semaphore::new(0),
            retakes: RefCell::default(),
            acquires: RefCell::default(),
            requests: RefCell::default(),
            taken: RefCell::default(),
            overwrite: Cell::default(),
            net_conf: RefCell::default(),
            is_assigned: Cell::default(),
            expires: Cell::new(true),
            remark: RefCell::default(),
            renewals: Rc::default(),
            renewed: RefCell::default(),
            reports: Cell::default(),
        });
        let kernel = FakeKernel::new(host_of(config), PROTOCOL);
        let (conf, there) = (ParsedConf::parse(config).unwrap(), host_of(config));
        let candidates = acquire::candidates(&there, &conf.net_conf, Subnets::default());
        let picked = crate::uplink::pick(&options.uplink, &candidates).unwrap();
        let mac = weft_backends::state::Mac([2, 0, 0, 0, 0, 1]);
        let identities = match conf.backend.kind() {
            "wireguard" => KeyPair::of(Secret::new([1; 32])).both(),
            _ => VtepMac::both(mac, mac),
        };
        let host = acquire::host(&picked, &there, &conf.net_conf, identities);
        let mut started = start_with(config, host, own);
        alter(&mut started);
        let (watch, events) = mpsc::channel(8);
        let (tasks, answers) = LeaseTasks::new(store.clone(), watch.clone());
        let (readiness, metrics) = (Readiness::new(), Arc::new(Metrics::new()));
        let (notify, saver, conflist) = (Notify::new(), Saver::default(), Conflist::default());
        let condition = ConditionReporter::new(store.clone(), options.unwell_after);
        let reporter = Reporter { readiness, metrics, notify, condition, events: EventReporter::new(store.clone()) };
        let context = NodeContext {
            options,
            store: store.clone(),
            reporter,
            saver,
            conflist,
            recorder: Recorder::default(),
            secrets: acquire::SecretFiles::default(),
        };
        let node = Node::new(context, Passer::new(kernel.clone()), tasks, started);
        TestNode { node, kernel, store, answers, file, _dir: dir, events, watch }
    }

    /// Starts the agent again on this host, from what its start has found.
    fn again(self, started: Started) -> TestNode {
        let (watch, events) = mpsc::channel(8);
        let (tasks, answers) = LeaseTasks::new(self.store.clone(), watch.clone());
        let node = Node::new(self.node.context, Passer::new(self.kernel.clone()), tasks, started);
        TestNode { node, answers, events, watch, ..self }
    }

    async fn ready(on_lost_lease: OnLostLease) -> TestNode {
        let mut test = TestNode::new(on_lost_lease);
        test.node.full_pass(Cause::Start).await;
        let records = vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.2.0-24", "192.168.0.2")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        test
    }

    /// Lets the node save its peers from now on. Returns the file, for reading.
    fn saves(&mut self) -> SavedFile {
        let dir = self.file.parent().unwrap().join("state");
        std::fs::create_dir_all(&dir).unwrap();
        let file = || SavedFile::new(Some(&dir), &self.file, Some("script".into())).unwrap();
        self.node.context.saver = Saver::new(Some(file()));
        self.node.lease_renewed(None);
        file()
    }

    /// Lets the store answer one call, and hands the answer to the node.
    async fn answer(&mut self) -> NextStep {
        self.store.gate.add_permits(1);
        let answer = tokio::time::timeout(Duration::from_secs(10), self.answers.recv()).await;
        self.node.lease_answered(answer.expect("an answer").unwrap()).await
    }

    /// Lets open calls reach the store, and returns true if it was asked so many times to write the lease.
    async fn asked(&self, retakes: usize) -> bool {
        for _ in 0..1000 {
            if self.store.retakes.borrow().len() >= retakes {
                break;
            }
            tokio::task::yield_now().await;
        }
        // A call too many reaches the store in this time.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        self.store.retakes.borrow().len() == retakes
    }

    /// Lets the tasks that renew a lease begin and end. Returns how many run, and the lease of the one that began last.
    async fn renewals(&self) -> (usize, Option<String>) {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        (self.store.renewals.get(), self.store.renewed.borrow().as_ref().map(ToString::to_string))
    }

    fn via(&self, net: &str) -> Option<std::net::IpAddr> {
        let key = Key::Route(net.parse().unwrap(), 0);
        match self.kernel.entries().get(&key).map(|seen| seen.value.clone()) {
            Some(Value::Route(Route::Unicast { via, .. })) => Some(via),
            _ => None,
        }
    }
}

async fn local(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}
