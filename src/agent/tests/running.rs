// SPDX-License-Identifier: Apache-2.0
//! A running agent: what each input of its loop leads to, and what its options lead to. Where a timer would have the same effect some seconds
//! later, the clock of the test shows that it was not the timer.

use std::cell::{Cell, RefCell};
use std::fs;
use std::future::pending;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep, timeout};
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, LAST_METRIC, ObservedValue, Route, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Age, Lease, Record};
use weft_subnet::source::{Capabilities, Error, Event, LeaseRequest, Local, RecordChange, Source};

use super::super::{Surroundings, answer_early, serve_in};
use crate::conflist;
use crate::files;
use crate::instance::Instance;
use crate::kernel::fake::FakeKernel;
use crate::kernel::fake::tests::machine;
use crate::kernel::{Monitor, Notice};
use crate::observe::history;
use crate::observe::history::recorder::{EARLIER_WAS_KILLED, Recorder};
use crate::observe::metrics::Metrics;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::readiness::Readiness;
use crate::observe::socket::Request;
use crate::observe::status::Status;
use crate::options::{CniOptions, Fences, NetConfCommands, OnLostLease, Options};
use crate::saved;

const HOST_GW: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"host-gw"}}"#;
/// The id of our lease.
const OWN: &str = "10.5.7.0-24";
/// How long a test waits for a condition.
const PATIENCE: Duration = Duration::from_secs(120);
/// The loop looks at files and sysctls every ten seconds without an event. What happens within this time has another cause.
const SOON: Duration = Duration::from_secs(1);

/// A store in memory. The test decides how it answers.
struct Memory {
    net_conf: RefCell<String>,
    peers: Vec<Lease>,
    own: RefCell<Option<Lease>>,
    /// It cannot be reached.
    is_away: Cell<bool>,
    /// It does not send net-conf.
    lacks_net_conf: Cell<bool>,
    /// Another node owns our subnet.
    is_taken: Cell<bool>,
    acquires: Cell<usize>,
    retakes: Cell<usize>,
    /// The published address that an administrator wrote into the store.
    chosen: Cell<Option<IpAddr>>,
    /// What the first watch sends after the list.
    sent: RefCell<Option<mpsc::Receiver<Event>>>,
}

fn answers(is_away: bool) -> Result<(), Error> {
    match is_away {
        true => Err(Error::Unavailable { what: "read".into(), source: Some("connection refused".into()) }),
        false => Ok(()),
    }
}

impl Source for Memory {
    fn describe(&self) -> String {
        "memory".into()
    }
    fn fingerprint(&self) -> Local<'_, Option<String>> {
        Box::pin(async { Some("memory".into()) })
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: false, assigned: false }
    }
    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(async {
            answers(self.is_away.get() || self.lacks_net_conf.get())?;
            Ok(self.net_conf.borrow().clone())
        })
    }
    fn chosen(&self) -> Local<'_, Result<[Option<IpAddr>; 2], Error>> {
        Box::pin(async { Ok([self.chosen.get(), None]) })
    }
    fn own<'a>(&'a self, _: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        Box::pin(async {
            answers(self.is_away.get())?;
            Ok(self.own.borrow().clone())
        })
    }
    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            answers(self.is_away.get())?;
            self.acquires.set(self.acquires.get() + 1);
            let own = lease(OWN, request.attrs.clone());
            *self.own.borrow_mut() = Some(own.clone());
            Ok(own)
        })
    }
    fn retake<'a>(&'a self, subnets: &'a Subnets, _: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            self.retakes.set(self.retakes.get() + 1);
            if self.is_taken.get() {
                return Err(Error::Taken { subnet: *subnets, owner: "192.168.0.7".into() });
            }
            Ok(lease(OWN, attrs.clone()))
        })
    }
    fn release<'a>(&'a self, _: &'a Lease) -> Local<'a, Result<(), Error>> {
        unreachable!("no part of a run")
    }
    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        unreachable!("no part of a run")
    }
    fn remove<'a>(&'a self, _: &'a str) -> Local<'a, Result<(), Error>> {
        unreachable!("no part of a run")
    }
    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()> {
        Box::pin(async move {
            while self.is_away.get() {
                sleep(Duration::from_millis(10)).await;
            }
            let own = self.own.borrow().clone();
            let all = own.into_iter().chain(self.peers.iter().cloned());
            let records = all.map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) }).collect();
            let mut next = Some(Event::Snapshot { records, reset: false });
            let mut later = self.sent.take();
            while let Some(event) = next {
                if out.send(event).await.is_err() {
                    return;
                }
                next = match &mut later {
                    Some(later) => later.recv().await,
                    None => None,
                };
            }
            pending().await
        })
    }
}

fn lease(id: &str, attrs: Attrs) -> Lease {
    Lease { id: id.into(), subnets: Subnets::from_key(id).unwrap(), attrs, age: Age::default() }
}

/// Returns the lease of the peer with this number.
fn peer(number: u8, backend_type: &str) -> Lease {
    let public_ip = Some([192, 168, 0, number].into());
    lease(&format!("10.5.{number}.0-24"), Attrs { public_ip, backend_type: backend_type.into(), ..Attrs::default() })
}

/// A machine with peers on the link of its uplink.
fn kernel() -> FakeKernel {
    FakeKernel::new(machine(&["192.168.0.1/24"]), PROTOCOL)
}

/// Waits until this is true.
async fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "waited for {what}");
        sleep(Duration::from_millis(1)).await;
    }
}

async fn status(requests: &mpsc::Sender<Request>) -> Status {
    let (reply, answer) = oneshot::channel();
    requests.send(Request::Status(reply)).await.unwrap();
    answer.await.unwrap()
}

/// What an agent needs to run.
struct Place {
    dir: TempDir,
    options: Options,
    store: Rc<Memory>,
    kernel: FakeKernel,
    readiness: Readiness,
    /// What the store reports.
    events: mpsc::Sender<Event>,
    /// The agent before the one that is run was killed.
    was_killed: bool,
}

impl Place {
    fn new(net_conf: &str, peers: Vec<Lease>) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { state_dir: Some(dir.path().into()), ..Options::minimal(dir.path()) };
        let (events, sent) = mpsc::channel(1);
        let store = Memory {
            net_conf: RefCell::new(net_conf.to_owned()),
            peers,
            own: RefCell::default(),
            is_away: Cell::default(),
            lacks_net_conf: Cell::default(),
            is_taken: Cell::default(),
            acquires: Cell::default(),
            retakes: Cell::default(),
            chosen: Cell::default(),
            sent: RefCell::new(Some(sent)),
        };
        let (store, kernel, readiness) = (Rc::new(store), kernel(), Readiness::new());
        Place { dir, options, store, kernel, readiness, events, was_killed: false }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs the agent until the test has ended, or until the agent ends by itself. Returns its exit code.
    async fn run(&self, test: impl AsyncFnOnce(mpsc::Sender<Request>)) -> ExitCode {
        self.run_with(self.kernel.clone(), test).await
    }

    /// Runs the agent as [`Place::run`] does, with this monitor.
    async fn run_with<M: Monitor + 'static>(
        &self,
        monitor: M,
        test: impl AsyncFnOnce(mpsc::Sender<Request>),
    ) -> ExitCode {
        let (requests, received) = mpsc::channel(1);
        let (readiness, metrics) = (self.readiness.clone(), Arc::new(Metrics::new()));
        let surroundings =
            Surroundings { requests: received, readiness, metrics, traffic_rules: false, was_killed: self.was_killed };
        let kernels = (self.kernel.clone(), monitor);
        let agent = serve_in(surroundings, self.options.clone(), self.store.clone(), kernels, test(requests));
        let ended = timeout(PATIENCE * 2, LocalSet::new().run_until(agent)).await;
        ended.expect("the agent ends with its test").unwrap()
    }

    async fn ready(&self) {
        until("readiness", || self.readiness.is_ready()).await;
    }

    /// Lets the store report that our record is gone.
    async fn own_record_goes(&self) {
        self.events.send(Event::Changes(vec![RecordChange::Removed(OWN.into())])).await.unwrap();
    }

    fn has_route(&self, net: &str) -> bool {
        self.kernel.borrow_entries().contains_key(&Key::Route(net.parse().unwrap(), 0))
    }
}

#[tokio::test(start_paused = true)]
async fn a_subnet_file_that_somebody_deletes_or_edits_is_written_again_at_once() {
    let place = Place::new(HOST_GW, vec![peer(2, "host-gw")]);
    let file = &place.options.subnet_file;
    place
        .run(async |_| {
            place.ready().await;
            let text = fs::read_to_string(file).unwrap();
            for edited in [None, Some("FLANNEL_NETWORK=10.9.0.0/16\n")] {
                match edited {
                    Some(edited) => fs::write(file, edited).unwrap(),
                    None => fs::remove_file(file).unwrap(),
                }
                let since = Instant::now();
                until("the file", || fs::read_to_string(file).is_ok_and(|now| now == text)).await;
                assert!(since.elapsed() < SOON, "{edited:?}: {:?}", since.elapsed());
            }
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn an_edit_of_the_cni_configuration_is_published_at_once() {
    let mut place = Place::new(HOST_GW, Vec::new());
    let list = |name: &str| format!(r#"{{"name":"{name}","plugins":[{{"type":"flannel"}}]}}"#);
    let (conf, dir) = (place.path("cni-conf.json"), place.path("net.d"));
    let published = dir.join(conflist::NAME);
    fs::write(&conf, list("first")).unwrap();
    place.options.cni = Some(CniOptions { conf: conf.clone(), dir });
    let is = |name: &str| fs::read_to_string(&published).is_ok_and(|text| text == list(name));
    place
        .run(async |_| {
            until("the configuration", || is("first")).await;
            files::write(&conf, list("second").as_bytes()).unwrap();
            let since = Instant::now();
            until("the edit", || is("second")).await;
            assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_lease_ends_the_agent_with_a_failure_only_if_the_flag_says_so() {
    for (on_lost_lease, wanted) in [(OnLostLease::Exit, ExitCode::FAILURE), (OnLostLease::Hold, ExitCode::SUCCESS)] {
        let mut place = Place::new(HOST_GW, vec![peer(2, "host-gw")]);
        place.options.on_lost_lease = on_lost_lease;
        place.store.is_taken.set(true);
        let ended = place
            .run(async |_| {
                place.ready().await;
                place.own_record_goes().await;
                if on_lost_lease == OnLostLease::Exit {
                    return pending().await;
                }
                let is_told = |reason: &String| reason.contains("belongs to 192.168.0.7");
                until("the loss", || place.readiness.reasons().iter().any(is_told)).await;
            })
            .await;
        assert_eq!(ended, wanted, "{on_lost_lease:?}");
        assert!(place.has_route("10.5.2.0/24"), "the peers stay reachable");
    }
}

/// While a call for the lease is open, the next loss leads to no further one. So the loop must take notice of each answer.
#[tokio::test(start_paused = true)]
async fn each_answer_about_the_own_lease_is_noticed() {
    let place = Place::new(HOST_GW, Vec::new());
    place
        .run(async |_| {
            place.ready().await;
            for retakes in 1..=3 {
                place.own_record_goes().await;
                until("the lease to be written", || place.store.retakes.get() == retakes).await;
            }
        })
        .await;
}

/// While the store is away, another one may have changed net-conf. A lease that is taken without reading it would be that of a network of the
/// past.
#[tokio::test(start_paused = true)]
async fn a_start_without_the_store_uses_what_the_last_run_saved_and_reads_net_conf_before_it_takes_the_lease() {
    let first = Place::new(HOST_GW, vec![peer(2, "host-gw")]);
    let file = saved::file(first.dir.path(), &first.options.subnet_file);
    first
        .run(async |_| {
            first.ready().await;
            until("the peers to be saved", || file.exists()).await;
        })
        .await;
    let second = Place { kernel: kernel(), readiness: Readiness::new(), ..first };
    let store = &second.store;
    store.is_away.set(true);
    second
        .run(async |requests| {
            second.ready().await;
            assert!(second.has_route("10.5.2.0/24"), "the peer was saved");
            assert_eq!(store.acquires.get(), 1, "by the first run");
            store.lacks_net_conf.set(true);
            store.is_away.set(false);
            sleep(Duration::from_secs(20)).await;
            assert_eq!(store.acquires.get(), 1, "net-conf cannot be read yet");
            *store.net_conf.borrow_mut() = HOST_GW.replace("10.5.0.0/16", "10.6.0.0/16");
            store.lacks_net_conf.set(false);
            until("the lease", || store.acquires.get() == 2).await;
            let deadline = Instant::now() + PATIENCE;
            while !status(&requests).await.problems.iter().any(|problem| problem.text.contains("the new Network")) {
                assert!(Instant::now() < deadline, "the new net-conf is not noticed");
                sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn the_key_of_wireguard_is_kept_where_the_options_say_and_used_by_the_next_run() {
    let mut first = Place::new(&HOST_GW.replace("host-gw", "wireguard"), Vec::new());
    let kept = first.path(&format!("{}.wireguard.key", Instance::new(&first.options.subnet_file).name));
    first.options.wireguard_key = first.path("wgkey");
    let data = |place: &Place| place.store.own.borrow().as_ref().and_then(|own| own.attrs.backend_data.clone());
    first.run(async |_| first.ready().await).await;
    let (key, of_first) = (fs::read(first.path("wgkey")).unwrap(), data(&first));
    assert_eq!(fs::read(&kept).unwrap(), key, "it outlives a boot");
    assert!(first.kernel.secrets().is_some() && of_first.is_some());
    // A boot removes flannel's place and our record of the device, and the store has lost our lease.
    fs::remove_file(first.path("wgkey")).unwrap();
    first.store.own.take();
    let second = Place { kernel: kernel(), readiness: Readiness::new(), ..first };
    second.run(async |_| second.ready().await).await;
    assert_eq!(data(&second), of_first);
    assert_eq!(fs::read(second.path("wgkey")).unwrap(), key);
}

/// Otherwise the guards of all other nodes would be off, or drop our packets, until the second write.
#[tokio::test(start_paused = true)]
async fn with_the_tunnel_guard_the_first_lease_names_the_source_of_our_packets() {
    let mut place = Place::new(&HOST_GW.replace("host-gw", "ipip"), Vec::new());
    place.options.rules.guard = true;
    place.run(async |_| place.ready().await).await;
    let own = place.store.own.borrow().clone().unwrap();
    assert_eq!((own.attrs.tunnel_ip, place.store.retakes.get()), (Some([192, 168, 0, 1].into()), 0));
}

/// The flags of the agent do not name it, and its uplink has another address.
#[tokio::test(start_paused = true)]
async fn the_address_that_an_administrator_wrote_into_the_store_stays_the_published_one() {
    let place = Place::new(&HOST_GW.replace("host-gw", "ipip"), Vec::new());
    let chosen: IpAddr = [203, 0, 113, 9].into();
    place.store.chosen.set(Some(chosen));
    place
        .run(async |requests| {
            place.ready().await;
            // The host is looked at again.
            place.kernel.set_machine(machine(&["192.168.0.1/24"]));
            sleep(Duration::from_secs(20)).await;
            assert_eq!(status(&requests).await.public, [chosen]);
        })
        .await;
    assert_eq!(place.store.retakes.get(), 0, "the lease says what it should");
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_was_killed_is_a_remark_and_a_record_of_the_next_one() {
    for was_killed in [false, true] {
        let place = Place { was_killed, ..Place::new(HOST_GW, Vec::new()) };
        place
            .run(async |requests| {
                place.ready().await;
                let remarks = status(&requests).await.remarks;
                let is_it = |text: &String| text.contains(EARLIER_WAS_KILLED) && text.contains("weft doctor");
                assert_eq!(remarks.iter().any(is_it), was_killed, "{remarks:?}");
                let (reply, answer) = oneshot::channel();
                requests.send(Request::History(history::Query::default(), reply)).await.unwrap();
                let records = answer.await.unwrap();
                let first = records.first().is_some_and(|line| line.contains(EARLIER_WAS_KILLED));
                assert_eq!(first, was_killed, "{records:?}");
            })
            .await;
    }
}

/// The store is away, so the agent has no lease when it is stopped, and its socket is removed.
#[tokio::test(start_paused = true)]
async fn that_an_agent_was_killed_is_recorded_also_by_one_that_ends_before_it_has_a_lease() {
    let place = Place { was_killed: true, ..Place::new(HOST_GW, Vec::new()) };
    place.store.is_away.set(true);
    place
        .run(async |requests| {
            let said = status(&requests).await;
            assert!(said.subnet.is_empty(), "there is no lease yet");
            assert!(said.remarks.iter().any(|text| text.contains(EARLIER_WAS_KILLED)), "{:?}", said.remarks);
        })
        .await;
    let next = Place { was_killed: false, readiness: Readiness::new(), ..place };
    next.store.is_away.set(false);
    next.run(async |requests| {
        next.ready().await;
        let remarks = status(&requests).await.remarks;
        assert!(remarks.iter().any(|text| text.contains(EARLIER_WAS_KILLED)), "{remarks:?}");
    })
    .await;
}

/// A monitor that has no notices, and that cannot be read each time when the test says so.
struct Unreadable(Rc<Notify>);

impl Monitor for Unreadable {
    async fn next(&mut self) -> io::Result<Vec<Notice>> {
        self.0.notified().await;
        Err(io::ErrorKind::Interrupted.into())
    }
}

/// What the kernel announced meanwhile is not known.
#[tokio::test(start_paused = true)]
async fn everything_is_compared_each_time_when_the_monitor_cannot_be_read() {
    let (place, fails) = (Place::new(HOST_GW, vec![peer(2, "host-gw")]), Rc::new(Notify::new()));
    place
        .run_with(Unreadable(fails.clone()), async |_| {
            place.ready().await;
            for _ in 0..2 {
                place.kernel.disturb(Key::Route("10.5.2.0/24".parse().unwrap(), 0), None, false);
                let since = Instant::now();
                fails.notify_one();
                until("the route", || place.has_route("10.5.2.0/24")).await;
                assert!(since.elapsed() < SOON, "{:?}", since.elapsed());
            }
        })
        .await;
}

/// Such a route may be the reason why the host does not reach the store.
#[tokio::test(start_paused = true)]
async fn routes_of_an_earlier_version_are_replaced_before_the_store_answers() {
    let mut place = Place::new(HOST_GW, Vec::new());
    place.options.rules.fences = Fences { fail_closed: true, blackhole: false };
    let env = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=false\n";
    fs::write(&place.options.subnet_file, env).unwrap();
    let old = Key::Route("10.5.0.0/16".parse().unwrap(), LAST_METRIC);
    let seen = ObservedValue { value: Value::Route(Route::Unreachable), protocol: PROTOCOL, mark: false };
    place.kernel.disturb(old, Some(seen), false);
    place.store.is_away.set(true);
    place
        .run(async |requests| {
            assert!(status(&requests).await.subnet.is_empty(), "there is no lease yet");
            let there = place.kernel.entries();
            assert!(!there.contains_key(&old) && there.contains_key(&Key::Fence(Family::V4)), "{there:?}");
        })
        .await;
}

/// Otherwise pods would start before they can be reached.
#[tokio::test(start_paused = true)]
async fn after_a_boot_the_cni_configuration_of_an_earlier_run_is_withdrawn_before_the_store_answers() {
    let mut place = Place::new(HOST_GW, Vec::new());
    let (conf, dir) = (place.path("cni-conf.json"), place.path("net.d"));
    let published = dir.join(conflist::NAME);
    fs::create_dir(&dir).unwrap();
    for file in [&conf, &published] {
        fs::write(file, r#"{"name":"cbr0","plugins":[{"type":"flannel"}]}"#).unwrap();
    }
    place.options.cni = Some(CniOptions { conf, dir });
    place.store.is_away.set(true);
    place
        .run(async |requests| {
            assert!(status(&requests).await.subnet.is_empty(), "there is no lease yet");
            assert!(!published.exists());
        })
        .await;
}

/// They would fill the disk of a machine that loses power again and again.
#[tokio::test(start_paused = true)]
async fn what_interrupted_writes_left_in_the_state_directory_is_removed() {
    let place = Place::new(HOST_GW, Vec::new());
    let left = place.path(".weft-abc123");
    let two_hours_ago = SystemTime::now() - Duration::from_secs(7200);
    fs::File::create(&left).unwrap().set_modified(two_hours_ago).unwrap();
    place.run(async |_| until("the file to go", || !left.exists()).await).await;
}

/// Eight commands run at once. If the loop did not wake up when one ends, each further group would wait for ten seconds, which is much
/// longer than the test waits for all of them.
#[tokio::test]
async fn the_end_of_a_command_lets_the_next_one_start() {
    const PEERS: u8 = 240;
    let mut place = Place::new("", (8..8 + PEERS).map(|number| peer(number, "extension")).collect());
    let log = place.path("log");
    let add = format!("echo $SUBNET >> {}", log.display());
    let commands = format!(r#""PostStartupCommand":"true","SubnetAddCommand":"{add}""#);
    *place.store.net_conf.borrow_mut() =
        format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"extension","Shell":true,{commands}}}}}"#);
    place.options.net_conf_commands = NetConfCommands::Run;
    // The file of the peers would be written each second, which wakes the loop up.
    place.options.state_dir = None;
    place
        .run(async |_| {
            let is_done = || fs::read_to_string(&log).is_ok_and(|text| text.lines().count() == usize::from(PEERS));
            until("a command for each peer", is_done).await;
        })
        .await;
}

#[tokio::test]
async fn every_question_is_answered_before_there_is_a_lease() {
    let place = Place::new(HOST_GW, Vec::new());
    let (reason, mut recorder) = ("waiting: net-conf: it is not there", Recorder::default());
    recorder.add(history::HistoryRecord { event: "an earlier run".to_owned(), ..history::HistoryRecord::default() });
    place.readiness.set([reason.to_owned()]);
    let ask = |request: Request| answer_early(request, &*place.store, &place.readiness, &recorder);

    let (reply, answer) = oneshot::channel();
    ask(Request::Status(reply));
    let status = answer.await.unwrap();
    let wanted = vec![Problem::new(ProblemKind::Start, reason)];
    assert_eq!((status.ready, status.problems, status.store.as_str()), (false, wanted, "memory"));

    let (reply, answer) = oneshot::channel();
    ask(Request::Mesh(reply));
    let answer = answer.await.unwrap();
    assert_eq!((answer.row.ready, answer.row.problems), (false, vec![reason.to_owned()]));
    assert!(answer.readers.is_empty(), "nobody else may read the row of a node without a lease");

    let (reply, answer) = oneshot::channel();
    ask(Request::Plan(reply));
    let error = answer.await.unwrap().map(|plan| plan.len()).unwrap_err().to_string();
    assert!(error.contains("before the node has its lease") && error.contains(reason), "{error}");

    let (reply, answer) = oneshot::channel();
    ask(Request::RotateKey(reply));
    assert_eq!(answer.await.unwrap().unwrap_err().to_string(), "the node has no lease yet");

    let (reply, answer) = oneshot::channel();
    ask(Request::History(history::Query::default(), reply));
    let records = answer.await.unwrap();
    assert!(records.len() == 1 && records[0].contains("an earlier run"), "{records:?}");
}
