// SPDX-License-Identifier: Apache-2.0
//! What the etcd store must not change: records that changed since they were read, records of other nodes, and the etcd leases that keys
//! are attached to.
//!
//! The store uses the list that [`Source::own`] has read for the next call. So a test can change keys between a list and the write that
//! follows from it.

use std::cell::Cell;
use std::time::Duration;

use etcd_client::{Client, PutOptions};
use tokio::sync::mpsc;
use weft_backends::register::TYPES;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::etcd::EtcdStore;
use weft_subnet::evidence::Evidence;
use weft_subnet::net_conf::Range;
use weft_subnet::source::{Error, Event, LeaseRequest, RecordChange, Source};

use super::contract::{SHORT_TTL, any, attrs, booted, net_conf, next, request, subnet, watching};
use super::server::{PREFIX, Server, options};

fn key(id: &str) -> String {
    format!("{PREFIX}/subnets/{id}")
}

pub fn dual(v4: &str, v6: &str) -> Subnets {
    Subnets { v4: v4.parse().ok(), v6: v6.parse().ok() }
}

/// Returns a request in a dual-stack network, with this previous subnet.
pub fn dual_request(last: u8, previous: Subnets) -> LeaseRequest {
    let mut request = LeaseRequest { previous: Some(previous), ..request(last) };
    let network = "fd00:12::/48".parse().unwrap();
    let (min, max) = ("fd00:12:0:1::".parse().unwrap(), "fd00:12:0:ff::".parse().unwrap());
    request.net_conf.networks.v6 = Some(network);
    request.net_conf.v6 = Some(Range { network, len: 64, min, max });
    request
}

/// Returns what our node publishes with other data and the same device.
fn other_data() -> Attrs {
    Attrs { backend_data: Some(r#"{"VNI":2,"VtepMAC":"c6:d2:32:6f:8f:44"}"#.into()), ..attrs(1) }
}

/// Returns the value of this key and its etcd lease.
async fn stored(client: &mut Client, id: &str) -> Option<(String, i64)> {
    let answer = client.get(key(id), None).await.unwrap();
    answer.kvs().first().map(|kv| (kv.value_str().unwrap().to_owned(), kv.lease()))
}

async fn leases(client: &mut Client) -> Vec<i64> {
    client.leases().await.unwrap().leases().iter().map(|lease| lease.id()).collect()
}

#[tokio::test]
async fn a_rewrite_leaves_the_key_attached_to_its_etcd_lease() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let lease = store.acquire(&request(1)).await.unwrap();
    let (_, attached) = stored(&mut client, &lease.id).await.unwrap();
    assert_ne!(attached, 0, "a lease that ends by itself");
    // The node publishes a change, and then starts again and publishes something else.
    let moved = attrs(7);
    store.retake(&lease.subnets, &attrs(1), &moved).await.unwrap();
    assert_eq!(stored(&mut client, &lease.id).await, Some((moved.to_wire(), attached)));
    let again = LeaseRequest { previous: Some(lease.subnets), was: Some(moved), ..request(1) };
    store.acquire(&again).await.unwrap();
    assert_eq!(stored(&mut client, &lease.id).await, Some((attrs(1).to_wire(), attached)));
    assert_eq!(leases(&mut client).await, [attached], "and no other etcd lease is made");
}

/// The list of the start is the first one that the watch reports.
#[tokio::test]
async fn our_record_is_in_the_list_of_the_start_once_and_as_it_was_written() {
    let server = Server::start().await;
    let lease = server.store().acquire(&request(1)).await.unwrap();
    let store = server.store();
    assert_eq!(store.own(&booted(1)).await.unwrap().as_ref(), Some(&lease));
    let mut changed = LeaseRequest { was: Some(attrs(1)), ..request(1) };
    changed.attrs.backend_data = Some(r#"{"VNI":2,"VtepMAC":"c6:d2:32:6f:8f:44"}"#.into());
    let written = store.acquire(&changed).await.unwrap();
    assert_eq!((&written.id, &written.attrs), (&lease.id, &changed.attrs));
    watching(&store, |mut events| async move {
        let Event::Snapshot { records, .. } = next(&mut events).await else { panic!("a snapshot comes first") };
        let leases: Vec<_> = records.into_iter().map(|record| record.lease.unwrap()).collect();
        assert_eq!(leases, [written]);
    })
    .await;
}

/// Our record came second in a race, and the agent ended before it could delete it.
#[tokio::test]
async fn our_younger_record_is_deleted_if_an_older_one_overlaps_it() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let (theirs, ours) = ("10.5.1.0-24&fd00:12:0:1::-64", "10.5.1.0-24&fd00:12:0:2::-64");
    client.put(key(theirs), attrs(2).to_wire(), None).await.unwrap();
    client.put(key(ours), attrs(1).to_wire(), None).await.unwrap();
    let lease = store.acquire(&dual_request(1, Subnets::from_key(ours).unwrap())).await.unwrap();
    assert!(!lease.subnets.overlaps(&Subnets::from_key(theirs).unwrap()), "{}", lease.subnets);
    assert_eq!(stored(&mut client, ours).await, None, "our old record is gone");
    assert_eq!(stored(&mut client, theirs).await, Some((attrs(2).to_wire(), 0)));
    // The older of two overlapping records is kept, and so is one that a record of a larger subnet overlaps. It is not younger because it was
    // written again.
    let younger = format!("{}&fd00:12:0:fe::-64", lease.subnets.to_key().split('&').next().unwrap());
    client.put(key(&younger), attrs(3).to_wire(), None).await.unwrap();
    store.retake(&lease.subnets, &attrs(1), &other_data()).await.unwrap();
    let again = store.acquire(&dual_request(1, lease.subnets)).await.unwrap();
    assert_eq!(again.subnets, lease.subnets);
}

/// An earlier run of this node was killed, and its write was carried out after our list was read. The pods use the subnet that is asked for.
#[tokio::test]
async fn a_record_of_ours_that_appears_meanwhile_does_not_cost_us_our_subnet() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    assert_eq!(store.own(&booted(1)).await.unwrap(), None);
    client.put(key("10.5.2.0-24&fd00:12:0:1::-64"), attrs(1).to_wire(), None).await.unwrap();
    // Nobody believes what cannot be read.
    client.put(key("10.5.2.0-24&fd00:12:0:3::-64"), "no lease", None).await.unwrap();
    let ours = dual("10.5.2.0/24", "fd00:12:0:2::/64");
    assert_eq!(store.acquire(&dual_request(1, ours)).await.unwrap().subnets, ours);
    let restarted = server.store().acquire(&dual_request(1, ours)).await.unwrap();
    assert_eq!(restarted.subnets, ours, "the older record is not that of another node");
}

/// No node believes what cannot be read. So it must not cost us our subnet, which pods use.
#[tokio::test]
async fn our_record_stays_if_the_older_one_that_overlaps_it_is_no_lease() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let (older, ours) = ("10.5.1.0-24&fd00:12:0:1::-64", "10.5.1.0-24&fd00:12:0:2::-64");
    client.put(key(older), "no lease", None).await.unwrap();
    client.put(key(ours), attrs(1).to_wire(), None).await.unwrap();
    let lease = store.acquire(&dual_request(1, Subnets::from_key(ours).unwrap())).await.unwrap();
    assert_eq!(lease.subnets.to_key(), ours);
}

/// Our record does not fit net-conf any more and must be deleted. Meanwhile another node got its subnet.
#[tokio::test]
async fn a_record_that_changed_since_it_was_read_is_not_deleted() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let lease = store.acquire(&request(1)).await.unwrap();
    assert!(store.own(&Evidence::of(TYPES, lease.subnets, &lease.attrs)).await.unwrap().is_some());
    client.put(key(&lease.id), attrs(9).to_wire(), None).await.unwrap();
    let longer = LeaseRequest { net_conf: net_conf(26, "10.5.255.0"), ..request(1) };
    let new = store.acquire(&longer).await.unwrap();
    assert_eq!(new.subnets.v4.unwrap().prefix_len(), 26);
    assert_eq!(stored(&mut client, &lease.id).await, Some((attrs(9).to_wire(), 0)), "the other node's lease is there");
}

/// The same for a record that is to be rewritten.
#[tokio::test]
async fn a_record_that_changed_since_it_was_read_is_not_rewritten() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    let lease = store.acquire(&request(1)).await.unwrap();
    assert!(store.own(&Evidence::of(TYPES, lease.subnets, &lease.attrs)).await.unwrap().is_some());
    client.put(key(&lease.id), attrs(9).to_wire(), None).await.unwrap();
    let changed = LeaseRequest { attrs: Attrs { backend_type: "host-gw".into(), ..attrs(1) }, ..request(1) };
    let new = store.acquire(&LeaseRequest { was: Some(attrs(1)), ..changed }).await.unwrap();
    assert_ne!(new.subnets, lease.subnets);
    assert_eq!(stored(&mut client, &lease.id).await, Some((attrs(9).to_wire(), 0)), "the other node's lease is there");
}

/// Another node wrote our key and left it attached to our etcd lease. If we renewed that lease, the record would never expire.
#[tokio::test]
async fn the_lease_of_another_node_is_not_renewed() {
    let server = Server::start().await;
    let mut short = options(vec![server.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let (mut client, own) = (server.client().await, lease.clone());
    let (kept, mut keeps) = mpsc::channel(64);
    watching(&store, |mut events| {
        let store = &store;
        async move {
            assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
            let body = async {
                // The lease was renewed for longer than its TTL.
                for _ in 0..5 {
                    assert!(matches!(any(&mut keeps).await, Event::Renewed(Some(_))));
                }
                let same = PutOptions::new().with_ignore_lease();
                client.put(key(&own.id), attrs(9).to_wire(), Some(same)).await.unwrap();
                assert!(matches!(next(&mut events).await, Event::Changes(_)));
                // The task that renews runs, and lets the lease expire. One renewal may have been under way. The node must not take the record of
                // the other node for removed.
                let (mut client, theirs) = (client.clone(), Cell::new(0));
                let renewed = async {
                    for _ in 0..10 {
                        let Event::Changes(changes) = any(&mut keeps).await else { continue };
                        match &changes[0] {
                            RecordChange::Written(record) => {
                                assert_eq!(record.lease.as_ref().unwrap().attrs, attrs(9));
                                theirs.set(theirs.get() + 1);
                            }
                            RecordChange::Removed(id) => {
                                assert_eq!(stored(&mut client, id).await, None, "reported as removed");
                            }
                        }
                    }
                };
                tokio::select! {
                    () = renewed => panic!("another node's lease is renewed"),
                    event = next(&mut events) => assert_eq!(event, Event::Changes(vec![RecordChange::Removed(own.id.clone())])),
                }
                assert_ne!(theirs.get(), 0, "whose record it is must be reported");
            };
            tokio::select! {
                () = store.keep(&lease, kept) => panic!("the keeper ended"),
                () = body => {}
            }
        }
    })
    .await;
}

/// Our etcd lease has expired, and another node has created the key. The watch has not reported that yet.
#[tokio::test]
async fn the_record_of_the_node_that_created_our_key_is_not_reported_as_removed() {
    let server = Server::start().await;
    let mut short = options(vec![server.url()]);
    short.lease_ttl = SHORT_TTL;
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    // From its first event on, the watch is not polled any more.
    let mut watch = store.watch(out);
    tokio::select! {
        () = &mut watch => panic!("the watch ended"),
        event = next(&mut events) => assert!(matches!(event, Event::Snapshot { .. })),
    }
    let mut client = server.client().await;
    let (_, attached) = stored(&mut client, &lease.id).await.unwrap();
    client.lease_revoke(attached).await.unwrap();
    client.put(key(&lease.id), attrs(9).to_wire(), None).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(64);
    let told = tokio::select! {
        () = store.keep(&lease, kept) => panic!("the keeper ended"),
        told = next(&mut keeps) => told,
    };
    let Event::Changes(changes) = told else { panic!("{told:?}") };
    let record = changes[0].written().unwrap_or_else(|| panic!("{changes:?}"));
    assert_eq!((&record.id, &record.lease.as_ref().unwrap().attrs), (&lease.id, &attrs(9)));
}

/// Somebody has attached our key to another etcd lease, or to none, and has ended ours. The watch has not reported that yet.
#[tokio::test]
async fn our_key_is_not_reported_as_removed_if_it_has_another_etcd_lease() {
    for is_reservation in [false, true] {
        let server = Server::start().await;
        let mut short = options(vec![server.url()]);
        short.lease_ttl = SHORT_TTL;
        let store = EtcdStore::new(short).unwrap();
        let lease = store.acquire(&request(1)).await.unwrap();
        let (out, mut events) = mpsc::channel(64);
        // From its first event on, the watch is not polled any more.
        let mut watch = store.watch(out);
        tokio::select! {
            () = &mut watch => panic!("the watch ended"),
            event = next(&mut events) => assert!(matches!(event, Event::Snapshot { .. })),
        }
        let mut client = server.client().await;
        let (_, attached) = stored(&mut client, &lease.id).await.unwrap();
        let other = if is_reservation { 0 } else { client.lease_grant(60, None).await.unwrap().id() };
        let other = PutOptions::new().with_lease(other);
        client.put(key(&lease.id), attrs(1).to_wire(), Some(other)).await.unwrap();
        client.lease_revoke(attached).await.unwrap();
        let (kept, mut keeps) = mpsc::channel(64);
        // The first report may still be about the etcd lease that was granted a moment ago.
        let second = async {
            any(&mut keeps).await;
            any(&mut keeps).await
        };
        let told = tokio::select! {
            () = store.keep(&lease, kept) => panic!("the keeper ended"),
            told = second => told,
        };
        let Event::Renewed(ttl) = told else { panic!("{told:?}") };
        assert_eq!(ttl.is_none(), is_reservation, "{ttl:?}");
        assert!(ttl.is_none_or(|ttl| ttl > Duration::from_secs(30)), "{ttl:?}");
    }
}

/// A value that cannot be read does not say that the key belongs to another node. The agent writes it again, and until then the key must stay.
#[tokio::test]
async fn our_key_is_renewed_although_its_value_cannot_be_read() {
    let server = Server::start().await;
    let mut short = options(vec![server.url()]);
    short.lease_ttl = Duration::from_secs(2);
    let store = EtcdStore::new(short).unwrap();
    let lease = store.acquire(&request(1)).await.unwrap();
    let same = PutOptions::new().with_ignore_lease();
    server.client().await.put(key(&lease.id), "no lease", Some(same)).await.unwrap();
    let (kept, mut keeps) = mpsc::channel(64);
    let renewed = async {
        for _ in 0..4 {
            let told = any(&mut keeps).await;
            assert!(matches!(told, Event::Renewed(Some(_))), "{told:?}");
        }
    };
    tokio::select! {
        () = store.keep(&lease, kept) => panic!("the keeper ended"),
        () = renewed => {}
    }
}

/// An earlier run of this node was killed. Its write of the same key was carried out after our list was read, with an etcd lease of its own.
#[tokio::test]
async fn the_etcd_lease_that_an_earlier_run_gave_our_key_is_kept_and_the_second_one_revoked() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    assert_eq!(store.own(&booted(1)).await.unwrap(), None);
    let first = client.lease_grant(600, None).await.unwrap().id();
    let with_lease = PutOptions::new().with_lease(first);
    client.put(key("10.5.9.0-24"), other_data().to_wire(), Some(with_lease)).await.unwrap();
    let ours = LeaseRequest { previous: Some(subnet("10.5.9.0/24")), ..request(1) };
    assert_eq!(store.acquire(&ours).await.unwrap().subnets, subnet("10.5.9.0/24"));
    assert_eq!(stored(&mut client, "10.5.9.0-24").await, Some((attrs(1).to_wire(), first)));
    assert_eq!(leases(&mut client).await, [first]);
}

/// Tests each case in which an etcd lease is granted and then not used. It would otherwise remain for a day.
#[tokio::test]
async fn an_etcd_lease_that_is_not_used_is_revoked() {
    let server = Server::start().await;
    let (store, mut client) = (server.store(), server.client().await);
    // The only subnet is taken between the list and the write.
    assert_eq!(store.own(&booted(1)).await.unwrap(), None);
    client.put(key("10.5.1.0-24"), attrs(2).to_wire(), None).await.unwrap();
    let error = store.acquire(&LeaseRequest { net_conf: net_conf(24, "10.5.1.0"), ..request(1) }).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { .. }), "{error}");
    assert!(leases(&mut client).await.is_empty(), "the one of the first attempt is revoked");
    // A lease that overlaps ours is created between the list and the write. Ours is deleted, and its etcd lease is used again.
    let store = server.store();
    assert_eq!(store.own(&booted(1)).await.unwrap(), None);
    client.put(key("10.5.2.0-24&fd00:12:0:1::-64"), attrs(2).to_wire(), None).await.unwrap();
    let lease = store.acquire(&dual_request(1, dual("10.5.2.0/24", "fd00:12:0:2::/64"))).await.unwrap();
    assert!(!lease.subnets.overlaps(&subnet("10.5.2.0/24")), "{}", lease.subnets);
    assert_eq!(stored(&mut client, "10.5.2.0-24&fd00:12:0:2::-64").await, None, "it was given up");
    let (_, attached) = stored(&mut client, &lease.id).await.unwrap();
    assert_eq!(leases(&mut client).await, [attached]);
    // Our record is gone, and another node has taken half of our subnet.
    store.remove(&lease.id).await.unwrap();
    client.lease_revoke(attached).await.unwrap();
    let half = format!("{}&fd00:12:0:fe::-64", lease.subnets.to_key().split('&').next().unwrap());
    client.put(key(&half), attrs(3).to_wire(), None).await.unwrap();
    let error = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap_err();
    assert!(matches!(error, Error::Taken { .. }), "{error}");
    assert!(leases(&mut client).await.is_empty());
}
