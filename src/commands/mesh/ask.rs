// SPDX-License-Identifier: Apache-2.0
//! Asks all nodes for their rows of the mesh, on their health ports.
//!
//! The addresses come from leases and the answers from nodes. Each may be wrong, so every request has a limit of time and of size,
//! and an answer that cannot be used costs only its own row.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::observe::mesh::cluster::{AskError, Cluster, KnownNode};
use crate::observe::mesh::row::Row;
use crate::observe::status::parts;

/// Number of nodes that are asked at once.
const AT_ONCE: usize = 32;
/// Time limit for one node.
const LIMIT: Duration = Duration::from_secs(2);
/// Time limit for all nodes. Nodes that were not asked by then are left out.
const TOTAL_LIMIT: Duration = Duration::from_secs(60);
/// Maximum size of an answer in bytes. That of a row is less than a third of it.
const MAX_ANSWER: usize = 512 * 1024;
/// Maximum length of the text of a refusal.
const MAX_REFUSAL: usize = 200;

/// Returns the mesh of our own node and its peers, after all of them were asked on this port. `own` is not asked.
pub async fn cluster(own: Row, peers: Vec<KnownNode>, own_public: String, port: u16) -> Cluster {
    let mut waiting = peers.clone().into_iter();
    let mut cluster = own_row(own, peers, own_public);
    let deadline = Instant::now() + TOTAL_LIMIT;
    let mut asked = JoinSet::new();
    loop {
        while asked.len() < AT_ONCE
            && let Some(KnownNode { subnet, public }) = waiting.next()
        {
            asked.spawn(async move {
                let row = if Instant::now() < deadline { node(&public, port).await } else { Err(AskError::NoTime) };
                (subnet, row)
            });
        }
        match asked.join_next().await {
            Some(Ok(answer)) => cluster.answered(vec![answer]),
            Some(Err(_)) => {}
            None => return cluster,
        }
    }
}

/// Returns the mesh of our own node and its peers, of which none was asked.
pub fn own_row(own: Row, mut known: Vec<KnownNode>, own_public: String) -> Cluster {
    if !own.subnet.is_empty() {
        known.push(KnownNode { subnet: own.subnet.clone(), public: own_public });
    }
    let mut cluster = Cluster::new(known);
    cluster.answered(vec![(own.subnet.clone(), Ok(own))]);
    cluster
}

/// Asks one node, which has these addresses. The first one is asked.
async fn node(public: &str, port: u16) -> Result<Row, AskError> {
    let address: IpAddr = parts(public).next().ok_or(AskError::NoAddress)?;
    let address = SocketAddr::new(address, port);
    tokio::time::timeout(LIMIT, get(address)).await.unwrap_or(Err(AskError::Timeout(address)))
}

async fn get(address: SocketAddr) -> Result<Row, AskError> {
    let unreadable = |error: hyper::Error| AskError::Http(address, error.into());
    let stream = TcpStream::connect(address).await.map_err(|error| AskError::Connect(address, error))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(unreadable)?;
    let mut tasks = JoinSet::new();
    tasks.spawn(connection);
    let request = Request::get("/mesh").header(HOST, address.to_string()).body(Empty::<Bytes>::new());
    let request = request.map_err(|error| AskError::Http(address, error.into()))?;
    let answer = sender.send_request(request).await.map_err(unreadable)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    let body = body.map_err(|error| AskError::Http(address, error))?.to_bytes();
    if status != StatusCode::OK {
        let text: String = String::from_utf8_lossy(&body).trim().chars().take(MAX_REFUSAL).collect();
        return Err(AskError::Refused(address, status, text));
    }
    serde_json::from_slice(&body).map_err(|error| AskError::NoRow(address, error))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// A node that answers each request with this text, and then goes on with the connection open if `stays`.
    async fn server(address: &str, port: u16, answer: Vec<u8>, stays: bool) -> u16 {
        let listener = TcpListener::bind((address, port)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let answer = answer.clone();
                tokio::spawn(async move {
                    let _ = stream.read(&mut [0; 1024]).await;
                    let _ = stream.write_all(&answer).await;
                    if stays {
                        std::future::pending::<()>().await;
                    }
                });
            }
        });
        port
    }

    fn known(number: u8) -> KnownNode {
        KnownNode { subnet: format!("10.5.{number}.0/24"), public: format!("127.0.0.{number}") }
    }

    fn http(body: &str) -> Vec<u8> {
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
    }

    fn row(number: u8) -> Row {
        Row { node: format!("n{number}"), subnet: format!("10.5.{number}.0/24"), ..Row::default() }
    }

    #[tokio::test]
    async fn one_bad_answer_does_not_spoil_the_others() {
        let port = server("127.0.0.2", 0, http(&serde_json::to_string(&row(2)).unwrap()), false).await;
        server("127.0.0.3", port, http("{\"node\":7}"), false).await;
        server("127.0.0.4", port, http(&"[".repeat(2 * MAX_ANSWER)), false).await;
        server("127.0.0.5", port, b"HTTP/1.1 403 Forbidden\r\ncontent-length: 3\r\n\r\nno\n".to_vec(), false).await;
        server("127.0.0.6", port, b"SSH-2.0-x\r\n".to_vec(), false).await;
        server("127.0.0.7", port, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".to_vec(), true).await;
        server("127.0.0.8", port, http(&serde_json::to_string(&row(3)).unwrap()), false).await;
        server("127.0.0.10", port, http(&"[".repeat(100_000)), false).await;
        let mut peers: Vec<KnownNode> = (2..=10).map(known).collect();
        peers.push(KnownNode { subnet: "10.5.11.0/24".into(), public: "nonsense".into() });
        let cluster = cluster(row(1), peers, "127.0.0.1".into(), port).await;
        let errors: Vec<String> = cluster.nodes.iter().map(|node| node.error.clone().unwrap_or_default()).collect();
        assert_eq!((errors[0].as_str(), errors[1].as_str()), ("", ""), "{errors:#?}");
        for (error, wanted) in errors[2..].iter().zip([
            "does not answer as weft does",
            "no answer that can be read: length limit exceeded",
            "answers 403 Forbidden: no",
            "no answer that can be read: invalid HTTP version",
            "has not answered within 2 s",
            "another node answers at this address: n3 (10.5.3.0/24)",
            "Connection refused",
            "does not answer as weft does: invalid type",
            "its lease names no address",
        ]) {
            assert!(error.contains(wanted), "{wanted}: {error}");
        }
    }

    /// In a large cluster whose nodes are down, the command must end.
    #[tokio::test(start_paused = true)]
    async fn nodes_that_cannot_be_asked_within_a_minute_are_left_out_and_named() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let silent = |number: u16| KnownNode {
            subnet: format!("10.{}.{}.0/24", number / 250, number % 250),
            public: "127.0.0.1".into(),
        };
        let cluster = cluster(row(1), (0..1200).map(silent).collect(), String::new(), port).await;
        let count = |words: &str| {
            let errors = cluster.nodes.iter().filter_map(|node| node.error.as_deref());
            errors.filter(|error| error.contains(words)).count()
        };
        let (asked, left_out) = (count("has not answered within 2 s"), count("not asked: the time limit of 60 s"));
        assert_eq!(asked + left_out, 1200);
        assert!(asked >= AT_ONCE && left_out >= AT_ONCE, "{asked} asked, {left_out} left out");
    }

    #[tokio::test]
    async fn a_bounded_number_of_nodes_is_asked_at_once() {
        for _ in 0..20 {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let peers = (2..=200).map(|number| KnownNode { public: "127.0.0.1".into(), ..known(number) }).collect();
            let began = Instant::now();
            let asking = tokio::spawn(cluster(row(1), peers, String::new(), port));
            let mut open = Vec::new();
            while open.len() < AT_ONCE {
                open.push(listener.accept().await.unwrap());
            }
            // There is room for another one only after an answer, or when the time of the first ones is over, as on a very busy machine.
            let more = tokio::time::timeout(Duration::from_millis(200), listener.accept()).await;
            if more.is_err() {
                open.clear();
                listener.accept().await.unwrap();
                asking.abort();
                return;
            }
            assert!(began.elapsed() >= LIMIT, "more than {AT_ONCE} connections at once");
            asking.abort();
        }
        panic!("this machine is too slow");
    }
}
