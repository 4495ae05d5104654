// SPDX-License-Identifier: Apache-2.0
//! The value of a lease on the wire: JSON, flannel-compatible to the byte (flannel-compat.md section 1).

use std::net::{Ipv4Addr, Ipv6Addr};

use serde::Serialize;
use serde_json::value::RawValue;

use crate::network::members::Members;

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
    /// `TunnelIP`: the source of this node's tunnel packets, where a tunnel guard wants it said. flannel has no such member.
    pub tunnel_ip: Option<Ipv4Addr>,
    /// `TunnelIPv6`: the same over IPv6.
    pub tunnel_ipv6: Option<Ipv6Addr>,
}

/// Why a lease value could not be read.
#[derive(Debug, thiserror::Error)]
#[error("value is not a lease: {0}")]
pub struct BadAttrs(#[from] serde_json::Error);

/// Field order, and which fields are left out when empty, are flannel's.
#[derive(Serialize)]
struct Wire<'a> {
    /// Never `null`: flannel cannot read that, and writes 0.0.0.0 for none.
    #[serde(rename = "PublicIP")]
    public_ip: Ipv4Addr,
    #[serde(rename = "PublicIPv6")]
    public_ipv6: Option<Ipv6Addr>,
    #[serde(rename = "BackendType", skip_serializing_if = "str::is_empty")]
    backend_type: &'a str,
    #[serde(rename = "BackendData", skip_serializing_if = "Option::is_none")]
    backend_data: Option<&'a RawValue>,
    #[serde(rename = "BackendV6Data", skip_serializing_if = "Option::is_none")]
    backend_v6_data: Option<&'a RawValue>,
    #[serde(rename = "TunnelIP", skip_serializing_if = "Option::is_none")]
    tunnel_ip: Option<Ipv4Addr>,
    #[serde(rename = "TunnelIPv6", skip_serializing_if = "Option::is_none")]
    tunnel_ipv6: Option<Ipv6Addr>,
}

fn raw(text: &Option<Box<str>>) -> Option<&RawValue> {
    text.as_deref().and_then(|text| serde_json::from_str(text).ok())
}

fn text(members: &Members, name: &str) -> Option<Box<str>> {
    members.raw(name).filter(|text| *text != "null").map(Into::into)
}

impl Attrs {
    /// The public address by which people know the node.
    pub fn owner(&self) -> String {
        match (self.public_ip, self.public_ipv6) {
            (Some(v4), _) => v4.to_string(),
            (None, Some(v6)) => v6.to_string(),
            (None, None) => "an unnamed node".to_owned(),
        }
    }

    /// The wire value, fields in flannel's order. Backend data that is not JSON is left out.
    pub fn to_wire(&self) -> String {
        let wire = Wire {
            public_ip: self.public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED),
            public_ipv6: self.public_ipv6,
            backend_type: &self.backend_type,
            backend_data: raw(&self.backend_data),
            backend_v6_data: raw(&self.backend_v6_data),
            tunnel_ip: self.tunnel_ip,
            tunnel_ipv6: self.tunnel_ipv6,
        };
        // Only a map with keys that are no strings, or a failing writer, could make this fail.
        serde_json::to_string(&wire).unwrap_or_default()
    }

    /// Reads a wire value; unknown members are ignored, names compared without regard to case (as flannel does).
    pub fn from_wire(value: &[u8]) -> Result<Attrs, BadAttrs> {
        let wire: Members = serde_json::from_slice(value)?;
        Ok(Attrs {
            public_ip: wire.get("PublicIP")?.filter(|ip: &Ipv4Addr| !ip.is_unspecified()),
            public_ipv6: wire.get("PublicIPv6")?,
            backend_type: wire.get("BackendType")?.map(|kind: String| kind.to_lowercase()).unwrap_or_default(),
            backend_data: text(&wire, "BackendData"),
            backend_v6_data: text(&wire, "BackendV6Data"),
            tunnel_ip: wire.get("TunnelIP")?,
            tunnel_ipv6: wire.get("TunnelIPv6")?,
        })
    }
}
