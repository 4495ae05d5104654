// SPDX-License-Identifier: Apache-2.0
//! The content of a simulated API server: Nodes with their history, and what its watch cache knows of them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde_json::{Map, Value, json};

/// The prefix of the annotations.
pub const ANNOTATIONS: &str = "flannel.alpha.coreos.com/";

/// A Node, as far as weft reads it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Node {
    uid: String,
    /// The creation time, as text of the API.
    created: String,
    version: u64,
    pod_cidr: Option<Ipv4Net>,
    annotations: BTreeMap<String, String>,
    conditions: BTreeMap<String, Value>,
}

/// A change of a Node: its version, `ADDED`, `MODIFIED` or `DELETED`, the name, and the Node.
#[derive(Debug, Clone)]
pub struct Change {
    /// The version of all Nodes after the change.
    pub version: u64,
    /// What happened, as in the events of a watch.
    pub kind: &'static str,
    /// The name of the Node.
    pub name: String,
    node: Node,
}

/// Why the server refuses a request: the HTTP code, the reason and a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused(pub u16, pub &'static str, pub &'static str);

/// Someone has written the Node since it was read.
pub const CONFLICT: Refused = Refused(409, "Conflict", "the object has been modified");
/// There is no such object.
pub const NOT_FOUND: Refused = Refused(404, "NotFound", "not found");
/// The version is forgotten.
pub const EXPIRED: Refused = Refused(410, "Expired", "too old resource version");
/// The client sends too many requests.
pub const TOO_MANY: Refused = Refused(429, "TooManyRequests", "the server has received too many requests");

/// All Nodes. A clone is a backup.
#[derive(Debug, Clone)]
pub struct Nodes {
    nodes: BTreeMap<String, Node>,
    version: u64,
    history: Vec<Change>,
    compacted: u64,
    /// The version up to which the watch cache knows the Nodes, and those Nodes.
    cached: (u64, BTreeMap<String, Node>),
    uids: u64,
    /// The number of the pod CIDR that the controller assigned last. It goes on with the next free one.
    last_cidr: u32,
}

impl Nodes {
    /// Returns a server without Nodes.
    #[allow(clippy::new_without_default, reason = "only an API server has such a content")]
    pub fn new() -> Nodes {
        let (nodes, history, cached) = (BTreeMap::new(), Vec::new(), (1, BTreeMap::new()));
        Nodes { nodes, version: 1, history, compacted: 0, cached, uids: 0, last_cidr: 0 }
    }

    /// Returns the version up to which the watch cache knows the Nodes.
    pub fn cached_version(&self) -> u64 {
        self.cached.0
    }

    /// Lets the watch cache know everything.
    pub fn update_cache(&mut self) {
        self.cached = (self.version, self.nodes.clone());
    }

    /// Forgets all earlier versions.
    pub fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
    }

    fn write(&mut self, name: &str, kind: &'static str, mut node: Node) {
        self.version += 1;
        node.version = self.version;
        match kind {
            "DELETED" => self.nodes.remove(name),
            _ => self.nodes.insert(name.to_owned(), node.clone()),
        };
        self.history.push(Change { version: self.version, kind, name: name.to_owned(), node });
    }

    /// Creates a Node as its kubelet does, unless it exists. It has no pod CIDR yet.
    pub fn register(&mut self, name: &str, created: &str) {
        if !self.nodes.contains_key(name) {
            self.uids += 1;
            let node = Node { uid: format!("uid-{}", self.uids), created: created.to_owned(), ..Node::default() };
            self.write(name, "ADDED", node);
        }
    }

    /// Assigns a pod CIDR as the controller manager does: one that no Node has and that was not assigned lately.
    pub fn assign(&mut self, name: &str) {
        let Some(node) = self.nodes.get(name).filter(|node| node.pod_cidr.is_none()).cloned() else { return };
        let taken: Vec<Ipv4Net> = self.nodes.values().filter_map(|node| node.pod_cidr).collect();
        loop {
            self.last_cidr = self.last_cidr % 15_000 + 1;
            let net = Ipv4Net::new_assert(Ipv4Addr::from_bits((10 << 24) + (1 << 16) + self.last_cidr * 256), 24);
            if !taken.contains(&net) {
                return self.write(name, "MODIFIED", Node { pod_cidr: Some(net), ..node });
            }
        }
    }

    /// Deletes a Node, as an administrator does.
    pub fn delete(&mut self, name: &str) {
        if let Some(node) = self.nodes.get(name).cloned() {
            self.write(name, "DELETED", node);
        }
    }

    /// Removes the annotations of the agents from a Node.
    pub fn remove_annotations(&mut self, name: &str) {
        if let Some(node) = self.nodes.get(name).cloned() {
            self.write(name, "MODIFIED", Node { annotations: BTreeMap::new(), ..node });
        }
    }

    /// Adds a Node with a lease, as everybody can who may create Nodes.
    pub fn add(&mut self, name: &str, created: &str, pod_cidr: Ipv4Net, annotations: &[(&str, String)]) {
        self.register(name, created);
        if let Some(node) = self.nodes.get(name).cloned() {
            let annotations = annotations.iter().map(|(end, text)| (format!("{ANNOTATIONS}{end}"), text.clone()));
            self.write(name, "MODIFIED", Node { pod_cidr: Some(pod_cidr), annotations: annotations.collect(), ..node });
        }
    }

    /// Replaces the annotations of a Node.
    pub fn annotate(&mut self, name: &str, annotations: &[(&str, String)]) {
        if let Some(node) = self.nodes.get(name).cloned() {
            let annotations = annotations.iter().map(|(end, text)| (format!("{ANNOTATIONS}{end}"), text.clone()));
            self.write(name, "MODIFIED", Node { annotations: annotations.collect(), ..node });
        }
    }

    /// Returns an annotation of a Node.
    pub fn annotation(&self, name: &str, end: &str) -> Option<String> {
        self.nodes.get(name)?.annotations.get(&format!("{ANNOTATIONS}{end}")).cloned()
    }

    /// Returns the leases, by subnet as in etcd's keys. Each is described as etcd would have it.
    pub fn leases(&self) -> BTreeMap<String, String> {
        let lease = |node: &Node| {
            let annotation = |end: &str| node.annotations.get(&format!("{ANNOTATIONS}{end}"));
            let json = |end| annotation(end).and_then(|text| serde_json::from_str::<Value>(text).ok());
            let key = node.pod_cidr?.to_string().replace('/', "-");
            let mut lease = json!({"PublicIP": annotation("public-ip")?, "BackendType": annotation("backend-type")});
            for (member, end) in [("BackendData", "backend-data"), ("OtherWays", "other-ways")] {
                json(end).into_iter().for_each(|value| lease[member] = value);
            }
            Some((key, lease.to_string()))
        };
        self.nodes.values().filter_map(lease).collect()
    }

    /// Reads a Node.
    pub fn get(&self, name: &str) -> Result<Value, Refused> {
        self.nodes.get(name).map(|node| json_of(name, node)).ok_or(NOT_FOUND)
    }

    /// Patches a Node by a strategic merge patch.
    pub fn patch(&mut self, name: &str, patch: &Value) -> Result<Value, Refused> {
        let before = self.nodes.get(name).cloned().ok_or(NOT_FOUND)?;
        let version = patch["metadata"]["resourceVersion"].as_str();
        if version.is_some_and(|version| version != before.version.to_string()) {
            return Err(CONFLICT);
        }
        let mut node = before.clone();
        for (key, value) in patch["metadata"]["annotations"].as_object().into_iter().flatten() {
            match value.as_str() {
                Some(text) => node.annotations.insert(key.clone(), text.to_owned()),
                None => node.annotations.remove(key),
            };
        }
        for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
            let kind = condition["type"].as_str().unwrap_or_default().to_owned();
            let merged = node.conditions.entry(kind).or_insert_with(|| Value::Object(Map::new()));
            if let (Some(merged), Some(new)) = (merged.as_object_mut(), condition.as_object()) {
                merged.extend(new.clone());
            }
        }
        // A patch that changes nothing makes no new version.
        if node != before {
            self.write(name, "MODIFIED", node);
        }
        self.get(name)
    }

    /// Lists all Nodes as etcd has them, or as the watch cache has them.
    pub fn list(&self, from_cache: bool) -> Value {
        let (version, nodes) = if from_cache { (self.cached.0, &self.cached.1) } else { (self.version, &self.nodes) };
        let items: Vec<Value> = nodes.iter().map(|(name, node)| json_of(name, node)).collect();
        json!({"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": version.to_string()}, "items": items})
    }

    /// Returns the changes after this version that the watch cache knows.
    ///
    /// # Errors
    /// [`EXPIRED`], if some of them are forgotten.
    pub fn changes(&self, after: u64) -> Result<Vec<Change>, Refused> {
        if after < self.compacted {
            return Err(EXPIRED);
        }
        let known = self.history.iter().filter(|change| change.version > after && change.version <= self.cached.0);
        Ok(known.cloned().collect())
    }
}

impl Change {
    /// Returns the event of a watch.
    pub fn event(&self) -> Value {
        json!({"type": self.kind, "object": json_of(&self.name, &self.node)})
    }
}

/// Returns the object as the server sends it.
fn json_of(name: &str, node: &Node) -> Value {
    let Node { uid, created, version, pod_cidr, annotations, conditions } = node;
    let spec = pod_cidr.map_or(json!({}), |net| json!({"podCIDR": net, "podCIDRs": [net]}));
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": uid, "resourceVersion": version.to_string(), "creationTimestamp": created, "annotations": annotations,
        },
        "spec": spec,
        "status": {"conditions": conditions.values().collect::<Vec<_>>()},
    })
}
