// SPDX-License-Identifier: Apache-2.0
//! The watch of all Nodes: a list, then its changes.
//!
//! Where the server can do that, the list is the beginning of the watch ("streaming list", `sendInitialEvents`). Otherwise a list in pages
//! precedes the watch. A watch that ends is resumed at the last version that was seen. If that version is too old for the server, the list
//! is read again.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::core::WatchEvent;
use kube::core::watch::Bookmark;
use serde::de::IgnoredAny;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::lease::{Id, Record};
use crate::outside::random;
use crate::retry::Failures;
use crate::source::{Event, RecordChange};

use super::client::{ApiError, GONE, SILENCE_LIMIT, UNAUTHORIZED};
use super::node::Node;
use super::watch_stream::WatchStream;
use super::{KubeStore, node_list, random_part};

/// After this time without an event the server is asked for its version, because a stopped server keeps its connections open. In a large
/// cluster events come more often.
const IDLE: Duration = Duration::from_secs(15);
/// A streaming list that takes longer is given up: the server does not know the parameters and will never send the last bookmark.
const LIST_LIMIT: Duration = Duration::from_secs(60);
/// A watch that ends sooner without an error counts as a failure.
const SHORT: Duration = Duration::from_secs(1);
/// The shortest time between two [`Event::Answered`].
const ANSWERED_INTERVAL: Duration = Duration::from_secs(5);
/// The longest back-off. With a shorter one, thousands of agents could keep a server down that is coming back.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// When a server ends, the watches of all nodes end at once. The agents come back within this time, at random.
const RESUME_WITHIN: Duration = Duration::from_secs(1);
/// When a server forgets a version, all agents learn it at once. They list again within this time, at random.
const RELIST_WITHIN: Duration = Duration::from_secs(1);
/// A server without streaming lists is asked for one again after this time, because it may have been upgraded.
const STREAMING_RETRY: Duration = Duration::from_secs(600);

/// The annotation of the bookmark behind the last Node of a streaming list.
const LIST_ENDS: &str = "k8s.io/initial-events-end";

/// Why a session ended.
enum End {
    /// Nobody receives the events any more.
    Closed,
    /// The server closed the watch, as it does after some minutes. It can be resumed.
    Over,
    /// The server has no streaming lists.
    NoStreaming,
    /// The server has forgotten the version, so events may have been missed.
    Relist,
    /// A request failed; the text names it.
    Failed(&'static str, ApiError),
}

/// See [`crate::source::Source::watch`].
pub(super) async fn run(store: &KubeStore, out: &mpsc::Sender<Event>) {
    let mut watch = Watch {
        store,
        out,
        records: BTreeMap::new(),
        version: None,
        without_streaming: None,
        reset: false,
        last_answered: None,
        check_history: false,
        failures: Failures::new(RETRY_MAX),
    };
    loop {
        let began = Instant::now();
        let (what, error) = match watch.session().await {
            End::Closed => return,
            End::NoStreaming => {
                watch.without_streaming = Some(Instant::now());
                continue;
            }
            End::Over if began.elapsed() >= SHORT => {
                sleep(random_part(RESUME_WITHIN)).await;
                continue;
            }
            End::Over => (WATCH, ApiError::ClosedAtOnce),
            End::Relist => {
                tracing::info!("the API server no longer has the version of the Nodes that we know: listing again");
                watch.version = None;
                sleep(random_part(RELIST_WITHIN)).await;
                continue;
            }
            End::Failed(what, error) => (what, error),
        };
        watch.check_history = true;
        sleep(random_part(RESUME_WITHIN)).await;
        let error = store.api.error(what, error);
        if !watch.failures.pause(&error, 1, out).await {
            return;
        }
    }
}

/// The names of the requests in messages.
const WATCH: &str = "watch nodes";
const LIST: &str = "list nodes";

struct Watch<'a> {
    store: &'a KubeStore,
    out: &'a mpsc::Sender<Event>,
    /// What was reported, so that a change of a Node that does not concern its lease is not.
    records: BTreeMap<Id, Record>,
    /// Everything up to this version was reported. `None` before the first list, and if a new one is needed.
    version: Option<String>,
    /// When the server was last seen to have no streaming lists, or a line of its watch was too long.
    without_streaming: Option<Instant>,
    /// The next list is from another store than the one before.
    reset: bool,
    /// When [`Event::Answered`] was last sent.
    last_answered: Option<Instant>,
    /// A request failed, or the server ended a watch early: check that the server still has the history that we know.
    check_history: bool,
    failures: Failures,
}

impl Watch<'_> {
    fn may_stream(&self) -> bool {
        self.without_streaming.is_none_or(|since| since.elapsed() >= STREAMING_RETRY)
    }

    /// Finds out whether etcd was wiped or restored. It then has a shorter history than we know, or another Node with our name. A
    /// server does not refuse to watch from a version that it has not reached, but sends nothing until then.
    async fn ensure_same_history(&mut self) -> Result<(), ApiError> {
        if self.check_history {
            let known = self.version.clone().unwrap_or_else(|| self.store.own_version());
            let current = node_list::current_version(&self.store.api).await?;
            let shorter =
                matches!((current.parse::<u64>(), known.parse::<u64>()), (Ok(current), Ok(known)) if current < known);
            if shorter || self.store.own_node_replaced().await? {
                tracing::warn!("etcd was restored, or our Node was deleted and created again: listing again");
                self.store.forget_history();
                (self.version, self.reset) = (None, true);
            }
            self.check_history = false;
        }
        Ok(())
    }

    /// Lists if necessary, and follows one watch to its end.
    async fn session(&mut self) -> End {
        if let Err(error) = self.ensure_same_history().await {
            return End::Failed(LIST, error);
        }
        if self.version.is_none()
            && !self.may_stream()
            && let Err(end) = self.list_in_pages().await
        {
            return end;
        }
        // Agents that started together end their watches at different times.
        let seconds = 300 + random() % 300;
        let watch = format!("/api/v1/nodes?watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}");
        let path = match &self.version {
            Some(version) => format!("{watch}&resourceVersion={version}"),
            None => {
                let own = self.store.own_version();
                let at_least = if own.is_empty() { "0" } else { &own };
                format!("{watch}&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion={at_least}")
            }
        };
        let began = Instant::now();
        let end = match self.store.api.open(&path).await {
            Ok(body) => self.follow(WatchStream::new(body)).await,
            Err(error) => self.failed(error),
        };
        // A server that ends a watch early was stopped, perhaps to restore etcd.
        self.check_history |= matches!(end, End::Over) && began.elapsed() < Duration::from_secs(seconds);
        end
    }

    fn failed(&self, error: ApiError) -> End {
        if error.code() == GONE {
            return End::Relist;
        }
        // So answers a server that is too old for streaming lists, has them switched off, or (500) whose etcd is too old for them.
        if self.version.is_none() && self.may_stream() && matches!(error.code(), 400 | 422 | 500) {
            tracing::debug!(%error, "the API server has no streaming lists");
            return End::NoStreaming;
        }
        End::Failed(WATCH, error)
    }

    async fn list_in_pages(&mut self) -> Result<(), End> {
        let mut records = BTreeMap::new();
        let store = self.store;
        let insert = |node: Node| {
            if let Some(record) = store.record(&node) {
                records.insert(record.id.clone(), record);
            }
        };
        match node_list::all(&store.api, &store.own_version(), insert).await {
            Ok(version) => self.snapshot(records, version).await,
            Err(error) if error.code() == GONE => Err(End::Relist),
            Err(error) => Err(End::Failed(LIST, error)),
        }
    }

    async fn snapshot(&mut self, records: BTreeMap<Id, Record>, version: String) -> Result<(), End> {
        let all = records.values().cloned().collect();
        self.records = records;
        self.version = Some(version);
        self.failures.reset();
        let reset = std::mem::take(&mut self.reset);
        self.out.send(Event::Snapshot { records: all, reset }).await.map_err(|_| End::Closed)
    }

    /// Reports that the server lives, but not with each of a thousand updates.
    async fn server_lives(&mut self) -> Result<(), End> {
        self.failures.reset();
        if self.last_answered.is_some_and(|at| at.elapsed() < ANSWERED_INTERVAL) {
            return Ok(());
        }
        self.last_answered = Some(Instant::now());
        self.out.send(Event::Answered).await.map_err(|_| End::Closed)
    }

    async fn follow(&mut self, mut stream: WatchStream) -> End {
        let mut list = self.version.is_none().then(BTreeMap::new);
        let began = Instant::now();
        let mut last_event = began;
        loop {
            let handled = match timeout(IDLE, stream.next()).await {
                Ok(Ok(None)) if list.is_some() => return End::Failed(LIST, ApiError::CutOff),
                Ok(Ok(None)) => return End::Over,
                Ok(Ok(Some(event))) => {
                    last_event = Instant::now();
                    self.event(event, &mut list).await
                }
                Ok(Err(ApiError::TooLarge)) => return self.line_too_long(),
                Ok(Err(error)) => return End::Failed(WATCH, error),
                Err(_) if last_event.elapsed() >= SILENCE_LIMIT => return End::Failed(WATCH, ApiError::NoBookmark),
                Err(_) => self.ask_whether_it_lives().await,
            };
            if let Err(end) = handled {
                return end;
            }
            if list.is_some() && began.elapsed() >= LIST_LIMIT {
                tracing::debug!("the streaming list does not end: listing in pages from now on");
                return End::NoStreaming;
            }
        }
    }

    /// The next watch would get the same line again: a watch from the same version, and a streaming list, too. A list in pages has no
    /// lines. What follows the list is watched again.
    fn line_too_long(&mut self) -> End {
        if self.version.take().is_none() {
            tracing::debug!("the streaming list has too long a line: listing in pages from now on");
            return End::NoStreaming;
        }
        self.without_streaming = Some(Instant::now());
        End::Failed(WATCH, ApiError::TooLarge)
    }

    async fn ask_whether_it_lives(&mut self) -> Result<(), End> {
        match self.store.api.get::<IgnoredAny>("/version").await {
            Ok(_) => self.server_lives().await,
            Err(error) if error.code() == 0 || error.code() == UNAUTHORIZED => Err(End::Failed(WATCH, error)),
            // It is busy, or does not tell its version to everybody.
            Err(_) => Ok(()),
        }
    }

    /// Handles one event. It belongs to `list` if that is there.
    async fn event(&mut self, event: WatchEvent<Node>, list: &mut Option<BTreeMap<Id, Record>>) -> Result<(), End> {
        let (node, record) = match event {
            WatchEvent::Added(node) | WatchEvent::Modified(node) => {
                let record = self.store.record(&node);
                (node, record)
            }
            WatchEvent::Deleted(node) => (node, None),
            WatchEvent::Bookmark(bookmark) => return self.bookmark(bookmark, list).await,
            WatchEvent::Error(status) => return Err(self.failed(ApiError::Kube(kube::Error::Api(status)))),
        };
        let id = &node.metadata.name;
        if let Some(list) = list {
            match record {
                Some(record) => list.insert(id.clone(), record),
                None => list.remove(id),
            };
            return Ok(());
        }
        if let Some(change) = self.change(id, record) {
            self.out.send(Event::Changes(vec![change])).await.map_err(|_| End::Closed)?;
        }
        self.version = Some(node.metadata.resource_version);
        self.server_lives().await
    }

    /// Remembers what a Node says now, and returns what to report. `None` if nothing changed that concerns us.
    fn change(&mut self, id: &Id, record: Option<Record>) -> Option<RecordChange> {
        match (record, self.records.get(id)) {
            (Some(record), Some(old)) if record == *old => None,
            (Some(record), _) => {
                self.records.insert(id.clone(), record.clone());
                Some(RecordChange::Written(record))
            }
            (None, _) => self.records.remove(id).map(|_| RecordChange::Removed(id.clone())),
        }
    }

    async fn bookmark(&mut self, bookmark: Bookmark, list: &mut Option<BTreeMap<Id, Record>>) -> Result<(), End> {
        let ends_list = bookmark.metadata.annotations.get(LIST_ENDS).is_some_and(|value| value == "true");
        let version = bookmark.metadata.resource_version;
        match list.take() {
            Some(records) if ends_list => self.snapshot(records, version).await?,
            Some(records) => *list = Some(records),
            None => self.version = Some(version),
        }
        self.server_lives().await
    }
}

#[cfg(test)]
mod tests;
