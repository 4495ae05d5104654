// SPDX-License-Identifier: Apache-2.0
//! The watch of a server that restarts, forgets, falls silent or lies: what is asked next, and what the agent is told.

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

/// The next event that is no sign of life.
async fn next(events: &mut Events) -> Event {
    loop {
        match timeout(LIMIT, events.recv()).await.expect("an event").expect("the watch runs") {
            Event::Word => {}
            event => return event,
        }
    }
}

fn ids<'a>(records: impl IntoIterator<Item = &'a Record>) -> Vec<String> {
    records.into_iter().map(|record| record.id.to_string()).collect()
}

/// The names in the next event, which must be a snapshot.
async fn snapshot(events: &mut Events, wanted_reset: bool) -> Vec<String> {
    match next(events).await {
        Event::Snapshot { records, reset } if reset == wanted_reset => ids(&records),
        event => panic!("a snapshot with reset {wanted_reset}, not {event:?}"),
    }
}

/// The next event, which must be one change.
async fn change(events: &mut Events) -> Result<Record, Id> {
    match next(events).await {
        Event::Changes(mut changes) if changes.len() == 1 => changes.remove(0),
        event => panic!("one change, not {event:?}"),
    }
}

async fn trouble(events: &mut Events, words: &str) {
    match next(events).await {
        Event::Trouble(text) => assert!(text.contains(words), "{text}"),
        event => panic!("trouble with {words:?}, not {event:?}"),
    }
}

/// Nothing more was said, signs of life apart.
fn silent(events: &mut Events) {
    while let Ok(event) = events.try_recv() {
        assert_eq!(event, Event::Word);
    }
}

#[tokio::test]
async fn a_forgotten_version_in_a_watch_leads_to_a_new_list_that_removes_nobody() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5), FakeNode::new(3, 6), FakeNode::new(4, 7)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3", "n4"]);
        stream.error(410, "Expired").await;
        // Half a list removes nobody.
        let mut stream = fake.watch(None).await;
        stream.event("ADDED", &FakeNode::new(2, 5)).await;
        drop(stream);
        trouble(&mut events, "the answer was cut off").await;
        fake.verifies(90).await;
        let _stream = fake.list(90, &[FakeNode::new(2, 5), FakeNode::new(3, 80)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3"], "n4 was deleted while nobody watched");
    })
    .await;
}

#[tokio::test]
async fn a_forgotten_version_that_is_refused_leads_to_a_new_list() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        stream.half_an_event().await;
        drop(stream);
        trouble(&mut events, "cut off").await;
        fake.verifies(90).await;
        fake.expect("GET", "/api/v1/nodes?watch=true").await.refuse(410, "Expired").await;
        let mut stream = fake.list(90, &[FakeNode::new(2, 5), FakeNode::new(3, 80)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n3"], "and 410 is no trouble of the store");
        // What the list said is what later events are compared with.
        stream.event("MODIFIED", &FakeNode::new(3, 91)).await;
        stream.event("DELETED", &FakeNode::new(7, 92)).await;
        for version in [93, 94] {
            stream.event("DELETED", &FakeNode::new(3, version)).await;
        }
        assert_eq!(change(&mut events).await.unwrap_err().as_ref(), "n3");
        stream.event("ADDED", &FakeNode::new(3, 95)).await;
        assert_eq!(change(&mut events).await.unwrap().id.as_ref(), "n3", "a lease goes once");
    })
    .await;
}

#[tokio::test]
async fn a_watch_goes_on_from_the_last_bookmark_or_event() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        // Hours in which no Node changes: other objects move the version on.
        stream.bookmark(500).await;
        sleep(SHORT).await;
        drop(stream);
        let mut stream = fake.watch(Some(500)).await;
        // Heartbeats are no news, but move the version on, too.
        stream.event("MODIFIED", &FakeNode::new(2, 600)).await;
        sleep(SHORT).await;
        drop(stream);
        let mut stream = fake.watch(Some(600)).await;
        silent(&mut events);
        stream.event("ADDED", &FakeNode::new(3, 601)).await;
        assert_eq!(change(&mut events).await.unwrap().id.as_ref(), "n3");
    })
    .await;
}

#[tokio::test]
async fn only_the_marked_bookmark_ends_a_list() {
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
        assert_eq!(snapshot(&mut events, false).await, ["n2", "n5"], "n4 was deleted, n3 takes no part any more");
    })
    .await;
}

#[tokio::test]
async fn a_list_is_not_older_than_what_was_written() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let read = async {
        let node = FakeNode::new(1, 77);
        fake.expect("GET", "/api/v1/nodes/n1").await.json(&node.json()).await;
    };
    let (own, ()) = tokio::join!(store.find_own(), read);
    assert_eq!(own.unwrap().unwrap().id.as_ref(), "n1");
    watching(&store, |events| async move {
        let asked = fake.asked().await;
        let said = [asked.query("resourceVersion"), asked.query("resourceVersionMatch")];
        assert_eq!(said, [Some("77"), Some("NotOlderThan")]);
        asked.refuse(400, "no streaming lists").await;
        let asked = fake.expect("GET", "/api/v1/nodes?limit=500&").await;
        let said = [asked.query("resourceVersion"), asked.query("resourceVersionMatch")];
        assert_eq!(said, [Some("77"), Some("NotOlderThan")]);
        drop(events);
    })
    .await;
}

#[tokio::test]
async fn a_server_without_streaming_lists_is_asked_for_pages_and_later_again() {
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
            // The next list may be forgotten on its second page: again, and no trouble.
            fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await.page(20, "more", &first).await;
            fake.expect("GET", "/api/v1/nodes?limit=500&continue=more").await.refuse(410, "Expired").await;
            fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await.page(30, "", &second).await;
            assert_eq!(snapshot(&mut events, false).await, ["n3"]);
            let _stream = fake.watch(Some(30)).await;
            if code == 400 {
                // It may be a newer server ten minutes later. After so long a silence the store is asked for its version first.
                let clock = Clock::stop();
                clock.jump(PAGED_FOR).await;
                clock.until(fake.verifies(30)).await;
                clock.until(fake.expect("GET", "/api/v1/nodes?watch=true")).await.refuse(410, "Expired").await;
                let asked = clock.until(fake.asked()).await;
                assert_eq!(asked.query("sendInitialEvents"), Some("true"), "{}", asked.path);
            }
        })
        .await;
    }
}

#[tokio::test]
async fn a_refusal_that_is_about_rights_is_no_lack_of_streaming_lists() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        fake.expect("GET", "/api/v1/nodes?watch=true").await.refuse(403, "forbidden").await;
        trouble(&mut events, "RBAC: nodes get, list, watch").await;
        fake.expect("GET", "/api/v1/nodes?limit=1").await.refuse(403, "forbidden").await;
        fake.verifies(9).await;
        let _stream = fake.list(10, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
    })
    .await;
}

#[tokio::test]
async fn a_list_without_an_end_is_asked_for_in_pages() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let mut stream = fake.watch(None).await;
        stream.event("ADDED", &FakeNode::new(2, 5)).await;
        let clock = Clock::stop();
        loop {
            let asked = clock.until(fake.asked()).await;
            if asked.path.contains("limit=500") {
                asked.page(10, "", &[FakeNode::new(3, 6)]).await;
                break;
            }
            assert_eq!(asked.path, "/version", "is it there at all?");
            asked.json(&serde_json::json!({})).await;
            assert_eq!(events.recv().await, Some(Event::Word));
        }
        assert_eq!(snapshot(&mut events, false).await, ["n3"]);
    })
    .await;
}

#[tokio::test]
async fn a_store_with_a_shorter_history_is_another_one() {
    for (version, reset) in [(99, true), (100, false), (101, false)] {
        let mut fake = Fake::start().await;
        watching(&fake.store(), |mut events| async move {
            let mut stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
            assert_eq!(snapshot(&mut events, false).await, ["n2"]);
            stream.half_an_event().await;
            drop(stream);
            trouble(&mut events, "cut off").await;
            fake.verifies(version).await;
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
async fn our_own_node_that_was_made_again_is_another_store() {
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
            trouble(&mut events, "cut off").await;
            fake.verifies(200).await;
            let there = FakeNode { uid: uid.to_owned(), ..own };
            fake.expect("GET", "/api/v1/nodes/n1").await.json(&there.json()).await;
            if reset {
                let asked = fake.asked().await;
                assert_eq!(asked.query("resourceVersion"), Some("0"), "our old version may be none of this store's");
                let mut stream = asked.stream().await;
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

#[tokio::test]
async fn a_server_that_is_away_for_minutes_is_named_each_minute_and_followed_when_it_is_back() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        fake.close().await;
        drop(stream);
        let clock = Clock::stop();
        let began = Instant::now();
        let mut said = Vec::new();
        while began.elapsed() < Duration::from_secs(600) {
            match clock.until(timeout(Duration::from_secs(100), events.recv())).await {
                Ok(Some(Event::Trouble(text))) => said.push(text),
                Ok(Some(Event::Word)) => {}
                event => panic!("{event:?}"),
            }
        }
        // Once a minute, give or take a wait for the next attempt.
        assert!((8..=11).contains(&said.len()), "{said:?}");
        assert!(said[1..].iter().all(|text| text.contains(&fake.url()) && text.contains("refused")), "{said:?}");
        fake.open().await;
        let back = Instant::now();
        let asked = clock.until(fake.asked()).await;
        assert!(back.elapsed() <= RETRY_MAX + AGAIN_WITHIN + Duration::from_secs(2), "{:?}", back.elapsed());
        drop(clock);
        asked.page(200, "", &[]).await;
        let mut stream = fake.watch(Some(100)).await;
        stream.event("MODIFIED", &FakeNode::bare(2, 150)).await;
        assert_eq!(change(&mut events).await.unwrap_err().as_ref(), "n2", "what changed meanwhile, and nothing else");
    })
    .await;
}

#[tokio::test]
async fn a_watch_that_stays_silent_is_given_up_though_the_server_answers() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let _stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        let clock = Clock::stop();
        let mut asks = 0;
        let text = loop {
            tokio::select! {
                asked = clock.until(fake.asked()) => {
                    assert_eq!(asked.path, "/version");
                    asks += 1;
                    assert!(asks < 20, "it is never given up");
                    // What it refuses is a sign of life, too.
                    if asks == 3 { asked.refuse(403, "forbidden").await } else { asked.json(&serde_json::json!({})).await }
                }
                event = events.recv() => match event.unwrap() {
                    Event::Word => {}
                    Event::Trouble(text) => break text,
                    event => panic!("{event:?}"),
                },
            }
        };
        assert!(text.contains("not even a bookmark within 150 s") && asks >= 8, "{asks}: {text}");
        drop(clock);
        fake.verifies(200).await;
        fake.watch(Some(100)).await;
    })
    .await;
}

#[tokio::test]
async fn a_server_that_stops_is_noticed_by_its_silence() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        let _stream = fake.list(100, &[FakeNode::new(2, 5)]).await;
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        let clock = Clock::stop();
        let began = Instant::now();
        // It takes the question and never answers.
        let asked = clock.until(fake.asked()).await;
        assert_eq!(asked.path, "/version");
        let text = loop {
            match clock.until(events.recv()).await.unwrap() {
                Event::Word => {}
                Event::Trouble(text) => break text,
                event => panic!("{event:?}"),
            }
        };
        assert!(text.contains("no answer within 10 s") && text.contains(&fake.url()), "{text}");
        assert!(began.elapsed() <= Duration::from_secs(30), "{:?}", began.elapsed());
    })
    .await;
}

#[tokio::test]
async fn a_watch_that_is_closed_at_once_is_trouble() {
    let mut fake = Fake::start().await;
    watching(&fake.store(), |mut events| async move {
        drop(fake.list(100, &[FakeNode::new(2, 5)]).await);
        assert_eq!(snapshot(&mut events, false).await, ["n2"]);
        trouble(&mut events, "the server closed the watch at once").await;
        fake.verifies(100).await;
        fake.watch(Some(100)).await;
    })
    .await;
}

#[tokio::test]
async fn one_shot_lists_are_read_page_by_page() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        let first = fake.expect("GET", "/api/v1/nodes?limit=500&resourceVersion=0&").await;
        first.page(10, "more", &[FakeNode::new(2, 5), FakeNode::bare(8, 5)]).await;
        fake.expect("GET", "/api/v1/nodes?limit=500&continue=more").await.page(10, "", &[FakeNode::new(3, 6)]).await;
        fake.expect("GET", "/api/v1/nodes?limit=500&").await.refuse(403, "forbidden").await;
    };
    let read = async {
        assert_eq!(ids(&store.list().await.unwrap()), ["n2", "n3"]);
        assert!(matches!(store.list().await, Err(Error::Refused { .. })));
    };
    tokio::join!(serve, read);
}
