// SPDX-License-Identifier: Apache-2.0
//! vxlan devices: `IFLA_VXLAN_*` of linux/if_link.h.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use weft_backends::link::LinkKind;
use weft_backends::vxlan::VxlanLink;

use super::super::wire::{Writer, attrs, ip, u8_at, u16_at, u32_at};
use super::Parents;

const ID: u16 = 1;
const GROUP: u16 = 2;
const LINK: u16 = 3;
const LOCAL: u16 = 4;
const LEARNING: u16 = 7;
const PORT: u16 = 15;
const GROUP6: u16 = 16;
const LOCAL6: u16 = 17;
const GBP: u16 = 23;
const COLLECT_METADATA: u16 = 25;
const GPE: u16 = 27;

/// vxlan.
pub(super) struct Codec;

impl super::Codec for Codec {
    fn name(&self) -> &'static str {
        "vxlan"
    }

    fn has_fdb(&self) -> bool {
        true
    }

    fn create(&self, w: &mut Writer, kind: &dyn LinkKind, parent: u32) {
        let Some(VxlanLink { vni, port, local, gbp, learning, .. }) = kind.of() else { return };
        w.attr_u32(ID, *vni);
        w.attr_u32(LINK, parent);
        w.attr_ip(if local.is_ipv4() { LOCAL } else { LOCAL6 }, *local);
        w.attr(LEARNING, &[u8::from(*learning)]);
        w.attr(PORT, &port.to_be_bytes());
        if *gbp {
            w.attr(GBP, &[]);
        }
    }

    fn difference(&self, want: &dyn LinkKind, have: &dyn LinkKind) -> Option<&'static str> {
        let (want, have) = (want.of::<VxlanLink>()?, have.of::<VxlanLink>()?);
        (want.learning != have.learning).then_some(if want.learning { "learning" } else { "nolearning" })
    }

    fn alter(&self, w: &mut Writer, want: &dyn LinkKind) {
        let Some(VxlanLink { vni, learning, .. }) = want.of() else { return };
        w.attr_u32(ID, *vni);
        w.attr(LEARNING, &[u8::from(*learning)]);
    }

    fn read(&self, data: &[u8], parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        let (mut vni, mut port, mut parent, mut learning, mut gbp) = (0, 0, 0, false, false);
        let mut local = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        for (kind, value) in attrs(data) {
            match kind {
                ID => vni = u32_at(value, 0),
                LINK => parent = u32_at(value, 0),
                LOCAL | LOCAL6 => local = ip(value).unwrap_or(local),
                LEARNING => learning = u8_at(value, 0) != 0,
                PORT => port = u16::from_be(u16_at(value, 0)),
                GBP => gbp = true,
                // Fixed attributes that ours never have.
                GROUP | GROUP6 | GPE => return None,
                COLLECT_METADATA if u8_at(value, 0) != 0 => return None,
                _ => {}
            }
        }
        let parent = parents.of_index(parent)?;
        Some(Arc::new(VxlanLink { vni, port, parent, local, gbp, learning }))
    }
}
