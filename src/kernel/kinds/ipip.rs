// SPDX-License-Identifier: Apache-2.0
//! ipip devices: `IFLA_IPTUN_*` of linux/if_tunnel.h.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use netlink_packet_core::ParseableParametrized;
use netlink_packet_route::link::{InfoData, InfoIpTunnel, InfoKind};
use weft_backends::ipip::IpipLink;
use weft_backends::link::LinkKind;

use super::super::typed::attributes;
use super::Parents;

/// The type ipip.
pub(super) struct Codec;

impl super::Codec for Codec {
    fn name(&self) -> &'static str {
        "ipip"
    }

    /// Like flannel's device, it is bound to an address and to no link.
    fn create(&self, kind: &dyn LinkKind, _parent: u32) -> Option<InfoData> {
        let IpipLink { local, .. } = kind.of()?;
        Some(InfoData::IpTunnel(vec![
            InfoIpTunnel::Local(*local),
            // As flannel sets it: the underlay may fragment a packet that is too long, instead of losing it.
            InfoIpTunnel::PMtuDisc(false),
        ]))
    }

    fn read(&self, data: &[u8], _parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        let (mut bound, mut local) = (false, IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        for attribute in attributes(data, 0) {
            match InfoIpTunnel::parse_with_param(&attribute, InfoKind::IpIp) {
                Ok(InfoIpTunnel::Link(index)) => bound = index != 0,
                Ok(InfoIpTunnel::Local(address)) => local = address,
                // A device with a fixed remote end is a point-to-point tunnel, which the agent never creates.
                Ok(InfoIpTunnel::Remote(remote)) if !remote.is_unspecified() => return None,
                _ => {}
            }
        }
        Some(Arc::new(IpipLink { local, bound }))
    }
}
