// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes store. Each Node is a lease: its name is the id, its pod CIDRs are the subnet, and its annotations, which are
//! flannel's, are the rest (docs/flannel-formats.md, "Nodes in Kubernetes").
//!
//! A lease is written as a patch of the annotations. It names the version of the Node that was read, so the server refuses it if
//! somebody else has written the Node since. Nothing is written if nothing differs.

mod annotations;
mod client;
mod conf;
#[cfg(test)]
mod fake;
mod fault_event;
mod node;
mod node_list;
mod own_node;
mod proxy;
mod publish;
mod watch;
mod watch_stream;

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::sync::{OnceCell, mpsc};
use tokio::time::Instant;

use crate::attrs::Attrs;
use crate::backend_types::BackendTypes;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{Lease, Record, Unreadable};
use crate::net_conf::NetConf;
use crate::outside::{random, wall_clock};
use crate::retry::Reminder;
use crate::source::{Capabilities, Error, Event, FaultNotice, LeaseRequest, Local, Source};

use annotations::Prefix;
use client::Api;
use conf::Conf;
use node::Node;

pub use client::Access;
#[cfg(feature = "kube-channel")]
pub use client::Clients;
pub use proxy::Proxies;

/// Returns a random part of `limit`, so that the agents of all nodes do not act at the same time.
fn random_part(limit: Duration) -> Duration {
    limit.mul_f64((random() % 1000) as f64 / 1000.0)
}

/// Returns the time of the wall clock.
fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH.checked_add(wall_clock()).unwrap_or(Timestamp::MAX)
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
    /// Unknown: leases can be listed, but none can be acquired.
    Unknown,
}

/// The options of [`KubeStore`].
#[derive(Debug, Clone)]
pub struct KubeOptions {
    /// The server and the credentials.
    pub access: Access,
    /// Which Node is ours.
    pub who: Who,
    /// `--kube-annotation-prefix`.
    pub prefix: String,
    /// `--net-config-path`.
    pub net_config: PathBuf,
    /// `--set-node-network-unavailable`: report [`Source::health`] as the condition NetworkUnavailable.
    pub set_condition: bool,
    /// `--kube-events`: how long a fault lasts before an Event about our Node says so. `None` means that Events are off.
    pub events_after: Option<Duration>,
    /// What leases mean, and what a Node says for them.
    pub types: BackendTypes,
}

/// What our Node publishes.
struct Publication {
    net_conf: NetConf,
    attrs: Attrs,
    /// The addresses that the Node had after our last write.
    addresses: Option<publish::Addresses>,
}

/// Leases in the Nodes of a cluster.
pub struct KubeStore {
    api: Api,
    conf: Conf,
    prefix: Prefix,
    who: Who,
    writes_condition: bool,
    events_after: Option<Duration>,
    types: BackendTypes,
    own_name: OnceCell<String>,
    /// `None` before a lease is acquired.
    publication: RefCell<Option<Publication>>,
    /// The version of our Node when we last read or wrote it. A list that is older could be without our lease.
    own_version: RefCell<String>,
    /// The uid of our Node when we last read it.
    own_uid: RefCell<String>,
    /// When our Node was written.
    writes: RefCell<Vec<Instant>>,
    /// Limits the warnings of annotations that cannot be read.
    unreadable: RefCell<Reminder>,
}

impl KubeStore {
    /// Checks the options. No file is read and no connection is made yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the flag and the remedy.
    pub fn new(options: KubeOptions) -> Result<KubeStore, Error> {
        Ok(KubeStore {
            api: Api::new(options.access),
            conf: Conf::new(options.net_config),
            prefix: Prefix::new(&options.prefix)?,
            who: options.who,
            writes_condition: options.set_condition,
            events_after: options.events_after,
            types: options.types,
            own_name: OnceCell::new(),
            publication: RefCell::new(None),
            own_version: RefCell::new(String::new()),
            own_uid: RefCell::new(String::new()),
            writes: RefCell::new(Vec::new()),
            unreadable: RefCell::default(),
        })
    }

    /// Replaces the connections to the API server.
    #[cfg(feature = "kube-channel")]
    #[must_use]
    pub fn with_clients(mut self, clients: Clients) -> KubeStore {
        self.api.use_clients(clients);
        self
    }

    fn own_version(&self) -> String {
        self.own_version.borrow().clone()
    }

    /// Forgets versions and the uid: in another store they mean nothing.
    fn forget_history(&self) {
        self.own_version.borrow_mut().clear();
        self.own_uid.borrow_mut().clear();
    }

    /// Warns of an annotation that an admin wrote to our Node and that cannot be read.
    fn warn_of_unreadable(&self, node: &Node) {
        let Err(error) = publish::check_overwrites(node, &self.prefix) else { return };
        let text = format!("{error}: our own address is published");
        if self.unreadable.borrow_mut().due(&text, Instant::now()) {
            tracing::warn!("{text}");
        }
    }

    /// Returns the record of a Node for the watch; `None` if no agent has published a lease in it.
    fn record(&self, node: &Node) -> Option<Record> {
        let mut record = node.record(&self.prefix)?;
        if self.own_name.get().is_some_and(|name| **name == *node.metadata.name)
            && let Some(publication) = &*self.publication.borrow()
        {
            self.warn_of_unreadable(node);
            let wanted = publish::wanted_addresses(&publication.attrs, self.types, node, &self.prefix);
            let now = publish::addresses(node, &self.prefix);
            if now != wanted {
                record.lease = record.lease.and_then(|lease| {
                    // The agent publishes its lease again if it has another address, and if it cannot be read.
                    if publication.addresses.as_ref() == Some(&now) {
                        return Ok(publish::with_addresses(lease, &wanted));
                    }
                    Err(Unreadable::new(format!("node {}: somebody else wrote the published address", record.id)))
                });
            }
            record.lease = record.lease.map(|lease| own_node::in_families_of(&publication.net_conf.networks, lease));
        }
        Some(record)
    }

    async fn list_all(&self) -> Result<Vec<Record>, Error> {
        let mut records = Vec::new();
        let insert = |node: Node| records.extend(node.record(&self.prefix));
        let all = node_list::all(&self.api, &self.own_version(), insert).await;
        all.map_err(|error| self.api.error("list nodes", error))?;
        Ok(records)
    }
}

impl Source for KubeStore {
    fn describe(&self) -> String {
        format!("kubernetes {}", self.api.describe())
    }

    fn fingerprint(&self) -> Local<'_, Option<String>> {
        Box::pin(async {
            let node = if let Who::Node(name) = &self.who { name } else { "" };
            Some(format!("{} {} {node}", self.api.fingerprint().await?, self.prefix.name("")))
        })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: false, assigned: true }
    }

    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(async { self.conf.read() })
    }

    fn own<'a>(&'a self, _evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        Box::pin(self.find_own())
    }

    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        Box::pin(self.take(request))
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

    fn chosen(&self) -> Local<'_, Result<[Option<IpAddr>; 2], Error>> {
        Box::pin(self.chosen_addresses())
    }

    fn health<'a>(&'a self, fault: Option<&'a str>) -> Local<'a, Result<(), Error>> {
        Box::pin(self.set_condition(fault))
    }

    fn notices_after(&self) -> Option<Duration> {
        self.events_after
    }

    fn write_notice<'a>(&'a self, notice: &'a FaultNotice) -> Local<'a, Result<(), Error>> {
        Box::pin(self.write_event(notice))
    }
}
