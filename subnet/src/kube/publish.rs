// SPDX-License-Identifier: Apache-2.0
//! What a node publishes in its annotations, and the patch that makes it so; nothing when nothing differs.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde_json::{Map, Value, json};

use crate::attrs::Attrs;

use super::annotations::{self, Prefix};
use super::node::Node;

/// Annotations to set, and those to take away.
pub(super) type Changes = BTreeMap<String, Option<String>>;

/// The address to publish: the admin's when there is one that can be read.
fn address<A: Display + FromStr>(node: &Node, prefix: &Prefix, overwrite: &str, ours: A) -> String {
    node.address::<A>(prefix, overwrite).ok().flatten().unwrap_or(ours).to_string()
}

/// The admin's address that cannot be read, for people.
pub(super) fn unreadable(node: &Node, prefix: &Prefix) -> Option<String> {
    let v4 = node.address::<Ipv4Addr>(prefix, annotations::OVERWRITE).err();
    let reason = v4.or_else(|| node.address::<Ipv6Addr>(prefix, annotations::OVERWRITE_V6).err())?;
    Some(format!("{reason}: our own address is published"))
}

/// What the backend of a node has said of it, whatever else stands there.
pub(super) fn said_by_backend(node: &Node, prefix: &Prefix) -> Attrs {
    let data = |end| node.get(prefix, end).filter(|text| *text != "null").map(Into::into);
    Attrs {
        backend_type: node.get(prefix, annotations::TYPE).unwrap_or_default().to_lowercase(),
        backend_data: data(annotations::DATA),
        backend_v6_data: data(annotations::DATA_V6),
        ..Attrs::default()
    }
}

/// Every annotation that this node publishes, as it should be (docs/flannel-formats.md, "Nodes in Kubernetes").
fn wanted(attrs: &Attrs, node: &Node, prefix: &Prefix) -> Changes {
    let kind = attrs.backend_type.as_str();
    let text = |data: &Option<Box<str>>| data.as_deref().unwrap_or("null").to_owned();
    let needs_data = matches!(kind, "vxlan" | "wireguard");
    let v4 = attrs.public_ip.filter(|_| !needs_data || attrs.backend_data.is_some());
    let v6_kinds = needs_data && attrs.backend_v6_data.is_some() || matches!(kind, "host-gw" | "extension");
    let v6 = attrs.public_ipv6.filter(|_| v6_kinds);
    let mut all = Changes::new();
    let mut put = |end: &str, value: Option<String>| all.insert(prefix.name(end), value);
    put(annotations::MANAGED, Some("true".to_owned()));
    put(annotations::TYPE, Some(kind.to_owned()));
    put(annotations::DATA, v4.map(|_| text(&attrs.backend_data)));
    put(annotations::DATA_V6, v6.map(|_| text(&attrs.backend_v6_data)));
    put(annotations::PUBLIC, v4.map(|ip| address(node, prefix, annotations::OVERWRITE, ip)));
    put(annotations::TUNNEL, attrs.tunnel_ip.map(|ip| ip.to_string()));
    put(annotations::TUNNEL_V6, attrs.tunnel_ipv6.map(|ip| ip.to_string()));
    put(annotations::PUBLIC_V6, v6.map(|ip| address(node, prefix, annotations::OVERWRITE_V6, ip)));
    all
}

/// What must change for the node to say this.
pub(super) fn changes(attrs: &Attrs, node: &Node, prefix: &Prefix) -> Changes {
    let mut all = wanted(attrs, node, prefix);
    let differs = |(name, value): &(&String, &Option<String>)| node.annotation(name) != value.as_deref();
    let names: Vec<String> = all.iter().filter(differs).map(|(name, _)| name.clone()).collect();
    all.retain(|name, _| names.contains(name));
    all
}

/// The admin's addresses are not what the node says: an overwrite came or went while the agent runs.
pub(super) fn overwritten(attrs: &Attrs, node: &Node, prefix: &Prefix) -> bool {
    let changes = changes(attrs, node, prefix);
    [annotations::PUBLIC, annotations::PUBLIC_V6].iter().any(|end| changes.contains_key(&prefix.name(end)))
}

/// What must change for the node to say nothing; the admin's annotations stay.
pub(super) fn removal(node: &Node, prefix: &Prefix) -> Changes {
    use annotations::{DATA, DATA_V6, MANAGED, PUBLIC, PUBLIC_V6, TUNNEL, TUNNEL_V6, TYPE};
    let names = [MANAGED, TYPE, DATA, DATA_V6, PUBLIC, PUBLIC_V6, TUNNEL, TUNNEL_V6].map(|end| prefix.name(end));
    names.into_iter().filter(|name| node.annotation(name).is_some()).map(|name| (name, None)).collect()
}

/// A strategic merge patch, refused by the server when the node is another than the one that was read.
pub(super) fn patch(changes: Changes, node: &Node) -> Value {
    let value = |text: Option<String>| text.map_or(Value::Null, Value::String);
    let annotations: Map<String, Value> = changes.into_iter().map(|(name, text)| (name, value(text))).collect();
    json!({ "metadata": { "resourceVersion": node.metadata.resource_version, "annotations": annotations } })
}

#[cfg(test)]
#[path = "publish/tests.rs"]
mod tests;
