// SPDX-License-Identifier: Apache-2.0
//! What a store must know about the types of backends. The stores know no type by name. Each backend decides what its leases mean, and the
//! register of backends (in the crate weft-backends) passes that to the stores as a [`BackendTypes`].

use std::fmt;

use crate::attrs::Attrs;

/// The public part of the identity of a device: a VTEP MAC, or a public key. Leases contain it, and two devices never have the same one.
/// It is a text that only its backend can read. All others only compare it. One identity has one text, whatever notation a lease uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicIdentity {
    /// The type of its backend.
    kind: &'static str,
    text: Box<str>,
}

impl PublicIdentity {
    /// Returns the identity with this text of a device of this backend type.
    pub fn new(kind: &'static str, text: impl fmt::Display) -> PublicIdentity {
        PublicIdentity { kind, text: text.to_string().into_boxed_str() }
    }

    /// Returns whether both are the identity of one device. Returns `None` if they are of two types: a node has a device of each type that
    /// it used, so a MAC says nothing about a key.
    pub(crate) fn same(&self, other: &PublicIdentity) -> Option<bool> {
        (self.kind == other.kind).then(|| self.text == other.text)
    }
}

impl fmt::Display for PublicIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The public identities of a node's devices, of IPv4 and of IPv6; `None` where there is no device, or one without an identity.
pub type PublicIdentities = [Option<PublicIdentity>; 2];

/// The UDP ports at which a node is reached at its published addresses, IPv4 and IPv6. `None` where the address alone says which node it is.
pub type PublicPorts = [Option<u16>; 2];

/// What a lease puts into the annotations of a Node besides its type (docs/flannel-formats.md, "Nodes in Kubernetes"). A family
/// whose text is `None` is not published at all, neither its data nor its address.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Annotations {
    /// `backend-data`, which goes with `public-ip`.
    pub data: Option<String>,
    /// `backend-v6-data`, which goes with `public-ipv6`.
    pub data_v6: Option<String>,
}

impl Annotations {
    /// Returns the data of each family that has any.
    pub fn of_data(attrs: &Attrs) -> Annotations {
        let text = |data: &Option<Box<str>>| data.as_deref().map(str::to_owned);
        Annotations { data: text(&attrs.backend_data), data_v6: text(&attrs.backend_v6_data) }
    }

    /// Returns the data of each family, or the text `null` for one that has none.
    pub fn of_data_or_null(attrs: &Attrs) -> Annotations {
        let (own, null) = (Annotations::of_data(attrs), Annotations::without_data(true, true));
        Annotations { data: own.data.or(null.data), data_v6: own.data_v6.or(null.data_v6) }
    }

    /// Returns the text `null` for these families, which a backend without data publishes.
    pub fn without_data(v4: bool, v6: bool) -> Annotations {
        let null = |wanted: bool| wanted.then(|| "null".to_owned());
        Annotations { data: null(v4), data_v6: null(v6) }
    }
}

/// What backends say about the leases of their types. Each function looks at [`Attrs::backend_type`] first.
#[derive(Debug, Clone, Copy)]
pub struct BackendTypes {
    /// Returns the identities of the devices of the node that published this lease. One that no device can have is left out.
    pub identities: fn(&Attrs) -> PublicIdentities,
    /// Returns the annotations of a Node for this lease.
    pub annotations: fn(&Attrs) -> Annotations,
    /// Returns the ports that this lease names. They are `None` unless several nodes with this type may share one published address, each with a
    /// port of its own.
    pub ports: fn(&Attrs) -> PublicPorts,
}

/// Returns true if a lease with these ports of one family may be that of another node than a lease with those, although both name one
/// address.
pub(crate) fn differ(one: Option<u16>, other: Option<u16>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one != other)
}

/// Stands for the register of backends in the tests of this crate: a lease is identified by its member VtepMAC or PublicKey, and those of
/// wireguard have ports.
#[cfg(test)]
pub(crate) const FOR_TESTS: BackendTypes = BackendTypes {
    identities: |attrs| {
        let identity = |data: &Option<Box<str>>| {
            let data: serde_json::Value = serde_json::from_str(data.as_deref()?).ok()?;
            if let Some(key) = data.get("PublicKey") {
                return key.as_str().map(|key| PublicIdentity::new("wireguard", key));
            }
            data.get("VtepMAC")?.as_str().map(|mac| PublicIdentity::new("vxlan", mac))
        };
        [identity(&attrs.backend_data), identity(&attrs.backend_v6_data)]
    },
    annotations: |attrs| match attrs.backend_type.as_str() {
        "vxlan" => Annotations::of_data(attrs),
        kind => Annotations::without_data(true, kind == "host-gw"),
    },
    ports: |attrs| {
        let port = |data: &Option<Box<str>>| {
            let data: serde_json::Value = serde_json::from_str(data.as_deref()?).ok()?;
            data.get("Port")?.as_u64()?.try_into().ok()
        };
        [port(&attrs.backend_data), port(&attrs.backend_v6_data)]
            .map(|port| port.filter(|_| attrs.backend_type == "wireguard"))
    },
};
