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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::io::AsyncWriteExt;
    use tokio::time::Instant;

    use super::*;

    /// The time is longer than the default of the HTTP library, which ends a request after 30 s.
    const LIMITS: RequestLimits = RequestLimits { time: Duration::from_secs(3600), size: 8192 };

    /// Serves a client that sends this and then waits. Returns whether it was answered, and how long it was served.
    async fn served(sent: &str) -> (bool, Duration) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = accept(&listener).await;
        let (is_answered, begin) = (Cell::new(false), Instant::now());
        let answer = |_: Request<Incoming>| {
            is_answered.set(true);
            async { text(StatusCode::OK, "here") }
        };
        // The connection may end before everything is sent.
        let _ = tokio::join!(client.write_all(sent.as_bytes()), serve(stream, LIMITS, answer));
        (is_answered.get(), begin.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_end_its_request_is_disconnected_after_the_time_of_a_request() {
        for sent in ["", "GET / HTTP/1.1\r\nHost: a\r\n"] {
            let (is_answered, time) = served(sent).await;
            assert!(!is_answered && time >= LIMITS.time, "{sent:?}: {time:?}");
        }
    }

    /// The clock runs here: one that stands still may jump to the end of the time before the kernel has delivered the request.
    #[tokio::test]
    async fn a_request_with_more_headers_than_its_limit_is_not_answered() {
        let request = |size| format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "x".repeat(size));
        assert!(served(&request(LIMITS.size / 2)).await.0);
        assert!(!served(&request(LIMITS.size * 3)).await.0);
    }
}
