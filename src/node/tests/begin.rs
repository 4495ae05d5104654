// SPDX-License-Identifier: Apache-2.0
//! The first pass, with or without a list from the store.

use std::io::ErrorKind;

use weft_backends::state::{Key, Name, ObservedValue, Route, Value};
use weft_subnet::saved_peers::Saved;
use weft_subnet::source::Event;

use super::wireguard::head;
use super::{CONFIG, PROTOCOL, TestNode, VXLAN, lease, local, stored};
use crate::options::{OnLostLease, RuleOptions};
use crate::pass::Cause;

fn list(peers: &[(&str, &str)]) -> Vec<Event> {
    let own = stored("10.5.1.0-24", "192.168.0.1");
    let records = [own].into_iter().chain(peers.iter().map(|(key, ip)| stored(key, ip))).collect();
    vec![Event::Snapshot { records, reset: false }]
}

/// Adds a route that an earlier run has left, to a peer that is gone.
fn add_stale_route(test: &TestNode) -> Key {
    let key = Key::Route("10.5.8.0/24".parse().unwrap(), 0);
    let (via, dev) = ("192.168.0.8".parse().unwrap(), Name::new("eth0").unwrap());
    let value = Value::Route(Route::Unicast { via, dev, onlink: false });
    test.kernel.disturb(key, Some(ObservedValue { value, protocol: PROTOCOL, mark: false }), false);
    key
}

#[tokio::test]
async fn the_first_pass_uses_the_first_list() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        let stale = add_stale_route(&test);
        test.node.start(list(&[("10.5.2.0-24", "192.168.0.2")])).await;
        assert_eq!(test.kernel.observations(), 1);
        assert_eq!(test.via("10.5.2.0/24"), "192.168.0.2".parse().ok());
        assert!(!test.kernel.entries().contains_key(&stale));
        assert!(test.file.exists());
    })
    .await;
}

#[tokio::test]
async fn nothing_is_removed_before_the_store_has_sent_a_list() {
    local(async {
        for events in [vec![], vec![Event::Unreachable("no answer".into())]] {
            let mut test = TestNode::new(OnLostLease::Hold);
            let stale = add_stale_route(&test);
            test.node.start(events).await;
            assert!(test.file.exists(), "subnet.env must be written, so that pods can start");
            assert!(test.kernel.entries().contains_key(&stale));
            test.node.store_changed(list(&[("10.5.2.0-24", "192.168.0.2")])).await;
            assert!(!test.kernel.entries().contains_key(&stale));
        }
    })
    .await;
}

/// The store may have been wiped. Then the peers come back one by one.
#[tokio::test]
async fn neither_a_first_list_without_peers_nor_a_short_second_one_removes_entries() {
    local(async {
        let own = stored("10.5.1.0-24", "192.168.0.1");
        for first in [vec![], vec![own]] {
            let mut test = TestNode::new(OnLostLease::Hold);
            let stale = add_stale_route(&test);
            let second = [&first[..], &[stored("10.5.2.0-24", "192.168.0.2")]].concat();
            test.node.start(vec![Event::Snapshot { records: first, reset: false }]).await;
            assert!(test.kernel.entries().contains_key(&stale));
            test.node.store_changed(vec![Event::Snapshot { records: second, reset: false }]).await;
            test.node.full_pass(Cause::Audit).await;
            assert!(test.kernel.entries().contains_key(&stale));
            assert!(test.via("10.5.2.0/24").is_some());
        }
    })
    .await;
}

#[tokio::test]
async fn a_first_pass_that_fails_is_repeated() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        test.kernel.break_dumps(Some(ErrorKind::Interrupted));
        test.node.start(list(&[("10.5.2.0-24", "192.168.0.2")])).await;
        assert_eq!(test.via("10.5.2.0/24"), None);
        test.kernel.break_dumps(None);
        let due = test.node.next_wake().expect("a pass must be due");
        tokio::time::sleep_until(due).await;
        test.node.tick().await;
        while test.via("10.5.2.0/24").is_none() {
            tokio::time::sleep_until(test.node.next_wake().expect("a pass must be due")).await;
            test.node.tick().await;
        }
    })
    .await;
}

/// Net-conf was changed and changed back while the node started. The store reports that once.
#[tokio::test]
async fn the_net_conf_that_the_start_read_does_not_replace_a_newer_one() {
    local(async {
        let own = lease("10.5.1.0-24", "192.168.0.1");
        for (newer, wanted) in [(None, VXLAN), (Some(CONFIG), CONFIG)] {
            let mut test =
                TestNode::altered((CONFIG, own.clone()), OnLostLease::Hold, RuleOptions::default(), |started| {
                    started.wanted = Some(VXLAN.to_owned());
                });
            test.node.start(newer.map(|text| Event::Config(text.to_owned())).into_iter().collect()).await;
            test.node.tick().await;
            assert_eq!(test.node.net_conf.text, wanted, "{newer:?}");
        }
    })
    .await;
}

/// A node that starts without the store reads net-conf as soon as the store answers. Meanwhile the watch reports a newer one.
#[tokio::test]
async fn the_net_conf_that_is_read_after_a_start_without_the_store_comes_before_a_newer_one() {
    local(async {
        let own = lease("10.5.1.0-24", "192.168.0.1");
        let mut test = TestNode::altered((CONFIG, own), OnLostLease::Hold, RuleOptions::default(), |started| {
            started.saved = Some(Saved { head: head(&started.own), peers: Vec::new() });
        });
        *test.store.net_conf.borrow_mut() = Some(VXLAN.to_owned());
        test.node.start(Vec::new()).await;
        // The answer about the lease is there, so net-conf has been read.
        test.answer().await;
        test.watch.send(Event::Config(CONFIG.to_owned())).await.unwrap();
        let reported: Vec<Event> = std::iter::from_fn(|| test.events.try_recv().ok()).collect();
        assert_eq!(reported, [Event::Config(VXLAN.to_owned()), Event::Config(CONFIG.to_owned())]);
        test.node.store_changed(reported).await;
        test.node.tick().await;
        assert_eq!((test.node.net_conf.text.as_str(), test.node.plan.is_changing()), (CONFIG, false));
    })
    .await;
}

/// The pods that run have addresses of this subnet.
#[tokio::test]
async fn a_node_that_started_without_the_store_asks_for_the_lease_that_was_saved() {
    local(async {
        let own = lease("10.5.1.0-24", "192.168.0.1");
        let start = (CONFIG, own.clone());
        let mut test = TestNode::altered(start, OnLostLease::Hold, RuleOptions::default(), |started| {
            started.saved = Some(Saved { head: head(&started.own), peers: Vec::new() });
        });
        *test.store.net_conf.borrow_mut() = Some(CONFIG.to_owned());
        test.node.start(Vec::new()).await;
        test.answer().await;
        let asked = test.store.requests.borrow()[0].clone();
        assert_eq!((asked.previous, asked.was), (Some(own.subnets), Some(own.attrs)));
    })
    .await;
}
