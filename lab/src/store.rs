// SPDX-License-Identifier: Apache-2.0
//! The store of a lab: a directory, or a private etcd in the bridge's namespace.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use tokio::process::Child;

use super::netns::{Netns, checked, require};
use super::process::{self, PATIENCE};
use super::wait_for;

/// Address of the lab's etcd, which is the bridge's own, and flannel's default prefix.
const URL: &str = "http://192.168.77.1:2379";
const PREFIX: &str = "/coreos.com/network";

/// Which store the agents use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum StoreKind {
    /// A directory shared by all nodes.
    #[default]
    Dir,
    /// A private etcd.
    Etcd,
}

/// A running store.
#[derive(Debug)]
pub enum Store {
    /// Leases are files here.
    Dir(PathBuf),
    /// The etcd process.
    Etcd(Box<Etcd>),
}

impl Store {
    /// Starts the store and writes the net-conf.
    ///
    /// # Errors
    /// etcd does not start, or the directory cannot be written.
    pub async fn start(kind: StoreKind, fabric: &Netns, dir: &Path, config: &str) -> Result<Store> {
        match kind {
            StoreKind::Dir => {
                let path = dir.join("store");
                fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
                fs::write(path.join("config.json"), config).context("write config.json")?;
                Ok(Store::Dir(path))
            }
            StoreKind::Etcd => {
                require("etcd", "etcd-server")?;
                require("etcdctl", "etcd-client")?;
                let mut etcd =
                    Etcd { fabric: fabric.clone(), dir: dir.to_owned(), config: config.to_owned(), child: None };
                etcd.start().await?;
                etcd.put_config().await?;
                Ok(Store::Etcd(Box::new(etcd)))
            }
        }
    }

    /// Writes another net-conf, as an operator would.
    ///
    /// # Errors
    /// etcd does not answer, or the directory cannot be written.
    pub async fn set_net_conf(&mut self, text: &str) -> Result<()> {
        match self {
            Store::Dir(path) => {
                // No agent must read half of it.
                let aside = path.join(".config.json.new");
                fs::write(&aside, text).with_context(|| format!("write {}", aside.display()))?;
                fs::rename(&aside, path.join("config.json")).context("write config.json")
            }
            Store::Etcd(etcd) => {
                text.clone_into(&mut etcd.config);
                etcd.put_config().await
            }
        }
    }

    /// Returns the agent's flags for this store.
    pub fn flags(&self) -> Vec<String> {
        match self {
            Store::Dir(path) => vec![format!("--store=dir:{}", path.display())],
            Store::Etcd(_) => vec![format!("--etcd-endpoints={URL}")],
        }
    }

    /// Returns the etcd process.
    ///
    /// # Errors
    /// The lab has a directory store.
    pub fn etcd(&mut self) -> Result<&mut Etcd> {
        match self {
            Store::Etcd(etcd) => Ok(etcd),
            Store::Dir(_) => bail!("this lab has no etcd"),
        }
    }
}

/// An etcd with one member in the bridge's namespace.
#[derive(Debug)]
pub struct Etcd {
    fabric: Netns,
    dir: PathBuf,
    config: String,
    child: Option<Child>,
}

impl Etcd {
    /// Starts etcd with its existing data, and waits until it answers.
    ///
    /// # Errors
    /// etcd does not answer in time.
    pub async fn start(&mut self) -> Result<()> {
        let mut command = self.fabric.command("etcd");
        command.arg("--name=lab").arg(format!("--data-dir={}", self.dir.join("etcd").display()));
        command.arg(format!("--listen-client-urls={URL}")).arg(format!("--advertise-client-urls={URL}"));
        command.arg("--listen-peer-urls=http://127.0.0.1:2380");
        command.arg("--initial-advertise-peer-urls=http://127.0.0.1:2380");
        command.arg("--initial-cluster=lab=http://127.0.0.1:2380");
        self.child = Some(self.fabric.spawn(&mut command, &self.dir.join("logs/etcd.log"))?);
        let answers = async || self.ctl_within(Duration::from_secs(3), &["endpoint", "health"]).await.is_ok();
        wait_for("etcd to answer", PATIENCE, answers).await
    }

    /// Writes the net-conf.
    ///
    /// # Errors
    /// etcd does not answer.
    pub async fn put_config(&self) -> Result<()> {
        self.ctl(&["put", &format!("{PREFIX}/config"), &self.config]).await.map(drop)
    }

    /// Runs `etcdctl WORDS` and returns its standard output.
    ///
    /// # Errors
    /// etcdctl fails.
    pub async fn ctl(&self, words: &[&str]) -> Result<String> {
        // etcd waits for the disk, which may be busy.
        self.ctl_within(PATIENCE, words).await
    }

    async fn ctl_within(&self, limit: Duration, words: &[&str]) -> Result<String> {
        let mut command = self.fabric.command("etcdctl");
        let limit = limit.as_secs();
        command.arg(format!("--endpoints={URL}")).arg(format!("--dial-timeout={limit}s"));
        checked(command.arg(format!("--command-timeout={limit}s")).args(words)).await
    }

    /// Returns the keys below `subnets/`, sorted. Each key is the subnet of a lease.
    ///
    /// # Errors
    /// etcd does not answer.
    pub async fn leases(&self) -> Result<Vec<String>> {
        let prefix = format!("{PREFIX}/subnets/");
        let out = self.ctl(&["get", "--prefix", "--keys-only", &prefix]).await?;
        let mut keys: Vec<_> = out.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect();
        keys.sort();
        Ok(keys)
    }

    /// Sends a signal such as SIGSTOP or SIGCONT.
    ///
    /// # Errors
    /// etcd does not run.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        process::signal(self.child.as_ref(), signal)
    }

    /// Kills etcd, as a crash would.
    ///
    /// # Errors
    /// etcd does not run, or cannot be waited for.
    pub async fn kill(&mut self) -> Result<()> {
        process::end(&mut self.child, Signal::SIGKILL).await.map(drop)
    }

    /// Kills etcd, deletes its data, and starts it again with the net-conf. It then has another cluster ID, revision 1
    /// and no leases.
    ///
    /// # Errors
    /// etcd does not start again.
    pub async fn wipe(&mut self) -> Result<()> {
        self.kill().await?;
        fs::remove_dir_all(self.dir.join("etcd")).context("remove the data of etcd")?;
        self.start().await?;
        self.put_config().await
    }
}
