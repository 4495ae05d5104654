// SPDX-License-Identifier: Apache-2.0
//! A private etcd on a memory disk, and the leases in it.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use etcd_client::{Client, GetOptions, Txn, TxnOp};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::peers::{Backend, Peer, STORE};
use crate::site::MEMORY;

const SUBNETS: &str = "/coreos.com/network/subnets/";
/// etcd's default limit of operations in one transaction.
const TXN: usize = 128;
/// How long etcd may take to come up.
const PATIENCE: Duration = Duration::from_secs(30);

/// etcd, and a client of it. Dropped, it ends.
pub struct Store {
    child: Child,
    runtime: Runtime,
    client: Client,
    backend: Backend,
    /// Data of etcd, files of the agents.
    pub dir: TempDir,
}

/// Where the clients reach it.
pub fn url() -> String {
    format!("http://{STORE}:2379")
}

/// The key of a peer.
pub fn key(peer: Peer, backend: Backend) -> String {
    format!("{SUBNETS}{}", peer.id(backend))
}

impl Store {
    /// An empty store with net-conf, in the namespace of the calling thread.
    ///
    /// # Errors
    /// When etcd does not come up.
    pub fn start(backend: Backend) -> Result<Store> {
        let dir = TempDir::with_prefix_in("weft-bench-", MEMORY).context("create a temporary directory")?;
        let log = std::fs::File::create(dir.path().join("etcd.log")).context("create a log")?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "etcd", "--name=bench", "--unsafe-no-fsync", "--logger=zap"]);
        command.arg("--log-outputs=stderr").arg("--quota-backend-bytes=4294967296");
        command.arg(format!("--data-dir={}", dir.path().join("etcd").display()));
        command.arg(format!("--listen-client-urls={}", url())).arg(format!("--advertise-client-urls={}", url()));
        command
            .args(["--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380"]);
        command.arg("--initial-cluster=bench=http://127.0.0.1:2380");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().context("start etcd")?;
        let runtime = runtime()?;
        let client = runtime.block_on(connect()).inspect_err(|_| {
            // The log says why; the directory goes with the error.
            let text = std::fs::read_to_string(dir.path().join("etcd.log")).unwrap_or_default();
            text.lines().rev().take(5).for_each(|line| eprintln!("etcd: {line}"));
        })?;
        let mut store = Store { child, runtime, client, backend, dir };
        let conf = backend.net_conf();
        let put = store.client.put("/coreos.com/network/config", conf, None);
        store.runtime.block_on(put).context("write net-conf")?;
        Ok(store)
    }

    /// Puts these peers, in transactions as large as etcd takes.
    ///
    /// # Errors
    /// As etcd.
    pub fn put(&mut self, peers: impl Iterator<Item = Peer>) -> Result<()> {
        let backend = self.backend;
        self.write(peers.map(|peer| TxnOp::put(key(peer, backend), peer.value(backend), None)).collect())
    }

    /// Deletes these.
    ///
    /// # Errors
    /// As etcd.
    pub fn delete(&mut self, peers: impl Iterator<Item = Peer>) -> Result<()> {
        let backend = self.backend;
        self.write(peers.map(|peer| TxnOp::delete(key(peer, backend), None)).collect())
    }

    fn write(&mut self, ops: Vec<TxnOp>) -> Result<()> {
        for slice in ops.chunks(TXN) {
            let txn = Txn::new().and_then(slice.to_vec());
            self.runtime.block_on(self.client.txn(txn)).context("write leases")?;
        }
        Ok(())
    }

    /// How long a bare client takes for all leases in one range request.
    ///
    /// # Errors
    /// As etcd.
    pub fn list_time(&mut self) -> Result<Duration> {
        let mut client = self.client.kv_client().max_decoding_message_size(256 << 20);
        let begin = Instant::now();
        let answer = self.runtime.block_on(client.get(SUBNETS, Some(GetOptions::new().with_prefix())));
        let took = begin.elapsed();
        anyhow::ensure!(answer.context("list leases")?.count() > 0, "the store is empty");
        Ok(took)
    }

    /// Puts the same lease again, `rate` a second, for so long, each time of another peer: what renewals look like from elsewhere.
    ///
    /// # Errors
    /// As etcd.
    pub fn renew(&mut self, peers: usize, rate: u32, time: Duration) -> Result<()> {
        let backend = self.backend;
        let client = &mut self.client;
        self.runtime.block_on(async {
            let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
            let end = Instant::now() + time;
            for number in (0..peers).cycle() {
                tick.tick().await;
                if Instant::now() >= end {
                    break;
                }
                let peer = Peer::new(number);
                client.put(key(peer, backend), peer.value(backend), None).await.context("renew a lease")?;
            }
            Ok(())
        })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // It may be gone already; its data is.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A runtime on the calling thread.
///
/// # Errors
/// Out of descriptors.
pub fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("make a runtime")
}

/// A client, once etcd answers.
///
/// # Errors
/// When it does not within 30 s.
pub async fn connect() -> Result<Client> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let answer = async {
            let mut client = Client::connect([url()], None).await?;
            client.status().await.map(|_| client)
        };
        match tokio::time::timeout(Duration::from_secs(2), answer).await {
            Ok(Ok(client)) => return Ok(client),
            _ if Instant::now() >= deadline => bail!("etcd does not answer on {}", url()),
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
