// SPDX-License-Identifier: Apache-2.0
//! The first look: with what the store has told by then, or without.

use std::io::ErrorKind;

use weft_backends::state::{Key, Name, Route, Seen, Value};
use weft_subnet::lease::Record;
use weft_subnet::source::Event;

use super::{Bench, CONFIG, local, put};
use crate::lease::keep::Answer;
use crate::options::OnLostLease;

fn list(peers: &[(&str, &str)]) -> Vec<Event> {
    let own: Result<Record, _> = put("10.5.1.0-24", "192.168.0.1");
    let records = [own].into_iter().chain(peers.iter().map(|(key, ip)| put(key, ip))).map(Result::unwrap).collect();
    vec![Event::Snapshot { records, reset: false }]
}

/// What an earlier run left of a peer that is gone.
fn leave_a_route(bench: &Bench) -> Key {
    let key = Key::Route("10.5.8.0/24".parse().unwrap(), 0);
    let (via, dev) = ("192.168.0.8".parse().unwrap(), Name::new("eth0").unwrap());
    let value = Value::Route(Route::Unicast { via, dev, onlink: false });
    let protocol = weft_backends::owner::PROTOCOL;
    bench.kernel.disturb(key, Some(Seen { value, protocol, mark: false }), false);
    key
}

#[tokio::test]
async fn the_first_list_is_part_of_the_first_look() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        let stale = leave_a_route(&bench);
        bench.node.begin(list(&[("10.5.2.0-24", "192.168.0.2")])).await;
        assert_eq!(bench.kernel.observations(), 1);
        assert_eq!(bench.via("10.5.2.0/24"), "192.168.0.2".parse().ok());
        assert!(!bench.kernel.entries().contains_key(&stale));
        assert!(bench.file.exists());
    })
    .await;
}

#[tokio::test]
async fn a_store_that_says_nothing_yet_takes_nothing_away() {
    local(async {
        for told in [vec![], vec![Event::Trouble("no answer".into())]] {
            let mut bench = Bench::new(OnLostLease::Hold);
            let stale = leave_a_route(&bench);
            bench.node.begin(told).await;
            assert!(bench.file.exists(), "pods can start");
            assert!(bench.kernel.entries().contains_key(&stale));
            bench.node.stored(list(&[("10.5.2.0-24", "192.168.0.2")])).await;
            assert!(!bench.kernel.entries().contains_key(&stale));
        }
    })
    .await;
}

#[tokio::test]
async fn a_list_without_peers_takes_nothing_away() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        let stale = leave_a_route(&bench);
        bench.node.begin(list(&[])).await;
        assert!(bench.kernel.entries().contains_key(&stale), "the store may have been wiped");
    })
    .await;
}

#[tokio::test]
async fn a_first_look_that_fails_is_made_again() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        bench.kernel.break_dumps(Some(ErrorKind::Interrupted));
        bench.node.begin(list(&[("10.5.2.0-24", "192.168.0.2")])).await;
        assert_eq!(bench.via("10.5.2.0/24"), None);
        bench.kernel.break_dumps(None);
        let due = bench.node.next_wake().expect("it is due");
        tokio::time::sleep_until(due.into()).await;
        bench.node.tick().await;
        while bench.via("10.5.2.0/24").is_none() {
            tokio::time::sleep_until(bench.node.next_wake().expect("it is due").into()).await;
            bench.node.tick().await;
        }
    })
    .await;
}

/// After a start without the store.
#[tokio::test]
async fn a_net_conf_that_changed_meanwhile_is_heard() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.node.answered(Answer::Config(CONFIG.to_owned())).await;
        assert_eq!(bench.node.restart_wanted, None);
        let text = r#"{"Network":"10.6.0.0/16","Backend":{"Type":"host-gw"}}"#;
        bench.node.answered(Answer::Config(text.to_owned())).await;
        assert!(bench.node.restart_wanted.as_ref().is_some_and(|text| text.contains("the change of Network")));
    })
    .await;
}
