// SPDX-License-Identifier: Apache-2.0
//! A TCP relay to the API server for one store. When it is closed, the server is away for this store, but not for the test and others.

use std::io::ErrorKind;

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use weft_subnet::kube::{KubeStore, Who};

use super::contract::PATIENCE;
use super::server::Cluster;

pub struct Relay {
    port: u16,
    to: u16,
    task: Option<JoinHandle<()>>,
}

impl Relay {
    pub async fn open_to(cluster: &Cluster) -> Relay {
        let mut relay = Relay { port: 0, to: cluster.server.port(), task: None };
        relay.open().await;
        relay
    }

    /// Returns the store of this node's agent. All its connections go through the relay.
    pub fn store(&self, cluster: &Cluster, last: u8) -> KubeStore {
        let mut options = cluster.options(Who::Node(cluster.node(last)), "weft");
        options.access.url = Some(format!("https://127.0.0.1:{}", self.port));
        KubeStore::new(options).unwrap()
    }

    /// Accepts connections, each time on the same port. A process that another test is just starting has a copy of the last listener
    /// until it executes its program.
    pub async fn open(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        let listener = loop {
            match TcpListener::bind(("127.0.0.1", self.port)).await {
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                    tokio::task::yield_now().await;
                }
                done => break done.unwrap(),
            }
        };
        self.port = listener.local_addr().unwrap().port();
        let to = self.to;
        self.task = Some(tokio::spawn(async move {
            // Dropped with the task, which closes the open connections.
            let mut carried = JoinSet::new();
            loop {
                let Ok((mut from, _)) = listener.accept().await else { continue };
                carried.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await {
                        // Either side may close the connection at any time.
                        let _ = tokio::io::copy_bidirectional(&mut from, &mut server).await;
                    }
                });
            }
        }));
    }

    /// Refuses connections and closes the open ones.
    pub async fn close(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            let _ = task.await;
        }
    }
}
