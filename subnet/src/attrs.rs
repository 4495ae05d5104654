// SPDX-License-Identifier: Apache-2.0
//! The value of a lease in a store. It is JSON, and has exactly the bytes that flannel writes (docs/flannel-formats.md, "Leases in etcd").

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::cidr::Subnets;
use crate::json::Members;
use crate::text;

/// The largest value of a lease in bytes. In Kubernetes it limits the annotations of a lease together. The longest value of flannel (vxlan with
/// IPv4 and IPv6) has 330 bytes. etcd accepts 1.5 MB by default, and a Node 256 KiB of annotations. Whoever writes so much could fill the
/// memory of all other nodes, where each lease stays as long as it is in the store.
pub const MAX_VALUE_BYTES: usize = 4096;

/// What a node publishes about itself in its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attrs {
    /// `PublicIP`: where peers reach this node over IPv4.
    pub public_ip: Option<Ipv4Addr>,
    /// `PublicIPv6`: where peers reach this node over IPv6.
    pub public_ipv6: Option<Ipv6Addr>,
    /// `BackendType` in lower case. It is empty if the value has none. A type that is longer than [`text::MAX_CHARS`] is cut, because no
    /// backend has such a name.
    pub backend_type: String,
    /// `BackendData` as raw JSON, exactly as in the store.
    pub backend_data: Option<Box<str>>,
    /// `BackendV6Data` as raw JSON, exactly as in the store.
    pub backend_v6_data: Option<Box<str>>,
    /// `TunnelIP`: the source address of this node's tunnel packets. The tunnel guard of peers needs it in every lease, their backend udp only
    /// if it is not the published address. flannel has no such member.
    pub tunnel_ip: Option<Ipv4Addr>,
    /// `TunnelIPv6`: the same over IPv6.
    pub tunnel_ipv6: Option<Ipv6Addr>,
    /// `OtherWays`: how else this node is reached while it changes its backend, raw JSON. [`Attrs::other_ways`] reads it. flannel has no
    /// such member.
    pub other_ways: Option<Box<str>>,
}

/// The largest number of other ways in a lease. A node could have more only after several changes of the backend in a row.
pub const MAX_OTHER_WAYS: usize = 4;

/// Why a value is not a lease.
#[derive(Debug, thiserror::Error)]
pub enum BadAttrs {
    /// It is not JSON, or a member has another type.
    #[error("value is not a lease: {0}")]
    Json(#[from] serde_json::Error),
    /// It is larger than any lease.
    #[error("value is not a lease: it is larger than {MAX_VALUE_BYTES} bytes")]
    TooLarge,
}

/// The order of the fields, and which of them are left out if they are empty, are as in flannel.
#[derive(Serialize)]
struct Wire<'a> {
    /// It is never `null`, because flannel cannot read that. flannel writes 0.0.0.0 if there is no address.
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
    #[serde(rename = "OtherWays", skip_serializing_if = "Option::is_none")]
    other_ways: Option<&'a RawValue>,
}

/// One element of `OtherWays`.
#[derive(Serialize)]
struct OtherWay<'a> {
    #[serde(rename = "BackendType", skip_serializing_if = "str::is_empty")]
    backend_type: &'a str,
    #[serde(rename = "BackendData", skip_serializing_if = "Option::is_none")]
    backend_data: Option<&'a RawValue>,
    #[serde(rename = "BackendV6Data", skip_serializing_if = "Option::is_none")]
    backend_v6_data: Option<&'a RawValue>,
}

/// Returns a backend type in the form in which it is kept: in lower case, printable and not too long.
pub(crate) fn kind_of(text: &str) -> String {
    text::shown(&text.to_lowercase())
}

fn raw(text: &Option<Box<str>>) -> Option<&RawValue> {
    text.as_deref().and_then(|text| serde_json::from_str(text).ok())
}

fn text(members: &Members, name: &str) -> Option<Box<str>> {
    members.raw(name).filter(|text| *text != "null").map(Into::into)
}

impl Attrs {
    /// Returns the published addresses, that of IPv4 first.
    pub fn published(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.public_ip.map(IpAddr::V4).into_iter().chain(self.public_ipv6.map(IpAddr::V6))
    }

    /// Returns true if two leases of one node differ at most in their published addresses. A store may publish others than those of the host,
    /// because an administrator chose them.
    pub fn same_but_addresses(&self, other: &Attrs) -> bool {
        let published = (other.public_ip, other.public_ipv6);
        Attrs { public_ip: published.0, public_ipv6: published.1, ..self.clone() } == *other
    }

    /// Returns the published addresses, each as a network of one address.
    pub fn public_addresses(&self) -> Subnets {
        Subnets { v4: self.public_ip.map(Ipv4Net::from), v6: self.public_ipv6.map(Ipv6Net::from) }
    }

    /// Returns the published address by which people know the node.
    pub fn owner(&self) -> String {
        match (self.public_ip, self.public_ipv6) {
            (Some(v4), _) => v4.to_string(),
            (None, Some(v6)) => v6.to_string(),
            (None, None) => "an unnamed node".to_owned(),
        }
    }

    /// Returns the value for the store, with the fields in flannel's order. Backend data that is not JSON is left out.
    pub fn to_wire(&self) -> String {
        let wire = Wire {
            public_ip: self.public_ip.unwrap_or(Ipv4Addr::UNSPECIFIED),
            public_ipv6: self.public_ipv6,
            backend_type: &self.backend_type,
            backend_data: raw(&self.backend_data),
            backend_v6_data: raw(&self.backend_v6_data),
            tunnel_ip: self.tunnel_ip,
            tunnel_ipv6: self.tunnel_ipv6,
            other_ways: raw(&self.other_ways),
        };
        // Only a map with keys that are no strings, or a failing writer, could make this fail.
        serde_json::to_string(&wire).unwrap_or_default()
    }

    /// Reads a value from the store. As in flannel, unknown members are ignored, and names are compared without regard to case.
    ///
    /// # Errors
    /// The value is not a lease, or it is larger than [`MAX_VALUE_BYTES`].
    pub fn from_wire(value: &[u8]) -> Result<Attrs, BadAttrs> {
        if value.len() > MAX_VALUE_BYTES {
            return Err(BadAttrs::TooLarge);
        }
        let wire: Members = serde_json::from_slice(value)?;
        Ok(Attrs {
            public_ip: wire.get("PublicIP")?.filter(|ip: &Ipv4Addr| !ip.is_unspecified()),
            public_ipv6: wire.get_pointer("PublicIPv6")?,
            backend_type: wire.get("BackendType")?.map(|kind: String| kind_of(&kind)).unwrap_or_default(),
            backend_data: text(&wire, "BackendData"),
            backend_v6_data: text(&wire, "BackendV6Data"),
            tunnel_ip: wire.get("TunnelIP")?,
            tunnel_ipv6: wire.get("TunnelIPv6")?,
            other_ways: text(&wire, "OtherWays"),
        })
    }

    /// Returns what the lease would say if each of its other ways were its only one. Ways that cannot be read are left out, so they
    /// disturb no other part of the lease.
    pub fn other_ways(&self) -> Vec<Attrs> {
        let read = |text: &str| serde_json::from_str::<Vec<Members>>(text).ok();
        let ways = self.other_ways.as_deref().and_then(read).unwrap_or_default();
        let attrs = |way: &Members| {
            Some(Attrs {
                backend_type: way.get("BackendType").ok()?.map(|kind: String| kind_of(&kind)).unwrap_or_default(),
                backend_data: text(way, "BackendData"),
                backend_v6_data: text(way, "BackendV6Data"),
                other_ways: None,
                ..self.clone()
            })
        };
        ways.iter().take(MAX_OTHER_WAYS).filter_map(attrs).collect()
    }

    /// Returns these attributes with other ways to reach this node. Only the type and the data of each way count.
    pub fn with_other_ways(self, ways: &[Attrs]) -> Attrs {
        let way = |attrs: &Attrs| {
            let way = OtherWay {
                backend_type: &attrs.backend_type,
                backend_data: raw(&attrs.backend_data),
                backend_v6_data: raw(&attrs.backend_v6_data),
            };
            serde_json::to_string(&way).unwrap_or_default()
        };
        let ways: Vec<String> = ways.iter().take(MAX_OTHER_WAYS).map(way).collect();
        let other_ways = (!ways.is_empty()).then(|| format!("[{}]", ways.join(",")).into_boxed_str());
        Attrs { other_ways, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_larger_than_any_lease_is_refused_unread() {
        let value = |bytes: usize| format!("{:bytes$}", r#"{"PublicIP":"192.0.2.1"}"#).into_bytes();
        assert!(Attrs::from_wire(&value(MAX_VALUE_BYTES)).is_ok());
        let error = Attrs::from_wire(&value(MAX_VALUE_BYTES + 1)).unwrap_err();
        assert_eq!(error.to_string(), "value is not a lease: it is larger than 4096 bytes");
    }

    #[test]
    fn other_ways_survive_the_wire_and_bad_ones_disturb_nothing() {
        let way = |kind: &str, data: Option<&str>| Attrs {
            public_ip: Some([192, 0, 2, 1].into()),
            backend_type: kind.to_owned(),
            backend_data: data.map(Into::into),
            ..Attrs::default()
        };
        let (vxlan, alloc) = (way("vxlan", Some(r#"{"VNI":1}"#)), way("", None));
        let attrs = way("host-gw", None).with_other_ways(&[vxlan.clone(), alloc.clone()]);
        let wire = attrs.to_wire();
        assert!(wire.ends_with(r#","OtherWays":[{"BackendType":"vxlan","BackendData":{"VNI":1}},{}]}"#), "{wire}");
        let read = Attrs::from_wire(wire.as_bytes()).unwrap();
        assert_eq!((&read, read.other_ways()), (&attrs, vec![vxlan, alloc]));
        assert_eq!(way("host-gw", None).with_other_ways(&[]), way("host-gw", None));
        // Whoever may write a lease could otherwise let each node plan it very often.
        let too_many = "[{},{},{},{},{},{}]";
        let rows = [("7", 0), (r#"{"BackendType":"vxlan"}"#, 0), (r#"[{"BackendType":7},{}]"#, 1), ("[7]", 0)];
        for (bad, ways) in rows.into_iter().chain([(too_many, MAX_OTHER_WAYS)]) {
            let text = format!(r#"{{"PublicIP":"192.0.2.1","BackendType":"host-gw","OtherWays":{bad}}}"#);
            let read = Attrs::from_wire(text.as_bytes()).unwrap();
            assert_eq!((read.backend_type.as_str(), read.other_ways().len()), ("host-gw", ways), "{bad}");
        }
        let many = vec![way("host-gw", None); 50];
        assert_eq!(way("vxlan", None).with_other_ways(&many).other_ways().len(), MAX_OTHER_WAYS);
    }

    #[test]
    fn a_node_is_known_by_its_ipv4_address_or_else_by_that_of_ipv6() {
        let (v4, v6) = ("192.0.2.1".parse().ok(), "2001:db8::1".parse().ok());
        for (public_ip, public_ipv6, owner) in
            [(v4, v6, "192.0.2.1"), (None, v6, "2001:db8::1"), (None, None, "an unnamed node")]
        {
            let attrs = Attrs { public_ip, public_ipv6, ..Attrs::default() };
            assert_eq!(attrs.owner(), owner);
            let networks = attrs.public_addresses();
            assert_eq!(
                (networks.v4.map(|net| net.addr()), networks.v6.map(|net| net.addr())),
                (public_ip, public_ipv6)
            );
            assert!(attrs.published().eq(networks.iter().map(|net| net.addr())));
        }
    }

    #[test]
    fn only_public_addresses_may_differ_between_what_is_wanted_and_what_is_published() {
        let attrs = Attrs { public_ip: "192.0.2.1".parse().ok(), backend_type: "vxlan".into(), ..Attrs::default() };
        let v6 = "2001:db8::1".parse().ok();
        assert!(attrs.same_but_addresses(&Attrs { public_ip: None, public_ipv6: v6, ..attrs.clone() }));
        for other in [
            Attrs { backend_type: "host-gw".into(), ..attrs.clone() },
            Attrs { backend_data: Some("{}".into()), ..attrs.clone() },
            Attrs { backend_v6_data: Some("{}".into()), ..attrs.clone() },
            Attrs { tunnel_ip: attrs.public_ip, ..attrs.clone() },
            Attrs { tunnel_ipv6: v6, ..attrs.clone() },
            Attrs { other_ways: Some("[]".into()), ..attrs.clone() },
        ] {
            assert!(!attrs.same_but_addresses(&other), "{other:?}");
        }
    }

    #[test]
    fn foreign_text_is_bounded_where_it_enters() {
        let attrs = Attrs::from_wire(format!(r#"{{"BackendType":"{}\\u001b"}}"#, "X".repeat(3000)).as_bytes()).unwrap();
        assert!(attrs.backend_type.starts_with("xxx") && attrs.backend_type.ends_with(text::CUT));
        assert!(attrs.backend_type.len() <= text::MAX_CHARS);
        let error = Attrs::from_wire(format!(r#"{{"PublicIP":"{}"}}"#, "x".repeat(3000)).as_bytes()).unwrap_err();
        assert!(error.to_string().len() < 300, "{error}");
        assert!(
            error.to_string().contains("PublicIP = \"xxx") && error.to_string().contains("invalid IPv4"),
            "{error}"
        );
    }
}
