// SPDX-License-Identifier: Apache-2.0
//! Lists of all Nodes, in pages. An answer is parsed while it arrives, so that only our few fields of each Node are in memory.
//!
//! A server that answers from its watch cache ignores the limit and sends all Nodes at once: 240 MB for 15,000 Nodes of 16 kB. A
//! list of real pages would be read from etcd, which thousands of agents that start together would overload.

use std::io::{self, Read};

use futures_util::{AsyncBufReadExt, AsyncReadExt};
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::outside::is_simulated;

use super::client::{Api, ApiError, Body, CALL_LIMIT};
use super::node::Node;

/// The limit for one answer, in Nodes.
const PAGE: usize = 500;
/// How many pieces of an answer wait for the parser. hyper reads at most 400 kB at once.
const QUEUE: usize = 4;

#[derive(Deserialize)]
struct NodeList {
    metadata: ListMeta,
    /// `null` in the answer of some servers that have none.
    items: Option<Vec<Node>>,
}

/// The head of a list without its items.
#[derive(Deserialize)]
struct ListHead {
    metadata: ListMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    /// Where the next page begins. Empty on the last page.
    #[serde(default)]
    r#continue: String,
}

/// Passes every Node to `each`, and returns the version of the list.
///
/// The list is not older than the version `at_least`. If that is empty, the server may answer with any version from its cache.
///
/// # Errors
/// As the server answers. `each` may have seen some of the Nodes then.
pub(super) async fn all(api: &Api, at_least: &str, mut each: impl FnMut(Node)) -> Result<String, ApiError> {
    let mut query = if at_least.is_empty() {
        format!("limit={PAGE}&resourceVersion=0&resourceVersionMatch=NotOlderThan")
    } else {
        // With a limit, a server before Kubernetes 1.34 would read this list from etcd.
        format!("resourceVersion={at_least}&resourceVersionMatch=NotOlderThan")
    };
    loop {
        let body = api.open(&format!("/api/v1/nodes?{query}")).await?;
        let NodeList { metadata, items } = read(body).await?;
        items.into_iter().flatten().for_each(&mut each);
        if metadata.r#continue.is_empty() {
            return Ok(metadata.resource_version);
        }
        query = format!("limit={PAGE}&continue={}", metadata.r#continue);
    }
}

/// Returns the current version of the Nodes in etcd. A version from a server's cache may be older.
pub(super) async fn current_version(api: &Api) -> Result<String, ApiError> {
    Ok(api.get::<ListHead>("/api/v1/nodes?limit=1").await?.metadata.resource_version)
}

/// Parses an answer while it arrives. serde_json parses from a blocking reader, so the parser has a thread of its own. It ends when
/// the queue is closed, also if the caller is dropped.
async fn read(body: Body) -> Result<NodeList, ApiError> {
    // The moment at which another thread ends cannot be simulated.
    if is_simulated() {
        return read_at_once(body).await;
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let reader = io::BufReader::new(Pieces { receiver, piece: io::Cursor::default() });
    let parser = spawn_blocking(move || serde_json::from_reader(reader));
    let received = receive(body, sender).await;
    let list = parser.await.map_err(|error| ApiError::Connection(io::Error::other(error)))?;
    // A broken connection explains a list that has no end.
    received?;
    Ok(list?)
}

async fn read_at_once(mut body: Body) -> Result<NodeList, ApiError> {
    let mut text = Vec::new();
    timeout(CALL_LIMIT, body.read_to_end(&mut text)).await.map_err(|_| ApiError::NoAnswer)??;
    Ok(serde_json::from_slice(&text)?)
}

/// Moves the body into the queue, until its end or until the parser has given up.
async fn receive(mut body: Body, queue: mpsc::Sender<Vec<u8>>) -> Result<(), ApiError> {
    loop {
        let piece = timeout(CALL_LIMIT, body.fill_buf()).await.map_err(|_| ApiError::NoAnswer)??.to_vec();
        body.consume_unpin(piece.len());
        if piece.is_empty() || queue.send(piece).await.is_err() {
            return Ok(());
        }
    }
}

/// The other end of the queue.
struct Pieces {
    receiver: mpsc::Receiver<Vec<u8>>,
    piece: io::Cursor<Vec<u8>>,
}

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = self.piece.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            match self.receiver.blocking_recv() {
                Some(piece) => self.piece = io::Cursor::new(piece),
                None => return Ok(0),
            }
        }
    }
}

#[cfg(test)]
mod tests;
