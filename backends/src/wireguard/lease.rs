// SPDX-License-Identifier: Apache-2.0
//! The data of WireGuard in a lease: `{"PublicKey":"...","Port":51820}` for each family.

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::PublicPorts;
use weft_subnet::cidr::Family;
use weft_subnet::text::shown;

use super::error::ReachError;
use crate::family;
use crate::options::Members;
use crate::wireguard_key::PublicKey;

/// The data of one family.
pub(super) struct Data {
    pub(super) key: PublicKey,
    /// `None` if the lease names no port, as with flannel before 0.26.5, or names 0.
    pub(super) port: Option<u16>,
}

/// Returns the data with exactly the bytes that flannel writes.
pub(super) fn text(key: PublicKey, port: u16) -> Box<str> {
    format!("{{\"PublicKey\":\"{key}\",\"Port\":{port}}}").into_boxed_str()
}

/// Reads `BackendData` or `BackendV6Data`. As in Go, the case of names does not matter.
pub(super) fn data(attrs: &Attrs, family: Family) -> Result<Data, ReachError> {
    let member = family::data_member(family);
    let raw = family::data(attrs, family).ok_or(ReachError::Missing(member))?;
    let members: Members = serde_json::from_str(raw)
        .map_err(|e: serde_json::Error| ReachError::NoObject { member, error: shown(&e.to_string()) })?;
    let key = members.get("PublicKey").ok_or(ReachError::NoKey(member))?;
    let bad = || ReachError::BadKey { key: shown(&key.to_string()), member };
    let key = key.as_str().and_then(PublicKey::parse).ok_or_else(bad)?;
    let port = match members.get("Port") {
        None => 0,
        Some(port) => port
            .as_u64()
            .and_then(|port| u16::try_from(port).ok())
            .ok_or_else(|| ReachError::BadPort { port: shown(&port.to_string()), member })?,
    };
    Ok(Data { key, port: Some(port).filter(|port| *port != 0) })
}

/// Returns the ports that a lease names.
pub(super) fn ports(attrs: &Attrs) -> PublicPorts {
    Family::BOTH.map(|family| data(attrs, family).ok()?.port)
}

/// Returns the public keys that a lease names. One that no node can have is left out.
pub(super) fn keys(attrs: &Attrs) -> [Option<PublicKey>; 2] {
    let key = |family| data(attrs, family).ok().map(|data| data.key).filter(|key| !key.is_zero());
    [key(Family::V4), key(Family::V6)]
}
