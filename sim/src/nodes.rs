// SPDX-License-Identifier: Apache-2.0
//! The content of a simulated API server: Nodes with their history, and what its watch cache knows of them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use hyper::body::Bytes;
use ipnet::Ipv4Net;
use serde_json::{Value, json};

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
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    conditions: Vec<Value>,
}

/// Nodes by name.
type Named = BTreeMap<String, Arc<Node>>;

/// A change of a Node.
#[derive(Debug, Clone)]
pub struct Change {
    /// The version of all Nodes after the change.
    pub version: u64,
    /// The name of the Node.
    pub name: String,
    /// The event of a watch, as a line of text. All watches share it.
    pub event: Bytes,
    /// The Node after the change. `None` if it was deleted.
    node: Option<Arc<Node>>,
}

impl Change {
    fn apply(&self, nodes: &mut Named) {
        match &self.node {
            Some(node) => nodes.insert(self.name.clone(), node.clone()),
            None => nodes.remove(&self.name),
        };
    }
}

/// Which version of the Nodes a list shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The one that the watch cache has.
    Cached,
    /// The one that etcd has.
    Current,
    /// This one.
    Exactly(u64),
}

/// What a patch can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Everything but the status.
    Node,
    /// The status and the metadata.
    Status,
}

/// Why the server refuses a request: the HTTP code, the reason and a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused(pub u16, pub &'static str, pub &'static str);

/// Someone has written the Node since it was read.
pub const CONFLICT: Refused = Refused(409, "Conflict", "the object has been modified");
/// There is such an object already.
pub const EXISTS: Refused = Refused(409, "AlreadyExists", "already exists");
/// The object is not valid, or may not be changed like this.
pub const INVALID: Refused = Refused(422, "Invalid", "is invalid");
/// The request cannot be understood.
pub const BAD_REQUEST: Refused = Refused(400, "BadRequest", "the request cannot be understood");
/// The server does not have this version yet.
pub const TOO_LARGE: Refused = Refused(504, "Timeout", "Too large resource version");
/// There is no such object.
pub const NOT_FOUND: Refused = Refused(404, "NotFound", "not found");
/// The version is forgotten.
pub const EXPIRED: Refused = Refused(410, "Expired", "too old resource version");
/// The client sends too many requests.
pub const TOO_MANY: Refused = Refused(429, "TooManyRequests", "the server has received too many requests");

/// All Nodes. A clone is a backup.
#[derive(Debug, Clone)]
pub struct Nodes {
    nodes: Named,
    version: u64,
    history: Vec<Change>,
    /// The version before which nothing can be read, and the Nodes at this version.
    compacted: (u64, Named),
    /// The version up to which the watch cache knows the Nodes, and those Nodes.
    cached: (u64, Named),
    uids: u64,
    /// The number of the pod CIDR that the controller assigned last. It goes on with the next free one.
    last_cidr: u32,
}

impl Nodes {
    /// Returns a server without Nodes.
    #[allow(clippy::new_without_default, reason = "only an API server has such a content")]
    pub fn new() -> Nodes {
        let empty = (1, BTreeMap::new());
        let (nodes, history) = (BTreeMap::new(), Vec::new());
        Nodes { nodes, version: 1, history, compacted: empty.clone(), cached: empty, uids: 0, last_cidr: 0 }
    }

    /// Returns the present version.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the version up to which the watch cache knows the Nodes.
    pub fn cached_version(&self) -> u64 {
        self.cached.0
    }

    /// Lets the watch cache know everything.
    pub fn update_cache(&mut self) {
        let known = self.history.partition_point(|change| change.version <= self.cached.0);
        self.history[known..].iter().for_each(|change| change.apply(&mut self.cached.1));
        self.cached.0 = self.version;
    }

    /// Forgets all earlier versions.
    pub fn compact(&mut self) {
        self.compacted = (self.version, self.nodes.clone());
        // The watch cache learns of the last changes later.
        self.history.retain(|change| change.version > self.cached.0);
    }

    /// Writes a Node, or deletes it.
    fn write(&mut self, name: &str, node: Option<Node>) {
        self.version += 1;
        let before = self.nodes.get(name);
        let kind = match (&node, before) {
            (None, _) => "DELETED",
            (Some(_), None) => "ADDED",
            (Some(_), Some(_)) => "MODIFIED",
        };
        let node = node.map(|node| Arc::new(Node { version: self.version, ..node }));
        let shown = match (&node, before) {
            (Some(node), _) => json_of(name, node),
            // The version of the deletion, and else what was deleted.
            (None, before) => {
                let node = before.map(|before| Node { version: self.version, ..Node::clone(before) });
                json_of(name, &node.unwrap_or_default())
            }
        };
        let event = Bytes::from(format!("{}\n", json!({"type": kind, "object": shown})));
        let change = Change { version: self.version, name: name.to_owned(), event, node };
        change.apply(&mut self.nodes);
        self.history.push(change);
    }

    /// Changes a Node, if it exists.
    fn edit(&mut self, name: &str, edit: impl FnOnce(&mut Node)) {
        if let Some(before) = self.nodes.get(name) {
            let mut node = Node::clone(before);
            edit(&mut node);
            self.write(name, Some(node));
        }
    }

    /// Creates a Node as its kubelet does, unless it exists. It has no pod CIDR yet.
    pub fn register(&mut self, name: &str, created: &str) {
        let _ = self.create(&json!({"metadata": {"name": name}}), created);
    }

    /// Creates a Node.
    ///
    /// # Errors
    /// [`EXISTS`], and [`INVALID`] for a pod CIDR that is none.
    pub fn create(&mut self, object: &Value, created: &str) -> Result<Value, Refused> {
        let name = object["metadata"]["name"].as_str().ok_or(INVALID)?;
        let uid = format!("uid-{}", self.uids + 1);
        let mut node = Node { uid, created: created.to_owned(), ..Node::default() };
        node.patch(Part::Node, object)?;
        if self.nodes.contains_key(name) {
            return Err(EXISTS);
        }
        self.uids += 1;
        self.write(name, Some(node));
        self.get(name)
    }

    /// Assigns a pod CIDR as the controller manager does: one that no Node has and that was not assigned lately.
    pub fn assign(&mut self, name: &str) {
        if self.nodes.get(name).is_none_or(|node| node.pod_cidr.is_some()) {
            return;
        }
        let taken: Vec<Ipv4Net> = self.nodes.values().filter_map(|node| node.pod_cidr).collect();
        loop {
            self.last_cidr = self.last_cidr % 15_000 + 1;
            let net = Ipv4Net::new_assert(Ipv4Addr::from_bits((10 << 24) + (1 << 16) + self.last_cidr * 256), 24);
            if !taken.contains(&net) {
                return self.edit(name, |node| node.pod_cidr = Some(net));
            }
        }
    }

    /// Deletes a Node, as an administrator does.
    ///
    /// # Errors
    /// [`NOT_FOUND`].
    pub fn delete(&mut self, name: &str) -> Result<(), Refused> {
        if !self.nodes.contains_key(name) {
            return Err(NOT_FOUND);
        }
        self.write(name, None);
        Ok(())
    }

    /// Removes the annotations of the agents from a Node.
    pub fn remove_annotations(&mut self, name: &str) {
        self.edit(name, |node| node.annotations.clear());
    }

    /// Adds a Node with a lease, as everybody can who may create Nodes.
    pub fn add(&mut self, name: &str, created: &str, pod_cidr: Ipv4Net, annotations: &[(&str, String)]) {
        self.register(name, created);
        self.edit(name, |node| {
            node.pod_cidr = Some(pod_cidr);
            node.annotate(annotations);
        });
    }

    /// Replaces the annotations of a Node.
    pub fn annotate(&mut self, name: &str, annotations: &[(&str, String)]) {
        self.edit(name, |node| node.annotate(annotations));
    }

    /// Returns an annotation of a Node.
    pub fn annotation(&self, name: &str, end: &str) -> Option<String> {
        self.nodes.get(name)?.annotations.get(&format!("{ANNOTATIONS}{end}")).cloned()
    }

    /// Returns the leases, by subnet as in etcd's keys. Each is described as etcd would have it.
    pub fn leases(&self) -> BTreeMap<String, String> {
        let lease = |node: &Arc<Node>| {
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
    ///
    /// # Errors
    /// [`NOT_FOUND`], [`CONFLICT`] if the patch names another version, and [`INVALID`] for a change of a pod CIDR.
    pub fn patch(&mut self, name: &str, part: Part, patch: &Value) -> Result<Value, Refused> {
        let before = self.nodes.get(name).ok_or(NOT_FOUND)?;
        let version = patch["metadata"]["resourceVersion"].as_str();
        if version.is_some_and(|version| version != before.version.to_string()) {
            return Err(CONFLICT);
        }
        let mut node = Node::clone(before);
        node.patch(part, patch)?;
        // A patch that changes nothing makes no new version.
        if node != **before {
            self.write(name, Some(node));
        }
        self.get(name)
    }

    /// Lists the Nodes whose names come after `after`, at most `limit` of them.
    ///
    /// # Errors
    /// [`EXPIRED`] and [`TOO_LARGE`], if the server does not have this version any more, or not yet.
    pub fn list(&self, at: At, limit: usize, after: &str) -> Result<Value, Refused> {
        let of_past;
        let (version, nodes) = match at {
            At::Cached => (self.cached.0, &self.cached.1),
            At::Current => (self.version, &self.nodes),
            At::Exactly(version) => {
                of_past = self.of_version(version)?;
                (version, &of_past)
            }
        };
        let mut rest = nodes.iter().filter(|(name, _)| after.is_empty() || name.as_str() > after).peekable();
        let page: Vec<(&String, &Arc<Node>)> = rest.by_ref().take(limit).collect();
        let mut metadata = json!({"resourceVersion": version.to_string()});
        if let (Some(_), Some((last, _))) = (rest.peek(), page.last()) {
            metadata["continue"] = json!(format!("{version}.{last}"));
        }
        let items: Vec<Value> = page.into_iter().map(|(name, node)| json_of(name, node)).collect();
        Ok(json!({"kind": "NodeList", "apiVersion": "v1", "metadata": metadata, "items": items}))
    }

    /// Returns the Nodes as they were at a version.
    fn of_version(&self, version: u64) -> Result<Named, Refused> {
        let (compacted, mut nodes) = self.compacted.clone();
        if version < compacted {
            return Err(EXPIRED);
        }
        if version > self.version {
            return Err(TOO_LARGE);
        }
        let later = self.history.iter().filter(|change| change.version > compacted && change.version <= version);
        later.for_each(|change| change.apply(&mut nodes));
        Ok(nodes)
    }

    /// Returns the changes after this version that the watch cache knows.
    ///
    /// # Errors
    /// [`EXPIRED`], if some of them are forgotten.
    pub fn changes(&self, after: u64) -> Result<Vec<Change>, Refused> {
        if after < self.compacted.0 {
            return Err(EXPIRED);
        }
        let index = |version: u64| self.history.partition_point(|change| change.version <= version);
        let (first, end) = (index(after), index(self.cached.0));
        Ok(self.history.get(first..end).unwrap_or_default().to_vec())
    }
}

impl Node {
    fn annotate(&mut self, annotations: &[(&str, String)]) {
        let named = annotations.iter().map(|(end, text)| (format!("{ANNOTATIONS}{end}"), text.clone()));
        self.annotations = named.collect();
    }

    /// Applies a strategic merge patch, which merges conditions by their type.
    fn patch(&mut self, part: Part, patch: &Value) -> Result<(), Refused> {
        let metadata = &patch["metadata"];
        for (texts, new) in [(&mut self.annotations, "annotations"), (&mut self.labels, "labels")] {
            for (key, value) in metadata[new].as_object().into_iter().flatten() {
                match value.as_str() {
                    Some(text) => texts.insert(key.clone(), text.to_owned()),
                    None => texts.remove(key),
                };
            }
        }
        if part == Part::Node {
            return self.set_pod_cidr(&patch["spec"]);
        }
        for condition in patch["status"]["conditions"].as_array().into_iter().flatten() {
            let same = self.conditions.iter_mut().find(|known| known["type"] == condition["type"]);
            match (same.and_then(Value::as_object_mut), condition.as_object()) {
                (Some(known), Some(new)) => known.extend(new.clone()),
                _ => self.conditions.push(condition.clone()),
            }
        }
        Ok(())
    }

    /// Sets the pod CIDR. It can never be another one.
    fn set_pod_cidr(&mut self, spec: &Value) -> Result<(), Refused> {
        let Some(text) = spec["podCIDR"].as_str() else { return Ok(()) };
        let net = text.parse().map_err(|_| INVALID)?;
        if *self.pod_cidr.get_or_insert(net) != net {
            return Err(INVALID);
        }
        Ok(())
    }
}

/// Returns the object as the server sends it.
fn json_of(name: &str, node: &Node) -> Value {
    let Node { uid, created, version, pod_cidr, labels, annotations, conditions } = node;
    let spec = pod_cidr.map_or(json!({}), |net| json!({"podCIDR": net, "podCIDRs": [net]}));
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": uid, "resourceVersion": version.to_string(), "creationTimestamp": created,
            "labels": labels, "annotations": annotations,
        },
        "spec": spec,
        "status": {"conditions": conditions},
    })
}
