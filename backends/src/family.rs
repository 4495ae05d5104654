// SPDX-License-Identifier: Apache-2.0
//! What differs between IPv4 and IPv6, so that each backend needs only one code for both.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, family};

use crate::host::Host;
use crate::skip::Skip;
use crate::state::{Key, Name, Route, State, Value, metric};

/// Returns the name of the lease's member that contains the published address.
pub fn public_member(family: Family) -> &'static str {
    match family {
        Family::V4 => "PublicIP",
        Family::V6 => "PublicIPv6",
    }
}

/// Returns the name of the lease's member that contains the backend's data.
pub fn data_member(family: Family) -> &'static str {
    match family {
        Family::V4 => "BackendData",
        Family::V6 => "BackendV6Data",
    }
}

/// Returns the name for people.
pub fn label(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

/// Returns the published address of a lease in this family.
pub fn public(attrs: &Attrs, family: Family) -> Option<IpAddr> {
    match family {
        Family::V4 => attrs.public_ip.map(IpAddr::V4),
        Family::V6 => attrs.public_ipv6.map(IpAddr::V6),
    }
}

/// Returns the backend's data of this family as raw JSON.
pub fn data(attrs: &Attrs, family: Family) -> Option<&str> {
    match family {
        Family::V4 => attrs.backend_data.as_deref(),
        Family::V6 => attrs.backend_v6_data.as_deref(),
    }
}

/// Returns the address that we publish for this family.
pub fn published(host: &Host, family: Family) -> Option<IpAddr> {
    match family {
        Family::V4 => host.public_v4.map(IpAddr::V4),
        Family::V6 => host.public_v6.map(IpAddr::V6),
    }
}

/// Puts our published address of one family into the lease.
pub fn publish(attrs: &mut Attrs, address: IpAddr) {
    match address {
        IpAddr::V4(v4) => attrs.public_ip = Some(v4),
        IpAddr::V6(v6) => attrs.public_ipv6 = Some(v6),
    }
}

/// There is no address to publish for a family that net-conf enables.
#[derive(Debug, thiserror::Error)]
#[error("{uplink} has no {family} address, which {backend} needs to publish")]
struct NoAddress {
    uplink: Name,
    family: &'static str,
    backend: &'static str,
}

/// Puts the address that we publish for this family into the lease, or that of the uplink if there is no other. `backend` is the type that
/// needs it.
///
/// # Errors
/// There is no address of this family.
pub fn publish_ours(attrs: &mut Attrs, host: &Host, family: Family, backend: &'static str) -> Result<(), Skip> {
    let uplink = &host.uplink;
    let Some(address) = published(host, family).or(uplink.address(family)) else {
        return Err(Skip::new(NoAddress { uplink: uplink.name, family: label(family), backend }));
    };
    publish(attrs, address);
    Ok(())
}

/// Puts the backend's data of one family into the lease, as raw JSON.
pub fn set_data(attrs: &mut Attrs, family: Family, data: Box<str>) {
    match family {
        Family::V4 => attrs.backend_data = Some(data),
        Family::V6 => attrs.backend_v6_data = Some(data),
    }
}

/// Returns the first address of the subnet as a single address, for a tunnel device. So the device gets no broadcast and connected routes.
pub fn host_address(subnet: IpNet) -> IpNet {
    IpNet::from(subnet.network())
}

/// Returns one route to the subnet of a peer.
pub fn route(subnet: IpNet, via: IpAddr, dev: Name, onlink: bool) -> State {
    let key = Key::Route(subnet, metric(family(&subnet)));
    State::from([(key, Value::Route(Route::Unicast { via, dev, onlink }))])
}
