// SPDX-License-Identifier: Apache-2.0
//! Serves /healthz, /readyz, /metrics and /mesh over HTTP/1.1. The first two answer as flannel does (docs/flannel-formats.md,
//! "Health checks, signals, exit codes"), except that readiness can become false again, and that the answer contains
//! the reasons.
//!
//! The server must not harm the agent. If the port is in use, the server tries again. It disconnects slow clients. If
//! there are too many clients, it disconnects the oldest one, so that new clients are always answered.

pub mod mesh_page;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::observe::clients_by_age::ClientsByAge;
use crate::observe::http::{self, RequestLimits, reply, text};
use crate::observe::metrics::Metrics;
use crate::observe::readiness::Readiness;
use mesh_page::{MeshPage, MeshPageError};

/// The limits of a request.
const REQUEST: RequestLimits = RequestLimits { time: Duration::from_secs(1), size: 8192 };
/// Time limit for a request and its answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Time between attempts to listen on the port.
const LISTEN_RETRY: Duration = Duration::from_secs(5);
/// Maximum number of clients. A further client disconnects the oldest one.
const MAX_CLIENTS: usize = 32;

/// What the pages show.
#[derive(Debug, Clone)]
pub struct Pages {
    /// The state behind /readyz.
    pub readiness: Readiness,
    /// The numbers behind /metrics.
    pub metrics: Arc<Metrics>,
    /// /mesh.
    pub mesh: MeshPage,
}

/// Serves until dropped. If the port is in use, it logs that and tries again every 5 s; the agent works without the
/// server.
pub async fn serve(address: SocketAddr, pages: Pages) {
    let mut logged = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !logged => {
                logged = true;
                tracing::error!(%address, %error, "listen for health checks; trying again every 5 s");
            }
            Err(_) => {}
        }
        tokio::time::sleep(LISTEN_RETRY).await;
    };
    serve_on(listener, pages).await;
}

/// Serves on a listener until dropped.
pub async fn serve_on(listener: TcpListener, pages: Pages) {
    // Dropping the set aborts the clients.
    let mut clients = JoinSet::new();
    let mut by_age = ClientsByAge::new(MAX_CLIENTS);
    loop {
        let (stream, address) = http::accept(&listener).await;
        while clients.try_join_next().is_some() {}
        let pages = pages.clone();
        by_age.add(clients.spawn(async move {
            let _ = tokio::time::timeout(LIMIT, client(stream, address.ip(), pages)).await;
        }));
    }
}

async fn client(stream: TcpStream, address: IpAddr, pages: Pages) {
    let pages = &pages;
    let answer = |request: Request<Incoming>| async move {
        let accepted = request.headers().get(hyper::header::ACCEPT).and_then(|value| value.to_str().ok());
        let open = accepted.is_some_and(|kinds| kinds.contains("application/openmetrics-text"));
        let is_read = request.method() == Method::GET || request.method() == Method::HEAD;
        if is_read && request.uri().path() == "/mesh" {
            return mesh(pages.mesh.read(address).await);
        }
        answer(request.method(), (request.uri().path(), open), &pages.readiness, &pages.metrics)
    };
    http::serve(stream, REQUEST, answer).await;
}

/// Returns the answer for a path. `open` is true if the client understands OpenMetrics.
fn answer(
    method: &Method,
    (path, open): (&str, bool),
    readiness: &Readiness,
    metrics: &Metrics,
) -> Response<Full<Bytes>> {
    if method != Method::GET && method != Method::HEAD {
        return text(StatusCode::METHOD_NOT_ALLOWED, "use GET\n");
    }
    match path {
        "/healthz" => text(StatusCode::OK, "flanneld is running"),
        "/readyz" => match readiness.reasons() {
            reasons if reasons.is_empty() => text(StatusCode::OK, "flanneld is ready"),
            reasons => {
                let body = format!("flanneld is not ready yet\n{}\n", reasons.join("\n"));
                text(StatusCode::SERVICE_UNAVAILABLE, body)
            }
        },
        "/metrics" if !open => {
            reply(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", metrics.render_classic(Instant::now()))
        }
        "/metrics" => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            reply(StatusCode::OK, kind, metrics.render(Instant::now()))
        }
        _ => text(StatusCode::NOT_FOUND, "there is /healthz, /readyz, /metrics and /mesh\n"),
    }
}

fn mesh(row: Result<Bytes, MeshPageError>) -> Response<Full<Bytes>> {
    match row {
        Ok(row) => reply(StatusCode::OK, "application/json", row),
        Err(error @ MeshPageError::Stranger(_)) => text(StatusCode::FORBIDDEN, format!("{error}\n")),
        Err(error @ MeshPageError::Ending) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::mpsc;

    use super::*;

    async fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await;
        read.expect("the server must close the connection").unwrap();
        String::from_utf8(answer).unwrap()
    }

    /// The pages of an agent that ends.
    fn pages(readiness: Readiness) -> Pages {
        Pages { readiness, metrics: Arc::new(Metrics::new()), mesh: MeshPage::new(mpsc::channel(1).0) }
    }

    #[tokio::test]
    async fn bodies_are_those_of_flannel_and_readiness_can_become_false_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let readiness = Readiness::new();
        let server = tokio::spawn(serve_on(listener, pages(readiness.clone())));
        let ready = "GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n";
        let got = get(address, ready).await;
        assert!(
            got.starts_with("HTTP/1.1 503") && got.ends_with("flanneld is not ready yet\nthe agent is starting\n"),
            "{got}"
        );
        assert!(readiness.set([]), "readiness must change to true");
        let got = get(address, ready).await;
        assert!(got.starts_with("HTTP/1.1 200") && got.ends_with("\r\n\r\nflanneld is ready"), "{got}");
        assert!(readiness.set(["no lease".to_owned()]) && !readiness.set(["no store".to_owned()]));
        assert!(get(address, ready).await.ends_with("flanneld is not ready yet\nno store\n"));
        let got = get(address, "GET /healthz HTTP/1.0\r\n\r\n").await;
        assert!(got.contains(" 200 OK") && got.ends_with("\r\n\r\nflanneld is running"), "{got}");
        let got = get(address, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(got.contains("version=0.0.4") && got.contains("# TYPE weft_build_info gauge"), "{got}");
        let accept = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2";
        let got = get(address, &format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{accept}\r\n\r\n")).await;
        assert!(got.contains("content-type: application/openmetrics-text") && got.ends_with("# EOF\n"), "{got}");
        let got = get(address, "HEAD /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(got.starts_with("HTTP/1.1 200") && got.ends_with("\r\n\r\n"), "{got}");
        assert!(got.contains("connection: close"), "a client that says nothing more must not keep its place: {got}");
        assert!(get(address, "GET /x HTTP/1.1\r\nHost: a\r\n\r\n").await.starts_with("HTTP/1.1 404"));
        let got = get(address, "GET /mesh HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(got.starts_with("HTTP/1.1 503") && got.ends_with("the agent is ending\n"), "{got}");
        assert_eq!(mesh(Err(MeshPageError::Stranger([192, 0, 2, 1].into()))).status(), StatusCode::FORBIDDEN);
        assert!(get(address, "POST /mesh HTTP/1.1\r\nHost: a\r\n\r\n").await.starts_with("HTTP/1.1 405"));
        assert!(get(address, "POST /readyz HTTP/1.1\r\nHost: a\r\n\r\n").await.starts_with("HTTP/1.1 405"));
        server.abort();
    }

    #[tokio::test]
    async fn a_silent_client_does_not_block_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve_on(listener, pages(Readiness::new())));
        let _silent = TcpStream::connect(address).await.unwrap();
        assert!(get(address, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.contains("flanneld is running"));
        server.abort();
    }

    #[tokio::test]
    async fn a_new_client_is_answered_although_many_are_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(serve_on(listener, pages(Readiness::new())));
        let mut silent = Vec::new();
        for _ in 0..3 * MAX_CLIENTS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert!(get(address, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.contains("flanneld is running"));
        server.abort();
    }
}
