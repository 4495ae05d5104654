// SPDX-License-Identifier: Apache-2.0
//! What only the etcd store does: the exact bytes of flannel, etcd leases, and failures of the server.

use std::cell::Cell;
use std::collections::HashSet;
use std::convert::Infallible;
use std::time::Duration;

use etcd_client::{AlarmAction, AlarmType, Client, CompactionOptions, PutOptions, Txn, TxnOp};
use nix::sys::signal::Signal;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use weft_subnet::etcd::{EtcdOptions, EtcdStore};
use weft_subnet::retry::chain;
use weft_subnet::source::{Error, Event, LeaseRequest, RecordChange, Source};

use super::contract::{PATIENCE, SHORT_TTL, any, attrs, booted, next, request, subnet, until, watching, within};
use super::server::{PREFIX, Server, free_port, options};

fn key(id: &str) -> String {
    format!("{PREFIX}/subnets/{id}")
}

#[tokio::test]
async fn keys_and_values_are_byte_for_byte_those_of_flannel() {
    let server = Server::start().await;
    let wanted = Some(subnet("10.5.52.0/24"));
    server.store().acquire(&LeaseRequest { previous: wanted, ..request(3) }).await.unwrap();
    let out = server.etcdctl(&["get", "--prefix", PREFIX]);
    let value = r#"{"PublicIP":"192.0.2.3","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:46"}}"#;
    assert_eq!(String::from_utf8(out).unwrap(), format!("{PREFIX}/subnets/10.5.52.0-24\n{value}\n"));
}

#[tokio::test]
async fn a_key_lives_as_long_as_the_flag_says() {
    let server = Server::start().await;
    let two_hours = EtcdOptions { lease_ttl: Duration::from_secs(7200), ..options(vec![server.url()]) };
    let lease = EtcdStore::new(two_hours).unwrap().acquire(&request(1)).await.unwrap();
    let mut client = server.client().await;
    let attached = client.get(key(&lease.id), None).await.unwrap().kvs()[0].lease();
    assert_eq!(client.lease_time_to_live(attached, None).await.unwrap().granted_ttl(), 7200);
}

#[tokio::test]
async fn a_slash_at_the_end_of_the_prefix_makes_no_difference() {
    let server = Server::start().await;
    let lease = server.store().acquire(&request(1)).await.unwrap();
    let with_slash = EtcdOptions { prefix: format!("{PREFIX}/"), ..options(vec![server.url()]) };
    let store = EtcdStore::new(with_slash).unwrap();
    assert_eq!(store.own(&booted(1)).await.unwrap(), Some(lease));
}

#[tokio::test]
async fn a_reservation_stays_a_reservation() {
    let server = Server::start().await;
    let mut client = server.client().await;
    client.put(key("10.5.9.0-24"), r#"{"PublicIP":"192.0.2.1"}"#, None).await.unwrap();
    let store = server.store();
    let lease = store.acquire(&request(1)).await.unwrap();
    assert_eq!((lease.subnets, &lease.attrs), (subnet("10.5.9.0/24"), &attrs(1)));
    let answer = client.get(key("10.5.9.0-24"), None).await.unwrap();
    assert_eq!(answer.kvs()[0].lease(), 0);
    let (out, mut events) = mpsc::channel(4);
    tokio::select! {
        () = store.keep(&lease, out) => panic!("the keeper ended"),
        event = any(&mut events) => assert_eq!(event, Event::Renewed(None)),
    }
    assert!(client.leases().await.unwrap().leases().is_empty(), "no etcd lease may be left over");
}

#[tokio::test]
async fn the_renewal_reports_a_key_that_is_gone_without_a_watch() {
    let server = Server::start().await;
    let mut short = options(vec![server.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let mut client = server.client().await;
    let (kept, mut keeps) = mpsc::channel(64);
    let body = async {
        assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
        let etcd_lease = client.get(key(&lease.id), None).await.unwrap().kvs()[0].lease();
        client.lease_revoke(etcd_lease).await.unwrap();
        loop {
            match keeps.recv().await.unwrap() {
                Event::Renewed(Some(_)) => {}
                Event::Changes(changes) => break assert_eq!(changes, [RecordChange::Removed(lease.id.clone())]),
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        () = store.keep(&lease, kept) => panic!("the keeper ended"),
        done = timeout(PATIENCE, body) => done.expect("nothing was reported"),
    }
}

#[tokio::test]
async fn a_renewal_that_fails_is_reported_and_tried_again() {
    let mut server = Server::start().await;
    let mut short = options(vec![server.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(64);
    let body = async {
        assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
        server.end();
        loop {
            match keeps.recv().await.unwrap() {
                Event::Renewed(Some(_)) => {}
                Event::NotRenewed(text) => break assert!(text.contains(&server.url()), "{text}"),
                other => panic!("{other:?}"),
            }
        }
        server.again();
        loop {
            match keeps.recv().await.unwrap() {
                Event::NotRenewed(_) => {}
                Event::Renewed(Some(_)) => break,
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::select! {
        () = store.keep(&lease, kept) => panic!("the keeper ended"),
        done = timeout(2 * PATIENCE, body) => done.expect("a report"),
    }
}

#[tokio::test]
async fn the_etcd_lease_that_the_key_is_attached_to_now_is_renewed() {
    let server = Server::start().await;
    let mut short = options(vec![server.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let mut client = server.client().await;
    let (kept, mut keeps) = mpsc::channel(64);
    watching(&store, |mut events| {
        let (store, lease) = (&store, &lease);
        async move {
            next(&mut events).await;
            let grant = client.lease_grant(SHORT_TTL.as_secs().cast_signed(), None).await.unwrap().id();
            let body = async {
                assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
                client
                    .put(key(&lease.id), lease.attrs.to_wire(), Some(PutOptions::new().with_lease(grant)))
                    .await
                    .unwrap();
                let end = Instant::now() + 2 * SHORT_TTL;
                while Instant::now() < end {
                    any(&mut keeps).await;
                }
                let answer = client.get(key(&lease.id), None).await.unwrap();
                assert_eq!(answer.kvs()[0].lease(), grant);
            };
            tokio::select! {
                () = store.keep(lease, kept) => panic!("the keeper ended"),
                () = body => {}
            }
            // Nobody renews the etcd lease any more, so it expires, and the watch reports that the key is gone.
            let removal = Event::Changes(vec![RecordChange::Removed(lease.id.clone())]);
            until(&mut events, "the removal of our key", |event| *event == removal).await;
        }
    })
    .await;
}

/// An operator gives our key an etcd lease that ends soon. The next renewal of the one before would be hours later.
#[tokio::test]
async fn an_etcd_lease_that_somebody_gives_our_key_is_renewed_at_once() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let lease = store.acquire(&request(1)).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(64);
    watching(&store, async |mut events| {
        next(&mut events).await;
        let body = async {
            let first = any(&mut keeps).await;
            assert!(matches!(first, Event::Renewed(Some(ttl)) if ttl > Duration::from_secs(3600)), "{first:?}");
            let grant = client.lease_grant(600, None).await.unwrap().id();
            let other = PutOptions::new().with_lease(grant);
            client.put(key(&lease.id), lease.attrs.to_wire(), Some(other)).await.unwrap();
            let is_short = |event: &Event| matches!(event, Event::Renewed(Some(ttl)) if ttl.as_secs() <= 600);
            until(&mut keeps, "the renewal of the operator's etcd lease", is_short).await;
        };
        tokio::select! {
            () = store.keep(&lease, kept) => panic!("the keeper ended"),
            () = body => {}
        }
    })
    .await;
}

/// The same before the watch begins. It does not report what happened before its list.
#[tokio::test]
async fn an_etcd_lease_that_somebody_gave_our_key_before_the_list_is_renewed_at_once() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let lease = store.acquire(&request(1)).await.unwrap();
    let grant = client.lease_grant(600, None).await.unwrap().id();
    let other = PutOptions::new().with_lease(grant);
    client.put(key(&lease.id), lease.attrs.to_wire(), Some(other)).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(64);
    watching(&store, async |mut events| {
        assert_eq!(snapshot(&mut events).await, (1, false));
        let is_short = |event: &Event| matches!(event, Event::Renewed(Some(ttl)) if ttl.as_secs() <= 600);
        tokio::select! {
            () = store.keep(&lease, kept) => panic!("the keeper ended"),
            _ = until(&mut keeps, "the renewal of the operator's etcd lease", is_short) => {}
        }
    })
    .await;
}

#[tokio::test]
async fn everything_is_read_again_after_a_compaction() {
    let mut server = Server::start().await;
    let store = server.store();
    let config = format!("{PREFIX}/config");
    let net_conf = |number: u8| format!(r#"{{"Network":"10.{number}.0.0/16"}}"#);
    server.client().await.put(config.as_str(), net_conf(5), None).await.unwrap();
    let (out, mut events) = mpsc::channel(1);
    let watch = store.watch(out);
    tokio::pin!(watch);
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        event = next(&mut events) => assert!(matches!(event, Event::Snapshot { .. })),
    }
    // The server restarts, so that the watch hears nothing of what follows. The revision at which it would resume is compacted.
    server.end();
    server.again();
    server.ready().await;
    let mut client = server.client().await;
    client.put(config.as_str(), net_conf(4), None).await.unwrap();
    let mut revision = 0;
    for last in 1..5 {
        let put = client.put(key(&format!("10.5.{last}.0-24")), attrs(last).to_wire(), None).await.unwrap();
        revision = put.header().unwrap().revision();
    }
    client.compact(revision, None).await.unwrap();
    let again = async {
        let (count, reset) = snapshot(&mut events).await;
        (count, reset, next(&mut events).await)
    };
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        seen = again => assert_eq!(seen, (4, false, Event::Config(net_conf(4)))),
    }
}

/// Waits for an empty list, writes a lease, and waits for its event.
async fn one_lease_appears(client: &mut Client, events: &mut mpsc::Receiver<Event>) {
    assert_eq!(snapshot(events).await, (0, false));
    client.put(key("10.5.1.0-24"), attrs(1).to_wire(), None).await.unwrap();
    assert_eq!(ids(events, 1).await, ["10.5.1.0-24"]);
}

/// etcd before 3.4.34 has nothing of a deletion that it has compacted. So a watch that began with the deletion would never hear of it.
#[tokio::test]
async fn a_lease_that_was_deleted_and_compacted_while_the_watch_was_away_goes() {
    let mut server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let (out, mut events) = mpsc::channel(64);
    let mut watch = store.watch(out);
    let begins = one_lease_appears(&mut client, &mut events);
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        () = begins => {}
    }
    // The watch does not run meanwhile. The deletion is the first change after the last one that it knows.
    server.end();
    server.again();
    server.ready().await;
    let mut client = server.client().await;
    let deleted = client.delete(key("10.5.1.0-24"), None).await.unwrap().header().unwrap().revision();
    client.compact(deleted, Some(CompactionOptions::new().with_physical())).await.unwrap();
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        seen = snapshot(&mut events) => assert_eq!(seen, (0, false), "the lease is gone"),
    }
}

/// Collects the ids of changes until there are `count`.
async fn ids(events: &mut mpsc::Receiver<Event>, count: usize) -> Vec<String> {
    let mut seen = Vec::new();
    while seen.len() < count {
        match next(events).await {
            Event::Changes(changes) => {
                seen.extend(changes.iter().map(|change| change.written().unwrap().id.to_string()))
            }
            event => panic!("the watch must be resumed, not answered by {event:?}"),
        }
    }
    seen
}

#[tokio::test]
async fn the_watch_is_resumed_after_the_server_stopped_or_restarted() {
    let mut server = Server::start().await;
    let store = server.store();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        server.signal(Signal::SIGSTOP);
        // The watch must notice this although nothing is written.
        let is_failure = |event: &Event| matches!(event, Event::Unreachable(_));
        let told = until(&mut events, "the report of the stopped server", is_failure).await;
        let Event::Unreachable(text) = told else { panic!("{told:?}") };
        assert!(text.contains(&server.url()), "{text}");
        server.signal(Signal::SIGCONT);
        server.ready().await;
        server.client().await.put(key("10.5.1.0-24"), attrs(1).to_wire(), None).await.unwrap();
        assert_eq!(ids(&mut events, 1).await, ["10.5.1.0-24"]);
        server.end();
        server.again();
        server.ready().await;
        let mut client = server.client().await;
        for last in 2..6 {
            client.put(key(&format!("10.5.{last}.0-24")), attrs(last).to_wire(), None).await.unwrap();
        }
        assert_eq!(ids(&mut events, 4).await, ["10.5.2.0-24", "10.5.3.0-24", "10.5.4.0-24", "10.5.5.0-24"]);
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

#[tokio::test]
async fn a_wiped_store_is_reported_as_another_store() {
    let mut server = Server::start().await;
    let store = server.store();
    store.acquire(&request(1)).await.unwrap();
    store.acquire(&request(2)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { reset: false, .. }));
        server.end();
        server.wipe();
        server.again();
        server.ready().await;
        assert_eq!(next(&mut events).await, Event::Snapshot { records: Vec::new(), reset: true });
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// Returns the next snapshot: the number of its records, and whether it comes from another store. All other events are skipped.
async fn snapshot(events: &mut mpsc::Receiver<Event>) -> (usize, bool) {
    let is_list = |event: &Event| matches!(event, Event::Snapshot { .. });
    let told = until(events, "a list of all leases", is_list).await;
    let Event::Snapshot { records, reset } = told else { panic!("{told:?}") };
    (records.len(), reset)
}

/// Ends the server, starts another store at its address, and writes seven leases there. A watch of the former store must not run meanwhile, so
/// that the other store has more revisions when the watch looks at it.
async fn replace_with_seven_leases(server: &mut Server, start: impl FnOnce(&mut Server)) {
    server.end();
    start(server);
    server.ready().await;
    let mut client = server.client().await;
    for last in 2..9 {
        client.put(key(&format!("10.5.{last}.0-24")), attrs(last).to_wire(), None).await.unwrap();
    }
}

/// Another cluster listens at the same address. It has more revisions and no net-conf, so only the id of the cluster tells them apart.
#[tokio::test]
async fn another_cluster_with_a_higher_revision_is_reported_as_another_store() {
    let mut server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let (out, mut events) = mpsc::channel(64);
    let mut watch = store.watch(out);
    let begins = one_lease_appears(&mut client, &mut events);
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        () = begins => {}
    }
    replace_with_seven_leases(&mut server, |server| server.again_as("another")).await;
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        seen = snapshot(&mut events) => assert_eq!(seen, (7, true)),
    }
}

/// The list is not checked again before the watch that follows it at once. So the first question whether the server is alive finds it.
#[tokio::test]
async fn a_store_that_is_replaced_between_the_list_and_the_watch_is_noticed_although_it_is_silent() {
    let mut server = Server::start().await;
    server.store().acquire(&request(1)).await.unwrap();
    // The watch begins with this list.
    let store = server.store();
    store.own(&booted(1)).await.unwrap().expect("our lease");
    server.end();
    server.again_as("another");
    server.ready().await;
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert_eq!(snapshot(&mut events).await, (1, false));
        assert_eq!(snapshot(&mut events).await, (0, true));
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// A wiped etcd with the same member has the same cluster id. If it is filled quickly, its revision is higher than the last one, too.
#[tokio::test]
async fn a_wiped_store_with_a_higher_revision_is_recognised_by_its_net_conf() {
    let mut server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let config = format!("{PREFIX}/config");
    client.put(config.as_str(), r#"{"Network":"10.5.0.0/16"}"#, None).await.unwrap();
    for last in 1..6 {
        client.put(key(&format!("10.5.{last}.0-24")), attrs(last).to_wire(), None).await.unwrap();
    }
    let (out, mut events) = mpsc::channel(64);
    let mut watch = store.watch(out);
    let begins = async {
        assert_eq!(snapshot(&mut events).await, (5, false));
        client.put(key("10.5.6.0-24"), attrs(6).to_wire(), None).await.unwrap();
        until(&mut events, "the event of the lease", |event| matches!(event, Event::Changes(_))).await;
    };
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        () = begins => {}
    }
    server.end();
    server.wipe();
    server.again();
    server.ready().await;
    let mut client = server.client().await;
    for last in 1..4 {
        client.put(key(&format!("10.5.{last}.0-24")), attrs(last).to_wire(), None).await.unwrap();
    }
    // The same text at another revision, which is not later than the last one that the watch knows.
    client.put(config.as_str(), r#"{"Network":"10.5.0.0/16"}"#, None).await.unwrap();
    for _ in 0..9 {
        client.put(key("10.5.1.0-24"), attrs(1).to_wire(), None).await.unwrap();
    }
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        seen = snapshot(&mut events) => assert_eq!(seen, (3, true)),
    }
}

/// There is no net-conf. The term is higher because etcd was started again before. A restored etcd begins with the first term, too.
#[tokio::test]
async fn a_wiped_store_with_a_higher_revision_is_recognised_by_its_term() {
    let mut server = Server::start().await;
    server.end();
    server.again();
    server.ready().await;
    let (store, mut client) = (server.store(), server.client().await);
    let (out, mut events) = mpsc::channel(64);
    let mut watch = store.watch(out);
    let begins = one_lease_appears(&mut client, &mut events);
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        () = begins => {}
    }
    let again_without_data = |server: &mut Server| {
        server.wipe();
        server.again();
    };
    replace_with_seven_leases(&mut server, again_without_data).await;
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        seen = snapshot(&mut events) => assert_eq!(seen, (7, true)),
    }
}

#[tokio::test]
async fn a_net_conf_that_changed_is_no_sign_of_another_store() {
    let mut server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let net_conf = |number: u8| format!(r#"{{"Network":"10.{number}.0.0/16"}}"#);
    let config = format!("{PREFIX}/config");
    client.put(config.as_str(), net_conf(1), None).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let mut watch = store.watch(out);
    let begins = async {
        assert_eq!(snapshot(&mut events).await, (0, false));
        // Once while the watch runs.
        client.put(config.as_str(), net_conf(2), None).await.unwrap();
        assert_eq!(next(&mut events).await, Event::Config(net_conf(2)));
    };
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        () = begins => {}
    }
    for number in [3, 4] {
        server.end();
        server.again();
        server.ready().await;
        let mut client = server.client().await;
        client.put(key(&format!("10.5.{number}.0-24")), attrs(number).to_wire(), None).await.unwrap();
        if number == 4 {
            // Once while the watch is away.
            client.put(config.as_str(), net_conf(number), None).await.unwrap();
        }
        let goes_on = async {
            assert_eq!(ids(&mut events, 1).await, [format!("10.5.{number}.0-24")]);
            if number == 4 {
                assert_eq!(next(&mut events).await, Event::Config(net_conf(number)));
            }
        };
        tokio::select! {
            () = &mut watch => panic!("the watch ended"),
            () = goes_on => {}
        }
    }
}

#[tokio::test]
async fn a_net_conf_that_was_deleted_stays_in_force_until_there_is_another() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let net_conf = |number: u8| format!(r#"{{"Network":"10.{number}.0.0/16"}}"#);
    let config = format!("{PREFIX}/config");
    client.put(config.as_str(), net_conf(1), None).await.unwrap();
    watching(&store, async |mut events| {
        assert_eq!(snapshot(&mut events).await, (0, false));
        client.delete(config.as_str(), None).await.unwrap();
        client.put(config.as_str(), net_conf(1), None).await.unwrap();
        client.put(key("10.5.1.0-24"), attrs(1).to_wire(), None).await.unwrap();
        // The first event is that of the lease.
        assert_eq!(ids(&mut events, 1).await, ["10.5.1.0-24"]);
        client.put(config.as_str(), net_conf(2), None).await.unwrap();
        assert_eq!(next(&mut events).await, Event::Config(net_conf(2)));
    })
    .await;
}

/// Neither a list in smaller pages nor one without values makes such an answer smaller.
#[tokio::test]
async fn a_net_conf_that_is_larger_than_any_message_is_an_error() {
    let server = Server::start_with("http", |_| vec!["--max-request-bytes".to_owned(), (64 << 20).to_string()]);
    server.ready().await;
    server.client().await.put(format!("{PREFIX}/config"), "x".repeat(17 << 20), None).await.unwrap();
    let store = server.store();
    let read = within(PATIENCE, "net-conf, or an error,", store.config()).await;
    assert!(matches!(read, Err(Error::Unavailable { .. })), "{:?}", read.map(|text| text.len()));
}

/// It answers, so only those who ask for it, or write, notice that.
#[tokio::test]
async fn an_etcd_that_is_full_says_so_to_whoever_asks_or_writes() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    assert_eq!(store.alarm().await.unwrap(), None);
    client.alarm(AlarmAction::Activate, AlarmType::Nospace, None).await.unwrap();
    let alarm = store.alarm().await.unwrap().expect("the alarm");
    assert!(alarm.what.contains("alarm NOSPACE") && alarm.remedy.contains("etcdctl alarm disarm"), "{alarm:?}");
    let text = chain(&store.acquire(&request(1)).await.unwrap_err());
    assert!(text.contains("(etcd is full and refuses all writes: etcdctl compact"), "{text}");
    assert!(store.list().await.unwrap().is_empty(), "it can be read");
}

/// Accepts connections and counts them. `answer` says what happens to each connection.
async fn accept(
    listener: &tokio::net::TcpListener,
    count: &Cell<usize>,
    mut answer: impl FnMut(tokio::net::TcpStream),
) -> Infallible {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        count.set(count.get() + 1);
        answer(stream);
    }
}

#[tokio::test]
async fn an_endpoint_that_does_not_work_is_left_and_not_asked_again() {
    let live = Server::start().await;
    let bind = || tokio::net::TcpListener::bind("127.0.0.1:0");
    let (silent, closing) = (bind().await.unwrap(), bind().await.unwrap());
    let url = |listener: &tokio::net::TcpListener| format!("http://{}", listener.local_addr().unwrap());
    let (silent_count, closing_count) = (Cell::new(0), Cell::new(0));
    let (zero, mut open) = (Cell::new(0), Vec::new());
    let body = async {
        let closed_port = format!("http://127.0.0.1:{}", free_port());
        for (bad, count) in [(closed_port, &zero), (url(&silent), &silent_count), (url(&closing), &closing_count)] {
            let store = EtcdStore::new(options(vec![bad.clone(), live.url()])).unwrap();
            store.list().await.unwrap();
            let connections = count.get();
            store.list().await.unwrap();
            assert_eq!(count.get(), connections, "the second list must not ask {bad}");
        }
        assert_eq!(silent_count.get(), 1, "the list must wait for a silent endpoint only once");
        assert!(closing_count.get() > 0, "the endpoint that comes first must be asked first");
    };
    tokio::select! {
        () = body => {}
        never = accept(&silent, &silent_count, |stream| open.push(stream)) => match never {},
        never = accept(&closing, &closing_count, drop) => match never {},
    }
}

#[tokio::test]
async fn fifty_thousand_leases_are_listed_each_once() {
    let server = Server::start().await;
    let mut client = server.client().await;
    let leases = (0..50_000_u32).map(|n| {
        let address = std::net::Ipv4Addr::from(0x0a00_0000 + (n << 8));
        (key(&format!("{address}-24")).into_bytes(), attrs(1).to_wire())
    });
    // The first page ends among these keys, whose names no lease can have.
    let foreign = (0..1_500_u16).map(|n| {
        let name = [&[1, 0xff], &n.to_be_bytes()[..]].concat();
        ([key("").into_bytes(), name].concat(), "not a lease".into())
    });
    let all: Vec<_> = leases.chain(foreign).collect();
    for batch in all.chunks(128) {
        let put = |(key, value): &(Vec<u8>, _)| TxnOp::put(key.clone(), String::clone(value), None);
        client.txn(Txn::new().and_then(batch.iter().map(put).collect::<Vec<_>>())).await.unwrap();
    }
    let records = server.store().list().await.unwrap();
    assert_eq!(records.len(), 50_000);
    let leases: HashSet<_> = records.iter().filter_map(|record| record.lease.as_ref().ok()?.subnets.v4).collect();
    assert_eq!(leases.len(), 50_000, "each lease must occur once");
}

#[tokio::test]
async fn leases_are_read_although_other_values_are_larger_than_any_message() {
    let server = Server::start().await;
    let mut client = server.client().await;
    client.put(key("10.5.1.0-24"), attrs(1).to_wire(), None).await.unwrap();
    client.put(key("10.5.250.0-24"), attrs(250).to_wire(), None).await.unwrap();
    // These are a hundred megabytes, more than six times the limit of one answer.
    let huge = format!("{{\"BackendType\":\"{}\"}}", "x".repeat(1_000_000));
    for n in 100..200 {
        client.put(key(&format!("10.5.{n}.0-24")), huge.as_str(), None).await.unwrap();
    }
    let store = server.store();
    let read = |records: &[weft_subnet::lease::Record]| {
        let (good, bad): (Vec<_>, Vec<_>) = records.iter().partition(|record| record.lease.is_ok());
        assert!(
            bad.iter().all(|record| record.lease.as_ref().unwrap_err().as_str().contains("larger than 4096 bytes")),
            "{bad:?}"
        );
        (good.len(), bad.len())
    };
    // On a busy machine the server may need longer for this answer than the store waits, so the list is tried again, as the agent does.
    let list = async {
        loop {
            match store.list().await {
                Err(Error::Unavailable { .. }) => {}
                list => break list.unwrap(),
            }
        }
    };
    assert_eq!(read(&timeout(Duration::from_secs(120), list).await.unwrap()), (2, 100));
    let (out, mut events) = mpsc::channel(1);
    let body = async {
        let Event::Snapshot { records, .. } = next(&mut events).await else { panic!("a list comes first") };
        assert_eq!(read(&records), (2, 100));
        // The watch is not polled meanwhile, so its next message would be as large.
        for n in 100..130 {
            client.put(key(&format!("10.5.{n}.0-24")), huge.as_str(), None).await.unwrap();
        }
        client.put(key("10.5.251.0-24"), attrs(251).to_wire(), None).await.unwrap();
        loop {
            let good = |id: &str| id == "10.5.251.0-24";
            match next(&mut events).await {
                Event::Changes(changes)
                    if changes.iter().filter_map(RecordChange::written).any(|record| good(&record.id)) =>
                {
                    break;
                }
                Event::Snapshot { records, .. } if records.iter().any(|record| good(&record.id)) => break,
                Event::Changes(_) | Event::Snapshot { .. } | Event::Answered => {}
                event => panic!("{event:?}"),
            }
        }
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// The first value comes together with net-conf, and is too large even without the others.
#[tokio::test]
async fn leases_are_read_although_the_first_value_is_larger_than_any_message() {
    let server = Server::start_with("http", |_| vec!["--max-request-bytes".to_owned(), (64 << 20).to_string()]);
    server.ready().await;
    let mut client = server.client().await;
    let net_conf = r#"{"Network":"10.5.0.0/16"}"#;
    client.put(format!("{PREFIX}/config"), net_conf, None).await.unwrap();
    client.put(key("10.5.1.0-24"), "x".repeat(17 << 20), None).await.unwrap();
    client.put(key("10.5.2.0-24"), attrs(2).to_wire(), None).await.unwrap();
    // So is this one, which comes with a later page.
    client.put(key("10.5.3.0-24"), "x".repeat(17 << 20), None).await.unwrap();
    client.put(key("10.5.4.0-24"), attrs(4).to_wire(), None).await.unwrap();
    let store = server.store();
    let list = within(PATIENCE, "the list of all leases", store.list()).await.unwrap();
    let read: Vec<_> = list.iter().map(|record| (&*record.id, record.lease.is_ok())).collect();
    let wanted = [("10.5.1.0-24", false), ("10.5.2.0-24", true), ("10.5.3.0-24", false), ("10.5.4.0-24", true)];
    assert_eq!(read, wanted);
    assert_eq!(store.config().await.unwrap(), net_conf);
}

/// An administrator may allow etcd requests of any size. Such an event cannot be received, and a watch that is resumed would get it again.
#[tokio::test]
async fn a_single_event_that_is_larger_than_any_message_leads_to_a_new_list() {
    let server = Server::start_with("http", |_| vec!["--max-request-bytes".to_owned(), (64 << 20).to_string()]);
    server.ready().await;
    let (store, mut client) = (server.store(), server.client().await);
    watching(&store, async |mut events| {
        assert_eq!(snapshot(&mut events).await, (0, false));
        client.put(key("10.5.1.0-24"), attrs(1).to_wire(), None).await.unwrap();
        assert_eq!(ids(&mut events, 1).await, ["10.5.1.0-24"]);
        client.put(key("10.5.2.0-24"), "x".repeat(17 << 20), None).await.unwrap();
        assert_eq!(snapshot(&mut events).await, (2, false), "a list in place of the event");
        client.put(key("10.5.3.0-24"), attrs(3).to_wire(), None).await.unwrap();
        assert_eq!(ids(&mut events, 1).await, ["10.5.3.0-24"]);
    })
    .await;
}

/// While the watch was away, somebody may have given our key another etcd lease. The next renewal would be hours later.
#[tokio::test]
async fn our_lease_is_renewed_at_once_after_a_new_list() {
    let server = Server::start_with("http", |_| vec!["--max-request-bytes".to_owned(), (64 << 20).to_string()]);
    server.ready().await;
    let (store, mut client) = (server.store(), server.client().await);
    let ours = LeaseRequest { previous: Some(subnet("10.5.1.0/24")), ..request(1) };
    let lease = store.acquire(&ours).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(64);
    watching(&store, async |mut events| {
        assert_eq!(snapshot(&mut events).await, (1, false));
        let body = async {
            assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
            // The event of this write cannot be received, so all leases are read again.
            client.put(key("10.5.2.0-24"), "x".repeat(17 << 20), None).await.unwrap();
            assert_eq!(snapshot(&mut events).await, (2, false));
            let told = any(&mut keeps).await;
            assert!(matches!(told, Event::Renewed(Some(_))), "{told:?}");
        };
        tokio::select! {
            () = store.keep(&lease, kept) => panic!("the keeper ended"),
            () = body => {}
        }
    })
    .await;
}
