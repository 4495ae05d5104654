// SPDX-License-Identifier: Apache-2.0
//! What the HTTP servers of the agent and of `weft ui` have in common: a client is accepted, asks once, and gets one answer.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};

/// Time until a client is accepted again after an error.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What a request may take.
#[derive(Debug, Clone, Copy)]
pub struct RequestLimits {
    /// Time limit for receiving it.
    pub time: Duration,
    /// Maximum size of the request line and the headers in bytes.
    pub size: usize,
}

/// Waits for the next client.
pub async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            // The usual reason is that there are no file descriptors left. Wait, so that the loop does not spin.
            Err(error) => tracing::debug!(%error, "accept a client"),
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
    }
}

/// Reads the request of a client and answers it. Returns when the client has the answer.
pub async fn serve<F: Future<Output = Response<Full<Bytes>>>>(
    stream: TcpStream,
    limits: RequestLimits,
    answer: impl Fn(Request<Incoming>) -> F,
) {
    let service = service_fn(|request| {
        let answer = answer(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.time)
        .max_buf_size(limits.size)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    // A client that closes its connection is no error.
    if let Err(error) = served {
        tracing::trace!(%error, "serve a client");
    }
}

/// Returns an answer of text.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    reply(status, "text/plain; charset=utf-8", body)
}

/// Returns an answer of this type.
pub fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
