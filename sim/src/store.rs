// SPDX-License-Identifier: Apache-2.0
//! The store of a cluster: an etcd or the Nodes of an API server, what happens to it, and the leases in it.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use ipnet::Ipv4Net;
use weft_backends::register::TYPES;
use weft_subnet::cidr::Subnets;
use weft_subnet::etcd::{EtcdOptions, EtcdStore};
use weft_subnet::kube::{Access, KubeOptions, KubeStore, Who};
use weft_subnet::source::Source;

use crate::api::ApiServer;
use crate::etcd::Etcd;
use crate::hostile::Lie;
use crate::net_conf::WantedConf;
use crate::nodes::{ANNOTATIONS, Nodes};
use crate::server::Server;
use crate::timeline;
use crate::wire::Wire;

/// The prefix of weft's keys in etcd.
const PREFIX: &str = "/coreos.com/network";

/// The store, which all machines share.
#[derive(Debug)]
pub enum Store {
    /// Leases are keys of an etcd.
    Etcd {
        /// The server.
        server: Server,
        /// What a restore brings back.
        backup: Option<Etcd>,
        /// Net-conf, which is in the store.
        net_conf: String,
        /// The id of the present cluster.
        cluster: u64,
    },
    /// Leases are the annotations of Nodes.
    Kube {
        /// The server.
        api: ApiServer,
        /// What a restore brings back.
        backup: Option<Nodes>,
    },
}

/// A lease that no agent has written.
#[derive(Debug, Clone)]
pub struct FalseLease {
    /// The name of its Node.
    pub name: String,
    /// The subnet that it grants.
    pub subnet: Ipv4Net,
    /// The address that it publishes.
    pub public: Ipv4Addr,
    /// Its BackendData.
    pub data: String,
}

/// Returns the name of the Node of a machine.
fn node_name(number: usize) -> String {
    format!("n{number}")
}

/// Returns the file with net-conf that a machine of a Kubernetes cluster has. Its kubelet writes it.
fn net_conf_file(number: usize) -> PathBuf {
    PathBuf::from(format!("net-conf-{number}.json"))
}

fn key(subnets: &Subnets) -> String {
    format!("{PREFIX}/subnets/{}", subnets.to_key())
}

impl Store {
    /// Returns an etcd with this net-conf.
    pub fn etcd(net_conf: &WantedConf) -> Store {
        let (cluster, net_conf) = (0x1000, net_conf.text());
        let mut etcd = Etcd::new(cluster);
        etcd.write(&format!("{PREFIX}/config"), &net_conf);
        Store::Etcd { server: Server::start(etcd), backup: None, net_conf, cluster }
    }

    /// Returns an API server without Nodes.
    ///
    /// # Errors
    /// The files with net-conf cannot be written.
    pub fn kube(net_conf: &WantedConf, machines: usize) -> std::io::Result<Store> {
        (0..machines).try_for_each(|number| fs::write(net_conf_file(number), net_conf.text()))?;
        Ok(Store::Kube { api: ApiServer::start(), backup: None })
    }

    /// Returns the connection of a machine to the store.
    pub fn connect(&self, wire: &Wire, number: usize, lease_ttl: Duration) -> anyhow::Result<Rc<dyn Source>> {
        match self {
            Store::Etcd { server, .. } => {
                let options = EtcdOptions {
                    endpoints: vec!["http://etcd:2379".to_owned()],
                    prefix: PREFIX.to_owned(),
                    key_file: None,
                    cert_file: None,
                    ca_file: None,
                    username: None,
                    password: None,
                    lease_ttl,
                    renew_margin: Duration::from_secs(3600),
                    types: TYPES,
                };
                let (server, wire) = (server.clone(), wire.clone());
                Ok(Rc::new(EtcdStore::new(options)?.with_channels(Box::new(move |_| server.channel(&wire)))))
            }
            Store::Kube { api, .. } => {
                let options = KubeOptions {
                    access: Access { url: Some("http://api:6443".to_owned()), ..Access::default() },
                    who: Who::Node(node_name(number)),
                    prefix: ANNOTATIONS.to_owned(),
                    net_config: net_conf_file(number),
                    set_condition: true,
                    events_after: None,
                    types: TYPES,
                };
                let (api, wire) = (api.clone(), wire.clone());
                Ok(Rc::new(KubeStore::new(options)?.with_clients(Box::new(move || api.client(&wire)))))
            }
        }
    }

    /// Returns the leases in the store, by subnet as in etcd's keys.
    pub fn leases(&self) -> BTreeMap<String, String> {
        match self {
            Store::Etcd { server, .. } => {
                let prefix = format!("{PREFIX}/subnets/");
                let all = server.read(|etcd| etcd.all(&prefix)).into_iter();
                all.map(|(key, value)| (key[prefix.len()..].to_owned(), value)).collect()
            }
            Store::Kube { api, .. } => api.read(Nodes::leases),
        }
    }

    /// Returns true if the lease of these subnets ended because nobody renewed it.
    pub fn has_ended(&self, subnets: &Subnets) -> bool {
        match self {
            Store::Etcd { server, .. } => server.read(|etcd| etcd.has_ended(&key(subnets))),
            Store::Kube { .. } => false,
        }
    }

    /// Loses everything but net-conf. If `other` is true, an etcd has another cluster id then.
    pub fn wipe(&mut self, other: bool) {
        match self {
            Store::Etcd { server, net_conf, cluster, .. } => {
                *cluster += u64::from(other);
                let mut empty = Etcd::new(*cluster);
                empty.write(&format!("{PREFIX}/config"), net_conf);
                server.restart_with(empty);
            }
            Store::Kube { api, .. } => api.restart_with(Nodes::new()),
        }
    }

    /// Makes a backup.
    pub fn back_up(&mut self) {
        match self {
            Store::Etcd { server, backup, .. } => *backup = Some(server.read(Etcd::clone)),
            Store::Kube { api, backup } => *backup = Some(api.read(Nodes::clone)),
        }
    }

    /// Starts again from the last backup, if there is one.
    pub fn restore(&mut self) {
        match self {
            Store::Etcd { server, backup, .. } => backup.iter().for_each(|backup| server.restart_with(backup.clone())),
            Store::Kube { api, backup } => backup.iter().for_each(|backup| api.restart_with(backup.clone())),
        }
    }

    /// Forgets the history.
    pub fn compact(&mut self) {
        match self {
            Store::Etcd { server, .. } => server.change(Etcd::compact),
            Store::Kube { api, .. } => api.change(Nodes::compact),
        }
    }

    /// Deletes the lease of a machine, whose pods have these subnets.
    pub fn delete_lease(&mut self, number: usize, pods: Option<&Subnets>) {
        match self {
            Store::Etcd { server, .. } => {
                pods.into_iter().for_each(|pods| server.change(|etcd| etcd.delete_prefix(&key(pods))));
            }
            Store::Kube { api, .. } => api.change(|nodes| nodes.remove_annotations(&node_name(number))),
        }
    }

    /// Returns true if the store has Nodes.
    pub fn has_nodes(&self) -> bool {
        matches!(self, Store::Kube { .. })
    }

    /// Deletes the Node of a machine.
    pub fn delete_node(&mut self, number: usize) {
        if let Store::Kube { api, .. } = self {
            // It may be deleted already.
            let _ = api.change(|nodes| nodes.delete(&node_name(number)));
        }
    }

    /// Creates the Node of a machine, unless it exists.
    pub fn register(&mut self, number: usize) {
        if let Store::Kube { api, .. } = self {
            api.change(|nodes| nodes.register(&node_name(number), &timeline::date()));
        }
    }

    /// Gives the Node of a machine a pod CIDR, unless it has one.
    pub fn assign(&mut self, number: usize) {
        if let Store::Kube { api, .. } = self {
            api.change(|nodes| nodes.assign(&node_name(number)));
        }
    }

    /// Sets how far the watch cache of an API server is behind.
    pub fn set_cache_lag(&mut self, lag: Duration) {
        if let Store::Kube { api, .. } = self {
            api.set_lag(lag);
        }
    }

    /// Returns the BackendData of the lease of a machine, whose pods have these subnets.
    pub fn backend_data(&self, number: usize, pods: &Subnets) -> Option<String> {
        match self {
            Store::Etcd { .. } => {
                let value = self.leases().remove(&pods.to_key())?;
                let value: serde_json::Value = serde_json::from_str(&value).ok()?;
                value.get("BackendData").map(ToString::to_string)
            }
            Store::Kube { api, .. } => api.read(|nodes| nodes.annotation(&node_name(number), "backend-data")),
        }
    }

    /// Writes a lease of vxlan, as everybody can who may write to the store.
    pub fn add_lease(&mut self, lease: &FalseLease) {
        let FalseLease { name, subnet, public, data } = lease;
        match self {
            Store::Etcd { server, .. } => {
                let value = format!(r#"{{"PublicIP":"{public}","BackendType":"vxlan","BackendData":{data}}}"#);
                server.change(|etcd| etcd.write(&key(&Subnets { v4: Some(*subnet), v6: None }), &value));
            }
            Store::Kube { api, .. } => {
                let annotations = [
                    ("kube-subnet-manager", "true".to_owned()),
                    ("backend-type", "vxlan".to_owned()),
                    ("backend-data", data.clone()),
                    ("public-ip", public.to_string()),
                ];
                api.change(|nodes| nodes.add(name, &timeline::date(), *subnet, &annotations));
            }
        }
    }

    /// Removes a lease that [`Store::add_lease`] has written.
    pub fn remove_lease(&mut self, lease: &FalseLease) {
        match self {
            Store::Etcd { server, .. } => {
                let key = key(&Subnets { v4: Some(lease.subnet), v6: None });
                server.change(|etcd| etcd.delete_prefix(&key));
            }
            Store::Kube { api, .. } => {
                let _ = api.change(|nodes| nodes.delete(&lease.name));
            }
        }
    }

    /// Writes net-conf. In Kubernetes it comes to each machine as a file, see [`Store::write_net_conf_file`].
    pub fn write_net_conf(&mut self, wanted: &WantedConf) {
        if let Store::Etcd { server, net_conf, .. } = self {
            *net_conf = wanted.text();
            server.change(|etcd| etcd.write(&format!("{PREFIX}/config"), net_conf));
        }
    }

    /// Writes the file with net-conf of a machine, as its kubelet does. With an etcd there is no such file.
    pub fn write_net_conf_file(&self, number: usize, wanted: &WantedConf) {
        if self.has_nodes() {
            // The directory is in memory.
            fs::write(net_conf_file(number), wanted.text()).unwrap_or_else(|error| panic!("write net-conf: {error}"));
        }
    }

    /// Writes a false lease with the rights of one node. In Kubernetes these are the annotations of its Node, which gets a pod CIDR as any Node.
    pub fn write_lie(&mut self, name: &str, lie: &Lie) {
        match self {
            Store::Etcd { server, .. } => {
                server.change(|etcd| etcd.write_bytes(&format!("{PREFIX}/subnets/{}", lie.key), lie.value()));
            }
            Store::Kube { api, .. } => api.change(|nodes| {
                nodes.register(name, &timeline::date());
                nodes.assign(name);
                nodes.annotate(name, &lie.annotations());
            }),
        }
    }

    /// Removes what [`Store::write_lie`] has written under these keys.
    pub fn remove_lies(&mut self, name: &str, keys: &[String]) {
        match self {
            Store::Etcd { server, .. } => {
                for key in keys {
                    server.change(|etcd| etcd.remove(&format!("{PREFIX}/subnets/{key}")));
                }
            }
            Store::Kube { api, .. } => {
                let _ = api.change(|nodes| nodes.delete(name));
            }
        }
    }
}
