// SPDX-License-Identifier: Apache-2.0
//! udp: each IPv4 packet in a UDP datagram of its own, between TUN devices. The agent carries the packets itself ([`crate::tunnel`]).
//! The kernel has one route for the whole Network, and no entry for a peer. Behaviour: docs/flannel-formats.md, "Backends".

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::sync::Arc;

use ipnet::{IpNet, Ipv4Net};
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::Annotations;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;

use crate::backend::{Backend, BackendType, Planned, Skip};
use crate::family::host_address;
use crate::host::Host;
use crate::link::{Link, LinkKind};
use crate::options::{BadOption, Members, Options};
use crate::overhead;
use crate::state::{Key, Name, Route, State, Value, metric};
use crate::tunnel::{Tunnel, TunnelPeer};

/// The name of the device, which is flannel's.
const DEVICE: Name = Name::constant("flannel0");
/// The kind of its device.
const DEVICE_KIND: &str = "tun";
/// flannel's default port.
const PORT: u16 = 8285;
/// The first port that a lease may name although net-conf does not. Services of the system listen below it, and whoever can write a lease could
/// let other nodes send datagrams to them.
const FIRST_FREE_PORT: u16 = 1024;

/// udp in the register. Its leases have no type, and are for IPv4 only. They have data only if the port is not flannel's default.
pub(crate) const TYPE: BackendType = BackendType {
    lease_type: "",
    annotations: Annotations::of_data_or_null,
    device_kind: Some(DEVICE_KIND),
    ..BackendType::new("udp", make)
};

/// A persistent TUN device. The framing of its packets is not compared, because the program that opens the device chooses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunLink;

impl fmt::Display for TunLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tun")
    }
}

impl LinkKind for TunLink {
    fn name(&self) -> &'static str {
        DEVICE_KIND
    }

    /// Returns the sysctls that let the tunnel answer "network unreachable" and "time exceeded" from an address of the host itself. The
    /// kernel drops such packets otherwise.
    fn ipv4_settings(&self) -> &'static [(&'static str, &'static str)] {
        &[("accept_local", "1")]
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of::<TunLink>().is_some()
    }
}

/// Why udp does not reach a peer, or cannot run here.
#[derive(Debug, thiserror::Error)]
enum UdpError {
    #[error("backend type udp carries IPv4 only: use vxlan or host-gw for IPv6")]
    WithoutIpv4,
    #[error("{0}: the lease has no PublicIP, which udp needs")]
    NoPublic(Ipv4Net),
    #[error("{subnet}: PublicIP {public} is inside Network {network}, and only the tunnel itself leads there")]
    InsideNetwork { subnet: Ipv4Net, public: Ipv4Addr, network: Ipv4Net },
    #[error(
        "{subnet}: the lease names the port {port}, which is below {FIRST_FREE_PORT} and is not the Port of net-conf"
    )]
    SystemPort { subnet: Ipv4Net, port: u16 },
    #[error("{0} has no IPv4 address, which udp needs")]
    NoAddress(Name),
    #[error("{0}: udp carries IPv4 only")]
    Ipv6Subnet(IpNet),
}

/// The udp backend.
#[derive(Debug)]
struct Udp {
    network: Ipv4Net,
    port: u16,
    /// True if IPv6 is enabled. Then IPv6 subnets of peers are reported as not reachable.
    has_v6: bool,
}

fn make(options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    let has_v6 = net_conf.networks.v6.is_some();
    let network = net_conf.networks.v4.ok_or_else(|| Skip::new(UdpError::WithoutIpv4))?;
    let port = u16::try_from(options.number("Port", 1..=u32::from(u16::MAX), PORT.into())?).unwrap_or(u16::MAX);
    Ok(Box::new(Udp { network, port, has_v6 }))
}

/// Returns the port that a lease names. flannel names none, whatever its port is. We name none if it is flannel's default. Data that cannot be
/// read name none.
fn named_port(lease: &Attrs) -> Option<u16> {
    let members: Members = serde_json::from_str(lease.backend_data.as_deref()?).ok()?;
    u16::try_from(members.get("Port")?.as_u64()?).ok().filter(|port| *port != 0)
}

impl Udp {
    /// Returns how the tunnel reaches a peer. `None` if the peer has no IPv4 subnet.
    fn reach(&self, host: &Host, peer: &Lease) -> Option<Result<TunnelPeer, UdpError>> {
        let subnet = peer.subnets.v4?;
        let Some(public) = peer.attrs.public_ip else { return Some(Err(UdpError::NoPublic(subnet))) };
        // Such a datagram would come back out of the TUN device, and be put into another one.
        let routed = host.routes.prefix_len(IpAddr::V4(public)).is_some_and(|len| len > self.network.prefix_len());
        if self.network.contains(&public) && !routed {
            return Some(Err(UdpError::InsideNetwork { subnet, public, network: self.network }));
        }
        let sends_from = peer.attrs.tunnel_ip.filter(|other| *other != public);
        let port = named_port(&peer.attrs).unwrap_or(self.port);
        if port < FIRST_FREE_PORT && port != self.port {
            return Some(Err(UdpError::SystemPort { subnet, port }));
        }
        Some(Ok(TunnelPeer { subnet, address: SocketAddrV4::new(public, port), sends_from }))
    }
}

impl Backend for Udp {
    fn kind(&self) -> &'static str {
        TYPE.kind
    }

    /// Returns true for a lease without a type, which is one of udp in a network of udp. Nodes of other types do not listen on our port.
    fn serves(&self, backend_type: &str) -> bool {
        backend_type.is_empty()
    }

    /// Returns true if the node with this lease listens on our port.
    fn understands(&self, lease: &Attrs) -> bool {
        self.serves(&lease.backend_type) && named_port(lease).unwrap_or(PORT) == self.port
    }

    /// flannel names no port.
    fn knows_options_of_flannel(&self) -> bool {
        false
    }

    fn mtu(&self, host: &Host, _family: Family) -> u32 {
        host.uplink.mtu.saturating_sub(overhead::udp())
    }

    /// Names the address of the uplink, too, if another one is published, because peers on the same link get our packets from there. And names
    /// the port, if flannel's default is another one, so that peers see in the lease whether this node has followed a change of the port.
    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let local = host.uplink.v4.ok_or_else(|| Skip::new(UdpError::NoAddress(host.uplink.name)))?;
        let public = host.public_v4.unwrap_or(local);
        let tunnel_ip = (public != local).then_some(local);
        let backend_data = (self.port != PORT).then(|| format!("{{\"Port\":{}}}", self.port).into_boxed_str());
        Ok(Attrs { public_ip: Some(public), tunnel_ip, backend_data, ..Attrs::default() })
    }

    fn device(&self, host: &Host, own: &Lease) -> State {
        let Some(Tunnel { mtu, subnet, .. }) = self.tunnel(host, own) else { return State::new() };
        let link = Link { kind: Arc::new(TunLink), mtu: mtu.into(), mac: None, up: true };
        State::from([
            (Key::Link(DEVICE), Value::link(link)),
            (Key::Addr(DEVICE, host_address(subnet.into())), Value::Addr),
            (Key::Route(self.network.into(), metric(Family::V4)), Value::Route(Route::Device { dev: DEVICE })),
        ])
    }

    fn plan(&self, host: &Host, _own: &Lease, peer: &Lease) -> Planned {
        let mut planned = Planned::default();
        if let Some(Err(reason)) = self.reach(host, peer) {
            planned.take(Err(Skip::new(reason)));
        }
        if let Some(subnet) = peer.subnets.of(Family::V6).filter(|_| self.has_v6) {
            planned.take(Err(Skip::new(UdpError::Ipv6Subnet(subnet))));
        }
        planned
    }

    fn tunnel(&self, host: &Host, own: &Lease) -> Option<Tunnel> {
        let (local, subnet) = (host.uplink.v4?, own.subnets.v4?);
        let mtu = u16::try_from(self.mtu(host, Family::V4)).unwrap_or(u16::MAX);
        Some(Tunnel { device: DEVICE, mtu, local, port: self.port, subnet })
    }

    fn tunnel_peer(&self, host: &Host, peer: &Lease) -> Option<TunnelPeer> {
        self.reach(host, peer)?.ok()
    }
}
