// SPDX-License-Identifier: Apache-2.0
//! Our own Node: published, withdrawn, its condition.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};

use crate::attrs::Attrs;
use crate::cidr::{Family, Subnets};
use crate::evidence::Evidence;
use crate::lease::{Age, Lease};
use crate::network::Network;
use crate::source::{Claim, Error, UNREADABLE};

use super::client::Fault;
use super::node::Node;
use super::proto;
use super::{Asked, KubeStore, Who, publish, spread};

/// So long a pod CIDR is waited for before it is said that there is none.
const WAIT: Duration = Duration::from_secs(10);
/// Tries of one write: the kubelet writes the same object.
const TRIES: u32 = 16;
/// Between them, each time longer: whoever writes the same object is done then.
const TRY_AGAIN: Duration = Duration::from_millis(20);
const CONFLICT: u16 = 409;
/// More writes than this within [`CALM`] mean that someone else writes the same annotations.
const MANY: usize = 10;
const CALM: Duration = Duration::from_secs(60);

/// What the condition says when all is well: flannel's words, which people and tools know.
const UP: (&str, &str, &str) = ("False", "FlannelIsUp", "Flannel is running on this node");
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

/// Of a lease what this network enables.
pub(super) fn concerning(lease: Lease, network: &Network) -> Lease {
    of_families(lease, &network.networks)
}

/// Of a lease the families that these networks have.
fn of_families(lease: Lease, networks: &Subnets) -> Lease {
    let all = lease.subnets;
    let subnets =
        Subnets { v4: all.v4.filter(|_| networks.v4.is_some()), v6: all.v6.filter(|_| networks.v6.is_some()) };
    Lease { subnets, ..lease }
}

/// Why these pod CIDRs do not fit to net-conf, if they do not.
fn misfit(name: &str, subnets: &Subnets, network: &Network) -> Option<String> {
    [Family::V4, Family::V6].into_iter().find_map(|family| {
        let within = network.networks.of(family)?;
        match subnets.of(family) {
            None => Some(format!("node {name} has no pod CIDR inside {within}, which net-conf enables")),
            Some(net) if !within.contains(&net) => Some(format!(
                "pod CIDR {net} of node {name} lies outside {within} of net-conf: make net-conf and the cluster CIDR of kube-controller-manager equal"
            )),
            Some(_) => None,
        }
    })
}

fn path(name: &str) -> String {
    format!("/api/v1/nodes/{name}")
}

impl KubeStore {
    /// The name of our Node; asked once.
    async fn name(&self) -> Result<&str, Error> {
        let find = || async {
            match &self.who {
                Who::Node(name) => Ok(name.clone()),
                Who::Unknown => {
                    Err(Error::Invalid("set NODE_NAME, or POD_NAME and POD_NAMESPACE, in the environment".to_owned()))
                }
                Who::Pod { name, namespace } => {
                    let what = format!("pod {namespace}/{name}");
                    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
                    let pod: Pod = self.api.get(&path).await.map_err(|fault| self.api.error(&what, fault))?;
                    let node = pod.spec.node_name.filter(|node| !node.is_empty());
                    node.ok_or_else(|| Error::Unavailable { what: format!("{what} is on no node yet"), source: None })
                }
            }
        };
        self.name.get_or_try_init(find).await.map(String::as_str)
    }

    async fn read(&self, name: &str) -> Result<Node, Error> {
        let node = self.api.get(&path(name)).await;
        node.map_err(|fault| self.api.error(&format!("node {name}"), fault))
    }

    async fn read_own(&self) -> Result<Node, Error> {
        let node = self.read(self.name().await?).await?;
        *self.newest.borrow_mut() = node.metadata.resource_version.clone();
        *self.uid.borrow_mut() = node.metadata.uid.to_string();
        Ok(node)
    }

    /// Our Node is another one than the one that we read; as good as there when it is gone, which the watch tells.
    pub(super) async fn replaced(&self) -> Result<bool, Fault> {
        let uid = self.uid.borrow().clone();
        let Some(name) = self.name.get().filter(|_| !uid.is_empty()) else { return Ok(false) };
        match self.api.get::<Node>(&path(name)).await {
            Ok(node) => Ok(*node.metadata.uid != *uid),
            Err(fault) if fault.code() == 404 => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    /// The lease of the Node with our name: no other evidence is better, so none is asked for ([`crate::evidence::Proof::Identity`]).
    /// It is as the annotations say; what backends have said there also before a pod CIDR is assigned, and where another
    /// annotation cannot be read: the VTEP MAC is what is asked for.
    pub(super) async fn find_own(&self) -> Result<Option<Lease>, Error> {
        let node = self.read_own().await?;
        let Some(record) = node.record(&self.prefix) else { return Ok(None) };
        Ok(Some(record.lease.unwrap_or_else(|_| Lease {
            id: record.id,
            subnets: node.subnets().unwrap_or_default(),
            attrs: publish::said_by_backend(&node, &self.prefix),
            age: Age::default(),
        })))
    }

    pub(super) async fn admins_choice(&self) -> Result<[Option<IpAddr>; 2], Error> {
        self.read_own().await?.chosen(&self.prefix).map_err(Error::Invalid)
    }

    pub(super) async fn take(&self, claim: &Claim) -> Result<Lease, Error> {
        *self.asked.borrow_mut() = Some(Asked { network: claim.network.clone(), attrs: claim.attrs.clone() });
        let node = self.assigned().await?;
        self.publish(node, &claim.attrs, &claim.network).await
    }

    pub(super) async fn take_again(&self, attrs: &Attrs) -> Result<Lease, Error> {
        let network = {
            let mut asked = self.asked.borrow_mut();
            let asked =
                asked.as_mut().ok_or_else(|| Error::Invalid("a lease is taken before it is kept".to_owned()))?;
            asked.attrs = attrs.clone();
            asked.network.clone()
        };
        let node = self.read_own().await?;
        self.publish(node, attrs, &network).await
    }

    /// Our Node once it has a pod CIDR; waits for it a while.
    async fn assigned(&self) -> Result<Node, Error> {
        let node = self.read_own().await?;
        if node.assigned() {
            return Ok(node);
        }
        // Whether the wait ends with a change or with time: what counts is what the server says then.
        let _ = timeout(WAIT, self.wait_for_change(&node)).await;
        let node = self.read_own().await?;
        if node.assigned() {
            return Ok(node);
        }
        let text = format!(
            "node {} has no pod CIDR: does kube-controller-manager run with --allocate-node-cidrs and --cluster-cidr?",
            node.metadata.name
        );
        Err(Error::Unavailable { what: text, source: None })
    }

    /// Ends when the Node was changed so that it has a pod CIDR, or was deleted, or the watch ends.
    async fn wait_for_change(&self, node: &Node) -> Result<(), Fault> {
        let (name, from) = (&node.metadata.name, &node.metadata.resource_version);
        let query = format!("watch=true&fieldSelector=metadata.name%3D{name}&resourceVersion={from}");
        let mut stream = self.api.open(&format!("/api/v1/nodes?{query}"), proto::WATCH).await?;
        while let Some(event) = stream.event().await? {
            match event.r#type.as_str() {
                "BOOKMARK" => {}
                "ADDED" | "MODIFIED" if !Node::from(event.object::<proto::Node>()?).assigned() => {}
                _ => break,
            }
        }
        Ok(())
    }

    /// Makes the annotations say this, and yields the lease that the Node then is.
    async fn publish(&self, mut node: Node, attrs: &Attrs, network: &Network) -> Result<Lease, Error> {
        let name = node.metadata.name.clone();
        let subnets = node.subnets().map_err(|what| Error::Unavailable { what, source: None })?;
        if let Some(reason) = misfit(&name, &subnets, network) {
            return Err(Error::Invalid(reason));
        }
        for tried in 1..=TRIES {
            self.warn(&node);
            let changes = publish::changes(attrs, &node, &self.prefix);
            if changes.is_empty() {
                let lease = node.lease(&self.prefix).map_err(Error::Invalid)?;
                return Ok(concerning(lease, network));
            }
            self.calm(&name)?;
            node = match self.write(&name, &publish::patch(changes, &node)).await? {
                Some(node) => {
                    self.writes.borrow_mut().push(Instant::now());
                    node
                }
                None => {
                    sleep(spread(TRY_AGAIN * tried)).await;
                    self.read_own().await?
                }
            };
        }
        Err(self.contended(&name))
    }

    /// Patches; `None` when the Node was another meanwhile.
    async fn write(&self, name: &str, patch: &Value) -> Result<Option<Node>, Error> {
        match self.api.patch::<Node>(&format!("{}/status?fieldManager=weft", path(name)), patch).await {
            Ok(node) => {
                *self.newest.borrow_mut() = node.metadata.resource_version.clone();
                Ok(Some(node))
            }
            Err(fault) if fault.code() == CONFLICT => Ok(None),
            Err(fault) => Err(self.api.error(&format!("patch node {name}"), fault)),
        }
    }

    /// Two agents with one name would write against each other without end.
    fn calm(&self, name: &str) -> Result<(), Error> {
        let mut writes = self.writes.borrow_mut();
        writes.retain(|at| at.elapsed() < CALM);
        if writes.len() >= MANY {
            return Err(self.contended(name));
        }
        Ok(())
    }

    fn contended(&self, name: &str) -> Error {
        let what = format!("annotations of node {name} are written by someone else too: is NODE_NAME given twice?");
        Error::Unavailable { what, source: None }
    }

    /// Takes the annotations away that make a Node a lease; with `ours`, only while they still say what it says.
    pub(super) async fn withdraw(&self, name: &str, ours: Option<&Lease>) -> Result<(), Error> {
        for tried in 1..=TRIES {
            let node = self.read(name).await?;
            if !node.managed(&self.prefix) {
                return Err(Error::Missing(format!("lease of node {name}")));
            }
            if let Some(ours) = ours {
                let subnet = node.subnets().unwrap_or_default();
                // Of the Node's families ours has those that net-conf enables.
                let lease = node.lease(&self.prefix).map(|lease| of_families(lease, &ours.subnets));
                match lease {
                    Ok(lease) if Evidence::of(ours.subnets, &ours.attrs).proves(&lease) => {}
                    Ok(lease) => return Err(Error::Taken { subnet, owner: lease.attrs.owner() }),
                    Err(_) => return Err(Error::Taken { subnet, owner: UNREADABLE.to_owned() }),
                }
            }
            let changes = publish::removal(&node, &self.prefix);
            if self.write(name, &publish::patch(changes, &node)).await?.is_some() {
                return Ok(());
            }
            sleep(spread(TRY_AGAIN * tried)).await;
        }
        Err(self.contended(name))
    }

    /// Sets NetworkUnavailable unless it says the same already.
    pub(super) async fn condition(&self, fault: Option<&str>) -> Result<(), Error> {
        if !self.set_condition {
            return Ok(());
        }
        let name = self.name().await?;
        let (status, reason, message) = fault.map_or(UP, |fault| ("True", DOWN_REASON, fault));
        let node: WithConditions =
            self.api.get(&path(name)).await.map_err(|fault| self.api.error(&format!("node {name}"), fault))?;
        let there = node.status.conditions.iter().find(|condition| condition.r#type == "NetworkUnavailable");
        if there.is_some_and(|it| (&*it.status, &*it.reason, &*it.message) == (status, reason, message)) {
            return Ok(());
        }
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let mut condition = json!({
            "type": "NetworkUnavailable", "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": now,
        });
        // The API's convention: another reason is no transition. What the patch does not name stays.
        if there.is_none_or(|it| it.status != status) {
            condition["lastTransitionTime"] = now.into();
        }
        // Merged by type: the other conditions are the kubelet's.
        let written = self.write(name, &json!({ "status": { "conditions": [condition] } })).await?;
        written.map(drop).ok_or_else(|| self.contended(name))
    }
}

#[cfg(test)]
#[path = "own/tests.rs"]
mod tests;
