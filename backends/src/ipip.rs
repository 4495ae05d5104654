// SPDX-License-Identifier: Apache-2.0
//! ipip: IPv4 in IPv4, which adds 20 bytes. There is one device without a remote address, and the gateway of a route is the outer
//! destination. The device has the attributes of flannel's, so that weft keeps that one. Behaviour: docs/flannel-formats.md, "Backends".

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::Annotations;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;

use crate::backend::{Backend, BackendType, Planned, Skip, of_kind};
use crate::family::{host_address, route};
use crate::host::Host;
use crate::link::{Link, LinkKind, Outer};
use crate::options::{BadOption, Options};
use crate::overhead;
use crate::state::{Key, Name, State, Value};

/// Its type, in net-conf and in leases.
pub(crate) const KIND: &str = "ipip";
/// The kind of the device, as the kernel names it.
pub const DEVICE_KIND: &str = "ipip";
/// The name of the device, which is flannel's. There is one per host.
const DEVICE: Name = Name::constant("flannel.ipip");

/// An IPv4-in-IPv4 tunnel device without a remote address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpipLink {
    /// The outer source address.
    pub local: IpAddr,
    /// True if the device is bound to a link. The kernel then looks for routes to peers over that link alone. Such a device is never
    /// wanted: its packets are lost when the local address moves to another link, or when a peer is behind another one.
    pub bound: bool,
}

impl fmt::Display for IpipLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ipip local {}{}", self.local, if self.bound { " bound to a link" } else { "" })
    }
}

impl LinkKind for IpipLink {
    fn name(&self) -> &'static str {
        DEVICE_KIND
    }

    fn outer(&self) -> Option<(Family, Outer)> {
        Some((Family::V4, Outer::Ipip))
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of() == Some(self)
    }
}

/// Why ipip does not reach a peer, or cannot run here.
#[derive(Debug, thiserror::Error)]
enum IpipError {
    #[error("backend type ipip carries IPv4 only: use vxlan or host-gw for IPv6")]
    WithoutIpv4,
    #[error("{0}: the lease has no PublicIP, which ipip needs")]
    NoPublic(IpNet),
    #[error("{subnet}: this node has no IPv4 address on {uplink} for ipip")]
    NoLocal { subnet: IpNet, uplink: Name },
    #[error("{0} has no IPv4 address, which ipip needs")]
    NoAddress(Name),
    #[error("{0}: ipip carries IPv4 only")]
    Ipv6Subnet(IpNet),
}

/// The ipip backend.
#[derive(Debug)]
pub struct Ipip {
    direct_routing: bool,
    /// False in a mixed cluster in which we are of another type. Then the plans of peers contain the device.
    own: bool,
    /// True if IPv6 is enabled. Then IPv6 subnets of peers are reported as not reachable.
    has_v6: bool,
}

impl Ipip {
    /// Reads the options. Fails if net-conf has no IPv4.
    pub fn new(options: &Options, net_conf: &NetConf) -> Result<Ipip, BadOption> {
        if net_conf.networks.v4.is_none() {
            return Err(Skip::new(IpipError::WithoutIpv4).into());
        }
        Ok(Ipip {
            direct_routing: options.flag("DirectRouting")?,
            own: net_conf.backend_type == KIND,
            has_v6: net_conf.networks.v6.is_some(),
        })
    }

    fn half(&self, host: &Host, own: &Lease, peer: &Lease) -> Option<Result<State, Skip>> {
        let subnet = peer.subnets.of(Family::V4)?;
        let Some(via) = peer.attrs.public_ip.map(IpAddr::V4) else {
            return Some(Err(Skip::new(IpipError::NoPublic(subnet))));
        };
        if self.direct_routing
            && let Some(dev) = host.routes.on_link(via)
        {
            return Some(Ok(route(subnet, via, dev, false)));
        }
        if host.uplink.v4.is_none() || own.subnets.v4.is_none() {
            return Some(Err(Skip::new(IpipError::NoLocal { subnet, uplink: host.uplink.name })));
        }
        let mut state = if self.own { State::new() } else { self.device(host, own) };
        state.extend(route(subnet, via, DEVICE, true));
        Some(Ok(state))
    }
}

/// ipip in the register. Its leases have no data, and are for IPv4 only.
pub(crate) const TYPE: BackendType = BackendType {
    annotations: |_| Annotations::without_data(true, false),
    device_kind: Some(DEVICE_KIND),
    ..BackendType::new(KIND, make)
};

fn make(options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    Ok(Box::new(Ipip::new(options, net_conf)?))
}

impl Backend for Ipip {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn mtu(&self, host: &Host, _family: Family) -> u32 {
        host.uplink.mtu.saturating_sub(overhead::ipip())
    }

    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        if host.uplink.v4.is_none() {
            return Err(Skip::new(IpipError::NoAddress(host.uplink.name)));
        }
        let public_ip = host.public_v4.or(host.uplink.v4);
        Ok(Attrs { public_ip, backend_type: KIND.to_owned(), ..Attrs::default() })
    }

    fn device(&self, host: &Host, own: &Lease) -> State {
        let (Some(local), Some(subnet)) = (host.uplink.v4, own.subnets.of(Family::V4)) else { return State::new() };
        let kind = Arc::new(IpipLink { local: IpAddr::V4(local), bound: false });
        let link = Link { kind, mtu: self.mtu(host, Family::V4), mac: None, up: true };
        State::from([(Key::Link(DEVICE), Value::link(link)), (Key::Addr(DEVICE, host_address(subnet)), Value::Addr)])
    }

    fn plan(&self, host: &Host, own: &Lease, peer: &Lease) -> Planned {
        if let Err(reason) = of_kind(KIND, peer) {
            return Planned::none(reason);
        }
        let mut planned = Planned::default();
        if let Some(half) = self.half(host, own, peer) {
            planned.take(half);
        }
        if let Some(subnet) = peer.subnets.of(Family::V6).filter(|_| self.has_v6) {
            planned.take(Err(Skip::new(IpipError::Ipv6Subnet(subnet))));
        }
        planned
    }
}
