// SPDX-License-Identifier: Apache-2.0
//! The value of a lease on the wire: JSON, flannel-compatible to the byte (flannel-compat.md section 1).

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// What a node publishes about itself in its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attrs {
    /// `PublicIP`: where peers reach this node over IPv4.
    pub public_ip: Option<Ipv4Addr>,
    /// `PublicIPv6`: where peers reach this node over IPv6.
    pub public_ipv6: Option<Ipv6Addr>,
    /// `BackendType`, lower case; empty when the wire has none.
    pub backend_type: String,
    /// `BackendData`: raw JSON, exactly as on the wire.
    pub backend_data: Option<Box<str>>,
    /// `BackendV6Data`: raw JSON, exactly as on the wire.
    pub backend_v6_data: Option<Box<str>>,
}

/// Why a lease value could not be read.
#[derive(Debug, thiserror::Error)]
#[error("value is not a lease: {0}")]
pub struct BadAttrs(#[from] serde_json::Error);

#[derive(Serialize, Deserialize)]
struct Wire {
    #[serde(rename = "PublicIP", default)]
    public_ip: Option<Ipv4Addr>,
    #[serde(rename = "PublicIPv6", default)]
    public_ipv6: Option<Ipv6Addr>,
    #[serde(rename = "BackendType", default, skip_serializing_if = "String::is_empty")]
    backend_type: String,
    #[serde(rename = "BackendData", default, skip_serializing_if = "Option::is_none")]
    backend_data: Option<Box<RawValue>>,
    #[serde(rename = "BackendV6Data", default, skip_serializing_if = "Option::is_none")]
    backend_v6_data: Option<Box<RawValue>>,
}

fn raw(text: &str) -> Option<Box<RawValue>> {
    RawValue::from_string(text.to_owned()).ok()
}

fn text(raw: Box<RawValue>) -> Option<Box<str>> {
    (raw.get() != "null").then(|| raw.get().into())
}

impl Attrs {
    /// The wire value, fields in flannel's order.
    pub fn to_wire(&self) -> String {
        let wire = Wire {
            public_ip: self.public_ip,
            public_ipv6: self.public_ipv6,
            backend_type: self.backend_type.clone(),
            backend_data: self.backend_data.as_deref().and_then(raw),
            backend_v6_data: self.backend_v6_data.as_deref().and_then(raw),
        };
        serde_json::to_string(&wire).unwrap_or_default()
    }

    /// Reads a wire value; unknown members are ignored.
    pub fn from_wire(value: &[u8]) -> Result<Attrs, BadAttrs> {
        let wire: Wire = serde_json::from_slice(value)?;
        Ok(Attrs {
            public_ip: wire.public_ip,
            public_ipv6: wire.public_ipv6,
            backend_type: wire.backend_type.to_lowercase(),
            backend_data: wire.backend_data.and_then(text),
            backend_v6_data: wire.backend_v6_data.and_then(text),
        })
    }
}
