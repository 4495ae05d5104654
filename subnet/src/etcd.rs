// SPDX-License-Identifier: Apache-2.0
//! The etcd v3 store, byte-compatible with flannel (docs/flannel-formats.md, "Leases in etcd").
//!
//! Every write is a transaction that compares the key with what was read. To renew a lease, no key is written.

mod acquire;
mod alarm;
mod call_failure;
mod client;
mod keys;
mod leases;
mod own_key;
mod renew;
mod tls;
mod watch;

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;

use crate::attrs::Attrs;
use crate::backend_types::BackendTypes;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{Lease, Record};
use crate::net_conf::{EXAMPLE, net_conf_text};
use crate::source::{Alarm, Capabilities, Error, Event, LastNetConf, LeaseRequest, Local, Source};

use acquire::Granted;
#[cfg(feature = "etcd-channel")]
pub use client::Channels;
use client::Pool;
use keys::{Keys, LastList};
use own_key::OwnKey;

/// How long one call to one endpoint may take.
const CALL_LIMIT: Duration = Duration::from_secs(3);

/// The flags of the etcd store.
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    /// `--etcd-endpoints`.
    pub endpoints: Vec<String>,
    /// `--etcd-prefix`.
    pub prefix: String,
    /// `--etcd-keyfile`.
    pub key_file: Option<PathBuf>,
    /// `--etcd-certfile`.
    pub cert_file: Option<PathBuf>,
    /// `--etcd-cafile`.
    pub ca_file: Option<PathBuf>,
    /// `--etcd-username`.
    pub username: Option<String>,
    /// `--etcd-password`.
    pub password: Option<String>,
    /// TTL of our etcd lease. As in flannel, it is 24 h.
    pub lease_ttl: Duration,
    /// `--subnet-lease-renew-margin`: the lease is renewed at the latest this long before it expires.
    pub renew_margin: Duration,
    /// What leases mean.
    pub types: BackendTypes,
}

/// Leases in etcd.
pub struct EtcdStore {
    pool: Pool,
    keys: Keys,
    types: BackendTypes,
    lease_ttl: Duration,
    renew_margin: Duration,
    last_net_conf: LastNetConf,
    own_key: OwnKey,
    /// An etcd lease of ours with which a key may have been written: no answer came.
    unanswered: Cell<Granted>,
    /// The list that was read together with net-conf, until the own lease is looked for.
    config_list: LastList,
    last_list: LastList,
}

impl EtcdStore {
    /// Checks the options and reads the files. Does not connect yet.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names the flag and the remedy.
    pub fn new(options: EtcdOptions) -> Result<EtcdStore, Error> {
        let (lease_ttl, renew_margin) = (options.lease_ttl, options.renew_margin);
        Ok(EtcdStore {
            keys: Keys::new(&options.prefix),
            types: options.types,
            pool: Pool::new(options)?,
            lease_ttl,
            renew_margin,
            last_net_conf: LastNetConf::default(),
            own_key: OwnKey::default(),
            unanswered: Cell::default(),
            config_list: LastList::default(),
            last_list: LastList::default(),
        })
    }

    /// Uses these channels instead of connections to the endpoints. The simulator has its server behind them.
    #[cfg(feature = "etcd-channel")]
    #[must_use]
    pub fn with_channels(mut self, channels: Channels) -> EtcdStore {
        self.pool.use_channels(channels);
        self
    }

    /// Reads net-conf, and with the same request all leases, which are needed next.
    async fn read_config(&self) -> Result<String, Error> {
        let all = self.read_all_for(format!("read {}", self.keys.config())).await?;
        let text = all.config.as_ref().map(|kv| net_conf_text(kv.value()));
        let text = text.ok_or_else(|| self.no_net_conf())?;
        self.config_list.set(all);
        self.last_net_conf.set(&text);
        Ok(text)
    }

    /// Returns the error with the command that writes net-conf, for this cluster and this prefix.
    fn no_net_conf(&self) -> Error {
        let place = self.keys.config();
        // Up to etcd 3.3, etcdctl writes into the store of version 2 unless ETCDCTL_API says otherwise, and reports success.
        let remedy = format!(
            "if `etcdctl set` or ETCDCTL_API=2 wrote it, it is in etcd's store of version 2, which is not read; write it, for example: \
             ETCDCTL_API=3 etcdctl {} put {place} '{EXAMPLE}'",
            self.pool.etcdctl_flags()
        );
        Error::NoNetConf { place, remedy }
    }

    async fn delete(&self, id: &str) -> Result<(), Error> {
        let key = self.keys.lease(id);
        let answer = self
            .pool
            .call(&format!("delete {key}"), |mut client| {
                let key = key.clone();
                async move { client.delete(key, None).await }
            })
            .await?;
        if answer.deleted() == 0 { Err(Error::Missing(key)) } else { Ok(()) }
    }
}

impl Source for EtcdStore {
    fn describe(&self) -> String {
        format!("etcd {} {}", self.pool.urls(), self.keys.prefix())
    }

    fn fingerprint(&self) -> Local<'_, Option<String>> {
        let mut urls: Vec<String> = self.pool.urls().split(',').map(str::to_owned).collect();
        urls.sort_unstable();
        let text = format!("etcd {} {}", urls.join(","), self.keys.prefix());
        Box::pin(async move { Some(text) })
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: true, assigned: false }
    }

    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(self.read_config())
    }

    fn own<'a>(&'a self, evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        Box::pin(self.find_own(evidence))
    }

    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        Box::pin(self.acquire_subnet(request))
    }

    fn retake<'a>(&'a self, subnets: &'a Subnets, was: &'a Attrs, attrs: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        Box::pin(self.retake_subnet(subnets, was, attrs))
    }

    fn release<'a>(&'a self, lease: &'a Lease) -> Local<'a, Result<(), Error>> {
        Box::pin(self.release_lease(lease))
    }

    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        Box::pin(async { Ok(self.read_all().await?.stored.into_iter().map(|stored| stored.record).collect()) })
    }

    fn alarm(&self) -> Local<'_, Result<Option<Alarm>, Error>> {
        Box::pin(self.read_alarm())
    }

    fn remove<'a>(&'a self, id: &'a str) -> Local<'a, Result<(), Error>> {
        Box::pin(self.delete(id))
    }

    fn watch(&self, out: mpsc::Sender<Event>) -> Local<'_, ()> {
        Box::pin(watch::run(self, out))
    }

    fn keep<'a>(&'a self, lease: &'a Lease, out: mpsc::Sender<Event>) -> Local<'a, ()> {
        Box::pin(renew::run(self, lease, out))
    }
}
