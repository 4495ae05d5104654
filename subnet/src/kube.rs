// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes store: each Node is a lease. Its pod CIDRs are the subnet, its annotations are flannel's
//! (docs/flannel-formats.md, "Nodes in Kubernetes"), its name is the identity.
//!
//! Every write is a patch that the server refuses when the Node is another than the one that was read; nothing is written
//! when nothing differs.

mod annotations;
mod client;
mod conf;
#[cfg(test)]
mod fake;
mod list;
mod node;
mod own;
mod proto;
mod publish;
mod watch;

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::{OnceCell, mpsc};
use tokio::time::{Instant, sleep};

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{Lease, Record};
use crate::network::Network;
use crate::retry::Reminder;
use crate::source::{Capabilities, Claim, Error, Event, Local, Source, random};

use annotations::Prefix;
use client::Api;
use conf::Conf;
use node::Node;

pub use client::Access;

/// How often the keeper says that it is there: nothing is to be renewed.
const KEEP_EVERY: Duration = Duration::from_secs(60);

/// Somewhere between nothing and this.
fn spread(limit: Duration) -> Duration {
    limit.mul_f64((random() % 1000) as f64 / 1000.0)
}

/// Which Node is ours.
#[derive(Debug, Clone)]
pub enum Who {
    /// `NODE_NAME`.
    Node(String),
    /// `POD_NAME` and `POD_NAMESPACE`: the node that the pod runs on.
    Pod {
        /// `POD_NAME`.
        name: String,
        /// `POD_NAMESPACE`.
        namespace: String,
    },
    /// Neither was said: leases can be looked at, not taken.
    Unknown,
}

/// How to reach the API, and what is ours there.
#[derive(Debug, Clone)]
pub struct KubeOptions {
    /// Server and credentials.
    pub access: Access,
    /// Our Node.
    pub who: Who,
    /// `--kube-annotation-prefix`.
    pub prefix: String,
    /// `--net-config-path`.
    pub net_config: PathBuf,
    /// `--set-node-network-unavailable`: report [`Source::health`] as the condition NetworkUnavailable.
    pub set_condition: bool,
}

/// What we asked the Node to say.
struct Asked {
    network: Network,
    attrs: Attrs,
}

/// Leases in the Nodes of a cluster.
pub struct KubeStore {
    api: Api,
    conf: Conf,
    prefix: Prefix,
    who: Who,
    set_condition: bool,
    name: OnceCell<String>,
    asked: RefCell<Option<Asked>>,
    /// The version of our Node when we last read or wrote it: no list may be older, or we would miss ourselves in it.
    newest: RefCell<String>,
    /// The uid of our Node when we last read it.
    uid: RefCell<String>,
    writes: RefCell<Vec<Instant>>,
    /// What was said of our Node's annotations.
    said: RefCell<Reminder>,
}

impl KubeStore {
    /// Checks the options; reads no file and does not connect yet.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming the flag and the remedy.
    pub fn new(options: KubeOptions) -> Result<KubeStore, Error> {
        Ok(KubeStore {
            api: Api::new(options.access),
            conf: Conf::new(options.net_config),
            prefix: Prefix::new(&options.prefix)?,
            who: options.who,
            set_condition: options.set_condition,
            name: OnceCell::new(),
            asked: RefCell::new(None),
            newest: RefCell::new(String::new()),
            uid: RefCell::new(String::new()),
            writes: RefCell::new(Vec::new()),
            said: RefCell::default(),
        })
    }

    fn newest(&self) -> String {
        self.newest.borrow().clone()
    }

    /// The server's history is another one.
    fn forget(&self) {
        self.newest.borrow_mut().clear();
        self.uid.borrow_mut().clear();
    }

    /// Names what the admin wrote onto our Node and cannot be read.
    fn warn(&self, node: &Node) {
        if let Some(reason) = publish::unreadable(node, &self.prefix)
            && self.said.borrow_mut().due(&reason, Instant::now().into_std())
        {
            tracing::warn!("{reason}");
        }
    }

    /// The entry that a node is; none where no agent has published itself.
    fn judge(&self, node: &Node) -> Option<Record> {
        let mut record = node.record(&self.prefix)?;
        if self.name.get().is_some_and(|name| **name == *node.metadata.name)
            && let Some(asked) = &*self.asked.borrow()
        {
            self.warn(node);
            // Whoever reads this asks us to publish again, and the admin's address is then taken.
            if publish::overwritten(&asked.attrs, node, &self.prefix) {
                record.lease = Err(format!("node {}: public address to be published again", record.id));
            }
            record.lease = record.lease.map(|lease| own::concerning(lease, &asked.network));
        }
        Some(record)
    }

    async fn list_all(&self) -> Result<Vec<Record>, Error> {
        let mut records = Vec::new();
        let all = list::all(&self.api, &self.newest(), |node| records.extend(node.record(&self.prefix))).await;
        all.map_err(|fault| self.api.error("list nodes", fault))?;
        Ok(records)
    }
}

impl Source for KubeStore {
    fn describe(&self) -> String {
        format!("kubernetes {}", self.api.describe())
    }

    fn identity(&self) -> Local<'_, Option<String>> {
        Box::pin(async {
            let node = if let Who::Node(name) = &self.who { name } else { "" };
            Some(format!("{} {} {node}", self.api.identity().await?, self.prefix.name("")))
        })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: false, fenced: true, assigned: true }
    }

    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(async { self.conf.read() })
    }

    fn own<'a>(&'a self, _evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        Box::pin(self.find_own())
    }

    fn acquire<'a>(&'a self, claim: &'a Claim) -> Local<'a, Result<Lease, Error>> {
        Box::pin(self.take(claim))
    }

    fn retake<'a>(&'a self, _: &'a Subnets, _was: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        Box::pin(self.take_again(attrs))
    }

    fn release<'a>(&'a self, lease: &'a Lease) -> Local<'a, Result<(), Error>> {
        Box::pin(self.withdraw(&lease.id, Some(lease)))
    }

    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        Box::pin(self.list_all())
    }

    fn remove<'a>(&'a self, id: &'a str) -> Local<'a, Result<(), Error>> {
        Box::pin(self.withdraw(id, None))
    }

    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()> {
        Box::pin(async move {
            tokio::select! {
                () = out.closed() => {}
                () = watch::run(self, &out) => {}
                () = self.conf.follow(&out) => {}
            }
        })
    }

    fn keep<'a>(&'a self, _lease: &'a Lease, out: mpsc::Sender<Event>) -> Local<'a, ()> {
        Box::pin(async move {
            while out.send(Event::Kept(None)).await.is_ok() {
                tokio::select! {
                    () = sleep(KEEP_EVERY) => {}
                    () = out.closed() => return,
                }
            }
        })
    }

    fn chosen(&self) -> Local<'_, Result<[Option<IpAddr>; 2], Error>> {
        Box::pin(self.admins_choice())
    }

    fn health<'a>(&'a self, fault: Option<&'a str>) -> Local<'a, Result<(), Error>> {
        Box::pin(self.condition(fault))
    }
}
