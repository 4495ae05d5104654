// SPDX-License-Identifier: Apache-2.0
//! host-gw: the peer itself is the gateway of its subnet. There is no device and no overhead, and all nodes must be on one link.
//! Behaviour: docs/flannel-formats.md, "Backends".

use std::net::IpAddr;

use ipnet::IpNet;
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::Annotations;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;

use crate::backend::{Backend, BackendType, EchoAddress, Planned, Skip, families, of_kind};
use crate::family::{label, public, public_member, publish, published, route};
use crate::host::Host;
use crate::options::{BadOption, Options};
use crate::state::{Name, State};

/// Its type, in net-conf and in leases.
pub(crate) const KIND: &str = "host-gw";

/// Why host-gw does not reach a peer, or cannot run on this host.
#[derive(Debug, thiserror::Error)]
enum HostGwError {
    #[error("{subnet}: the lease has no {member}, which host-gw needs as gateway")]
    NoGateway { subnet: IpNet, member: &'static str },
    #[error(
        "{0} is not on a link of this node: host-gw needs all nodes on one link (vxlan with DirectRouting does not)"
    )]
    NotOnLink(IpAddr),
    #[error("{uplink} has no {family} address, which host-gw needs as gateway")]
    NoAddress { uplink: Name, family: &'static str },
    #[error(
        "{member} {ours} is not the address of {uplink} ({address}): peers cannot use it as gateway; \
         choose the interface that has it (--iface), or another backend (vxlan)"
    )]
    OtherAddress { member: &'static str, ours: IpAddr, uplink: Name, address: IpAddr },
}

/// The host-gw backend. It has no options.
#[derive(Debug)]
pub struct HostGw {
    families: Vec<Family>,
}

impl HostGw {
    /// Makes a backend for the families of this net-conf.
    pub fn new(net_conf: &NetConf) -> HostGw {
        HostGw { families: families(net_conf) }
    }

    fn half(&self, host: &Host, peer: &Lease, family: Family) -> Option<Result<State, Skip>> {
        let subnet = peer.subnets.of(family)?;
        let Some(via) = public(&peer.attrs, family) else {
            let member = public_member(family);
            return Some(Err(Skip::new(HostGwError::NoGateway { subnet, member })));
        };
        let Some(dev) = host.routes.on_link(via) else {
            return Some(Err(Skip::new(HostGwError::NotOnLink(via))));
        };
        Some(Ok(route(subnet, via, dev, false)))
    }
}

/// host-gw in the register. Its leases have no data for both families.
pub(crate) const TYPE: BackendType =
    BackendType { annotations: |_| Annotations::without_data(true, true), ..BackendType::new(KIND, make) };

fn make(_options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    Ok(Box::new(HostGw::new(net_conf)))
}

impl Backend for HostGw {
    fn echo_address(&self, peer: &Lease, family: Family) -> Option<EchoAddress> {
        peer.subnets.of(family).filter(|_| self.families.contains(&family))?;
        public(&peer.attrs, family).map(EchoAddress::Published)
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn mtu(&self, host: &Host, _family: Family) -> u32 {
        host.uplink.mtu
    }

    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let mut attrs = Attrs { backend_type: KIND.to_owned(), ..Attrs::default() };
        for family in self.families.iter().copied() {
            let uplink = host.uplink.name;
            let Some(address) = host.uplink.address(family) else {
                return Err(Skip::new(HostGwError::NoAddress { uplink, family: label(family) }));
            };
            match published(host, family) {
                Some(ours) if ours != address => {
                    let member = public_member(family);
                    return Err(Skip::new(HostGwError::OtherAddress { member, ours, uplink, address }));
                }
                _ => publish(&mut attrs, address),
            }
        }
        Ok(attrs)
    }

    fn device(&self, _host: &Host, _own: &Lease) -> State {
        State::new()
    }

    fn plan(&self, host: &Host, _own: &Lease, peer: &Lease) -> Planned {
        if let Err(reason) = of_kind(KIND, peer) {
            return Planned::none(reason);
        }
        let mut planned = Planned::default();
        self.families.iter().filter_map(|family| self.half(host, peer, *family)).for_each(|half| planned.take(half));
        planned
    }
}
