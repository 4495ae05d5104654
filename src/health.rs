// SPDX-License-Identifier: Apache-2.0
//! /healthz, /readyz and /metrics over HTTP/1.1 (flannel-compat.md section 10). Unlike flannel's, readiness can go false again, and
//! says why. Nothing here may harm the agent: a port that is taken is tried again, slow clients are cut off, and of too many the oldest,
//! so that whoever comes and asks is answered.

use std::collections::{BTreeSet, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use crate::metrics::Metrics;

/// A client gets so long for its request.
const REQUEST_LIMIT: Duration = Duration::from_secs(1);
/// And so long in all, with our answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Between attempts to take the port.
const AGAIN: Duration = Duration::from_secs(5);
/// Clients at once. One more: the oldest has to go.
const CLIENTS: usize = 32;
/// Request line and headers, bytes.
const REQUEST: usize = 8192;

/// Why the node is not ready: a set of sentences, written by the agent, read here. No reason = ready.
#[derive(Debug, Clone)]
pub struct Readiness {
    reasons: Arc<Mutex<BTreeSet<String>>>,
}

impl Default for Readiness {
    fn default() -> Readiness {
        Readiness::new()
    }
}

impl Readiness {
    /// Not ready: the agent is starting.
    pub fn new() -> Readiness {
        let readiness = Readiness { reasons: Arc::default() };
        readiness.set(["the agent is starting".to_owned()]);
        readiness
    }

    /// These are the reasons now; none = ready. True when readiness itself changed.
    pub fn set(&self, reasons: impl IntoIterator<Item = String>) -> bool {
        let new: BTreeSet<String> = reasons.into_iter().collect();
        let mut now = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let turned = now.is_empty() != new.is_empty();
        *now = new;
        turned
    }

    /// The reasons, sorted; none = ready.
    pub fn reasons(&self) -> Vec<String> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// True when there is no reason against it.
    pub fn is_ready(&self) -> bool {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// Serves until dropped. When the port is taken, says so and tries again every 5 s: the agent goes on without.
pub async fn serve(address: SocketAddr, readiness: Readiness, metrics: Arc<Metrics>) {
    let mut said = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !said => {
                said = true;
                tracing::error!(%address, %error, "listen for health checks; trying again every 5 s");
            }
            Err(_) => {}
        }
        tokio::time::sleep(AGAIN).await;
    };
    serve_on(listener, readiness, metrics).await;
}

/// Serves on a listener until dropped.
pub async fn serve_on(listener: TcpListener, readiness: Readiness, metrics: Arc<Metrics>) {
    // Ends with this future: aborts the clients that are still there.
    let mut clients = JoinSet::new();
    let mut by_age: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, mostly: do not spin.
                tracing::debug!(%error, "accept a health check");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        while clients.try_join_next().is_some() {}
        by_age.retain(|client| !client.is_finished());
        if by_age.len() >= CLIENTS
            && let Some(oldest) = by_age.pop_front()
        {
            oldest.abort();
        }
        let (readiness, metrics) = (readiness.clone(), metrics.clone());
        by_age.push_back(clients.spawn(async move {
            let _ = tokio::time::timeout(LIMIT, client(stream, readiness, metrics)).await;
        }));
    }
}

async fn client(stream: TcpStream, readiness: Readiness, metrics: Arc<Metrics>) {
    let service = service_fn(|request: Request<Incoming>| {
        let response = answer(request.method(), request.uri().path(), &readiness, &metrics);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_LIMIT)
        .max_buf_size(REQUEST)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::trace!(%error, "serve a health check");
    }
}

fn answer(method: &Method, path: &str, readiness: &Readiness, metrics: &Metrics) -> Response<Full<Bytes>> {
    if method != Method::GET && method != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".to_owned());
    }
    match path {
        "/healthz" => text(StatusCode::OK, "flanneld is running".to_owned()),
        "/readyz" => match readiness.reasons() {
            reasons if reasons.is_empty() => text(StatusCode::OK, "flanneld is ready".to_owned()),
            reasons => {
                let body = format!("flanneld is not ready yet\n{}\n", reasons.join("\n"));
                text(StatusCode::SERVICE_UNAVAILABLE, body)
            }
        },
        "/metrics" => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            reply(StatusCode::OK, kind, metrics.render(Instant::now()))
        }
        _ => text(StatusCode::NOT_FOUND, "there is /healthz, /readyz and /metrics\n".to_owned()),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    reply(status, "text/plain; charset=utf-8", body)
}

fn reply(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await;
        read.expect("the server closes").unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn bodies_are_flannels_and_readiness_comes_and_goes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let readiness = Readiness::new();
        let server = tokio::spawn(serve_on(listener, readiness.clone(), Arc::new(Metrics::new())));
        let ready = "GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n";
        let got = get(address, ready).await;
        assert!(
            got.starts_with("HTTP/1.1 503") && got.ends_with("flanneld is not ready yet\nthe agent is starting\n"),
            "{got}"
        );
        assert!(readiness.set([]), "turned ready");
        let got = get(address, ready).await;
        assert!(got.starts_with("HTTP/1.1 200") && got.ends_with("\r\n\r\nflanneld is ready"), "{got}");
        assert!(readiness.set(["no lease".to_owned()]) && !readiness.set(["no store".to_owned()]));
        assert!(get(address, ready).await.ends_with("flanneld is not ready yet\nno store\n"));
        let got = get(address, "GET /healthz HTTP/1.0\r\n\r\n").await;
        assert!(got.contains(" 200 OK") && got.ends_with("\r\n\r\nflanneld is running"), "{got}");
        assert!(get(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await.contains("weft_build_info"));
        assert!(get(address, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n").await.starts_with("HTTP/1.1 404"));
        assert!(get(address, "POST /readyz HTTP/1.1\r\nHost: a\r\n\r\n").await.starts_with("HTTP/1.1 405"));
        server.abort();
    }

    #[tokio::test]
    async fn a_client_that_says_nothing_does_not_block_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve_on(listener, Readiness::new(), Arc::new(Metrics::new())));
        let _silent = TcpStream::connect(address).await.unwrap();
        assert!(get(address, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.contains("flanneld is running"));
        server.abort();
    }

    #[tokio::test]
    async fn of_too_many_clients_the_oldest_goes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve_on(listener, Readiness::new(), Arc::new(Metrics::new())));
        let begin = Instant::now();
        let mut silent = Vec::new();
        for _ in 0..3 * CLIENTS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert!(get(address, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.contains("flanneld is running"));
        let waited = begin.elapsed();
        assert!(waited < REQUEST_LIMIT, "{waited:?}: it waited until others were cut off for their silence");
        let closed = tokio::time::timeout(LIMIT, silent[0].read(&mut [0; 1])).await.expect("the oldest is cut off");
        assert!(!matches!(closed, Ok(1..)), "{closed:?}");
        server.abort();
    }
}
