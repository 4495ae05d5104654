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

    fn create(&self, kind: &dyn LinkKind, parent: u32) -> Option<InfoData> {
        let IpipLink { local, .. } = kind.of()?;
        Some(InfoData::IpTunnel(vec![
            InfoIpTunnel::Link(parent),
            InfoIpTunnel::Local(*local),
            // As flannel sets it: the underlay may fragment a packet that is too long, instead of losing it.
            InfoIpTunnel::PMtuDisc(false),
        ]))
    }

    /// flannel binds its device only to an address. The outer device is then the link that has this address.
    fn read(&self, data: &[u8], parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        let (mut parent, mut local) = (0, IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        for attribute in attributes(data, 0) {
            match InfoIpTunnel::parse_with_param(&attribute, InfoKind::IpIp) {
                Ok(InfoIpTunnel::Link(index)) => parent = index,
                Ok(InfoIpTunnel::Local(address)) => local = address,
                // A device with a fixed remote end is a point-to-point tunnel, which the agent never creates.
                Ok(InfoIpTunnel::Remote(remote)) if !remote.is_unspecified() => return None,
                _ => {}
            }
        }
        let parent = if parent == 0 { parents.of_address(local) } else { parents.of_index(parent) };
        Some(Arc::new(IpipLink { parent: parent?, local }))
    }
}
