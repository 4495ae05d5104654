// SPDX-License-Identifier: Apache-2.0
//! How many requests the etcd store makes. A request that is made once for each start costs etcd thousands when all nodes of a large
//! cluster start together. etcd itself counts them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use tokio::sync::mpsc;
use weft_subnet::source::{Error, Event, LeaseRequest, RecordChange, Source};

use super::contract::{SHORT_TTL, any, attrs, booted, net_conf, next, request, subnet, until, watching};
use super::server::{PREFIX, Server};

type Requests = BTreeMap<String, u64>;

/// Returns the messages that etcd has received, by method.
fn received(server: &Server) -> Requests {
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let counters = text.lines().filter_map(|line| {
        let (labels, count) = line.strip_prefix("grpc_server_msg_received_total{")?.rsplit_once(' ')?;
        let method = labels.split("grpc_method=\"").nth(1)?.split('"').next()?;
        Some((method.to_owned(), count.parse::<f64>().unwrap() as u64))
    });
    counters.filter(|(_, count)| *count > 0).collect()
}

/// Returns what was added since `before`.
fn since(server: &Server, before: &Requests) -> Requests {
    let added = |(method, count): (String, u64)| {
        let added = count - before.get(&method).copied().unwrap_or(0);
        (added > 0).then_some((method, added))
    };
    received(server).into_iter().filter_map(added).collect()
}

fn requests<const N: usize>(all: [(&str, u64); N]) -> Requests {
    all.map(|(method, count)| (method.to_owned(), count)).into()
}

async fn with_config() -> Server {
    let server = Server::start().await;
    server.client().await.put(format!("{PREFIX}/config"), r#"{"Network":"10.5.0.0/16"}"#, None).await.unwrap();
    server
}

/// Makes the calls of an agent's start, until it has all leases and knows how long its own one lives.
async fn start(server: &Server, last: u8) {
    let store = server.store();
    store.config().await.unwrap();
    let was = store.own(&booted(last)).await.unwrap().map(|lease| lease.attrs);
    let lease = store.acquire(&LeaseRequest { was, ..request(last) }).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(8);
    watching(&store, async |mut events| {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        let renewed = async {
            assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
            // The watch reports a lease that is created now. So it has also reported our own.
            server.store().acquire(&request(last + 100)).await.unwrap();
            let is_other = |event: &Event| match event {
                Event::Changes(all) => all.iter().filter_map(RecordChange::written).any(|record| record.id != lease.id),
                _ => false,
            };
            until(&mut events, "the lease of the other node", is_other).await;
        };
        tokio::select! {
            () = store.keep(&lease, kept) => panic!("the keeper ended"),
            () = renewed => {}
        }
    })
    .await;
}

/// The requests of the other node that [`start`] adds.
const OTHER: [(&str, u64); 3] = [("LeaseGrant", 1), ("Range", 1), ("Txn", 2)];

fn without_other(mut all: Requests) -> Requests {
    for (method, count) in OTHER {
        *all.get_mut(method).unwrap() -= count;
    }
    all.retain(|_, count| *count > 0);
    all
}

#[tokio::test]
async fn a_start_with_a_new_lease_makes_five_requests() {
    let server = with_config().await;
    let before = received(&server);
    start(&server, 1).await;
    // Net-conf and all leases; an etcd lease; the key; what was created meanwhile; the watch.
    let wanted = requests([("LeaseGrant", 1), ("Range", 1), ("Txn", 2), ("Watch", 1)]);
    assert_eq!(without_other(since(&server, &before)), wanted);
}

#[tokio::test]
async fn a_start_with_a_lease_from_before_makes_four_requests() {
    let server = with_config().await;
    server.store().acquire(&request(1)).await.unwrap();
    let before = received(&server);
    start(&server, 1).await;
    // Net-conf and all leases; the renewal; how long an etcd lease lives that an earlier run was granted; the watch.
    let wanted = requests([("LeaseKeepAlive", 1), ("LeaseTimeToLive", 1), ("Txn", 1), ("Watch", 1)]);
    assert_eq!(without_other(since(&server, &before)), wanted);
}

#[tokio::test]
async fn a_renewal_is_one_request_while_the_watch_reports_every_change_of_the_key() {
    let server = with_config().await;
    let mut short = super::server::options(vec![server.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = weft_subnet::etcd::EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(8);
    watching(&store, async |mut events| {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        let renewed = async {
            any(&mut keeps).await;
            let before = received(&server);
            for _ in 0..3 {
                any(&mut keeps).await;
            }
            let mut all = since(&server, &before);
            // The stream of the watch opens some time after the list. The test makes the changes.
            for other in ["Watch", "Put"] {
                all.remove(other);
            }
            assert!(all["LeaseKeepAlive"] >= 2, "{all:?}");
            assert_eq!(all.into_keys().collect::<Vec<_>>(), ["LeaseKeepAlive"]);
        };
        // A watch that hears nothing for some seconds asks whether the server lives.
        let changes = async {
            let mut client = server.client().await;
            loop {
                client.put(format!("{PREFIX}/subnets/10.5.200.0-24"), attrs(9).to_wire(), None).await.unwrap();
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            () = store.keep(&lease, kept) => panic!("the keeper ended"),
            () = changes => {}
            () = renewed => {}
        }
    })
    .await;
}

#[tokio::test]
async fn a_lost_race_costs_one_request() {
    let server = with_config().await;
    let (first, second) = (server.store(), server.store());
    assert_eq!(second.own(&booted(2)).await.unwrap(), None);
    let wanted = LeaseRequest { previous: Some(subnet("10.5.7.0/24")), ..request(1) };
    let lease = first.acquire(&wanted).await.unwrap();
    let before = received(&server);
    // The second node has read its list before the first one created its lease.
    let other = second.acquire(&LeaseRequest { previous: wanted.previous, ..request(2) }).await.unwrap();
    assert_ne!(other.subnets, lease.subnets);
    assert_eq!(since(&server, &before), requests([("LeaseGrant", 1), ("Range", 1), ("Txn", 2)]));
}

/// With each lost race one more subnet is known to be taken. After some of them, the list is so old that a new one costs less than further races.
#[tokio::test]
async fn after_four_lost_races_all_leases_are_read_again() {
    let server = with_config().await;
    let store = server.store();
    assert_eq!(store.own(&booted(9)).await.unwrap(), None);
    let mut client = server.client().await;
    for last in 1..=6 {
        client.put(format!("{PREFIX}/subnets/10.5.{last}.0-24"), attrs(last).to_wire(), None).await.unwrap();
    }
    let before = received(&server);
    let six = LeaseRequest { net_conf: net_conf(24, "10.5.6.0"), ..request(9) };
    let error = store.acquire(&six).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { .. }), "{error}");
    // Four attempts to write the key, and the list.
    assert_eq!(since(&server, &before), requests([("LeaseGrant", 1), ("LeaseRevoke", 1), ("Txn", 5)]));
}

/// A list that was read a moment ago is used again. One that is old may lack many leases, and its revision may be compacted already.
#[tokio::test]
async fn an_old_list_is_not_used() {
    let server = with_config().await;
    for (last, age, lists) in [(1, 3, 0), (2, 11, 1)] {
        let store = server.store();
        assert_eq!(store.own(&booted(last)).await.unwrap(), None);
        let before = received(&server);
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(age)).await;
        tokio::time::resume();
        store.acquire(&request(last)).await.unwrap();
        let wanted = requests([("LeaseGrant", 1), ("Range", 1), ("Txn", 1 + lists)]);
        assert_eq!(since(&server, &before), wanted, "after {age} s");
    }
}

#[tokio::test]
async fn a_release_is_one_request_and_checks_whose_lease_it_is() {
    let server = with_config().await;
    let store = server.store();
    let lease = store.acquire(&request(1)).await.unwrap();
    let before = received(&server);
    store.release(&lease).await.unwrap();
    assert_eq!(since(&server, &before), requests([("Txn", 1)]));
    assert!(matches!(store.release(&lease).await, Err(Error::Missing(_))));
    let lease = store.acquire(&request(1)).await.unwrap();
    let key = format!("{PREFIX}/subnets/{}", lease.id);
    server.client().await.put(key, attrs(9).to_wire(), None).await.unwrap();
    assert!(matches!(store.release(&lease).await, Err(Error::Taken { .. })));
}

/// Waits for a call while the clock stands still: while a blocking task runs, tokio does not move a paused clock by itself. A call that
/// makes a pause goes on after a second.
async fn standing<T>(call: impl Future<Output = T>) -> T {
    let mut call = std::pin::pin!(call);
    loop {
        #[expect(clippy::disallowed_methods, reason = "the second must be a real one")]
        let second = tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_secs(1)));
        tokio::select! {
            biased;
            done = &mut call => return done,
            _ = second => tokio::time::advance(Duration::from_millis(200)).await,
        }
    }
}

#[tokio::test]
async fn nodes_that_start_together_in_a_large_network_rarely_choose_the_same_subnet() {
    let server = with_config().await;
    // A list that is ten seconds old would be read again.
    tokio::time::pause();
    let nodes = 60;
    let stores: Vec<_> = (1..=nodes).map(|last| (last, server.store())).collect();
    // Each reads its list before any of them creates a lease.
    for (last, store) in &stores {
        assert_eq!(standing(store.own(&booted(*last))).await.unwrap(), None);
    }
    let before = received(&server);
    for (last, store) in &stores {
        let large = LeaseRequest { net_conf: net_conf(30, "10.5.255.0"), ..request(*last) };
        standing(store.acquire(&large)).await.unwrap();
    }
    let writes = since(&server, &before)["Txn"];
    // With 16,000 subnets, five collisions have a chance of one in a million. With the first 100 of them, 15 are expected.
    assert!(writes < u64::from(nodes) + 5, "{writes} writes for {nodes} leases");
}
