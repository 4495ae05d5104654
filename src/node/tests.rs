// SPDX-License-Identifier: Apache-2.0
//! The agent's decisions about its own lease, against a scripted store and a kernel in memory. Time moves only by the answers
//! that a test lets through.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::task::LocalSet;
use weft_backends::host::Reach;
use weft_backends::state::{Key, Name, Route, Seen, Value};
use weft_backends::vxlan::VtepMac;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Age, Id, Lease, Record};
use weft_subnet::source::{Capabilities, Claim, Error, Event, Local, Source};

use super::{Node, Verdict, World};
use crate::conflist::Conflist;
use crate::kernel::fake::FakeKernel;
use crate::kernel::{AddrInfo, Creator, LinkInfo, Machine, Notice, RouteInfo};
use crate::lease::acquire::{self, Started};
use crate::lease::keep::{Answer, Keeper};
use crate::observe::health::Readiness;
use crate::observe::metrics::Metrics;
use crate::observe::node_condition::ConditionReporter;
use crate::observe::systemd::Notify;
use crate::options::{OnLostLease, Options, RuleOptions, Store, UplinkChoice};
use crate::pass::{Cause, Passer};
use crate::saved::Saver;
use crate::subnet_file::Author;

mod begin;
mod churn;
mod claims;
mod config;
mod conflist;
mod lease;
mod looks;
mod peers;
mod rules;
mod subnet_file;
mod uplink;

const CONFIG: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
const VXLAN: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
const PROTOCOL: u8 = weft_backends::owner::PROTOCOL;

/// A store that answers a call for a lease when the test lets it, and remembers what it was asked.
struct Script {
    gate: Semaphore,
    retakes: RefCell<Vec<Attrs>>,
    acquires: RefCell<usize>,
    taken: RefCell<bool>,
}

impl Script {
    async fn pass(&self) {
        if let Ok(permit) = self.gate.acquire().await {
            permit.forget();
        }
    }
}

fn missing<T>() -> Local<'static, Result<T, Error>> {
    Box::pin(async { Err(Error::Missing("nothing is asked of this here".into())) })
}

impl Source for Script {
    fn describe(&self) -> String {
        "script".into()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: true, fenced: true, assigned: false }
    }
    fn config(&self) -> Local<'_, Result<String, Error>> {
        missing()
    }
    fn own<'a>(&'a self, _: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        missing()
    }
    fn acquire<'a>(&'a self, claim: &'a Claim) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            *self.acquires.borrow_mut() += 1;
            self.pass().await;
            Ok(Lease { attrs: claim.attrs.clone(), ..lease("10.5.9.0-24", "192.168.0.1") })
        })
    }
    fn retake<'a>(&'a self, subnets: &'a Subnets, _: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            self.retakes.borrow_mut().push(attrs.clone());
            self.pass().await;
            if *self.taken.borrow() {
                return Err(Error::Taken { subnet: *subnets, owner: "192.168.0.7".into() });
            }
            Ok(Lease { attrs: attrs.clone(), ..lease(&subnets.to_key(), "192.168.0.1") })
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
    fn keep<'a>(&'a self, _: &'a Lease, out: mpsc::Sender<Event>) -> Local<'a, ()> {
        Box::pin(async move { out.closed().await })
    }
}

fn lease(key: &str, ip: &str) -> Lease {
    let attrs = Attrs { public_ip: ip.parse().ok(), backend_type: "host-gw".into(), ..Attrs::default() };
    Lease { id: key.into(), subnets: Subnets::from_key(key).unwrap(), attrs, age: Age { stamp: 1, tie: "".into() } }
}

fn put(key: &str, ip: &str) -> Result<Record, Id> {
    let lease = lease(key, ip);
    Ok(Record { id: lease.id.clone(), lease: Ok(lease) })
}

/// One uplink with this address in 192.168.0.0/24.
fn machine(ip: &str) -> Machine {
    let eth0 = Name::new("eth0").unwrap();
    let route = |net: &str, reach| RouteInfo {
        net: net.parse().unwrap(),
        metric: 0,
        dev: Some(eth0),
        via: None,
        reach,
        protocol: 2,
    };
    let link = LinkInfo {
        index: 2,
        name: eth0,
        mtu: 1500,
        mac: None,
        up: true,
        carrier: true,
        loopback: false,
        creator: Creator::Unknown,
    };
    Machine {
        links: vec![link],
        addrs: vec![AddrInfo { index: 2, net: format!("{ip}/24").parse().unwrap(), scope: 0, flags: 0x80 }],
        routes: vec![route("0.0.0.0/0", Reach::Gateway), route("192.168.0.0/24", Reach::Link(eth0))],
    }
}

struct Bench {
    node: Node<FakeKernel>,
    kernel: FakeKernel,
    store: Rc<Script>,
    answers: mpsc::UnboundedReceiver<Answer>,
    file: std::path::PathBuf,
    _dir: tempfile::TempDir,
    _events: mpsc::Receiver<Event>,
}

impl Bench {
    fn new(on_lost_lease: OnLostLease) -> Bench {
        Bench::with(on_lost_lease, RuleOptions::default())
    }

    fn with(on_lost_lease: OnLostLease, rules: RuleOptions) -> Bench {
        Bench::of((CONFIG, lease("10.5.1.0-24", "192.168.0.1")), on_lost_lease, rules)
    }

    /// A node of the vxlan backend with this lease.
    fn of_vxlan(own: Lease, on_lost_lease: OnLostLease) -> Bench {
        Bench::of((VXLAN, own), on_lost_lease, RuleOptions::default())
    }

    fn of((config, own): (&str, Lease), on_lost_lease: OnLostLease, rules: RuleOptions) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        let options = Options {
            store: Store::Dir(dir.path().to_owned()),
            uplink: UplinkChoice::default(),
            subnet_file: file.clone(),
            socket: dir.path().join("socket"),
            health: None,
            resync: Duration::from_secs(3600),
            nexthop_objects: true,
            hold_removals: Duration::from_secs(300),
            on_lost_lease,
            manage_sysctls: false,
            state_dir: None,
            unwell_after: Duration::from_secs(30),
            rules,
            cni: None,
        };
        let store = Rc::new(Script {
            gate: Semaphore::new(0),
            retakes: RefCell::default(),
            acquires: RefCell::default(),
            taken: RefCell::default(),
        });
        let kernel = FakeKernel::new(machine("192.168.0.1"), PROTOCOL);
        let (network, backend) = acquire::parse(config).unwrap();
        let there = machine("192.168.0.1");
        let ground = acquire::ground(&there, &network, Subnets::default());
        let picked = crate::uplink::pick(&options.uplink, &ground).unwrap();
        let mac = weft_backends::state::Mac([2, 0, 0, 0, 0, 1]);
        let host = acquire::host(&picked, &there, &network, VtepMac::both(mac, mac));
        let started = Started {
            network,
            config: config.into(),
            backend,
            host,
            own,
            author: Author::Weft,
            uplink: UplinkChoice::default(),
            chosen: [None, None],
            saved: None,
        };
        let (events, received) = mpsc::channel(8);
        let (keeper, answers) = Keeper::new(store.clone(), events);
        let (readiness, metrics) = (Readiness::new(), Arc::new(Metrics::new()));
        let (notify, saver, conflist) = (Notify::new(), Saver::default(), Conflist::default());
        let condition = ConditionReporter::new(store.clone(), options.unwell_after);
        let world = World { options, store: store.clone(), readiness, metrics, notify, condition, saver, conflist };
        let node = Node::new(world, Passer::new(kernel.clone()), keeper, started);
        Bench { node, kernel, store, answers, file, _dir: dir, _events: received }
    }

    async fn ready(on_lost_lease: OnLostLease) -> Bench {
        let mut bench = Bench::new(on_lost_lease);
        bench.node.full(Cause::Start).await;
        let records = vec![put("10.5.1.0-24", "192.168.0.1").unwrap(), put("10.5.2.0-24", "192.168.0.2").unwrap()];
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        bench
    }

    /// Lets the store answer one call, and hands the answer in.
    async fn answer(&mut self) -> Verdict {
        self.store.gate.add_permits(1);
        let answer = tokio::time::timeout(Duration::from_secs(10), self.answers.recv()).await;
        self.node.answered(answer.expect("an answer").unwrap()).await
    }

    /// Lets the calls that were just begun reach the store.
    async fn asked(&self, retakes: usize) -> bool {
        for _ in 0..1000 {
            if self.store.retakes.borrow().len() >= retakes {
                break;
            }
            tokio::task::yield_now().await;
        }
        self.store.retakes.borrow().len() == retakes
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

#[tokio::test]
async fn a_deletion_during_a_call_is_not_forgotten() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let gone = || vec![Event::Changes(vec![Err("10.5.1.0-24".into())])];
        bench.node.stored(gone()).await;
        assert!(bench.asked(1).await, "taken again at once");
        bench.node.stored(gone()).await;
        assert!(bench.asked(1).await, "one call at a time");
        bench.answer().await;
        assert!(bench.asked(2).await, "the second deletion came after what the first call saw");
        bench.answer().await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(bench.asked(2).await, "and that was all");
    })
    .await;
}

#[tokio::test]
async fn an_address_that_flaps_ends_in_the_lease_as_it_is() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        for ip in ["192.168.0.3", "192.168.0.1"] {
            bench.kernel.set_machine(machine(ip));
            bench.node.full(Cause::Kernel).await;
        }
        assert!(bench.asked(1).await);
        // The echo of our own write comes before its answer: it must not be taken for an intruder.
        bench.node.stored(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.3")])]).await;
        bench.answer().await;
        assert!(bench.asked(2).await, "the address is the old one again");
        let asked: Vec<_> = bench.store.retakes.borrow().iter().map(|attrs| attrs.public_ip.unwrap()).collect();
        assert_eq!(asked.iter().map(ToString::to_string).collect::<Vec<_>>(), ["192.168.0.3", "192.168.0.1"]);
        bench.answer().await;
        assert_eq!(bench.node.plan.own().attrs.public_ip, "192.168.0.1".parse().ok());
        assert!(bench.node.lost.is_none());
    })
    .await;
}

#[tokio::test]
async fn who_took_our_subnet_is_a_peer_once_we_have_another() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Reacquire).await;
        *bench.store.taken.borrow_mut() = true;
        bench.node.stored(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        assert_eq!(bench.answer().await, Verdict::Stay);
        assert!(bench.node.lost.is_some());
        assert_eq!(bench.via("10.5.1.0/24"), None, "still ours to forward");
        bench.answer().await;
        assert_eq!(*bench.store.acquires.borrow(), 1);
        assert_eq!(bench.via("10.5.1.0/24"), "192.168.0.7".parse().ok());
        assert_eq!(bench.via("10.5.2.0/24"), "192.168.0.2".parse().ok(), "the others stay");
        let env = std::fs::read_to_string(&bench.file).unwrap();
        assert!(env.contains("FLANNEL_SUBNET=10.5.9.1/24"), "{env}");
    })
    .await;
}

#[tokio::test]
async fn a_held_subnet_is_taken_again_when_the_intruder_leaves() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        *bench.store.taken.borrow_mut() = true;
        bench.node.stored(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        bench.answer().await;
        assert!(bench.node.lost.is_some());
        *bench.store.taken.borrow_mut() = false;
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.1.0-24".into())])]).await;
        bench.answer().await;
        assert!(bench.node.lost.is_none());
    })
    .await;
}

#[tokio::test]
async fn an_intruder_that_leaves_during_the_call_has_not_taken_it() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Exit).await;
        *bench.store.taken.borrow_mut() = true;
        bench.node.stored(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.1.0-24".into())])]).await;
        assert_eq!(bench.answer().await, Verdict::Stay);
        *bench.store.taken.borrow_mut() = false;
        assert_eq!(bench.answer().await, Verdict::Stay);
        assert!(bench.node.lost.is_none() && bench.asked(2).await);
    })
    .await;
}

#[tokio::test]
async fn an_empty_first_list_removes_nothing_and_a_short_second_one_neither() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        let (key, dev) = (Key::Route("10.5.8.0/24".parse().unwrap(), 0), Name::new("eth0").unwrap());
        let value = Value::Route(Route::Unicast { via: "192.168.0.8".parse().unwrap(), dev, onlink: false });
        bench.kernel.disturb(key, Some(Seen { value, protocol: PROTOCOL, mark: false }), false);
        for records in [vec![], vec![put("10.5.2.0-24", "192.168.0.2").unwrap()]] {
            bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
            bench.node.full(Cause::Audit).await;
            assert!(bench.via("10.5.8.0/24").is_some());
        }
        assert!(bench.via("10.5.2.0/24").is_some());
    })
    .await;
}

#[tokio::test]
async fn a_dump_that_fails_is_tried_again_soon() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.kernel.break_dumps(Some(std::io::ErrorKind::Interrupted));
        bench.node.full(Cause::Kernel).await;
        assert!(bench.node.kernel_problem.is_some());
        let wait = bench.node.next_wake().unwrap().saturating_duration_since(std::time::Instant::now());
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        bench.kernel.break_dumps(None);
        bench.node.full(Cause::Audit).await;
        assert!(bench.node.kernel_problem.is_none());
    })
    .await;
}

#[tokio::test]
async fn noise_of_links_is_looked_at_later_not_never() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.node.quiet_until = std::time::Instant::now() + Duration::from_secs(60);
        let looks = bench.kernel.observations();
        bench.node.noticed(vec![Notice::Links]).await;
        assert_eq!(bench.kernel.observations(), looks);
        assert_eq!(bench.node.next_audit, bench.node.quiet_until);
        assert!(bench.node.next_wake() <= Some(bench.node.quiet_until));
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_there_wins_over_one_that_is_only_held() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        // The store was wiped: the old owner of 10.5.2.0/24 is held, and its subnet given to another under a wider key.
        let records = vec![put("10.5.1.0-24", "192.168.0.1").unwrap()];
        bench.node.stored(vec![Event::Snapshot { records, reset: true }]).await;
        assert_eq!(bench.via("10.5.2.0/24"), "192.168.0.2".parse().ok(), "held");
        let mut younger = lease("10.5.2.0-23", "192.168.0.3");
        younger.age.stamp = 2;
        let record = Record { id: younger.id.clone(), lease: Ok(younger) };
        bench.node.stored(vec![Event::Changes(vec![Ok(record)])]).await;
        assert_eq!(bench.via("10.5.2.0/23"), "192.168.0.3".parse().ok());
        assert_eq!(bench.via("10.5.2.0/24"), None, "the held one gave way");
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_cannot_be_planned_does_not_lower_the_mtu() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let mtu = bench.node.plan.mtu();
        let of_type = |data: Option<Box<str>>| {
            let mut peer = lease("10.5.3.0-24", "192.168.0.4");
            (peer.attrs.backend_type, peer.attrs.backend_data) = ("vxlan".into(), data);
            vec![Event::Changes(vec![Ok(Record { id: peer.id.clone(), lease: Ok(peer) })])]
        };
        bench.node.stored(of_type(None)).await;
        assert_eq!(bench.node.plan.mtu(), mtu, "a vxlan lease without a MAC");
        bench.node.stored(of_type(Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:04"}"#.into()))).await;
        assert_eq!(bench.node.plan.mtu(), mtu - 50, "a good one");
        bench.node.stored(of_type(None)).await;
        assert_eq!(bench.node.plan.mtu(), mtu, "and a bad one again");
    })
    .await;
}
