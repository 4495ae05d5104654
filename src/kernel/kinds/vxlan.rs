// SPDX-License-Identifier: Apache-2.0
//! vxlan devices: `IFLA_VXLAN_*` of linux/if_link.h.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use netlink_packet_core::Parseable;
use netlink_packet_route::link::{InfoData, InfoVxlan};
use weft_backends::link::LinkKind;
use weft_backends::vxlan::VxlanLink;

use super::super::typed::attributes;
use super::Parents;

/// The type vxlan.
pub(super) struct Codec;

impl super::Codec for Codec {
    fn name(&self) -> &'static str {
        "vxlan"
    }

    fn has_fdb(&self) -> bool {
        true
    }

    fn create(&self, kind: &dyn LinkKind, parent: u32) -> Option<InfoData> {
        let VxlanLink { vni, port, local, gbp, learning, ttl, .. } = kind.of()?;
        let mut attributes = vec![
            InfoVxlan::Id(*vni),
            InfoVxlan::Link(parent),
            match local {
                IpAddr::V4(local) => InfoVxlan::Local(*local),
                IpAddr::V6(local) => InfoVxlan::Local6(*local),
            },
            InfoVxlan::Learning(*learning),
            InfoVxlan::Port(*port),
            InfoVxlan::Ttl(*ttl),
        ];
        attributes.extend(gbp.then_some(InfoVxlan::Gbp));
        Some(InfoData::Vxlan(attributes))
    }

    fn difference(&self, want: &dyn LinkKind, have: &dyn LinkKind) -> Option<&'static str> {
        let (want, have) = (want.of::<VxlanLink>()?, have.of::<VxlanLink>()?);
        match () {
            () if want.learning != have.learning => Some(if want.learning { "learning" } else { "nolearning" }),
            () if want.ttl != have.ttl => Some("ttl"),
            () => None,
        }
    }

    fn alter(&self, want: &dyn LinkKind) -> Option<InfoData> {
        let VxlanLink { vni, learning, ttl, .. } = want.of()?;
        Some(InfoData::Vxlan(vec![InfoVxlan::Id(*vni), InfoVxlan::Learning(*learning), InfoVxlan::Ttl(*ttl)]))
    }

    fn read(&self, data: &[u8], parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        let (mut vni, mut port, mut parent, mut learning, mut gbp, mut ttl) = (0, 0, 0, false, false, 0);
        let mut local = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        for attribute in attributes(data, 0) {
            match InfoVxlan::parse(&attribute) {
                Ok(InfoVxlan::Id(id)) => vni = id,
                Ok(InfoVxlan::Link(index)) => parent = index,
                Ok(InfoVxlan::Local(address)) => local = address.into(),
                Ok(InfoVxlan::Local6(address)) => local = address.into(),
                Ok(InfoVxlan::Learning(on)) => learning = on,
                Ok(InfoVxlan::Port(number)) => port = number,
                Ok(InfoVxlan::Gbp) => gbp = true,
                Ok(InfoVxlan::Ttl(hops)) => ttl = hops,
                // The agent never creates a device with one of these, and the kernel cannot change them in place.
                Ok(InfoVxlan::Group(_) | InfoVxlan::Group6(_) | InfoVxlan::Gpe | InfoVxlan::CollectMetadata(true)) => {
                    return None;
                }
                _ => {}
            }
        }
        let parent = parents.of_index(parent)?;
        Some(Arc::new(VxlanLink { vni, port, parent, local, gbp, learning, ttl }))
    }
}
