// SPDX-License-Identifier: Apache-2.0
//! A simulated API server of Kubernetes. The agents use the real store code and the client of the crate kube; only the connection is replaced
//! ([`ApiServer::client`]).

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use crate::nodes::{Nodes, Refused, TOO_MANY};
use crate::shared::Shared;
use crate::wire::{LATENCY, Wire};

/// How often an idle watch gets a bookmark.
const BOOKMARK: Duration = Duration::from_secs(60);
/// How many pieces of an answer wait for the client.
const QUEUE: usize = 64;

/// The server, which all nodes share.
#[derive(Debug, Clone)]
pub struct ApiServer {
    nodes: Shared<Nodes>,
    /// The number of changes of the watch cache. Watches wait for the next one.
    cached: watch::Sender<u64>,
    /// How far the watch cache is behind.
    lag: Arc<Mutex<Duration>>,
}

/// A body that is sent piece by piece.
type Pieces = mpsc::Sender<Bytes>;

impl ApiServer {
    /// Returns a server without Nodes.
    pub fn start() -> ApiServer {
        let server = ApiServer { nodes: Shared::new(Nodes::new()), cached: watch::Sender::new(0), lag: Arc::default() };
        let caching = server.clone();
        tokio::spawn(async move {
            let mut written = caching.nodes.changes();
            while written.changed().await.is_ok() {
                let lag = *caching.lag.lock().unwrap_or_else(PoisonError::into_inner);
                sleep(LATENCY + lag).await;
                caching.nodes.change_silently(Nodes::update_cache);
                caching.cached.send_modify(|count| *count += 1);
            }
        });
        server
    }

    /// Reads the content.
    pub fn read<T>(&self, read: impl FnOnce(&Nodes) -> T) -> T {
        self.nodes.read(read)
    }

    /// Changes the content.
    pub fn change<T>(&self, change: impl FnOnce(&mut Nodes) -> T) -> T {
        self.nodes.change(change)
    }

    /// Changes how far the watch cache is behind.
    pub fn set_lag(&self, lag: Duration) {
        *self.lag.lock().unwrap_or_else(PoisonError::into_inner) = lag;
    }

    /// Starts the server again with this content. All watches end.
    pub fn restart_with(&self, mut content: Nodes) {
        content.update_cache();
        self.nodes.restart_with(content);
        self.cached.send_modify(|count| *count += 1);
    }

    /// Returns a client whose requests go over this wire.
    pub fn client(&self, wire: &Wire) -> Client {
        let (server, wire) = (self.clone(), wire.clone());
        let service = tower::service_fn(move |request: Request<Body>| server.clone().call(wire.clone(), request));
        Client::new(service, "default")
    }

    async fn call(self, wire: Wire, request: Request<Body>) -> Result<Response<Sent>, tower::BoxError> {
        if !wire.carry_request().await {
            return Err("tcp connect error: Connection refused".into());
        }
        let (parts, body) = request.into_parts();
        let body = serde_json::from_slice(&body.collect().await?.to_bytes()).unwrap_or_default();
        let answer = match wire.is_throttled() {
            true => Err(TOO_MANY),
            false => self.answer(&wire, &parts, &body).await,
        };
        wire.carry_answer().await;
        let answer = match answer {
            Ok(body) => Response::new(body),
            Err(refused) => {
                let mut answer = Response::new(whole(&status(refused)));
                *answer.status_mut() = http::StatusCode::from_u16(refused.0)?;
                answer
            }
        };
        Ok(answer)
    }

    async fn answer(&self, wire: &Wire, parts: &http::request::Parts, body: &Value) -> Result<Sent, Refused> {
        let query = parts.uri.query().unwrap_or_default();
        let parameter = |name: &str| {
            let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value.replace("%3D", "="))
        };
        match (&parts.method, parts.uri.path()) {
            (_, "/version") => Ok(whole(&json!({"gitVersion": "simulated"}))),
            (_, "/api/v1/nodes") if parameter("watch").is_some() => {
                let version = parameter("resourceVersion").and_then(|text| text.parse().ok()).unwrap_or(0);
                let lists = parameter("sendInitialEvents").is_some();
                let only = parameter("fieldSelector").and_then(|text| Some(text.split_once('=')?.1.to_owned()));
                let seconds = parameter("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(1800);
                if !lists {
                    self.read(|nodes| nodes.changes(version)).map(drop)?;
                }
                let (sender, receiver) = mpsc::channel(QUEUE);
                let end = Instant::now() + Duration::from_secs(seconds);
                tokio::spawn(self.clone().follow(wire.clone(), Followed { version, lists, only, end }, sender));
                Ok(sent(receiver))
            }
            (_, "/api/v1/nodes") => match parameter("resourceVersion").and_then(|text| text.parse().ok()) {
                Some(at_least) => {
                    self.wait_for(at_least).await;
                    Ok(whole(&self.read(|nodes| nodes.list(true))))
                }
                None => Ok(whole(&self.read(|nodes| nodes.list(false)))),
            },
            (method, path) => {
                let name = path.trim_start_matches("/api/v1/nodes/").trim_end_matches("/status");
                if method == Method::PATCH {
                    return Ok(whole(&self.change(|nodes| nodes.patch(name, body))?));
                }
                Ok(whole(&self.read(|nodes| nodes.get(name))?))
            }
        }
    }

    /// Waits until the watch cache knows this version.
    async fn wait_for(&self, version: u64) {
        let mut changes = self.cached.subscribe();
        while self.read(Nodes::cached_version) < version && changes.changed().await.is_ok() {}
    }

    /// Serves one watch until its time is over, or the client or the server ends it.
    async fn follow(self, wire: Wire, followed: Followed, out: Pieces) {
        let (mut changes, mut restarts) = (self.cached.subscribe(), self.nodes.restarts());
        let Followed { mut version, lists, only, end } = followed;
        let concerns = |name: &str| only.as_ref().is_none_or(|only| only == name);
        if lists {
            self.wait_for(version).await;
            let list = self.read(|nodes| nodes.list(true));
            version = list["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).unwrap_or(0);
            let items = list["items"].as_array().into_iter().flatten();
            let mut events: Vec<Value> = items.map(|node| json!({"type": "ADDED", "object": node})).collect();
            events.push(bookmark(version, true));
            for event in events {
                if !deliver(&wire, &out, &event).await {
                    return;
                }
            }
        }
        let mut next_bookmark = Instant::now() + BOOKMARK;
        loop {
            changes.mark_unchanged();
            let mut events: Vec<Value> = match self.read(|nodes| nodes.changes(version)) {
                Ok(changes) => changes.iter().filter(|change| concerns(&change.name)).map(|it| it.event()).collect(),
                Err(expired) => {
                    deliver(&wire, &out, &json!({"type": "ERROR", "object": status(expired)})).await;
                    return;
                }
            };
            version = version.max(self.read(Nodes::cached_version));
            if Instant::now() >= next_bookmark {
                events.push(bookmark(version, false));
                next_bookmark = Instant::now() + BOOKMARK;
            }
            if !events.is_empty() {
                sleep(LATENCY + wire.lag()).await;
            }
            for event in events {
                if !deliver(&wire, &out, &event).await {
                    return;
                }
            }
            tokio::select! {
                biased;
                _ = restarts.changed() => return,
                () = out.closed() => return,
                () = sleep_until(end) => return,
                _ = changes.changed() => {}
                () = sleep_until(next_bookmark) => {}
            }
        }
    }
}

/// What a watch asks for.
struct Followed {
    version: u64,
    /// The watch begins with a list.
    lists: bool,
    /// The name of the only Node that it asks for.
    only: Option<String>,
    end: Instant,
}

/// The body of an answer.
type Sent = http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>;

fn sent(receiver: mpsc::Receiver<Bytes>) -> Sent {
    let pieces = stream::unfold(receiver, |mut receiver| async move {
        let piece = receiver.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(piece)), receiver))
    });
    StreamBody::new(pieces).boxed_unsync()
}

fn whole(value: &Value) -> Sent {
    http_body_util::Full::new(Bytes::from(value.to_string())).boxed_unsync()
}

fn status(Refused(code, reason, message): Refused) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code})
}

fn bookmark(version: u64, ends_list: bool) -> Value {
    let annotations = if ends_list { json!({"k8s.io/initial-events-end": "true"}) } else { json!({}) };
    let metadata = json!({"resourceVersion": version.to_string(), "annotations": annotations});
    json!({"type": "BOOKMARK", "object": {"kind": "Node", "apiVersion": "v1", "metadata": metadata}})
}

/// Sends an event to the client when the network lets it through. Returns false if nobody receives it.
async fn deliver(wire: &Wire, out: &Pieces, event: &Value) -> bool {
    wire.passable().await;
    out.send(Bytes::from(format!("{event}\n"))).await.is_ok()
}
