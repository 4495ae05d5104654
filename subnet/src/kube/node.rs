// SPDX-License-Identifier: Apache-2.0
//! What we keep of a Node: a hundredth of it. Each is judged alone.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::attrs::{Attrs, MOST_OF_A_VALUE, kind_of};
use crate::cidr::Subnets;
use crate::lease::{Age, Lease, Record};
use crate::text::Shown;

use super::annotations::{self, ALL, PUBLISHED, Prefix};
use super::proto;

/// A Node, everything that is not ours left out while it is read.
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

/// Those whose name ends as one of ours: the prefix is not known here.
#[derive(Debug, Clone, Default)]
struct Annotations(BTreeMap<Box<str>, Box<str>>);

struct Ours;

impl<'de> Visitor<'de> for Ours {
    type Value = Annotations;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("annotations")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Annotations, M::Error> {
        let mut found = BTreeMap::new();
        while let Some(name) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            if ALL.iter().any(|end| name.ends_with(end)) {
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
        deserializer.deserialize_any(Ours)
    }
}

impl From<proto::Node> for Node {
    fn from(node: proto::Node) -> Node {
        let (meta, spec) = (node.metadata.unwrap_or_default(), node.spec.unwrap_or_default());
        let ours = |(name, _): &(&str, &str)| ALL.iter().any(|end| name.ends_with(end));
        let annotations = meta.annotations().filter(ours).map(|(name, text)| (name.into(), text.into())).collect();
        let created = meta.creation_timestamp.and_then(|time| Timestamp::from_second(time.seconds).ok());
        Node {
            metadata: Meta {
                name: meta.name.into(),
                uid: meta.uid.into(),
                resource_version: meta.resource_version,
                creation_timestamp: created,
                annotations: Annotations(annotations),
            },
            spec: Spec { pod_cidr: spec.pod_cidr, pod_cidrs: spec.pod_cidrs },
        }
    }
}

impl Node {
    /// The content of an annotation, by its whole name.
    pub(super) fn annotation(&self, name: &str) -> Option<&str> {
        self.metadata.annotations.0.get(name).map(|text| &**text)
    }

    /// The content of one of our annotations.
    pub(super) fn get(&self, prefix: &Prefix, end: &str) -> Option<&str> {
        self.annotation(&prefix.name(end))
    }

    /// An address in an annotation; an empty one is none.
    pub(super) fn address<A: FromStr>(&self, prefix: &Prefix, end: &str) -> Result<Option<A>, String> {
        match self.get(prefix, end).filter(|text| !text.is_empty()) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| {
                let (name, annotation) = (Shown(&self.metadata.name), prefix.name(end));
                format!("node {name}: annotation {annotation} = \"{}\" is no such address", Shown(text))
            }),
        }
    }

    /// True when an agent has published itself here.
    pub(super) fn managed(&self, prefix: &Prefix) -> bool {
        self.get(prefix, annotations::MANAGED) == Some("true")
    }

    /// True once a pod CIDR was assigned.
    pub(super) fn assigned(&self) -> bool {
        !self.spec.pod_cidr.is_empty() || !self.spec.pod_cidrs.is_empty()
    }

    /// The pod CIDRs, host bits cut off.
    pub(super) fn subnets(&self) -> Result<Subnets, String> {
        let name = Shown(&self.metadata.name);
        let single = std::slice::from_ref(&self.spec.pod_cidr);
        let texts = if self.spec.pod_cidrs.is_empty() { single } else { &self.spec.pod_cidrs };
        let mut subnets = Subnets::default();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let net: IpNet =
                text.parse().map_err(|_| format!("node {name}: pod CIDR {} is no network", Shown(text)))?;
            let twice = match net.trunc() {
                IpNet::V4(v4) => subnets.v4.replace(v4).is_some(),
                IpNet::V6(v6) => subnets.v6.replace(v6).is_some(),
            };
            if twice {
                let list = texts.join(", ");
                return Err(format!("node {name} has several pod CIDRs of one family: {}", Shown(&list)));
            }
        }
        if subnets == Subnets::default() {
            return Err(format!("node {name} has no pod CIDR yet"));
        }
        Ok(subnets)
    }

    fn data(&self, prefix: &Prefix, end: &str) -> Result<Option<Box<str>>, String> {
        let Some(text) = self.get(prefix, end).filter(|text| !text.is_empty() && *text != "null") else {
            return Ok(None);
        };
        let raw: Result<Box<RawValue>, _> = serde_json::from_str(text);
        raw.map(|_| Some(text.into())).map_err(|_| {
            let (name, annotation) = (Shown(&self.metadata.name), prefix.name(end));
            format!("node {name}: annotation {annotation} = \"{}\" is no JSON", Shown(text))
        })
    }

    /// Annotations that are larger than any lease are not looked at: a Node may have 256 KiB of them.
    fn small(&self, prefix: &Prefix) -> Result<(), String> {
        let bytes: usize = PUBLISHED.iter().filter_map(|end| self.get(prefix, end)).map(str::len).sum();
        if bytes <= MOST_OF_A_VALUE {
            return Ok(());
        }
        let (name, annotations) = (Shown(&self.metadata.name), prefix.name("*"));
        Err(format!("node {name}: annotations {annotations} are larger than {MOST_OF_A_VALUE} bytes together"))
    }

    /// What the node says of itself.
    fn attrs(&self, prefix: &Prefix) -> Result<Attrs, String> {
        self.small(prefix)?;
        Ok(Attrs {
            public_ip: self
                .address(prefix, annotations::PUBLIC)?
                .filter(|ip: &std::net::Ipv4Addr| !ip.is_unspecified()),
            public_ipv6: self.address(prefix, annotations::PUBLIC_V6)?,
            backend_type: kind_of(self.get(prefix, annotations::TYPE).unwrap_or_default()),
            backend_data: self.data(prefix, annotations::DATA)?,
            backend_v6_data: self.data(prefix, annotations::DATA_V6)?,
            tunnel_ip: self.address(prefix, annotations::TUNNEL)?,
            tunnel_ipv6: self.address(prefix, annotations::TUNNEL_V6)?,
        })
    }

    /// The lease that this node holds, or why it holds none that can be read.
    pub(super) fn lease(&self, prefix: &Prefix) -> Result<Lease, String> {
        let stamp = self.metadata.creation_timestamp.map_or(i64::MAX, Timestamp::as_second);
        let age = Age { stamp: u64::try_from(stamp).unwrap_or(0), tie: (*self.metadata.uid).into() };
        Ok(Lease { id: self.metadata.name.clone(), subnets: self.subnets()?, attrs: self.attrs(prefix)?, age })
    }

    /// As an entry of the store; none for a node that no agent has published.
    pub(super) fn record(&self, prefix: &Prefix) -> Option<Record> {
        self.managed(prefix).then(|| Record::new(self.metadata.name.clone(), self.lease(prefix)))
    }

    /// The addresses by which the admin chooses our interface.
    pub(super) fn chosen(&self, prefix: &Prefix) -> Result<[Option<IpAddr>; 2], String> {
        let v4 = self.address::<std::net::Ipv4Addr>(prefix, annotations::CHOSEN)?;
        let v6 = self.address::<std::net::Ipv6Addr>(prefix, annotations::CHOSEN_V6)?;
        Ok([v4.map(IpAddr::V4), v6.map(IpAddr::V6)])
    }
}

#[cfg(test)]
#[path = "node/tests.rs"]
mod tests;
