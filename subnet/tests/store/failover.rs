// SPDX-License-Identifier: Apache-2.0
//! Tests every call of the etcd store while the first endpoint refuses connections, hangs or is silent, or fails during the call.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use etcd_client::{Client, PutOptions, Txn, TxnOp};
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::timeout;
use weft_subnet::attrs::Attrs;
use weft_subnet::etcd::EtcdStore;
use weft_subnet::lease::Lease;
use weft_subnet::retry::chain;
use weft_subnet::source::{Error, Event, LeaseRequest, RecordChange, Source};

use super::contract::{SHORT_TTL, any, attrs, booted, net_conf, next, request, subnet, until};
use super::server::{PREFIX, Server, free_port, options};
use super::unchanged::{dual, dual_request};

/// The time limit of a wait on a busy machine. Only the expected answer ends the wait earlier.
const LIMIT: Duration = Duration::from_secs(180);
const CALLS: [&str; 9] = ["config", "own", "acquire", "retake", "release", "list", "remove", "keep", "watch"];

fn request_of(last: u8) -> LeaseRequest {
    LeaseRequest { previous: Some(subnet(&format!("10.5.{last}.0/24"))), ..request(last) }
}

/// Makes one call with a new store, whose first endpoint is `bad`. `last` is the number of a node that no other call uses.
async fn call(what: &str, bad: String, live: &Server, last: u8) {
    let (direct, request) = (live.store(), request_of(last));
    let store = EtcdStore::new(options(vec![bad, live.url()])).unwrap();
    let wanted = request.previous.unwrap();
    if what == "acquire" {
        assert_eq!(store.acquire(&request).await.unwrap().subnets, wanted);
        assert!(direct.own(&booted(last)).await.unwrap().is_some());
        return;
    }
    let lease = direct.acquire(&request).await.unwrap();
    match what {
        "config" => assert!(store.config().await.unwrap().contains("10.5.0.0/16")),
        "own" => assert_eq!(store.own(&booted(last)).await.unwrap(), Some(lease)),
        "retake" => {
            let changed = Attrs { backend_type: "host-gw".into(), ..attrs(last) };
            assert_eq!(store.retake(&wanted, &attrs(last), &changed).await.unwrap().attrs, changed);
        }
        "release" => {
            store.release(&lease).await.unwrap();
            assert_eq!(direct.own(&booted(last)).await.unwrap(), None);
        }
        "list" => assert!(store.list().await.unwrap().iter().any(|record| record.id == lease.id)),
        "remove" => {
            store.remove(&lease.id).await.unwrap();
            assert_eq!(direct.own(&booted(last)).await.unwrap(), None);
        }
        "keep" => {
            let (out, mut events) = mpsc::channel(8);
            tokio::select! {
                () = store.keep(&lease, out) => panic!("the keeper ended"),
                event = events.recv() => assert!(matches!(event, Some(Event::Renewed(Some(_)))), "{event:?}"),
            }
        }
        "watch" => {
            let (out, mut events) = mpsc::channel(64);
            tokio::select! {
                () = store.watch(out) => panic!("the watch ended"),
                () = async {
                    assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
                    direct.remove(&lease.id).await.unwrap();
                    gone(&mut events, &lease.id).await;
                } => {}
            }
        }
        _ => panic!("{what} is no call"),
    }
}

/// Waits until this lease is reported as deleted. Other calls change other leases at the same time.
async fn gone(events: &mut mpsc::Receiver<Event>, id: &weft_subnet::lease::Id) {
    loop {
        if let Event::Changes(changes) = next(events).await
            && changes.iter().any(|change| change.removed() == Some(id))
        {
            return;
        }
    }
}

async fn with_config() -> Server {
    let live = Server::start().await;
    live.client().await.put(format!("{PREFIX}/config"), r#"{"Network":"10.5.0.0/16"}"#, None).await.unwrap();
    live
}

/// Starts an endpoint that accepts connections, and then is silent or closes them at once.
async fn endpoint(silent: bool) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut open = Vec::new();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if silent {
                open.push(stream);
            }
        }
    });
    (url, tasks)
}

/// What a member says that replicates the data and does not vote yet.
const LEARNER: &str = "etcdserver: rpc not supported for learner";
/// What a member says that has too much to do.
const BUSY: &str = "etcdserver: too many requests";
/// What a member says that has lost the others.
const NO_LEADER: &str = "etcdserver: no leader";
/// What a member says whose disk, or whose way to the others, is too slow.
const LATE: &str = "etcdserver: request timed out";
/// What a member says that ends at this moment.
const STOPPED: &str = "etcdserver: server stopped";

/// Starts an endpoint that answers every call with this status of gRPC.
async fn refusing(code: u8, message: &'static str) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // The headers in HPACK: `:status: 200`, which is number 8 of its table, then names and values with their lengths.
    let mut headers = vec![0x88];
    let number = code.to_string();
    for (name, value) in [("content-type", "application/grpc"), ("grpc-status", &number), ("grpc-message", message)] {
        headers.push(0);
        for text in [name, value] {
            headers.push(u8::try_from(text.len()).unwrap());
            headers.extend(text.as_bytes());
        }
    }
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let headers = headers.clone();
            open.spawn(async move {
                let mut preface = [0; PREFACE];
                if stream.read_exact(&mut preface).await.is_err() {
                    return;
                }
                let mut answer = vec![0, 0, 0, SETTINGS, 0, 0, 0, 0, 0];
                while stream.write_all(&answer).await.is_ok()
                    && let Some(frame) = frame(&mut stream).await
                {
                    answer = match (frame[3], frame[4]) {
                        (SETTINGS, 0) => vec![0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0],
                        (HEADERS, _) => {
                            let length = u8::try_from(headers.len()).unwrap();
                            let head = [0, 0, length, HEADERS, END_STREAM | END_HEADERS];
                            [&head, &frame[5..9], &headers].concat()
                        }
                        _ => Vec::new(),
                    };
                }
            });
        }
    });
    (url, tasks)
}

#[tokio::test]
async fn every_call_is_tried_on_the_next_endpoint() {
    let live = with_config().await;
    let ((silent, _silent), (rude, _rude)) = (endpoint(true).await, endpoint(false).await);
    let dead = format!("http://127.0.0.1:{}", free_port());
    let ((learner, _learner), (busy, _busy)) = (refusing(9, LEARNER).await, refusing(8, BUSY).await);
    let ((alone, _alone), (stopped, _stopped)) = (refusing(14, NO_LEADER).await, refusing(2, STOPPED).await);
    let ((late, _late), (gave_up, _gave_up)) = (refusing(4, LATE).await, refusing(1, "context canceled").await);
    let (broken, _broken) = refusing(13, "stream terminated by RST_STREAM").await;
    let refusing = [("learner", learner), ("busy", busy), ("without a leader", alone), ("stopped", stopped)];
    let refusing = refusing.into_iter().chain([("late", late), ("gives up", gave_up), ("broken", broken)]);
    let kinds = [("dead", dead), ("silent", silent), ("hangs up", rude)].into_iter().chain(refusing);
    let kinds: Vec<_> = kinds.collect();
    let all = kinds.iter().flat_map(|kind| CALLS.map(|what| (kind, what)));
    let live = &live;
    let calls = all.zip(1..).map(|(((kind, url), what), last)| async move {
        timeout(LIMIT, call(what, url.clone(), live, last)).await.unwrap_or_else(|_| panic!("{what}, {kind}"));
    });
    futures_util::future::join_all(calls).await;
}

/// No endpoint knows another user, so the others are not asked.
#[tokio::test]
async fn a_refusal_of_the_user_is_not_tried_on_the_next_endpoint() {
    let live = with_config().await;
    let (url, _tasks) = refusing(9, "etcdserver: authentication is not enabled").await;
    let error = EtcdStore::new(options(vec![url, live.url()])).unwrap().list().await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
}

/// A member with too much to do would get still more by new connections and logins.
#[tokio::test]
async fn the_connection_to_a_member_that_refuses_a_call_stays() {
    let (busy, _busy) = refusing(8, BUSY).await;
    let port = busy.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap();
    let (url, _tasks, connections) = relay(port).await;
    let store = EtcdStore::new(options(vec![url])).unwrap();
    for _ in 0..3 {
        let error = timeout(LIMIT, store.list()).await.unwrap().unwrap_err();
        assert!(chain(&error).contains(BUSY), "{error:?}");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

/// Starts an endpoint that forwards everything to another port until it is dropped. Then its connections break, and it refuses new ones. Also
/// returns how many connections it has had.
pub async fn relay(port: u16) -> (String, JoinSet<()>, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    let connections = Arc::<AtomicUsize>::default();
    let count = connections.clone();
    tasks.spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            open.spawn(async move {
                let mut far = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
            });
        }
    });
    (url, tasks, connections)
}

/// The moment at which a [`breaking`] endpoint fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Break {
    /// A request has arrived and was not forwarded.
    Request,
    /// The request was forwarded and carried out, but its answer is lost.
    Answer,
    /// As `Answer`, and then the endpoint works again.
    OneAnswer,
}

const PREFACE: usize = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();
/// The type of the frame with which a request or an answer begins.
const HEADERS: u8 = 1;
/// The type of the frame that each side sends first.
const SETTINGS: u8 = 4;
/// Flags of frames.
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Reads one frame of HTTP/2. Returns `None` if the connection has ended.
async fn frame(from: &mut (impl AsyncReadExt + Unpin)) -> Option<Vec<u8>> {
    let mut head = [0; 9];
    from.read_exact(&mut head).await.ok()?;
    let [a, b, c, ..] = head;
    let mut frame = head.to_vec();
    frame.resize(9 + u32::from_be_bytes([0, a, b, c]) as usize, 0);
    from.read_exact(&mut frame[9..]).await.ok()?;
    Some(frame)
}

/// Starts an endpoint that forwards everything to etcd until call number `at`, which begins with 1. Then its connections end, and it
/// refuses new ones, except after [`Break::OneAnswer`]. Also returns a flag that says whether this has happened.
async fn breaking(port: u16, at: usize, how: Break) -> (String, JoinSet<()>, Rc<Cell<bool>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let broke = Rc::new(Cell::new(false));
    let (calls, said) = (Rc::new(Cell::new(0)), broke.clone());
    let mut tasks = JoinSet::new();
    tasks.spawn_local(async move {
        let connections = async {
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let far = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let ((mut from, mut back), (mut answers, mut to)) = (near.into_split(), far.into_split());
                let mut preface = [0; PREFACE];
                if from.read_exact(&mut preface).await.is_err() || to.write_all(&preface).await.is_err() {
                    continue;
                }
                // All calls use the same connection, one after the other.
                let requests = async {
                    while let Some(frame) = frame(&mut from).await {
                        if frame[3] == HEADERS {
                            calls.set(calls.get() + 1);
                            if calls.get() == at && how == Break::Request {
                                said.set(true);
                                return true;
                            }
                        }
                        if to.write_all(&frame).await.is_err() {
                            break;
                        }
                    }
                    false
                };
                let answers = async {
                    while let Some(frame) = frame(&mut answers).await {
                        if frame[3] == HEADERS && calls.get() == at && how != Break::Request && !said.get() {
                            said.set(true);
                            return true;
                        }
                        if back.write_all(&frame).await.is_err() {
                            break;
                        }
                    }
                    false
                };
                let broken = tokio::select! { broken = requests => broken, broken = answers => broken };
                if broken && how != Break::OneAnswer {
                    return;
                }
            }
        };
        connections.await;
    });
    (url, tasks, broke)
}

/// Makes all calls of the life of a lease. The first endpoint fails at call number `at`. Returns false if there are fewer calls.
async fn life(live: &Server, at: usize, how: Break) -> bool {
    let (url, _tasks, broke) = breaking(live.port, at, how).await;
    let store = EtcdStore::new(options(vec![url, live.url()])).unwrap();
    assert!(store.config().await.unwrap().contains("10.5.0.0/16"));
    assert_eq!(store.own(&booted(1)).await.unwrap(), None);
    // The list of the previous call is used. What follows is to grant an etcd lease, write the key, and read what was created meanwhile.
    let lease = store.acquire(&request_of(1)).await.unwrap();
    assert_eq!(Some(lease.subnets), request_of(1).previous);
    let (out, mut events) = mpsc::channel(8);
    tokio::select! {
        () = store.keep(&lease, out) => panic!("the keeper ended"),
        event = events.recv() => assert!(matches!(event, Some(Event::Renewed(Some(_)))), "{event:?}"),
    }
    let changed = Attrs { backend_type: "host-gw".into(), ..attrs(1) };
    let lease = store.retake(&lease.subnets, &attrs(1), &changed).await.unwrap();
    assert_eq!(lease.attrs, changed);
    assert_eq!(store.list().await.unwrap().len(), 1);
    // A start with another subnet length deletes the record and creates another one.
    let longer = LeaseRequest { net_conf: net_conf(26, "10.5.255.0"), was: Some(changed), ..request(1) };
    let lease = store.acquire(&longer).await.unwrap();
    assert_eq!(live.store().list().await.unwrap().len(), 1, "one lease, whatever was tried twice");
    match store.release(&lease).await {
        // If the answer is lost, the next attempt finds that the record is gone.
        Err(Error::Missing(_)) if how == Break::Answer && broke.get() => {}
        done => done.unwrap(),
    }
    assert!(live.store().list().await.unwrap().is_empty());
    let stray = live.store().acquire(&request_of(2)).await.unwrap();
    match store.remove(&stray.id).await {
        Err(Error::Missing(_)) if how == Break::Answer && broke.get() => {}
        done => done.unwrap(),
    }
    assert!(live.store().list().await.unwrap().is_empty());
    broke.get()
}

/// One endpoint fails at each call of a life in turn.
async fn fails_at_each_call(how: Break) {
    let live = with_config().await;
    let body = async {
        let mut at = 1;
        while timeout(LIMIT, life(&live, at, how)).await.unwrap_or_else(|_| panic!("{how:?} {at} hangs")) {
            at += 1;
        }
        assert!((15..60).contains(&at), "{how:?}: all calls were tried, one after the other: {at}");
    };
    LocalSet::new().run_until(body).await;
}

#[tokio::test]
async fn an_endpoint_may_fail_before_any_call() {
    fails_at_each_call(Break::Request).await;
}

#[tokio::test]
async fn an_endpoint_may_fail_before_it_answers_any_call() {
    fails_at_each_call(Break::Answer).await;
}

/// Our key was created, but the answer is lost. So was the revision of the key, by which we know what others created before it.
#[tokio::test]
async fn everything_is_read_again_after_the_creation_of_our_key_was_not_answered() {
    let body = async {
        let live = Server::start().await;
        // What is asked for is the list, an etcd lease, and the key.
        let (url, _tasks, broke) = breaking(live.port, 3, Break::Answer).await;
        let store = EtcdStore::new(options(vec![url, live.url()])).unwrap();
        assert_eq!(store.own(&booted(1)).await.unwrap(), None);
        // The list does not contain this lease, with which ours would share one half.
        let theirs = dual("10.5.2.0/24", "fd00:12:0:1::/64");
        live.store().acquire(&dual_request(2, theirs)).await.unwrap();
        let lease = store.acquire(&dual_request(1, dual("10.5.2.0/24", "fd00:12:0:2::/64"))).await.unwrap();
        assert!(broke.get());
        assert!(!lease.subnets.overlaps(&theirs), "{}", lease.subnets);
        assert_eq!(live.store().list().await.unwrap().len(), 2, "the key that came second is gone");
    };
    timeout(LIMIT, LocalSet::new().run_until(body)).await.unwrap();
}

/// etcd writes our key with call number `at` of `take`, and answers too late. Whoever deletes the key then tells all nodes that this one has left.
async fn our_key_stays_if_its_creation_is_not_answered(
    at: usize,
    take: impl AsyncFn(&EtcdStore) -> Result<Lease, Error>,
) {
    let body = async {
        let live = Server::start().await;
        let (url, _tasks, broke) = breaking(live.port, at, Break::OneAnswer).await;
        let store = EtcdStore::new(options(vec![url])).unwrap();
        take(&store).await.unwrap_err();
        assert!(broke.get());
        let key = format!("{PREFIX}/subnets/10.5.1.0-24");
        let mut client = live.client().await;
        let read = client.get(key.as_str(), None).await.unwrap();
        let written = read.kvs().first().expect("the key stays");
        take(&store).await.unwrap();
        let read = client.get(key.as_str(), None).await.unwrap();
        assert_eq!(read.kvs()[0].create_revision(), written.create_revision(), "it is the same key");
        assert_eq!(read.kvs()[0].lease(), written.lease(), "with the same etcd lease");
        let leases = client.leases().await.unwrap();
        assert_eq!(leases.leases().len(), 1, "no second etcd lease was granted");
    };
    timeout(LIMIT, LocalSet::new().run_until(body)).await.unwrap();
}

#[tokio::test]
async fn a_key_stays_if_its_creation_was_not_answered_by_the_only_endpoint() {
    // What is asked for is the list, an etcd lease, and the key.
    our_key_stays_if_its_creation_is_not_answered(3, async |store| store.acquire(&request_of(1)).await).await;
}

#[tokio::test]
async fn a_key_that_is_taken_again_stays_if_its_creation_was_not_answered_by_the_only_endpoint() {
    // What is asked for is the key, the list, an etcd lease, and the key again.
    let ours = subnet("10.5.1.0/24");
    let take = async |store: &EtcdStore| store.retake(&ours, &attrs(1), &attrs(1)).await;
    our_key_stays_if_its_creation_is_not_answered(4, take).await;
}

/// Starts an endpoint that forwards everything to etcd until it has answered with this many bytes. Then its connections break, and it
/// refuses new ones.
async fn breaking_after(port: u16, bytes: u64) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (near, _) = listener.accept().await.unwrap();
        let ((mut from, mut back), (answers, mut to)) =
            (near.into_split(), TcpStream::connect(("127.0.0.1", port)).await.unwrap().into_split());
        let mut answers = answers.take(bytes);
        tokio::select! {
            end = tokio::io::copy(&mut answers, &mut back) => drop(end),
            end = tokio::io::copy(&mut from, &mut to) => drop(end),
        }
    });
    (url, tasks)
}

/// etcd splits a long answer to a watch, also in the middle of what one transaction wrote.
#[tokio::test]
async fn a_watch_that_breaks_in_the_middle_of_a_revision_goes_on_with_all_of_it() {
    let live = Server::start().await;
    // An answer may be a little larger than 2 MiB. These two transactions write more. The endpoint breaks in the second part.
    let (url, _tasks) = breaking_after(live.port, 2_300_000).await;
    let store = EtcdStore::new(options(vec![url, live.url()])).unwrap();
    // The watch begins at the revision of this list, so that it gets everything that follows with one answer.
    assert_eq!(store.own(&booted(1)).await.unwrap(), None);
    let mut client = live.client().await;
    let id = |revision: u8, n: u8| format!("10.{revision}.{n}.0-24");
    let large = format!(r#"{{"BackendType":"{}"}}"#, "x".repeat(12_000));
    for revision in [1, 2] {
        let put = |n| TxnOp::put(format!("{PREFIX}/subnets/{}", id(revision, n)), large.as_str(), None);
        client.txn(Txn::new().and_then((0..110).map(put).collect::<Vec<_>>())).await.unwrap();
    }
    client.put(format!("{PREFIX}/subnets/{}", id(3, 0)), attrs(1).to_wire(), None).await.unwrap();
    let mut missing: BTreeSet<String> = [1, 2].into_iter().flat_map(|at| (0..110).map(move |n| id(at, n))).collect();
    let mut is_first = true;
    let (out, mut events) = mpsc::channel(64);
    let told = async {
        assert_eq!(next(&mut events).await, Event::Snapshot { records: Vec::new(), reset: false });
        loop {
            let Event::Changes(changes) = next(&mut events).await else { panic!("the watch must be resumed") };
            let ids: Vec<_> =
                changes.iter().filter_map(RecordChange::written).map(|record| record.id.clone()).collect();
            if std::mem::take(&mut is_first) {
                let has = |n: u8| ids.iter().any(|other| **other == id(2, n));
                assert!(has(0) && !has(109), "the first part ends in the middle of the second transaction");
            }
            missing.retain(|id| ids.iter().all(|told| **told != **id));
            if ids.iter().any(|last| **last == id(3, 0)) {
                return;
            }
        }
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        told = timeout(LIMIT, told) => told.expect("the last lease"),
    }
    assert_eq!(missing, BTreeSet::new());
}

/// The number of leases for which a list needs a second page.
const TWO_PAGES: u32 = 1_500;

/// Writes so many leases that a list needs a second page.
async fn fill(server: &Server) {
    let mut client = server.client().await;
    let all: Vec<u32> = (0..TWO_PAGES).collect();
    for batch in all.chunks(100) {
        let key = |n: &u32| format!("{PREFIX}/subnets/{}-24", Ipv4Addr::from(0x0a00_0000 + (n << 8)));
        let put = |n: &u32| TxnOp::put(key(n), attrs(1).to_wire(), None);
        client.txn(Txn::new().and_then(batch.iter().map(put).collect::<Vec<_>>())).await.unwrap();
    }
}

/// Another cluster answers at the next endpoint, for example because a node was moved to it and its flag names both.
#[tokio::test]
async fn a_list_is_never_that_of_two_clusters() {
    let body = async {
        let (first, second) = (Server::start().await, Server::start().await);
        // The second cluster has the revision of the first one, too.
        for server in [&first, &second, &second] {
            fill(server).await;
        }
        let (url, _tasks, broke) = breaking(first.port, 2, Break::Request).await;
        let store = EtcdStore::new(options(vec![url, second.url()])).unwrap();
        let error = store.list().await.unwrap_err().to_string();
        assert!(broke.get(), "the second page is asked for");
        assert!(error.contains("another cluster answered in the middle of the list"), "{error}");
        assert_eq!(store.list().await.unwrap().len(), TWO_PAGES as usize, "all of it is read from the second cluster");
    };
    timeout(LIMIT, LocalSet::new().run_until(body)).await.unwrap();
}

/// Starts an endpoint that forwards everything to etcd. Before call number `at` of its first connection, which begins with 1, it tells that it
/// has been reached, and waits.
async fn halting(port: u16, at: usize) -> (String, JoinSet<()>, oneshot::Receiver<()>, oneshot::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let ((reached, is_reached), (go_on, goes_on)) = (oneshot::channel(), oneshot::channel());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (near, _) = listener.accept().await.unwrap();
        let far = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        let ((mut from, mut back), (mut answers, mut to)) = (near.into_split(), far.into_split());
        let requests = async {
            let mut preface = [0; PREFACE];
            from.read_exact(&mut preface).await.unwrap();
            to.write_all(&preface).await.unwrap();
            let (mut calls, mut halt) = (0, Some((reached, goes_on)));
            while let Some(frame) = frame(&mut from).await {
                calls += usize::from(frame[3] == HEADERS);
                if calls == at
                    && let Some((reached, goes_on)) = halt.take()
                {
                    let _ = reached.send(());
                    let _ = goes_on.await;
                }
                if to.write_all(&frame).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = requests => {}
            end = tokio::io::copy(&mut answers, &mut back) => drop(end),
        }
    });
    (url, tasks, is_reached, go_on)
}

/// Between two pages, a node moves from a subnet that was not read yet to one that was. Pages of two revisions would have neither lease, and
/// the watch would begin after both changes.
#[tokio::test]
async fn all_pages_of_a_list_have_one_revision() {
    let body = async {
        let live = Server::start().await;
        fill(&live).await;
        let (url, _tasks, reached, go_on) = halting(live.port, 2).await;
        let store = EtcdStore::new(options(vec![url, live.url()])).unwrap();
        let key = |id: &str| format!("{PREFIX}/subnets/{id}");
        let moves = async {
            reached.await.unwrap();
            let mut client = live.client().await;
            client.delete(key("10.5.99.0-24"), None).await.unwrap();
            client.put(key("10.0.0.0-25"), attrs(1).to_wire(), None).await.unwrap();
            go_on.send(()).unwrap();
        };
        let (list, ()) = tokio::join!(store.list(), moves);
        let list = list.unwrap();
        assert_eq!(list.len(), TWO_PAGES as usize);
        assert!(list.iter().any(|record| &*record.id == "10.5.99.0-24"));
    };
    timeout(LIMIT, body).await.unwrap();
}

/// Leases of another cluster must not be taken for changes of those in the list.
#[tokio::test]
async fn an_endpoint_that_did_not_send_the_list_is_asked_for_its_cluster_before_its_watch_counts() {
    let body = async {
        let (first, other) = (Server::start().await, Server::start().await);
        let mut client = other.client().await;
        for last in 1..4 {
            client.put(format!("{PREFIX}/subnets/10.5.{last}.0-24"), attrs(last).to_wire(), None).await.unwrap();
        }
        // The first call is the list, and the second one the watch.
        let (url, _tasks, broke) = breaking(first.port, 2, Break::Request).await;
        let store = EtcdStore::new(options(vec![url, other.url()])).unwrap();
        let (out, mut events) = mpsc::channel(64);
        let told = async {
            let mut lists = Vec::new();
            while !lists.iter().any(|(_, reset)| *reset) {
                match events.recv().await.unwrap() {
                    Event::Snapshot { records, reset } => lists.push((records.len(), reset)),
                    Event::Answered => panic!("a watch counted after {lists:?}"),
                    _ => {}
                }
            }
            lists
        };
        tokio::select! {
            () = store.watch(out) => panic!("the watch ended"),
            lists = told => assert_eq!(lists, [(0, false), (3, true)]),
        }
        assert!(broke.get(), "the first server was asked first");
    };
    timeout(LIMIT, LocalSet::new().run_until(body)).await.unwrap();
}

/// etcd was restored from a snapshot, in which our key is the same, and not its etcd lease.
#[tokio::test]
async fn a_key_whose_etcd_lease_is_unknown_gets_another_one_and_stays() {
    let body = async {
        let (before, after) = (Server::start().await, Server::start().await);
        let key = format!("{PREFIX}/subnets/10.5.1.0-24");
        let attached = before.client().await.lease_grant(600, None).await.unwrap().id();
        let with_lease = PutOptions::new().with_lease(attached);
        before.client().await.put(key.as_str(), attrs(1).to_wire(), Some(with_lease)).await.unwrap();
        after.client().await.put(key.as_str(), attrs(1).to_wire(), None).await.unwrap();
        // The first call reads the key, and the second one renews its etcd lease.
        let (url, _tasks, broke) = breaking(before.port, 2, Break::Request).await;
        let store = EtcdStore::new(options(vec![url, after.url()])).unwrap();
        store.retake(&subnet("10.5.1.0/24"), &attrs(1), &attrs(1)).await.unwrap();
        assert!(broke.get(), "the first server was asked first");
        let found = after.client().await.get(key.as_str(), None).await.unwrap();
        let leases: Vec<i64> = found.kvs().iter().map(|kv| kv.lease()).collect();
        assert!(matches!(leases[..], [lease] if lease != 0 && lease != attached), "{leases:?}");
    };
    timeout(LIMIT, LocalSet::new().run_until(body)).await.unwrap();
}

/// Our key is gone, and another node takes one half of our subnet between our look at all leases and our write.
#[tokio::test]
async fn a_lease_that_appears_while_ours_is_taken_again_keeps_us_out() {
    let body = async {
        let live = Server::start().await;
        // What is asked for is the key, the list, an etcd lease, and the key again.
        let (url, _tasks, reached, go_on) = halting(live.port, 4).await;
        let store = EtcdStore::new(options(vec![url, live.url()])).unwrap();
        let (ours, was) = (dual("10.5.2.0/24", "fd00:12:0:1::/64"), attrs(1));
        let appears = async {
            reached.await.unwrap();
            let theirs = format!("{PREFIX}/subnets/10.5.2.0-24&fd00:12:0:2::-64");
            live.client().await.put(theirs, attrs(2).to_wire(), None).await.unwrap();
            go_on.send(()).unwrap();
        };
        let (taken, ()) = tokio::join!(store.retake(&ours, &was, &was), appears);
        assert!(matches!(&taken, Err(Error::Taken { owner, .. }) if owner == "192.0.2.2"), "{taken:?}");
        assert_eq!(live.store().list().await.unwrap().len(), 1, "the key that came second is gone");
    };
    timeout(LIMIT, body).await.unwrap();
}

/// The other node came second, and gives way.
#[tokio::test]
async fn a_lease_that_appears_after_our_write_does_not_cost_us_our_subnet() {
    let body = async {
        let live = Server::start().await;
        // What is asked for is the list, an etcd lease, the key, and what was created before it.
        let (url, _tasks, reached, go_on) = halting(live.port, 4).await;
        let store = EtcdStore::new(options(vec![url, live.url()])).unwrap();
        let ours = dual("10.5.2.0/24", "fd00:12:0:1::/64");
        let appears = async {
            reached.await.unwrap();
            let theirs = format!("{PREFIX}/subnets/10.5.2.0-24&fd00:12:0:2::-64");
            live.client().await.put(theirs, attrs(2).to_wire(), None).await.unwrap();
            go_on.send(()).unwrap();
        };
        let request = dual_request(1, ours);
        let (lease, ()) = tokio::join!(store.acquire(&request), appears);
        assert_eq!(lease.unwrap().subnets, ours);
    };
    timeout(LIMIT, body).await.unwrap();
}

/// Starts an endpoint that forwards everything to etcd. Before each call, another program writes this key with other data of our device.
async fn meddling(port: u16, key: &str) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (key, writes) = (key.to_owned(), Arc::<AtomicUsize>::default());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let (near, _) = listener.accept().await.unwrap();
            let (key, writes) = (key.clone(), writes.clone());
            open.spawn(async move {
                let mut client = Client::connect([format!("http://127.0.0.1:{port}")], None).await.unwrap();
                let far = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let ((mut from, mut back), (mut answers, mut to)) = (near.into_split(), far.into_split());
                let requests = async {
                    let mut preface = [0; PREFACE];
                    if from.read_exact(&mut preface).await.is_err() || to.write_all(&preface).await.is_err() {
                        return;
                    }
                    while let Some(frame) = frame(&mut from).await {
                        if frame[3] == HEADERS {
                            let number = 2 + writes.fetch_add(1, Ordering::SeqCst);
                            let data = format!(r#"{{"VNI":{number},"VtepMAC":"c6:d2:32:6f:8f:44"}}"#);
                            let value = Attrs { backend_data: Some(data.into()), ..attrs(1) }.to_wire();
                            client.put(key.as_str(), value, None).await.unwrap();
                        }
                        if to.write_all(&frame).await.is_err() {
                            return;
                        }
                    }
                };
                tokio::select! {
                    () = requests => {}
                    end = tokio::io::copy(&mut answers, &mut back) => drop(end),
                }
            });
        }
    });
    (url, tasks)
}

/// What was read has always changed when our write arrives. A call must not hang because of that, and must not overwrite what it did not read.
#[tokio::test]
async fn a_call_ends_with_an_error_if_our_key_changes_before_each_write() {
    let body = async {
        let live = Server::start().await;
        let lease = live.store().acquire(&request_of(1)).await.unwrap();
        let key = format!("{PREFIX}/subnets/{}", lease.id);
        let (url, _tasks) = meddling(live.port, &key).await;
        // If a call is not answered in time, it is made again, and the key changes again.
        let store = EtcdStore::new(options(vec![url.clone(), url])).unwrap();
        let errors = [
            store.acquire(&request_of(1)).await.err(),
            store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.err(),
            store.release(&lease).await.err(),
        ];
        for (what, error) in ["acquire a subnet", "retake 10.5.1.0/24", "release 10.5.1.0/24"].into_iter().zip(errors) {
            let text = error.unwrap_or_else(|| panic!("{what} must fail")).to_string();
            assert_eq!(text, format!("{what}: other nodes changed it 30 times in a row"));
        }
        let left = live.client().await.get(key.as_str(), None).await.unwrap();
        assert_eq!(left.kvs()[0].create_revision(), lease.age.stamp.cast_signed(), "it is the same key");
    };
    timeout(LIMIT, body).await.unwrap();
}

/// Such a member answers, and its connections stay. But it learns of no change, so the watch must go on at another member.
#[tokio::test]
async fn the_watch_of_a_member_that_lost_the_others_breaks() {
    let [first, second] = Server::start_two().await;
    let (out, mut events) = mpsc::channel(64);
    let breaks = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        second.signal(Signal::SIGSTOP);
        loop {
            match events.recv().await {
                Some(Event::Unreachable(text)) => return text,
                event => assert_eq!(event, Some(Event::Answered)),
            }
        }
    };
    let store = first.store();
    let text = tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        text = timeout(LIMIT, breaks) => text.expect("the watch must break"),
    };
    assert!(text.contains("no leader"), "{text}");
}

/// An operator looks at the server that the message names.
#[tokio::test]
async fn a_failure_of_the_watch_names_the_endpoint_that_failed() {
    let live = Server::start().await;
    let (url, tasks, _) = relay(live.port).await;
    let dead = format!("http://127.0.0.1:{}", free_port());
    let store = EtcdStore::new(options(vec![url.clone(), dead.clone()])).unwrap();
    let (out, mut events) = mpsc::channel(64);
    let fails = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        until(&mut events, "the first answer of the watch", |event| *event == Event::Answered).await;
        // The first failure is not reported, because the other endpoint may answer.
        drop(tasks);
        let is_failure = |event: &Event| matches!(event, Event::Unreachable(_));
        until(&mut events, "the report of the second failure", is_failure).await
    };
    let told = tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        told = fails => told,
    };
    let Event::Unreachable(text) = told else { panic!("{told:?}") };
    assert!(text.contains(&dead) && !text.contains(&url), "{text}");
}

/// Renewals and the watch continue on the next endpoint, and the lease does not expire.
#[tokio::test]
async fn renewals_and_the_watch_continue_after_an_endpoint_fails() {
    let live = with_config().await;
    let (url, tasks, _) = relay(live.port).await;
    let mut short = options(vec![url, live.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request_of(1)).await.unwrap();
    let other = live.store().acquire(&request_of(2)).await.unwrap();
    let ((kept, mut keeps), (out, mut events)) = (mpsc::channel(64), mpsc::channel(64));
    let body = async {
        assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        drop(tasks);
        // Each renewal follows a third of the TTL after the last one, so five of them take longer than the TTL.
        for _ in 0..5 {
            until(&mut keeps, "a renewal", |event| matches!(event, Event::Renewed(Some(_)))).await;
        }
        live.store().remove(&other.id).await.unwrap();
        let Event::Changes(changes) = next(&mut events).await else { panic!("the watch is resumed, not begun again") };
        assert_eq!(changes, [RecordChange::Removed(other.id)]);
        assert!(live.store().own(&booted(1)).await.unwrap().is_some_and(|own| own.age == lease.age), "it never ended");
    };
    tokio::select! {
        () = store.keep(&lease, kept) => panic!("the keeper ended"),
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}
