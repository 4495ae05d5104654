// SPDX-License-Identifier: Apache-2.0
//! A simulated API server of Kubernetes. The agents use the real store code and the client of the crate kube; only the connection is replaced
//! ([`ApiServer::client`]).

mod query;
mod watch;

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch as notice};
use tokio::time::{sleep, timeout};

use crate::nodes::{At, BAD_REQUEST, NOT_FOUND, Nodes, Part, Refused, TOO_LARGE, TOO_MANY};
use crate::shared::Shared;
use crate::timeline;
use crate::wire::{LATENCY, Wire};
use query::{List, Question, Version};

/// How many pieces of an answer wait for the client.
const QUEUE: usize = 64;
/// How long a request waits for a version that the watch cache does not have yet.
const FRESH_LIMIT: Duration = Duration::from_secs(3);

/// The server, which all nodes share.
#[derive(Debug, Clone)]
pub struct ApiServer {
    nodes: Shared<Nodes>,
    /// The number of changes of the watch cache. Watches wait for the next one.
    cached: notice::Sender<u64>,
    /// How far the watch cache is behind.
    lag: Arc<Mutex<Duration>>,
}

impl ApiServer {
    /// Returns a server without Nodes.
    pub fn start() -> ApiServer {
        let server =
            ApiServer { nodes: Shared::new(Nodes::new()), cached: notice::Sender::new(0), lag: Arc::default() };
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
        let (code, body) = answer.unwrap_or_else(|refused| (refused.0, whole(&status(refused))));
        let mut answer = Response::new(body);
        *answer.status_mut() = StatusCode::from_u16(code)?;
        Ok(answer)
    }

    /// Returns the HTTP code and the body.
    async fn answer(&self, wire: &Wire, parts: &Parts, body: &Value) -> Result<(u16, Sent), Refused> {
        let path = parts.uri.path();
        if path == "/version" {
            return Ok((200, whole(&json!({"gitVersion": "simulated"}))));
        }
        let Some(name) = path.strip_prefix("/api/v1/nodes") else { return Err(NOT_FOUND) };
        let (name, part) = match name.strip_suffix("/status") {
            Some(name) => (name, Part::Status),
            None => (name, Part::Node),
        };
        let answer = match (&parts.method, name.strip_prefix('/')) {
            (&Method::GET, Some(name)) => self.read(|nodes| nodes.get(name))?,
            (&Method::PATCH, Some(name)) => self.change(|nodes| nodes.patch(name, part, body))?,
            (&Method::DELETE, Some(name)) => {
                self.change(|nodes| nodes.delete(name))?;
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})
            }
            (&Method::POST, None) => {
                return Ok((201, whole(&self.change(|nodes| nodes.create(body, &timeline::date()))?)));
            }
            (&Method::GET, None) => match Question::of(parts.uri.query().unwrap_or_default())? {
                Question::List(list) => self.list(&list).await?,
                Question::Watch(watch) => return Ok((200, self.watch(wire, watch).await)),
            },
            _ => return Err(BAD_REQUEST),
        };
        Ok((200, whole(&answer)))
    }

    async fn list(&self, List { version, limit, after }: &List) -> Result<Value, Refused> {
        let (at, limit) = match *version {
            Version::Newest => (At::Current, *limit),
            Version::Exactly(version) => (At::Exactly(version), *limit),
            Version::AtLeast(version) => {
                self.wait_for(version).await?;
                // Whoever takes any version gets everything at once.
                (At::Cached, if version == 0 { usize::MAX } else { *limit })
            }
        };
        self.read(|nodes| nodes.list(at, limit, after))
    }

    /// Waits until the watch cache knows this version.
    async fn wait_for(&self, version: u64) -> Result<(), Refused> {
        let mut changes = self.cached.subscribe();
        let known = changes.wait_for(|_| self.read(Nodes::cached_version) >= version);
        timeout(FRESH_LIMIT, known).await.map(drop).map_err(|_| TOO_LARGE)
    }
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
