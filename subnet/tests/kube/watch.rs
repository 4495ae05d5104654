// SPDX-License-Identifier: Apache-2.0
//! The watch: which changes are reported, and an API server that goes away and comes back, also with another history.

use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Lease, Record};
use weft_subnet::source::{Event, RecordChange, Source};

use super::contract::{PATIENCE, attrs, first_list, next, request, until, watching};
use super::own::dual;
use super::relay::Relay;
use super::server::{Cluster, Server};

type Events = mpsc::Receiver<Event>;

async fn change(events: &mut Events) -> RecordChange {
    match next(events).await {
        Event::Changes(mut changes) if changes.len() == 1 => changes.remove(0),
        event => panic!("expected one change, got {event:?}"),
    }
}

async fn put(events: &mut Events) -> Lease {
    change(events).await.written().unwrap().lease.clone().unwrap()
}

async fn snapshot(events: &mut Events) -> Vec<Record> {
    match next(events).await {
        Event::Snapshot { records, reset: false } => records,
        event => panic!("expected a snapshot, got {event:?}"),
    }
}

/// Waits for the report of a failure.
async fn failure(events: &mut Events) -> String {
    let told = until(events, "the report of a failure", |event| matches!(event, Event::Unreachable(_))).await;
    let Event::Unreachable(text) = told else { panic!("{told:?}") };
    text
}

#[tokio::test]
async fn changes_that_do_not_concern_a_lease_are_not_reported() {
    let cluster = Cluster::shared().await;
    cluster.store(1).acquire(&request(1)).await.unwrap();
    watching(&cluster.store(2), |mut events| async move {
        assert_eq!(first_list(&mut events, 1, PATIENCE).await.len(), 1);
        for n in 0..5 {
            cluster.patch(1, &json!({"metadata": {"labels": {"n": n.to_string()}}})).await;
        }
        cluster.patch(2, &json!({"metadata": {"labels": {"n": "x"}}})).await;
        cluster.annotate(1, "backend-data", &json!(r#"{"VNI":7}"#)).await;
        assert_eq!(put(&mut events).await.attrs.backend_data.as_deref(), Some(r#"{"VNI":7}"#));
        cluster.annotate(1, "kube-subnet-manager", &json!("false")).await;
        assert_eq!(
            change(&mut events).await.removed().unwrap().as_ref(),
            cluster.node(1),
            "the Node has no lease any more"
        );
    })
    .await;
}

#[tokio::test]
async fn a_change_of_one_family_is_reported() {
    let cluster = Cluster::new(Server::shared().await).await;
    cluster.create(1, &["10.5.1.0/24", "fd00:12:0:1::/64"]).await;
    cluster.store(1).acquire(&dual(1)).await.unwrap();
    watching(&cluster.store(2), |mut events| async move {
        first_list(&mut events, 1, PATIENCE).await;
        cluster.annotate(1, "public-ipv6", &json!("2001:db8::77")).await;
        let lease = put(&mut events).await;
        let wanted = Attrs { public_ipv6: Some("2001:db8::77".parse().unwrap()), ..dual(1).attrs };
        assert_eq!(lease.attrs, wanted);
    })
    .await;
}

#[tokio::test]
async fn a_node_that_is_created_again_is_followed() {
    let cluster = Cluster::shared().await;
    let store = cluster.store(1);
    let lease = store.acquire(&request(1)).await.unwrap();
    watching(&store, |mut events| {
        let (store, cluster) = (&store, &cluster);
        async move {
            snapshot(&mut events).await;
            cluster.delete(1).await;
            assert_eq!(change(&mut events).await, RecordChange::Removed(lease.id));
            assert!(store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.is_err());
            cluster.create(1, &["10.5.9.0/24"]).await;
            let again = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
            assert_eq!((again.subnets.to_string().as_str(), &again.attrs), ("10.5.9.0/24", &lease.attrs));
            assert_ne!(again.age, lease.age);
            assert_eq!(put(&mut events).await, again);
        }
    })
    .await;
}

#[tokio::test]
async fn an_overwrite_is_applied_at_runtime() {
    let cluster = Cluster::shared().await;
    let store = cluster.store(1);
    let lease = store.acquire(&request(1)).await.unwrap();
    watching(&store, |mut events| {
        let (store, cluster) = (&store, &cluster);
        async move {
            snapshot(&mut events).await;
            for (value, wanted) in [(json!("198.51.100.9"), [198, 51, 100, 9]), (json!(null), [192, 0, 2, 1])] {
                cluster.annotate(1, "public-ip-overwrite", &value).await;
                assert_eq!(put(&mut events).await.attrs.public_ip, Some(wanted.into()));
                // The agent does this with an own record that has another address.
                let lease = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
                assert_eq!(lease.attrs.public_ip, Some(wanted.into()));
            }
        }
    })
    .await;
}

/// Tests outages and expired versions, for servers with and without streaming lists.
async fn lists_and_resumes(cluster: &Cluster) {
    let mut relay = Relay::open_to(cluster).await;
    let store = relay.store(cluster, 1);
    let first = store.acquire(&request(1)).await.unwrap();
    cluster.store(2).acquire(&request(2)).await.unwrap();
    watching(&store, |mut events| async move {
        let ids = |records: &[Record]| records.iter().map(|record| record.id.to_string()).collect::<Vec<_>>();
        assert_eq!(ids(&first_list(&mut events, 2, PATIENCE).await), [cluster.node(1), cluster.node(2)]);
        // The version has not expired: the changes in the meantime are reported in order, without a list.
        relay.close().await;
        failure(&mut events).await;
        cluster.delete(2).await;
        cluster.create(3, &["10.5.3.0/24"]).await;
        let third = cluster.store(3).acquire(&request(3)).await.unwrap();
        relay.open().await;
        assert_eq!(change(&mut events).await.removed().unwrap().as_ref(), cluster.node(2));
        assert_eq!(put(&mut events).await, third);
        // The version has expired (410): the next event is a snapshot.
        relay.close().await;
        failure(&mut events).await;
        cluster.delete(3).await;
        cluster.create(2, &["10.5.2.0/24"]).await;
        let second = cluster.store(2).acquire(&request(2)).await.unwrap();
        cluster.server.forget().await;
        relay.open().await;
        let records = snapshot(&mut events).await;
        assert_eq!(ids(&records), [cluster.node(1), cluster.node(2)]);
        assert_eq!(records.into_iter().map(|record| record.lease.unwrap()).collect::<Vec<_>>(), [first, second]);
        cluster.delete(2).await;
        assert_eq!(
            change(&mut events).await.removed().unwrap().as_ref(),
            cluster.node(2),
            "the watch must begin where the list ends"
        );
    })
    .await;
}

#[tokio::test]
async fn streaming_lists_and_resumed_watches() {
    let cluster = Cluster::new(Server::private("").await).await;
    cluster.create(1, &["10.5.1.0/24"]).await;
    cluster.create(2, &["10.5.2.0/24"]).await;
    lists_and_resumes(&cluster).await;
}

#[tokio::test]
async fn paged_lists_where_there_is_no_streaming() {
    let cluster = Cluster::new(Server::private("--feature-gates=WatchList=false").await).await;
    cluster.create(1, &["10.5.1.0/24"]).await;
    cluster.create(2, &["10.5.2.0/24"]).await;
    lists_and_resumes(&cluster).await;
}

/// A server that answers from its watch cache sends all Nodes at once. Only one without a cache sends pages.
#[tokio::test]
async fn every_page_is_read() {
    let cluster = Cluster::new(Server::private("--feature-gates=WatchList=false --watch-cache=false").await).await;
    let leases = |number: usize| number % 100 == 1;
    for first in (0..1200).step_by(50) {
        futures_util::future::join_all((first..first + 50).map(|number| {
            let (name, cidr) = (format!("n{number:04}"), format!("10.5.{}.0/24", number / 100));
            let managed = json!({cluster.annotation("kube-subnet-manager"): "true"});
            let annotations = if leases(number) { managed } else { json!({}) };
            let cluster = &cluster;
            async move { cluster.create_as(&name, &[&cidr], annotations).await }
        }))
        .await;
    }
    let wanted: Vec<String> = (0..1200).filter(|n| leases(*n)).map(|n| format!("n{n:04}")).collect();
    let names = |records: Vec<Record>| records.iter().map(|record| record.id.to_string()).collect::<Vec<_>>();
    assert_eq!(names(cluster.store(1).list().await.unwrap()), wanted);
    watching(&cluster.store(1), |mut events| async move {
        assert_eq!(names(snapshot(&mut events).await), wanted);
        cluster.delete_as("n1101").await;
        assert_eq!(
            change(&mut events).await,
            RecordChange::Removed("n1101".into()),
            "the watch must begin where the list ends"
        );
    })
    .await;
}

#[tokio::test]
async fn paged_lists_where_etcd_is_too_old() {
    let cluster = Cluster::new(Server::with_old_etcd().await).await;
    cluster.create(1, &["10.5.1.0/24"]).await;
    let lease = cluster.store(1).acquire(&request(1)).await.unwrap();
    watching(&cluster.store(2), |mut events| async move {
        assert_eq!(first_list(&mut events, 1, PATIENCE).await[0].lease.as_ref(), Ok(&lease));
        cluster.annotate(1, "kube-subnet-manager", &json!(null)).await;
        assert_eq!(change(&mut events).await, RecordChange::Removed(lease.id));
    })
    .await;
}

#[tokio::test]
async fn a_wiped_etcd_is_noticed() {
    let cluster = Cluster::new(Server::private("").await).await;
    cluster.create(1, &["10.5.1.0/24"]).await;
    let store = cluster.store(1);
    store.acquire(&request(1)).await.unwrap();
    for n in 0..150 {
        cluster.patch(1, &json!({"metadata": {"labels": {"n": n.to_string()}}})).await;
    }
    watching(&store, |mut events| {
        let (store, cluster) = (&store, &cluster);
        async move {
            snapshot(&mut events).await;
            // The new etcd must not have reached the last version that the watch knows.
            cluster.annotate(1, "backend-data", &json!(r#"{"VNI":7}"#)).await;
            put(&mut events).await;
            cluster.server.order("wipe");
            cluster.server.ready().await;
            let end = tokio::time::Instant::now() + PATIENCE;
            loop {
                assert!(tokio::time::Instant::now() < end, "no new list");
                match timeout(PATIENCE, events.recv()).await.unwrap() {
                    Some(Event::Snapshot { records, reset }) => {
                        assert!(reset && records.is_empty());
                        break;
                    }
                    Some(Event::Unreachable(_) | Event::Answered) => {}
                    event => panic!("{event:?}"),
                }
            }
            cluster.create(1, &["10.5.1.0/24"]).await;
            let lease = store.retake(&Default::default(), &attrs(1), &attrs(1)).await.unwrap();
            assert_eq!(put(&mut events).await, lease);
        }
    })
    .await;
}

#[tokio::test]
async fn a_server_that_hangs_is_noticed() {
    let cluster = Cluster::new(Server::private("").await).await;
    cluster.create(1, &["10.5.1.0/24"]).await;
    let store = cluster.store(1);
    watching(&store, |mut events| {
        let cluster = &cluster;
        async move {
            snapshot(&mut events).await;
            cluster.server.order("pause");
            let text = failure(&mut events).await;
            assert!(text.contains(&cluster.server.url()), "{text}");
            cluster.server.order("go-on");
            let lease = cluster.store(1).acquire(&request(1)).await.unwrap();
            assert_eq!(put(&mut events).await, lease);
        }
    })
    .await;
}
