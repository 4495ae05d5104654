// SPDX-License-Identifier: Apache-2.0
//! The annotations that a node publishes, and the patch that writes those which differ. What goes into them for which type of
//! backend is not decided here, but by the backend ([`BackendTypes::annotations`]).

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use serde_json::{Map, Value, json};

use crate::attrs::Attrs;
use crate::backend_types::BackendTypes;
use crate::lease::Lease;

use super::annotations::{self, Prefix};
use super::node::{Node, NodeError};

/// Annotations to set, and annotations to remove (`None`).
pub(super) type Changes = BTreeMap<String, Option<String>>;

/// Returns the address to publish: the one that the administrator wrote onto the Node, if it can be read, else ours.
fn address<A: Display + FromStr>(node: &Node, prefix: &Prefix, overwrite: &str, ours: A) -> String {
    node.address::<A>(prefix, overwrite).ok().flatten().unwrap_or(ours).to_string()
}

/// Checks the addresses that the administrator wrote onto our Node, to be published instead of ours.
///
/// # Errors
/// One of them cannot be read.
pub(super) fn check_overwrites(node: &Node, prefix: &Prefix) -> Result<(), NodeError> {
    node.address::<Ipv4Addr>(prefix, annotations::OVERWRITE)?;
    node.address::<Ipv6Addr>(prefix, annotations::OVERWRITE_V6)?;
    Ok(())
}

/// Returns every annotation of this node as it should be (docs/flannel-formats.md, "Nodes in Kubernetes"). One that is `None` should be absent.
fn wanted(attrs: &Attrs, types: BackendTypes, node: &Node, prefix: &Prefix) -> Changes {
    let said = (types.annotations)(attrs);
    let v4 = attrs.public_ip.zip(said.data);
    let v6 = attrs.public_ipv6.zip(said.data_v6);
    let mut all = Changes::new();
    let mut put = |end: &str, value: Option<String>| all.insert(prefix.name(end), value);
    put(annotations::MANAGED, Some("true".to_owned()));
    put(annotations::TYPE, Some(attrs.backend_type.clone()));
    put(annotations::PUBLIC, v4.as_ref().map(|(ip, _)| address(node, prefix, annotations::OVERWRITE, *ip)));
    put(annotations::PUBLIC_V6, v6.as_ref().map(|(ip, _)| address(node, prefix, annotations::OVERWRITE_V6, *ip)));
    put(annotations::DATA, v4.map(|(_, data)| data));
    put(annotations::DATA_V6, v6.map(|(_, data)| data));
    put(annotations::TUNNEL, attrs.tunnel_ip.map(|ip| ip.to_string()));
    put(annotations::TUNNEL_V6, attrs.tunnel_ipv6.map(|ip| ip.to_string()));
    put(annotations::OTHER_WAYS, attrs.other_ways.as_deref().map(str::to_owned));
    all
}

/// Returns the annotations that must change so that the node publishes `attrs`. The result is empty if nothing differs.
pub(super) fn changes(attrs: &Attrs, types: BackendTypes, node: &Node, prefix: &Prefix) -> Changes {
    let mut all = wanted(attrs, types, node, prefix);
    all.retain(|name, value| node.annotation(name) != value.as_deref());
    all
}

/// The published addresses of a Node, as text: IPv4 and IPv6.
pub(super) type Addresses = [Option<String>; 2];

/// Returns the addresses that a Node publishes.
pub(super) fn addresses(node: &Node, prefix: &Prefix) -> Addresses {
    [annotations::PUBLIC, annotations::PUBLIC_V6].map(|end| node.annotation(&prefix.name(end)).map(str::to_owned))
}

/// Returns the addresses that our Node should publish. They change while the agent runs if the administrator adds, changes or removes his.
pub(super) fn wanted_addresses(attrs: &Attrs, types: BackendTypes, node: &Node, prefix: &Prefix) -> Addresses {
    let mut all = wanted(attrs, types, node, prefix);
    [annotations::PUBLIC, annotations::PUBLIC_V6].map(|end| all.remove(&prefix.name(end)).flatten())
}

/// Returns the lease with these addresses.
pub(super) fn with_addresses(mut lease: Lease, [v4, v6]: &Addresses) -> Lease {
    lease.attrs.public_ip = v4.as_deref().and_then(|text| text.parse().ok());
    lease.attrs.public_ipv6 = v6.as_deref().and_then(|text| text.parse().ok());
    lease
}

/// Returns the removal of all that an agent published. The administrator's annotations stay.
pub(super) fn removal(node: &Node, prefix: &Prefix) -> Changes {
    let names = annotations::PUBLISHED.into_iter().chain([annotations::MANAGED]).map(|end| prefix.name(end));
    names.filter(|name| node.annotation(name).is_some()).map(|name| (name, None)).collect()
}

/// Returns a strategic merge patch. The server refuses it if the node was changed after it was read.
pub(super) fn patch(changes: Changes, node: &Node) -> Value {
    let value = |text: Option<String>| text.map_or(Value::Null, Value::String);
    let annotations: Map<String, Value> = changes.into_iter().map(|(name, text)| (name, value(text))).collect();
    json!({ "metadata": { "resourceVersion": node.metadata.resource_version, "annotations": annotations } })
}

#[cfg(test)]
mod tests;
