// SPDX-License-Identifier: Apache-2.0
//! The few fields of a Node that concern a lease, and the lease that they make up.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::attrs::{Attrs, MAX_VALUE_BYTES, kind_of};
use crate::cidr::Subnets;
use crate::lease::{Age, Lease, Record};
use crate::text::shown;

use super::annotations::{self, ALL, PUBLISHED, Prefix};

/// Why a Node holds no lease that can be read. Texts of the Node are in printable form.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NodeError {
    #[error("node {node} has no pod CIDR yet")]
    NoPodCidr { node: String },
    #[error("node {node}: pod CIDR {text} is not a network")]
    PodCidr { node: String, text: String },
    #[error("node {node} has several pod CIDRs of one family: {list}")]
    SeveralPodCidrs { node: String, list: String },
    #[error("node {node}: annotation {name} = \"{text}\" is not an address of its family")]
    Address { node: String, name: String, text: String },
    #[error("node {node}: annotation {name} = \"{text}\" is not JSON")]
    Json { node: String, name: String, text: String },
    #[error("node {node}: annotations {names} are larger than {MAX_VALUE_BYTES} bytes together")]
    TooLarge { node: String, names: String },
}

/// A Node. All other fields are skipped while it is parsed.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Node {
    pub(super) metadata: Meta,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Meta {
    #[serde(deserialize_with = "shared")]
    pub(super) name: Arc<str>,
    #[serde(default)]
    pub(super) uid: Box<str>,
    #[serde(default)]
    pub(super) resource_version: String,
    creation_timestamp: Option<Timestamp>,
    #[serde(default)]
    annotations: Annotations,
}

fn shared<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
    Box::<str>::deserialize(deserializer).map(Arc::from)
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Spec {
    #[serde(rename = "podCIDR", default)]
    pod_cidr: String,
    #[serde(rename = "podCIDRs", default)]
    pod_cidrs: Vec<String>,
}

/// The annotations whose names end like ours. The parser does not know the prefix.
#[derive(Debug, Clone, Default)]
struct Annotations(BTreeMap<Box<str>, Box<str>>);

struct AnnotationsVisitor;

impl<'de> Visitor<'de> for AnnotationsVisitor {
    type Value = Annotations;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("annotations")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Annotations, M::Error> {
        let mut found = BTreeMap::new();
        while let Some(name) = map.next_key::<Cow<'de, str>>()? {
            if ALL.iter().any(|suffix| name.ends_with(suffix)) {
                found.insert(name.into(), map.next_value()?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(Annotations(found))
    }

    fn visit_unit<E>(self) -> Result<Annotations, E> {
        Ok(Annotations::default())
    }
}

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Annotations, D::Error> {
        deserializer.deserialize_any(AnnotationsVisitor)
    }
}

impl Node {
    /// Returns the name for messages.
    fn shown_name(&self) -> String {
        shown(&self.metadata.name)
    }

    /// Returns the value of the annotation with this full name.
    pub(super) fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.0.get(name).map(|text| &**text)
    }

    /// Returns the value of one of our annotations, see [`annotations`].
    pub(super) fn get(&self, prefix: &Prefix, suffix: &str) -> Option<&str> {
        self.annotation(&prefix.name(suffix))
    }

    /// Returns the address in an annotation. An empty annotation counts as none.
    pub(super) fn address<A: FromStr>(&self, prefix: &Prefix, suffix: &str) -> Result<Option<A>, NodeError> {
        let Some(text) = self.get(prefix, suffix).filter(|text| !text.is_empty()) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| NodeError::Address {
            node: self.shown_name(),
            name: prefix.name(suffix),
            text: shown(text),
        })
    }

    /// Returns true if an agent has published a lease in this Node.
    pub(super) fn managed(&self, prefix: &Prefix) -> bool {
        self.get(prefix, annotations::MANAGED) == Some("true")
    }

    /// Returns true if a pod CIDR was assigned.
    pub(super) fn assigned(&self) -> bool {
        !self.spec.pod_cidr.is_empty() || !self.spec.pod_cidrs.is_empty()
    }

    /// Returns the pod CIDRs without host bits.
    pub(super) fn subnets(&self) -> Result<Subnets, NodeError> {
        let node = || self.shown_name();
        let single = std::slice::from_ref(&self.spec.pod_cidr);
        let texts = if self.spec.pod_cidrs.is_empty() { single } else { &self.spec.pod_cidrs };
        let mut subnets = Subnets::default();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let net: IpNet = text.parse().map_err(|_| NodeError::PodCidr { node: node(), text: shown(text) })?;
            let twice = match net.trunc() {
                IpNet::V4(v4) => subnets.v4.replace(v4).is_some(),
                IpNet::V6(v6) => subnets.v6.replace(v6).is_some(),
            };
            if twice {
                return Err(NodeError::SeveralPodCidrs { node: node(), list: shown(&texts.join(", ")) });
            }
        }
        if subnets == Subnets::default() {
            return Err(NodeError::NoPodCidr { node: node() });
        }
        Ok(subnets)
    }

    /// Returns the backend's data in an annotation. An empty annotation and `null` count as none.
    fn data(&self, prefix: &Prefix, suffix: &str) -> Result<Option<Box<str>>, NodeError> {
        let Some(text) = self.get(prefix, suffix).filter(|text| !text.is_empty() && *text != "null") else {
            return Ok(None);
        };
        if serde_json::from_str::<&RawValue>(text).is_err() {
            return Err(NodeError::Json { node: self.shown_name(), name: prefix.name(suffix), text: shown(text) });
        }
        Ok(Some(text.into()))
    }

    /// Refuses annotations that are larger than any lease, before they are parsed: a Node may have 256 KiB of them.
    fn check_size(&self, prefix: &Prefix) -> Result<(), NodeError> {
        let bytes: usize = PUBLISHED.iter().filter_map(|suffix| self.get(prefix, suffix)).map(str::len).sum();
        if bytes <= MAX_VALUE_BYTES {
            return Ok(());
        }
        Err(NodeError::TooLarge { node: self.shown_name(), names: prefix.name("*") })
    }

    /// Returns what the node's agent has published.
    fn attrs(&self, prefix: &Prefix) -> Result<Attrs, NodeError> {
        self.check_size(prefix)?;
        Ok(Attrs {
            public_ip: self.address(prefix, annotations::PUBLIC)?.filter(|ip: &Ipv4Addr| !ip.is_unspecified()),
            public_ipv6: self.address(prefix, annotations::PUBLIC_V6)?,
            backend_type: kind_of(self.get(prefix, annotations::TYPE).unwrap_or_default()),
            backend_data: self.data(prefix, annotations::DATA)?,
            backend_v6_data: self.data(prefix, annotations::DATA_V6)?,
            tunnel_ip: self.address(prefix, annotations::TUNNEL)?,
            tunnel_ipv6: self.address(prefix, annotations::TUNNEL_V6)?,
            other_ways: self.get(prefix, annotations::OTHER_WAYS).map(Into::into),
        })
    }

    /// Returns only what the backend of the node has published. The other annotations need not be readable, and data that cannot be read
    /// counts as none.
    pub(super) fn attrs_of_backend(&self, prefix: &Prefix) -> Attrs {
        let data = |suffix| self.data(prefix, suffix).ok().flatten().filter(|data| data.len() <= MAX_VALUE_BYTES);
        Attrs {
            backend_type: kind_of(self.get(prefix, annotations::TYPE).unwrap_or_default()),
            backend_data: data(annotations::DATA),
            backend_v6_data: data(annotations::DATA_V6),
            ..Attrs::default()
        }
    }

    /// Returns the lease that this Node holds, also if it is not [`Node::managed`].
    pub(super) fn lease(&self, prefix: &Prefix) -> Result<Lease, NodeError> {
        let stamp = self.metadata.creation_timestamp.map_or(i64::MAX, Timestamp::as_second);
        let age = Age { stamp: u64::try_from(stamp).unwrap_or(0), tie: (*self.metadata.uid).into() };
        Ok(Lease { id: self.metadata.name.clone(), subnets: self.subnets()?, attrs: self.attrs(prefix)?, age })
    }

    /// Returns the record of this Node; `None` if no agent has published a lease in it.
    pub(super) fn record(&self, prefix: &Prefix) -> Option<Record> {
        self.managed(prefix).then(|| Record::new(self.metadata.name.clone(), self.lease(prefix)))
    }

    /// Returns the addresses by which an admin chose the uplink, IPv4 first.
    pub(super) fn chosen(&self, prefix: &Prefix) -> Result<[Option<IpAddr>; 2], NodeError> {
        let v4 = self.address::<Ipv4Addr>(prefix, annotations::CHOSEN)?;
        let v6 = self.address::<Ipv6Addr>(prefix, annotations::CHOSEN_V6)?;
        Ok([v4.map(IpAddr::V4), v6.map(IpAddr::V6)])
    }
}

#[cfg(test)]
mod tests;
