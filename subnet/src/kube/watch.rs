// SPDX-License-Identifier: Apache-2.0
//! The watch of all nodes: a list that becomes a watch on the same stream where the server can do that, else a list and
//! then a watch; resumed where it broke, and begun anew when events may have been missed.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::core::Status;
use serde::de::IgnoredAny;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::lease::{Id, Record};
use crate::retry::Trouble;
use crate::source::{Event, random};

use super::client::Fault;
use super::node::Node;
use super::proto::{self, Reader, WatchEvent};
use super::{KubeStore, list, spread};

/// After this long without a line the server is asked for a word: a stopped one keeps its connections open. A large cluster
/// is never silent so long, a small one does not mind.
const IDLE: Duration = Duration::from_secs(15);
/// Bookmarks come each minute: a stream that brings none is dead, whatever the server says elsewhere.
const SILENT: Duration = Duration::from_secs(150);
/// A streaming list whose end does not come: the server does not know what it was asked for.
const LIST_LIMIT: Duration = Duration::from_secs(60);
/// A watch that ends sooner, having said nothing, was a failure.
const SHORT: Duration = Duration::from_secs(1);
const WORD_EVERY: Duration = Duration::from_secs(5);
/// The longest wait after a failure: thousands of agents must not keep a server down that comes back.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// A server that ends takes the watches of all nodes along: they come back spread over this.
const AGAIN_WITHIN: Duration = Duration::from_secs(1);
/// Every node of the cluster hears at once that its version is forgotten: lists begin spread over this.
const RELIST_WITHIN: Duration = Duration::from_secs(1);
/// A server without streaming lists is asked for one again after this time: it may be a newer one by then, or its fault over.
const PAGED_FOR: Duration = Duration::from_secs(600);

const UNAUTHORIZED: u16 = 401;
const GONE: u16 = 410;
/// Marks the bookmark behind the last node of a streaming list.
const LIST_ENDS: &str = "k8s.io/initial-events-end";

/// Why a stream ended.
enum End {
    /// Nobody listens.
    Closed,
    /// The server closes each watch after its time: go on where it ended.
    Over,
    /// The server has no streaming lists: ask in another way.
    Paged,
    /// Events may have been missed.
    Relist,
    /// Try again.
    Broken(&'static str, Fault),
}

/// See [`crate::source::Source::watch`].
pub(super) async fn run(store: &KubeStore, out: &mpsc::Sender<Event>) {
    let mut watch = Watch {
        store,
        out,
        known: BTreeMap::new(),
        at: None,
        paged: None,
        reset: false,
        word: None,
        verify: false,
        trouble: Trouble::new(RETRY_MAX),
    };
    loop {
        let began = Instant::now();
        let (what, fault) = match watch.session().await {
            End::Closed => return,
            End::Paged => {
                watch.paged = Some(Instant::now());
                continue;
            }
            End::Over if began.elapsed() >= SHORT => {
                sleep(spread(AGAIN_WITHIN)).await;
                continue;
            }
            End::Over => ("watch nodes", Fault::Stream("the server closed the watch at once".to_owned())),
            End::Relist => {
                tracing::info!("the API server has forgotten our version of the nodes: listing again");
                watch.at = None;
                sleep(spread(RELIST_WITHIN)).await;
                continue;
            }
            End::Broken(what, fault) => (what, fault),
        };
        watch.verify = true;
        sleep(spread(AGAIN_WITHIN)).await;
        let error = store.api.error(what, fault);
        if !watch.trouble.pause(&error, 1, out).await {
            return;
        }
    }
}

struct Watch<'a> {
    store: &'a KubeStore,
    out: &'a mpsc::Sender<Event>,
    /// What was reported.
    known: BTreeMap<Id, Record>,
    /// The version up to which everything was reported.
    at: Option<String>,
    /// When the server was seen to have no streaming lists.
    paged: Option<Instant>,
    /// The next list is another store's.
    reset: bool,
    word: Option<Instant>,
    /// The connection broke: is this still the store that we know?
    verify: bool,
    trouble: Trouble,
}

impl Watch<'_> {
    /// Lists are asked for as a stream, as far as we know.
    fn streaming(&self) -> bool {
        self.paged.is_none_or(|at| at.elapsed() >= PAGED_FOR)
    }

    /// A store that was wiped or restored has a shorter history, or another Node of our name. A watch from a version that
    /// is not there yet would be silent, not refused.
    async fn verified(&mut self) -> Result<(), Fault> {
        if self.verify {
            let newest = self.at.clone().unwrap_or_else(|| self.store.newest());
            let there = list::version(&self.store.api).await?;
            let behind = matches!((there.parse::<u64>(), newest.parse::<u64>()), (Ok(there), Ok(ours)) if there < ours);
            if behind || self.store.replaced().await? {
                tracing::warn!("this is another store than before, or our Node was made again: listing anew");
                self.store.forget();
                (self.at, self.reset) = (None, true);
            }
            self.verify = false;
        }
        Ok(())
    }

    async fn session(&mut self) -> End {
        if let Err(fault) = self.verified().await {
            return End::Broken("list nodes", fault);
        }
        if self.at.is_none()
            && !self.streaming()
            && let Err(end) = self.paged().await
        {
            return end;
        }
        let seconds = 300 + random() % 300;
        let watch = format!("/api/v1/nodes?watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}");
        let path = match &self.at {
            Some(at) => format!("{watch}&resourceVersion={at}"),
            None => {
                let newest = self.store.newest();
                let from = if newest.is_empty() { "0" } else { &newest };
                format!("{watch}&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion={from}")
            }
        };
        match self.store.api.open(&path, proto::WATCH).await {
            Ok(stream) => self.follow(stream).await,
            Err(fault) => self.refused(fault),
        }
    }

    fn refused(&mut self, fault: Fault) -> End {
        if fault.code() == GONE {
            return End::Relist;
        }
        // How servers say that they have no streaming lists: too old, switched off, or an etcd that is too old (500).
        if self.at.is_none() && self.streaming() && matches!(fault.code(), 400 | 422 | 500) {
            tracing::debug!(%fault, "no streaming lists here");
            return End::Paged;
        }
        End::Broken("watch nodes", fault)
    }

    /// The whole list, in pages.
    async fn paged(&mut self) -> Result<(), End> {
        let mut records = BTreeMap::new();
        let from = self.store.newest();
        let store = self.store;
        let take = |node: Node| {
            if let Some(record) = store.judge(&node) {
                records.insert(record.id.clone(), record);
            }
        };
        match list::all(&store.api, &from, take).await {
            Ok(version) => self.snapshot(records, version).await,
            Err(fault) => Err(match self.refused(fault) {
                End::Broken(_, fault) => End::Broken("list nodes", fault),
                end => end,
            }),
        }
    }

    async fn snapshot(&mut self, records: BTreeMap<Id, Record>, version: String) -> Result<(), End> {
        let all = records.values().cloned().collect();
        self.known = records;
        self.at = Some(version);
        self.trouble.over();
        let reset = std::mem::take(&mut self.reset);
        self.out.send(Event::Snapshot { records: all, reset }).await.map_err(|_| End::Closed)
    }

    /// Tells that the server lives, but not with each of a thousand heartbeats.
    async fn word(&mut self) -> Result<(), End> {
        self.trouble.over();
        if self.word.is_some_and(|at| at.elapsed() < WORD_EVERY) {
            return Ok(());
        }
        self.word = Some(Instant::now());
        self.out.send(Event::Word).await.map_err(|_| End::Closed)
    }

    async fn follow(&mut self, mut stream: Reader) -> End {
        let mut initial = self.at.is_none().then(BTreeMap::new);
        let mut last = Instant::now();
        let began = last;
        loop {
            match timeout(IDLE, stream.event()).await {
                Ok(Ok(None)) => {
                    return if initial.is_some() { End::Broken("list nodes", cut_off()) } else { End::Over };
                }
                Ok(Ok(Some(event))) => {
                    last = Instant::now();
                    if let Err(end) = self.event(event, &mut initial).await {
                        return end;
                    }
                }
                Ok(Err(garbled)) => return End::Broken("watch nodes", garbled.into()),
                Err(_) if last.elapsed() >= SILENT => return End::Broken("watch nodes", silent()),
                Err(_) => match self.store.api.get::<IgnoredAny>("/version").await {
                    Ok(_) => {
                        if let Err(end) = self.word().await {
                            return end;
                        }
                    }
                    // It lives: it is busy, or tells its version to nobody.
                    Err(fault) if fault.code() != 0 && fault.code() != UNAUTHORIZED => {}
                    Err(fault) => return End::Broken("watch nodes", fault),
                },
            }
            if initial.is_some() && began.elapsed() >= LIST_LIMIT {
                tracing::debug!("the streaming list has no end: paged lists from now on");
                return End::Paged;
            }
        }
    }

    /// One event. While `initial` is there it belongs to the list.
    async fn event(&mut self, event: WatchEvent, initial: &mut Option<BTreeMap<Id, Record>>) -> Result<(), End> {
        let garbled = |garbled: proto::Garbled| End::Broken("watch nodes", garbled.into());
        let deleted = match event.r#type.as_str() {
            "ADDED" | "MODIFIED" => false,
            "DELETED" => true,
            "BOOKMARK" => return self.bookmark(event.object().map_err(garbled)?, initial).await,
            _ => {
                let proto::Status { message, reason, code } = event.object().map_err(garbled)?;
                let status = Status::failure(&message, &reason).with_code(u16::try_from(code).unwrap_or(500));
                return Err(self.refused(Fault::Kube(kube::Error::Api(status.boxed()))));
            }
        };
        let node = Node::from(event.object::<proto::Node>().map_err(garbled)?);
        let record = if deleted { None } else { self.store.judge(&node) };
        let id = &node.metadata.name;
        if let Some(records) = initial {
            match record {
                Some(record) => records.insert(id.clone(), record),
                None => records.remove(id),
            };
            return Ok(());
        }
        let change = match (record, self.known.get(id)) {
            (Some(record), Some(old)) if record == *old => None,
            (Some(record), _) => {
                self.known.insert(id.clone(), record.clone());
                Some(Ok(record))
            }
            (None, Some(_)) => {
                self.known.remove(id);
                Some(Err(id.clone()))
            }
            (None, None) => None,
        };
        if let Some(change) = change {
            self.out.send(Event::Changes(vec![change])).await.map_err(|_| End::Closed)?;
        }
        self.at = Some(node.metadata.resource_version);
        self.word().await
    }

    async fn bookmark(&mut self, mark: proto::Node, initial: &mut Option<BTreeMap<Id, Record>>) -> Result<(), End> {
        let metadata = mark.metadata.unwrap_or_default();
        let ends = metadata.annotations().any(|mark| mark == (LIST_ENDS, "true"));
        let version = metadata.resource_version;
        match initial.take() {
            Some(records) if ends => self.snapshot(records, version).await?,
            Some(records) => *initial = Some(records),
            None => self.at = Some(version),
        }
        self.word().await
    }
}

fn cut_off() -> Fault {
    Fault::Stream("the answer was cut off".to_owned())
}

fn silent() -> Fault {
    Fault::Stream(format!("not even a bookmark within {} s", SILENT.as_secs()))
}

#[cfg(test)]
#[path = "watch/tests.rs"]
mod tests;
