// SPDX-License-Identifier: Apache-2.0
//! Serves the row of this node on the health port, to nodes alone.

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use hyper::body::Bytes;
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::time::Instant;

use crate::observe::socket::Request;

/// A row is made at most once in this time, however often it is asked for. Then it is forgotten.
const LIFETIME: Duration = Duration::from_secs(1);

/// Why a client gets no row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MeshPageError {
    /// The agent ends.
    #[error("the agent is ending")]
    Ending,
    /// The client is not a node.
    #[error("{0} is not the published address of a node: only nodes may read this page")]
    Stranger(IpAddr),
}

/// The page `/mesh`. Clones share the row.
#[derive(Debug, Clone)]
pub struct MeshPage {
    agent: mpsc::Sender<Request>,
    cached: Arc<Mutex<Option<Cached>>>,
}

#[derive(Debug)]
struct Cached {
    made: Instant,
    text: Bytes,
    readers: Vec<IpAddr>,
}

impl MeshPage {
    /// Creates the page of an agent, whose loop answers these requests.
    pub fn new(agent: mpsc::Sender<Request>) -> MeshPage {
        MeshPage { agent, cached: Arc::default() }
    }

    /// Returns the row as JSON.
    ///
    /// # Errors
    /// The client is neither a node nor on this machine, or the agent ends.
    pub async fn read(&self, client: IpAddr) -> Result<Bytes, MeshPageError> {
        let client = client.to_canonical();
        // Others wait here while a row is made, and then get the same one.
        let mut cached = self.cached.lock().await;
        if cached.as_ref().is_none_or(|row| row.made.elapsed() >= LIFETIME) {
            *cached = Some(self.ask().await.ok_or(MeshPageError::Ending)?);
            tokio::spawn(forget(Arc::downgrade(&self.cached)));
        }
        match cached.as_ref() {
            Some(row) if client.is_loopback() || row.readers.binary_search(&client).is_ok() => Ok(row.text.clone()),
            _ => Err(MeshPageError::Stranger(client)),
        }
    }

    async fn ask(&self) -> Option<Cached> {
        let (reply, answer) = oneshot::channel();
        self.agent.send(Request::Mesh(reply)).await.ok()?;
        let answer = answer.await.ok()?;
        let text = Bytes::from(serde_json::to_vec(&answer.row).ok()?);
        Some(Cached { made: Instant::now(), text, readers: answer.readers })
    }
}

/// Frees the memory of a row that nobody asks for any more.
async fn forget(cached: Weak<Mutex<Option<Cached>>>) {
    tokio::time::sleep(LIFETIME).await;
    if let Some(cached) = cached.upgrade() {
        let mut cached = cached.lock().await;
        // A newer row has a task of its own.
        if cached.as_ref().is_some_and(|row| row.made.elapsed() >= LIFETIME) {
            *cached = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::mesh::row::{Row, RowAnswer};

    /// An agent that counts how often it is asked.
    fn agent() -> (MeshPage, tokio::task::JoinHandle<u32>) {
        let (requests, mut received) = mpsc::channel(1);
        let counted = tokio::spawn(async move {
            let mut count = 0;
            while let Some(request) = received.recv().await {
                let Request::Mesh(reply) = request else { panic!("{request:?}") };
                count += 1;
                let row = Row { node: format!("n{count}"), ..Row::default() };
                let readers = vec!["192.168.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
                reply.send(RowAnswer { row, readers }).unwrap();
            }
            count
        });
        (MeshPage::new(requests), counted)
    }

    #[tokio::test(start_paused = true)]
    async fn only_nodes_read_the_row_and_it_is_made_once_a_second() {
        let (page, counted) = agent();
        for reader in ["127.0.0.1", "::1", "192.168.0.2", "::ffff:192.168.0.2", "fd00::2"] {
            let text = page.read(reader.parse().unwrap()).await.unwrap();
            assert!(text.starts_with(b"{\"node\":\"n1\""), "{reader}: {text:?}");
        }
        for _ in 0..100 {
            let stranger = "192.168.0.3".parse().unwrap();
            assert_eq!(page.read(stranger).await, Err(MeshPageError::Stranger(stranger)));
        }
        tokio::time::sleep(LIFETIME * 2).await;
        assert!(page.cached.lock().await.is_none(), "a row that nobody reads takes no memory");
        assert!(page.read("::1".parse().unwrap()).await.unwrap().starts_with(b"{\"node\":\"n2\""));
        drop(page);
        assert_eq!(counted.await.unwrap(), 2);
    }

    #[tokio::test]
    async fn an_agent_that_ends_has_no_row() {
        let page = MeshPage::new(mpsc::channel(1).0);
        assert_eq!(page.read("::1".parse().unwrap()).await, Err(MeshPageError::Ending));
    }
}
