// SPDX-License-Identifier: Apache-2.0
//! The watches of the simulated API server.

use std::time::Duration;

use hyper::body::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::query::{Begin, Version, Watch};
use super::{ApiServer, QUEUE, Sent, sent, status};
use crate::nodes::{At, Nodes, Refused};
use crate::wire::{LATENCY, Wire};

/// How often an idle watch gets a bookmark.
const BOOKMARK: Duration = Duration::from_secs(60);
/// A watch gets a bookmark so long before its time is over.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);

/// A watch that has begun.
struct Followed {
    /// Everything up to this version was sent.
    version: u64,
    only: Option<String>,
    bookmarks: bool,
    end: Instant,
}

impl Followed {
    fn concerns(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only == name)
    }

    /// Returns when the next bookmark is due, if there is one.
    fn next_bookmark(&self) -> Option<Instant> {
        let (now, last) = (Instant::now(), self.end.checked_sub(LAST_BOOKMARK));
        let next = now + BOOKMARK;
        self.bookmarks.then(|| last.filter(|last| *last > now).map_or(next, |last| last.min(next)))
    }
}

impl ApiServer {
    /// Begins a watch, and returns the body of its events.
    pub(super) async fn watch(&self, wire: &Wire, watch: Watch) -> Sent {
        let Watch { begin, only, bookmarks, time } = watch;
        let mut followed = Followed { version: 0, only, bookmarks, end: Instant::now() + time };
        let first = match begin {
            Begin::Changes(version) => {
                followed.version = version;
                Ok(Vec::new())
            }
            Begin::Nodes(version) | Begin::List(version) => self.all(&mut followed, version).await,
        };
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (server, wire) = (self.clone(), wire.clone());
        tokio::spawn(async move {
            match first {
                Ok(mut events) => {
                    let ends_list = matches!(begin, Begin::List(_)) && followed.bookmarks;
                    events.extend(ends_list.then(|| line(&bookmark(followed.version, true))));
                    server.follow(wire, followed, events, sender).await;
                }
                Err(refused) => drop(deliver(&wire, &sender, error(refused)).await),
            }
        });
        sent(receiver)
    }

    /// Returns an event for each Node that the watch cache knows.
    async fn all(&self, followed: &mut Followed, version: Version) -> Result<Vec<Bytes>, Refused> {
        self.wait_for(match version {
            Version::Newest => self.read(Nodes::version),
            Version::AtLeast(version) | Version::Exactly(version) => version,
        })
        .await?;
        let list = self.read(|nodes| {
            followed.version = nodes.cached_version();
            nodes.list(At::Cached, usize::MAX, "")
        })?;
        let concerned = list["items"].as_array().into_iter().flatten();
        let concerned = concerned.filter(|node| followed.concerns(node["metadata"]["name"].as_str().unwrap_or("")));
        Ok(concerned.map(|node| line(&json!({"type": "ADDED", "object": node}))).collect())
    }

    /// Serves one watch until its time is over, or the client or the server ends it.
    async fn follow(self, wire: Wire, mut followed: Followed, first: Vec<Bytes>, out: mpsc::Sender<Bytes>) {
        let (mut changes, mut restarts) = (self.cached.subscribe(), self.nodes.restarts());
        for event in first {
            if !deliver(&wire, &out, event).await {
                return;
            }
        }
        let mut next_bookmark = followed.next_bookmark();
        loop {
            changes.mark_unchanged();
            let mut events: Vec<Bytes> = match self.read(|nodes| nodes.changes(followed.version)) {
                Ok(changes) => {
                    let concerned = changes.into_iter().filter(|change| followed.concerns(&change.name));
                    concerned.map(|change| change.event).collect()
                }
                Err(expired) => {
                    deliver(&wire, &out, error(expired)).await;
                    return;
                }
            };
            followed.version = followed.version.max(self.read(Nodes::cached_version));
            if next_bookmark.is_some_and(|next| Instant::now() >= next) {
                events.push(line(&bookmark(followed.version, false)));
                next_bookmark = followed.next_bookmark();
            }
            if !events.is_empty() {
                sleep(LATENCY + wire.lag()).await;
            }
            for event in events {
                if !deliver(&wire, &out, event).await {
                    return;
                }
            }
            tokio::select! {
                biased;
                _ = restarts.changed() => return,
                () = out.closed() => return,
                () = sleep_until(followed.end) => return,
                _ = changes.changed() => {}
                () = sleep_until(next_bookmark.unwrap_or(followed.end)) => {}
            }
        }
    }
}

fn line(event: &Value) -> Bytes {
    Bytes::from(format!("{event}\n"))
}

/// Returns the event by which a server refuses to begin a watch, or to go on with it.
fn error(refused: Refused) -> Bytes {
    line(&json!({"type": "ERROR", "object": status(refused)}))
}

fn bookmark(version: u64, ends_list: bool) -> Value {
    let annotations = if ends_list { json!({"k8s.io/initial-events-end": "true"}) } else { json!({}) };
    let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
    json!({"type": "BOOKMARK", "object": {"kind": "Node", "apiVersion": "v1", "metadata": metadata}})
}

/// Sends an event to the client when the network lets it through. Returns false if nobody receives it.
async fn deliver(wire: &Wire, out: &mpsc::Sender<Bytes>, event: Bytes) -> bool {
    wire.passable().await;
    out.send(event).await.is_ok()
}
