// SPDX-License-Identifier: Apache-2.0
//! What an event costs the API server of Kubernetes for each of its watchers. The watchers only read.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::AsyncReadExt;
use http::Request;
use kube::Client;
use tokio::task::LocalSet;

use crate::kube::cluster::{Cluster, connect};
use crate::site::pause;
use crate::store::runtime;

/// Node objects.
const NODES: usize = 200;
/// Status updates, and how many of them a second.
const UPDATES: usize = 200;
const RATE: u32 = 20;
/// How long the watchers may take to receive something.
const PATIENCE: Duration = Duration::from_secs(60);

/// The figures of the API server.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct NodeApi {
    /// Bytes of a Node object as JSON.
    pub node: usize,
    /// Watchers of all Nodes.
    pub watchers: usize,
    /// Status updates of Nodes.
    pub updates: usize,
    /// Milliseconds of CPU time of the server for an update without any watcher.
    pub alone: f64,
    /// Milliseconds of CPU time of the server for an update with the watchers.
    pub watched: f64,
    /// Bytes that a watcher received for an event.
    pub event: f64,
}

impl NodeApi {
    /// Returns the microseconds of CPU time of the server for each event that a watcher hears.
    pub fn per_event(&self) -> f64 {
        (self.watched - self.alone) * 1000.0 / self.watchers as f64
    }
}

/// Measures with this many watchers.
///
/// # Errors
/// The API server does not work, or a watcher hears too little.
pub fn measure(binaries: &Path, watchers: usize) -> Result<NodeApi> {
    eprintln!("== the API server with {watchers} watchers");
    let mut cluster = Cluster::start(binaries)?;
    let node = cluster.fill(0..NODES)?;
    let alone = update(&mut cluster)?;
    let (notes, heard) = mpsc::channel();
    let kubeconfig = cluster.kubeconfig.clone();
    let dir = cluster.dir.path().to_owned();
    let thread = std::thread::Builder::new().name("watchers".into()).spawn(move || -> Result<()> {
        LocalSet::new().block_on(&runtime()?, async {
            let mut clients = Vec::new();
            for _ in 0..watchers {
                clients.push(connect(&kubeconfig, &dir).await?);
            }
            let watches = clients.iter().map(|client| watch(client, &notes));
            futures_util::future::try_join_all(watches).await.map(drop)
        })
    });
    let thread = thread.context("start a thread")?;
    // A watch begins with one event for each Node, and one more for the node that is measured elsewhere.
    receive(&heard, watchers * (NODES + 1))?;
    let watched_begin = cluster.server_cpu()?;
    cluster.heartbeats(NODES, UPDATES, RATE)?;
    let bytes = receive(&heard, watchers * UPDATES)?;
    let watched = (cluster.server_cpu()? - watched_begin).as_secs_f64() * 1000.0 / UPDATES as f64;
    // The watches end with the server.
    drop(cluster);
    let _ = thread.join();
    let event = bytes as f64 / (watchers * UPDATES) as f64;
    Ok(NodeApi { node, watchers, updates: UPDATES, alone, watched, event })
}

/// Updates Nodes without a watcher. Returns the milliseconds of CPU time for each.
fn update(cluster: &mut Cluster) -> Result<f64> {
    pause(Duration::from_secs(2));
    let begin = cluster.server_cpu()?;
    cluster.heartbeats(NODES, UPDATES, RATE)?;
    Ok((cluster.server_cpu()? - begin).as_secs_f64() * 1000.0 / UPDATES as f64)
}

/// Watches all Nodes, and reports what was received: events and bytes.
async fn watch(client: &Client, notes: &mpsc::Sender<(usize, usize)>) -> Result<()> {
    let request = Request::get("/api/v1/nodes?watch=1&resourceVersion=0").body(Vec::new())?;
    let mut stream = Box::pin(client.request_stream(request).await.context("watch Nodes")?);
    let mut buffer = vec![0; 64 << 10];
    loop {
        // The end of the server ends the watch.
        let Ok(count @ 1..) = stream.read(&mut buffer).await else { return Ok(()) };
        let events = buffer[..count].iter().filter(|byte| **byte == b'\n').count();
        if notes.send((events, count)).is_err() {
            return Ok(());
        }
    }
}

/// Waits for this many events. Returns their bytes.
fn receive(heard: &mpsc::Receiver<(usize, usize)>, events: usize) -> Result<usize> {
    let (mut got, mut bytes) = (0, 0);
    while got < events {
        let (more, size) = heard.recv_timeout(PATIENCE).with_context(|| format!("{got} of {events} events came"))?;
        (got, bytes) = (got + more, bytes + size);
    }
    Ok(bytes)
}
