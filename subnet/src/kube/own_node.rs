// SPDX-License-Identifier: Apache-2.0
//! Our own Node: reading it, publishing and withdrawing the lease, and the condition NetworkUnavailable.

use std::net::IpAddr;
use std::time::Duration;

use kube::core::WatchEvent;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::attrs::Attrs;
use crate::cidr::{Family, Subnets};
use crate::evidence::Evidence;
use crate::lease::{Age, Lease};
use crate::net_conf::NetConf;
use crate::source::{Error, LeaseRequest, UNREADABLE};

use super::client::{ApiError, CONFLICT, NOT_FOUND};
use super::node::{Node, NodeError};
use super::watch_stream::WatchStream;
use super::{KubeStore, Publication, Who, now, publish, random_part};

/// How long to wait for a pod CIDR before an error says that there is none.
const ASSIGN_LIMIT: Duration = Duration::from_secs(10);
/// How often one write is tried. The kubelet writes the same object, so conflicts are normal.
const TRIES: u32 = 16;
/// The longest wait before the second try. Each further wait may be longer by this.
const RETRY: Duration = Duration::from_millis(20);
/// More writes than this within [`WRITES_WITHIN`] mean that another program writes the same annotations.
const MAX_WRITES: usize = 10;
const WRITES_WITHIN: Duration = Duration::from_secs(60);

/// What the condition NetworkUnavailable says.
#[derive(PartialEq)]
struct Said<'a> {
    status: &'a str,
    reason: &'a str,
    message: &'a str,
}

/// The condition of a node whose network works. The texts are flannel's, because people and tools know them.
const UP: Said<'_> = Said { status: "False", reason: "FlannelIsUp", message: "Flannel is running on this node" };
/// The reason of the condition of a node whose network does not work.
const DOWN_REASON: &str = "WeftIsDown";

#[derive(Deserialize)]
struct Pod {
    spec: PodSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
}

#[derive(Deserialize)]
struct WithConditions {
    #[serde(default)]
    status: Conditions,
}

#[derive(Default, Deserialize)]
struct Conditions {
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    r#type: String,
    status: String,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    message: String,
}

/// Removes the subnet of a family that `networks` does not have: a Node may have pod CIDRs of both families.
pub(super) fn in_families_of(networks: &Subnets, lease: Lease) -> Lease {
    Lease { subnets: lease.subnets.in_families_of(networks), ..lease }
}

/// Returns true if these networks have the same families as the others, and contain them.
fn is_wider(networks: &Subnets, than: &Subnets) -> bool {
    Family::BOTH.into_iter().all(|family| match (networks.of(family), than.of(family)) {
        (Some(network), Some(than)) => network.contains(&than),
        (None, None) => true,
        _ => false,
    })
}

/// Checks that every network of net-conf contains a pod CIDR of the Node.
fn check_pod_cidrs(name: &str, subnets: &Subnets, net_conf: &NetConf) -> Result<(), Error> {
    for family in Family::BOTH {
        let Some(within) = net_conf.networks.of(family) else { continue };
        match subnets.of(family) {
            None => {
                let text = format!("node {name} has no pod CIDR inside {within}, which net-conf enables");
                return Err(Error::Invalid(text));
            }
            Some(net) if !within.contains(&net) => {
                let text = format!(
                    "pod CIDR {net} of node {name} lies outside {within} of net-conf: make net-conf and the cluster CIDR of kube-controller-manager equal"
                );
                return Err(Error::Invalid(text));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

fn path(name: &str) -> String {
    format!("/api/v1/nodes/{name}")
}

impl KubeStore {
    /// Returns the name of our Node. A pod is read for it once.
    pub(super) async fn own_name(&self) -> Result<&str, Error> {
        let find = || async {
            match &self.who {
                Who::Node(name) => Ok(name.clone()),
                Who::Unknown => {
                    Err(Error::Invalid("set NODE_NAME, or POD_NAME and POD_NAMESPACE, in the environment".to_owned()))
                }
                Who::Pod { name, namespace } => {
                    let what = format!("pod {namespace}/{name}");
                    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
                    let pod: Pod = self.api.get(&path).await.map_err(|error| self.api.error(&what, error))?;
                    let node = pod.spec.node_name.filter(|node| !node.is_empty());
                    node.ok_or_else(|| Error::Unavailable { what: format!("{what} is on no node yet"), source: None })
                }
            }
        };
        self.own_name.get_or_try_init(find).await.map(String::as_str)
    }

    async fn read(&self, name: &str) -> Result<Node, Error> {
        let node = self.api.get(&path(name)).await;
        node.map_err(|error| self.api.error(&format!("node {name}"), error))
    }

    async fn read_own(&self) -> Result<Node, Error> {
        let node = self.read(self.own_name().await?).await?;
        *self.own_version.borrow_mut() = node.metadata.resource_version.clone();
        *self.own_uid.borrow_mut() = node.metadata.uid.to_string();
        Ok(node)
    }

    /// Returns whether our Node is another object than the one that we read. A Node that was only deleted is not: the watch reports
    /// that.
    pub(super) async fn own_node_replaced(&self) -> Result<bool, ApiError> {
        let uid = self.own_uid.borrow().clone();
        let Some(name) = self.own_name.get().filter(|_| !uid.is_empty()) else { return Ok(false) };
        match self.api.get::<Node>(&path(name)).await {
            Ok(node) => Ok(*node.metadata.uid != *uid),
            Err(error) if error.code() == NOT_FOUND => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns the lease of the Node with our name. The name is proof enough ([`crate::evidence::Proof::Id`]).
    ///
    /// The agent needs the identity of our device in it. So if there is no pod CIDR yet, or another annotation cannot be read, the lease has what the
    /// backend published and nothing else.
    pub(super) async fn find_own(&self) -> Result<Option<Lease>, Error> {
        let node = self.read_own().await?;
        let Some(record) = node.record(&self.prefix) else { return Ok(None) };
        Ok(Some(record.lease.unwrap_or_else(|_| Lease {
            id: record.id,
            subnets: node.subnets().unwrap_or_default(),
            attrs: node.attrs_of_backend(&self.prefix),
            age: Age::default(),
        })))
    }

    pub(super) async fn chosen_addresses(&self) -> Result<[Option<IpAddr>; 2], Error> {
        self.read_own().await?.chosen(&self.prefix).map_err(|error| Error::Invalid(error.to_string()))
    }

    pub(super) async fn take(&self, request: &LeaseRequest) -> Result<Lease, Error> {
        let publication =
            Publication { net_conf: request.net_conf.clone(), attrs: request.attrs.clone(), addresses: None };
        *self.publication.borrow_mut() = Some(publication);
        let node = self.node_with_pod_cidr().await?;
        self.publish(node, &request.attrs, &request.net_conf).await
    }

    pub(super) async fn take_again(&self, attrs: &Attrs) -> Result<Lease, Error> {
        let net_conf = {
            let mut publication = self.publication.borrow_mut();
            let missing = || Error::Invalid("this agent has not acquired a lease that it could renew".to_owned());
            let publication = publication.as_mut().ok_or_else(missing)?;
            publication.attrs = attrs.clone();
            // The Network may have become wider since the lease was acquired, and the Node may have been registered again since.
            if let Some(now) = self.conf.net_conf()
                && is_wider(&now.networks, &publication.net_conf.networks)
            {
                publication.net_conf.networks = now.networks;
            }
            publication.net_conf.clone()
        };
        let node = self.read_own().await?;
        self.publish(node, attrs, &net_conf).await
    }

    /// Waits until our Node has a pod CIDR, but not for longer than [`ASSIGN_LIMIT`].
    async fn node_with_pod_cidr(&self) -> Result<Node, Error> {
        let node = self.read_own().await?;
        if node.assigned() {
            return Ok(node);
        }
        // The Node is read again in any case, also after an error.
        let _ = timeout(ASSIGN_LIMIT, self.wait_for_pod_cidr(&node)).await;
        let node = self.read_own().await?;
        if node.assigned() {
            return Ok(node);
        }
        let text = format!(
            "node {name} has no pod CIDR: does kube-controller-manager run with --allocate-node-cidrs=true and --cluster-cidr? \
             (with kubeadm: --pod-network-cidr) This shows it: kubectl get node {name} -o jsonpath='{{.spec.podCIDRs}}'",
            name = node.metadata.name
        );
        Err(Error::Unavailable { what: text, source: None })
    }

    /// Returns when the Node has a pod CIDR, was deleted, or the watch ended.
    async fn wait_for_pod_cidr(&self, node: &Node) -> Result<(), ApiError> {
        let (name, version) = (&node.metadata.name, &node.metadata.resource_version);
        let query = format!("watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion={version}");
        let mut stream = WatchStream::new(self.api.open(&format!("/api/v1/nodes?{query}")).await?);
        while let Some(event) = stream.next().await? {
            match event {
                WatchEvent::Bookmark(_) => {}
                WatchEvent::Added(node) | WatchEvent::Modified(node) if !node.assigned() => {}
                _ => break,
            }
        }
        Ok(())
    }

    /// Publishes `attrs` in the annotations of our Node, and returns the lease that it then holds.
    async fn publish(&self, mut node: Node, attrs: &Attrs, net_conf: &NetConf) -> Result<Lease, Error> {
        let name = node.metadata.name.clone();
        let unreadable = |error: NodeError| Error::Unavailable { what: error.to_string(), source: None };
        check_pod_cidrs(&name, &node.subnets().map_err(unreadable)?, net_conf)?;
        for tried in 1..=TRIES {
            self.warn_of_unreadable(&node);
            let changes = publish::changes(attrs, self.types, &node, &self.prefix);
            if changes.is_empty() {
                if let Some(publication) = &mut *self.publication.borrow_mut() {
                    publication.addresses = Some(publish::addresses(&node, &self.prefix));
                }
                let lease = node.lease(&self.prefix).map_err(|error| Error::Invalid(error.to_string()))?;
                return Ok(in_families_of(&net_conf.networks, lease));
            }
            self.check_rate(&name)?;
            node = match self.write(&name, &publish::patch(changes, &node)).await? {
                Some(node) => {
                    self.writes.borrow_mut().push(Instant::now());
                    node
                }
                None => {
                    sleep(random_part(RETRY * tried)).await;
                    self.read_own().await?
                }
            };
        }
        Err(self.contended(&name))
    }

    /// Patches a Node. `None` if somebody else has written it in the meantime.
    async fn write(&self, name: &str, patch: &Value) -> Result<Option<Node>, Error> {
        match self.api.patch::<Node>(&format!("{}/status?fieldManager=weft", path(name)), patch).await {
            Ok(node) => {
                *self.own_version.borrow_mut() = node.metadata.resource_version.clone();
                Ok(Some(node))
            }
            Err(error) if error.code() == CONFLICT => Ok(None),
            Err(error) => Err(self.api.error(&format!("patch node {name}"), error)),
        }
    }

    /// Refuses too many writes within a minute. Two agents with one name would overwrite each other's annotations without end.
    fn check_rate(&self, name: &str) -> Result<(), Error> {
        let mut writes = self.writes.borrow_mut();
        writes.retain(|at| at.elapsed() < WRITES_WITHIN);
        if writes.len() >= MAX_WRITES {
            return Err(self.contended(name));
        }
        Ok(())
    }

    fn contended(&self, name: &str) -> Error {
        let what = format!(
            "another program also writes the annotations of node {name}: do two agents have the same NODE_NAME?"
        );
        Error::Unavailable { what, source: None }
    }

    /// Removes the annotations that make a Node a lease. With `ours`, only if they still describe this lease.
    pub(super) async fn withdraw(&self, name: &str, ours: Option<&Lease>) -> Result<(), Error> {
        for tried in 1..=TRIES {
            let node = self.read(name).await?;
            if !node.managed(&self.prefix) {
                return Err(Error::Missing(format!("lease of node {name}")));
            }
            if let Some(ours) = ours {
                let subnet = node.subnets().unwrap_or_default();
                let lease = node.lease(&self.prefix).map(|lease| in_families_of(&ours.subnets, lease));
                match lease {
                    Ok(lease) if Evidence::of(self.types, ours.subnets, &ours.attrs).proves(&lease) => {}
                    Ok(lease) => return Err(Error::Taken { subnet, owner: lease.attrs.owner() }),
                    Err(_) => return Err(Error::Taken { subnet, owner: UNREADABLE.to_owned() }),
                }
            }
            let changes = publish::removal(&node, &self.prefix);
            if self.write(name, &publish::patch(changes, &node)).await?.is_some() {
                return Ok(());
            }
            sleep(random_part(RETRY * tried)).await;
        }
        Err(self.contended(name))
    }

    /// Sets the condition NetworkUnavailable, unless it is set so already.
    pub(super) async fn set_condition(&self, fault: Option<&str>) -> Result<(), Error> {
        if !self.writes_condition {
            return Ok(());
        }
        let name = self.own_name().await?;
        let wanted = fault.map_or(UP, |message| Said { status: "True", reason: DOWN_REASON, message });
        let node: WithConditions =
            self.api.get(&path(name)).await.map_err(|error| self.api.error(&format!("node {name}"), error))?;
        let current = node.status.conditions.iter().find(|condition| condition.r#type == "NetworkUnavailable");
        if current.is_some_and(|it| Said { status: &it.status, reason: &it.reason, message: &it.message } == wanted) {
            return Ok(());
        }
        let Said { status, reason, message } = wanted;
        let now = now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let mut condition = json!({
            "type": "NetworkUnavailable", "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": now,
        });
        // By the API's convention, another reason or message is not a transition. A time that the patch does not name stays.
        if current.is_none_or(|it| it.status != status) {
            condition["lastTransitionTime"] = now.into();
        }
        // The server merges conditions by type, so the kubelet's conditions stay.
        let written = self.write(name, &json!({ "status": { "conditions": [condition] } })).await?;
        written.map(drop).ok_or_else(|| self.contended(name))
    }
}

#[cfg(test)]
mod tests;
