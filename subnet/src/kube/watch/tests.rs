// SPDX-License-Identifier: Apache-2.0
//! The watch of a server that restarts, forgets versions, stops answering or answers wrongly: which request follows, and which events
//! the agent gets.

use super::super::client::MAX_LINE;
use super::super::fake::{Clock, Fake, FakeNode, LIMIT};
use super::*;
use crate::source::{Error, Source};

type Events = mpsc::Receiver<Event>;

async fn watching<F: Future<Output = ()>>(store: &KubeStore, body: impl FnOnce(Events) -> F) {
    let (out, events) = mpsc::channel(64);
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body(events) => {}
    }
}

/// Returns the next event other than [`Event::Answered`].
async fn next(events: &mut Events) -> Event {
    // The limit is that of the whole wait, because a watch may be answered again and again.
    let wait = async {
        loop {
            match events.recv().await.expect("the watch runs") {
                Event::Answered => {}
                event => return event,
            }
        }
    };
    timeout(LIMIT, wait).await.expect("an event that is more than an answer")
}

fn ids<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<String> {
    records.into_iter().map(|record| record.id.to_string()).collect()
}

/// Returns the names in the next event, which must be a snapshot.
async fn snapshot(events: &mut Events, wanted_reset: bool) -> Vec<String> {
    match next(events).await {
        Event::Snapshot { records, reset } if reset == wanted_reset => ids(&records),
        event => panic!("expected a snapshot with reset {wanted_reset}, got {event:?}"),
    }
}

/// Returns the next event, which must be one change.
async fn change(events: &mut Events) -> RecordChange {
    match next(events).await {
        Event::Changes(mut changes) if changes.len() == 1 => changes.remove(0),
        event => panic!("expected one change, got {event:?}"),
    }
}

/// Waits for the report of a failure with these words.
async fn failure(events: &mut Events, words: &str) {
    match next(events).await {
        Event::Unreachable(text) => assert!(text.contains(words), "{text}"),
        event => panic!("expected a failure with {words:?}, got {event:?}"),
    }
}

/// Checks that there was no event other than [`Event::Answered`].
fn assert_no_event(events: &mut Events) {
    while let Ok(event) = events.try_recv() {
        assert_eq!(event, Event::Answered);
    }
}

#[tokio::test]
async fn a_version_that_expires_during_a_watch_leads_to_a_new_list() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5), FakeNode::new(3, 6), FakeNode::new(4, 7)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3", "n4"]);
        stream.error(410, "Expired").await;
        // A list that is cut off removes no lease.
        let mut stream = fake.watch(None).await;
        stream.event("ADDED", &FakeNode::new(2, 5)).await;
        drop(stream);
        failure(&mut events, "the answer was cut off").await;
        fake.history_check(90).await;
        let _stream = fake.list(90, &[FakeNode::new(2, 5), FakeNode::new(3, 80)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3"], "n4 was deleted while there was no watch");
    })
    .await;
}

#[tokio::test]
async fn an_expired_version_leads_to_a_new_list() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        stream.half_an_event().await;
        drop(stream);
        failure(&mut events, "cut off").await;
        fake.history_check(90).await;
        fake.expect("GET", "/api/v1/nodes?watch=true").await.refuse(410, "Expired").await;
        let mut stream = fake.list(90, &[FakeNode::new(2, 5), FakeNode::new(3, 80)]).await;
        assert_eq!(
            snapshot(&mut events, false).await,
            ["n2", "n3"],
            "an expired version must not be reported as a failure"
        );
        // Later events are compared with the list.
        stream.event("MODIFIED", &FakeNode::new(3, 91)).await;
        stream.event("DELETED", &FakeNode::new(7, 92)).await;
        for version in [93, 94] {
            stream.event("DELETED", &FakeNode::new(3, version)).await;
        }
        assert_eq!(change(&mut events).await.removed().unwrap().as_ref(), "n3");
        stream.event("ADDED", &FakeNode::new(3, 95)).await;
        assert_eq!(
            change(&mut events).await.written().unwrap().id.as_ref(),
            "n3",
            "the second deletion of n3 must not be reported"
        );
    })
    .await;
}

#[tokio::test]
async fn a_watch_goes_on_from_the_last_bookmark_or_event() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        // The version grows with every object of the cluster, also while no Node changes.
        stream.bookmark(500).await;
        sleep(SHORT).await;
        drop(stream);
        fake.history_check(500).await;
        let mut stream = fake.watch(Some(500)).await;
        // An update that does not concern the lease is not reported, but its version counts.
        stream.event("MODIFIED", &FakeNode::new(2, 600)).await;
        sleep(SHORT).await;
        drop(stream);
        fake.history_check(600).await;
        let mut stream = fake.watch(Some(600)).await;
        assert_no_event(&mut events);
        stream.event("ADDED", &FakeNode::new(3, 601)).await;
        assert_eq!(change(&mut events).await.written().unwrap().id.as_ref(), "n3");
    })
    .await;
}

#[tokio::test]
async fn only_a_bookmark_with_the_annotation_ends_a_list() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.watch(None).await;
        stream.event("ADDED", &FakeNode::new(2, 5)).await;
        stream.bookmark(6).await;
        stream.event("ADDED", &FakeNode::new(3, 7)).await;
        stream.event("ADDED", &FakeNode::new(4, 8)).await;
        stream.event("DELETED", &FakeNode::new(4, 9)).await;
        stream.event("MODIFIED", &FakeNode::bare(3, 10)).await;
        stream.event("ADDED", &FakeNode::new(5, 11)).await;
        stream.list_ends(11).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n5"], "n4 was deleted, and n3 has no lease any more");
    })
    .await;
}

#[tokio::test]
async fn a_list_is_at_least_as_new_as_our_node() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let read = async {
        let node = FakeNode::new(1, 77);
        fake.expect("GET", "/api/v1/nodes/n1").await.json(&node.json()).await;
    };
    let (own, ()) = tokio::join!(store.find_own(), read);
    assert_eq!(own.unwrap().unwrap().id.as_ref(), "n1");
    let read = async {
        let request = fake.expect("GET", "/api/v1/nodes?resourceVersion=77&").await;
        assert_eq!(request.query("limit"), None, "a list for people comes from the cache of the server, too");
        request.page(80, "", &[FakeNode::new(1, 77)]).await;
    };
    let (listed, ()) = tokio::join!(store.list(), read);
    assert_eq!(ids(&listed.unwrap()), ["n1"]);
    watching(&store, |events| async move {
        let request = fake.request().await;
        let parameters = [request.query("resourceVersion"), request.query("resourceVersionMatch")];
        assert_eq!(parameters, [Some("77"), Some("NotOlderThan")]);
        request.refuse(400, "no streaming lists").await;
        let request = fake.expect("GET", "/api/v1/nodes?resourceVersion=77&").await;
        let parameters = [request.query("resourceVersionMatch"), request.query("limit")];
        assert_eq!(parameters, [Some("NotOlderThan"), None], "with a limit, older servers would read it from etcd");
        drop(events);
    })
    .await;
}

#[tokio::test]
async fn a_server_without_streaming_lists_is_asked_for_pages_and_later_for_a_stream_again() {
    for code in [400, 422, 500] {
        let mut fake = Fake::start().await;
        watching(&fake.store(), |mut events| async move {
            fake.expect("GET", "/api/v1/nodes?watch=true").await.refuse(code, "unknown").await;
            let (first, second) = ([FakeNode::new(2, 5), FakeNode::bare(8, 5)], [FakeNode::new(3, 6)]);
            fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await.page(10, "more", &first).await;
            fake.expect("GET", "/api/v1/nodes?limit=500&continue=more").await.page(10, "", &second).await;
            assert_eq!(snapshot(&mut events, false).await, ["n2", "n3"]);
            let mut stream = fake.watch(Some(10)).await;
            stream.error(410, "Expired").await;
            // If the version expires on the second page, the list begins again. That is not reported as a failure.
            fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await.page(20, "more", &first).await;
            fake.expect("GET", "/api/v1/nodes?limit=500&continue=more").await.refuse(410, "Expired").await;
            fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await.page(30, "", &second).await;
            assert_eq!(snapshot(&mut events, false).await, ["n3"]);
            let _stream = fake.watch(Some(30)).await;
            if code == 400 {
                // Ten minutes later it may be a newer server. The silence was so long that the history is checked first.
                let clock = Clock::stop();
                clock.jump(STREAMING_RETRY).await;
                clock.until(fake.history_check(30)).await;
                clock.until(fake.expect("GET", "/api/v1/nodes?watch=true")).await.refuse(410, "Expired").await;
                let request = clock.until(fake.request()).await;
                assert_eq!(request.query("sendInitialEvents"), Some("true"), "{}", request.path);
            }
        })
        .await;
    }
}

#[tokio::test]
async fn missing_rights_are_not_taken_for_a_server_without_streaming_lists() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        fake.expect("GET", "/api/v1/nodes?watch=true").await.refuse(403, "forbidden").await;
        failure(&mut events, "RBAC: nodes get, list, watch").await;
        fake.expect("GET", "/api/v1/nodes?limit=1").await.refuse(403, "forbidden").await;
        fake.history_check(9).await;
        let _stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
    })
    .await;
}

#[tokio::test]
async fn a_streaming_list_that_does_not_end_is_replaced_by_pages() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.watch(None).await;
        stream.event("ADDED", &FakeNode::new(2, 5)).await;
        let clock = Clock::stop();
        loop {
            let request = clock.until(fake.request()).await;
            if request.path.contains("limit=500") {
                request.page(10, "", &[FakeNode::new(3, 6)]).await;
                break;
            }
            assert_eq!(request.path, "/version", "the watch must ask whether the server lives");
            request.json(&serde_json::json!({})).await;
            assert_eq!(events.recv().await, Some(Event::Answered));
        }
        assert_eq!(snapshot(&mut events, false).await, ["n3"]);
    })
    .await;
}

#[tokio::test]
async fn a_streaming_list_with_a_line_that_is_too_long_is_replaced_by_pages() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.watch(None).await;
        stream.large_event("ADDED", &FakeNode::new(2, 5), MAX_LINE).await;
        let large = FakeNode::new(2, 5);
        fake.expect("GET", "/api/v1/nodes?limit=500&").await.page(10, "", &[large, FakeNode::new(3, 6)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3"]);
        fake.watch(Some(10)).await;
    })
    .await;
}

/// If the watch began again at the same version, the same line would come again, for as long as the server knows that version.
#[tokio::test]
async fn after_a_change_with_a_line_that_is_too_long_the_nodes_are_listed_in_pages() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        stream.large_event("MODIFIED", &FakeNode::new(2, 11), MAX_LINE).await;
        failure(&mut events, "a line of more than 16 MiB").await;
        fake.history_check(12).await;
        let large = FakeNode::new(2, 11);
        fake.expect("GET", "/api/v1/nodes?limit=500&").await.page(12, "", &[large, FakeNode::new(3, 12)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3"]);
        let mut stream = fake.watch(Some(12)).await;
        stream.event("DELETED", &FakeNode::new(3, 13)).await;
        assert_eq!(change(&mut events).await.removed().unwrap().as_ref(), "n3");
    })
    .await;
}

/// A server that is stopped in an orderly way ends its watches as if their time were over.
#[tokio::test]
async fn a_shorter_history_after_a_watch_that_ended_early_leads_to_a_new_list() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        sleep(SHORT).await;
        drop(stream);
        fake.history_check(7).await;
        let _stream = fake.list(7, &[]).await;
        assert_eq!(snapshot(&mut events, true).await, [""; 0]);
    })
    .await;
}

#[tokio::test]
async fn a_shorter_history_leads_to_a_snapshot_of_another_store() {
    for (version, reset) in [(99, true), (100, false), (101, false)] {
        let mut fake = Fake::start().await;
        watching(&fake.store(), |mut events| async move {
            let mut stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
            assert_eq!(snapshot(&mut events, false).await, ["n2"]);
            stream.half_an_event().await;
            drop(stream);
            failure(&mut events, "cut off").await;
            fake.history_check(version).await;
            if reset {
                let _stream = fake.list(version, &[]).await;
                assert_eq!(snapshot(&mut events, true).await, [""; 0]);
            } else {
                fake.watch(Some(100)).await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn another_uid_of_our_node_leads_to_a_snapshot_of_another_store() {
    for (uid, reset) in [("other", true), ("uid-1", false)] {
        let mut fake = Fake::start().await;
        let store = fake.store();
        let own = FakeNode::new(1, 5);
        let read = async { fake.expect("GET", "/api/v1/nodes/n1").await.json(&own.json()).await };
        let (found, ()) = tokio::join!(store.find_own(), read);
        found.unwrap();
        watching(&store, |mut events| async move {
            let mut stream = fake.list(100, std::slice::from_ref(&own)).await;
            assert_eq!(snapshot(&mut events, false).await, ["n1"]);
            stream.half_an_event().await;
            drop(stream);
            failure(&mut events, "cut off").await;
            fake.history_check(200).await;
            let there = FakeNode { uid: uid.to_owned(), ..own };
            fake.expect("GET", "/api/v1/nodes/n1").await.json(&there.json()).await;
            if reset {
                let request = fake.request().await;
                assert_eq!(
                    request.query("resourceVersion"),
                    Some("0"),
                    "the version of the old Node means nothing in this store"
                );
                let mut stream = request.stream().await;
                stream.event("ADDED", &there).await;
                stream.list_ends(200).await;
                assert_eq!(snapshot(&mut events, true).await, ["n1"]);
            } else {
                fake.watch(Some(100)).await;
            }
        })
        .await;
    }
}

/// The watch itself reports that our Node is gone.
#[tokio::test]
async fn a_node_of_ours_that_was_deleted_is_no_sign_of_another_store() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let own = FakeNode::new(1, 5);
    let read = async { fake.expect("GET", "/api/v1/nodes/n1").await.json(&own.json()).await };
    let (found, ()) = tokio::join!(store.find_own(), read);
    found.unwrap();
    watching(&store, |mut events| async move {
        let mut stream = fake.list(100, std::slice::from_ref(&own)).await;
        assert_eq!(snapshot(&mut events, false).await, ["n1"]);
        stream.half_an_event().await;
        drop(stream);
        failure(&mut events, "cut off").await;
        fake.history_check(200).await;
        fake.expect("GET", "/api/v1/nodes/n1").await.refuse(404, "NotFound").await;
        let mut stream = fake.watch(Some(100)).await;
        stream.event("DELETED", &FakeNode { version: 150, ..own }).await;
        assert_eq!(change(&mut events).await.removed().unwrap().as_ref(), "n1");
    })
    .await;
}

#[tokio::test]
async fn a_server_that_is_away_is_reported_once_a_minute_and_followed_when_it_is_back() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        fake.close().await;
        drop(stream);
        let clock = Clock::stop();
        let began = Instant::now();
        let mut reports = Vec::new();
        while began.elapsed() < Duration::from_secs(600) {
            match clock.until(timeout(Duration::from_secs(100), events.recv())).await {
                Ok(Some(Event::Unreachable(text))) => reports.push(text),
                Ok(Some(Event::Answered)) => {}
                event => panic!("{event:?}"),
            }
        }
        // Once a minute; the back-off shifts a report by some seconds.
        assert!((8..=11).contains(&reports.len()), "{reports:?}");
        assert!(reports[1..].iter().all(|text| text.contains(&fake.url()) && text.contains("refused")), "{reports:?}");
        fake.open().await;
        let back = Instant::now();
        let request = clock.until(fake.request()).await;
        assert!(back.elapsed() <= RETRY_MAX + RESUME_WITHIN + Duration::from_secs(2), "{:?}", back.elapsed());
        drop(clock);
        request.page(200, "", &[]).await;
        let mut stream = fake.watch(Some(100)).await;
        stream.event("MODIFIED", &FakeNode::bare(2, 150)).await;
        assert_eq!(
            change(&mut events).await.removed().unwrap().as_ref(),
            "n2",
            "only the change in the meantime must be reported"
        );
    })
    .await;
}

#[tokio::test]
async fn a_silent_watch_is_given_up_although_the_server_answers() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let _stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        let clock = Clock::stop();
        let mut questions = 0;
        let text = loop {
            tokio::select! {
                request = clock.until(fake.request()) => {
                    assert_eq!(request.path, "/version");
                    questions += 1;
                    assert!(questions < 20, "the watch is not given up");
                    // A refusal shows that the server lives, too.
                    if questions == 3 { request.refuse(403, "forbidden").await } else { request.json(&serde_json::json!({})).await }
                }
                event = events.recv() => match event.unwrap() {
                    Event::Answered => {}
                    Event::Unreachable(text) => break text,
                    event => panic!("{event:?}"),
                },
            }
        };
        assert!(text.contains("not even a bookmark within 150 s") && questions >= 8, "{questions}: {text}");
        drop(clock);
        fake.history_check(200).await;
        fake.watch(Some(100)).await;
    })
    .await;
}

#[tokio::test]
async fn a_server_that_hangs_is_noticed() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let _stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        let clock = Clock::stop();
        let began = Instant::now();
        // The server accepts the request and never answers.
        let request = clock.until(fake.request()).await;
        assert_eq!(request.path, "/version");
        let text = loop {
            match clock.until(timeout(LIMIT, events.recv())).await.expect("the report of a failure").unwrap() {
                Event::Answered => {}
                Event::Unreachable(text) => break text,
                event => panic!("{event:?}"),
            }
        };
        assert!(text.contains("no answer within 10 s") && text.contains(&fake.url()), "{text}");
        assert!(began.elapsed() <= Duration::from_secs(30), "{:?}", began.elapsed());
    })
    .await;
}

#[tokio::test]
async fn a_watch_that_is_closed_at_once_is_a_failure() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        drop(fake.list(100, &[FakeNode::new(2, 5)]).await);
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        failure(&mut events, "the server closed the watch at once").await;
        fake.history_check(100).await;
        fake.watch(Some(100)).await;
    })
    .await;
}

#[tokio::test]
async fn a_list_without_a_watch_is_read_in_pages() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        let first = fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await;
        first.page(10, "more", &[FakeNode::new(2, 5), FakeNode::bare(8, 5)]).await;
        let second = fake.request().await;
        assert_eq!(second.path, "/api/v1/nodes?limit=500&continue=more", "a server refuses a version beside a page");
        second.page(10, "", &[FakeNode::new(3, 6)]).await;
        fake.expect("GET", "/api/v1/nodes?limit=500&").await.refuse(403, "forbidden").await;
    };
    let read = async {
        assert_eq!(ids(&store.list().await.unwrap()), ["n2", "n3"]);
        assert!(matches!(store.list().await, Err(Error::Refused { .. })));
    };
    tokio::join!(serve, read);
}

/// In a large cluster the kubelets write their Nodes all the time, and each event wakes the agent.
#[tokio::test]
async fn many_updates_that_concern_no_lease_are_few_answers() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        let began = Instant::now();
        for version in 11..211 {
            stream.event("MODIFIED", &FakeNode::new(2, version)).await;
        }
        stream.event("DELETED", &FakeNode::new(2, 211)).await;
        let mut answers = 0;
        loop {
            match timeout(LIMIT, events.recv()).await.expect("the deletion").expect("the watch runs") {
                Event::Answered => answers += 1,
                Event::Changes(_) => break,
                event => panic!("{event:?}"),
            }
        }
        // The first one may be that of the list.
        let most = 2 + began.elapsed().as_secs() / ANSWERED_INTERVAL.as_secs();
        assert!(answers <= most, "{answers} answers to 200 updates");
    })
    .await;
}

#[tokio::test]
async fn another_net_conf_is_reported_beside_the_nodes() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let net_conf = |number: u8| format!(r#"{{"Network":"10.{number}.0.0/16"}}"#);
    std::fs::write(fake.net_conf(), net_conf(5)).unwrap();
    assert_eq!(store.config().await.unwrap(), net_conf(5));
    std::fs::write(fake.net_conf(), net_conf(6)).unwrap();
    watching(&store, |mut events| async move {
        let _stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        let told = [next(&mut events).await, next(&mut events).await];
        assert!(told.contains(&Event::Config(net_conf(6))), "{told:?}");
        assert!(told.iter().any(|event| matches!(event, Event::Snapshot { .. })), "{told:?}");
    })
    .await;
}
