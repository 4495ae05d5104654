// SPDX-License-Identifier: Apache-2.0
//! A way to the API server that one store uses alone: closed, the server is away for this store, while the test and others reach it.

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use weft_subnet::kube::{KubeStore, Who};

use super::server::Cluster;

pub struct Door {
    port: u16,
    to: u16,
    task: Option<JoinHandle<()>>,
}

impl Door {
    pub async fn open_to(cluster: &Cluster) -> Door {
        let mut door = Door { port: 0, to: cluster.server.port(), task: None };
        door.open().await;
        door
    }

    /// The agent of this node, whose every connection goes through the door.
    pub fn store(&self, cluster: &Cluster, last: u8) -> KubeStore {
        let mut options = cluster.options(Who::Node(cluster.node(last)), "weft");
        options.access.url = Some(format!("https://127.0.0.1:{}", self.port));
        KubeStore::new(options).unwrap()
    }

    /// Takes connections, each time on the same port.
    pub async fn open(&mut self) {
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await.unwrap();
        self.port = listener.local_addr().unwrap().port();
        let to = self.to;
        self.task = Some(tokio::spawn(async move {
            // Dropped with the task: what is still open is cut.
            let mut carried = JoinSet::new();
            loop {
                let Ok((mut from, _)) = listener.accept().await else { continue };
                carried.spawn(async move {
                    if let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)).await {
                        // Either side may go at any time.
                        let _ = tokio::io::copy_bidirectional(&mut from, &mut server).await;
                    }
                });
            }
        }));
    }

    /// Refuses connections, and cuts those that there are.
    pub async fn close(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            let _ = task.await;
        }
    }
}
