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
/// How long etcd may take to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// An etcd, and a client of it. The etcd ends when this is dropped.
pub struct Store {
    child: Child,
    runtime: Runtime,
    client: Client,
    backend: Backend,
    /// The directory for the data of etcd and the files of the agents.
    pub dir: TempDir,
}

/// Returns the URL for clients.
pub fn url() -> String {
    format!("http://{STORE}:2379")
}

/// Returns the key of a peer.
pub fn key(peer: Peer, backend: Backend) -> String {
    format!("{SUBNETS}{}", peer.id(backend))
}

impl Store {
    /// Starts an etcd that contains only net-conf, in the namespace of the calling thread.
    ///
    /// # Errors
    /// etcd does not start.
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
            // The log says why, and its directory is deleted when the error is returned.
            let text = std::fs::read_to_string(dir.path().join("etcd.log")).unwrap_or_default();
            text.lines().rev().take(5).for_each(|line| eprintln!("etcd: {line}"));
        })?;
        let mut store = Store { child, runtime, client, backend, dir };
        let conf = backend.net_conf();
        let put = store.client.put("/coreos.com/network/config", conf, None);
        store.runtime.block_on(put).context("write net-conf")?;
        Ok(store)
    }

    /// Returns the process id of etcd.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes this net-conf, even if it is the same as before.
    ///
    /// # Errors
    /// etcd refuses it, or does not answer.
    pub fn set_net_conf(&mut self, text: &str) -> Result<()> {
        let put = self.client.put("/coreos.com/network/config", text, None);
        self.runtime.block_on(put).context("write net-conf").map(drop)
    }

    /// Deletes these keys, one by one.
    ///
    /// # Errors
    /// etcd refuses it, or does not answer.
    pub fn delete_keys(&mut self, keys: &[String]) -> Result<()> {
        for key in keys {
            self.runtime.block_on(self.client.delete(key.as_str(), None)).context("delete a lease")?;
        }
        Ok(())
    }

    /// Writes these peers, in transactions as large as etcd accepts.
    ///
    /// # Errors
    /// etcd fails.
    pub fn put(&mut self, peers: impl Iterator<Item = Peer>) -> Result<()> {
        let backend = self.backend;
        self.write(peers.map(|peer| TxnOp::put(key(peer, backend), peer.value(backend), None)).collect())
    }

    /// Deletes these peers.
    ///
    /// # Errors
    /// etcd fails.
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

    /// Returns how long a bare client takes to read all leases with one range request.
    ///
    /// # Errors
    /// etcd fails.
    pub fn list_time(&mut self) -> Result<Duration> {
        let mut client = self.client.kv_client().max_decoding_message_size(256 << 20);
        let begin = Instant::now();
        let answer = self.runtime.block_on(client.get(SUBNETS, Some(GetOptions::new().with_prefix())));
        let took = begin.elapsed();
        anyhow::ensure!(answer.context("list leases")?.count() > 0, "the store is empty");
        Ok(took)
    }

    /// Writes unchanged leases again, `rate` per second, each time of another peer. To other nodes this looks like renewals.
    ///
    /// # Errors
    /// etcd fails.
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
        // It may have ended already. Its data is deleted anyway.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes a runtime for the calling thread.
///
/// # Errors
/// There are no file descriptors left.
pub fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("make a runtime")
}

/// Returns a client when etcd answers.
///
/// # Errors
/// etcd does not answer within 30 s.
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
