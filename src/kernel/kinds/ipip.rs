// SPDX-License-Identifier: Apache-2.0
//! ipip devices: `IFLA_IPTUN_*` of linux/if_tunnel.h.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use weft_backends::ipip::IpipLink;
use weft_backends::link::LinkKind;

use super::super::wire::{Writer, attrs, ip, u32_at};
use super::Parents;

const LINK: u16 = 1;
const LOCAL: u16 = 2;
const REMOTE: u16 = 3;
const PMTUDISC: u16 = 10;

/// ipip.
pub(super) struct Codec;

impl super::Codec for Codec {
    fn name(&self) -> &'static str {
        "ipip"
    }

    fn create(&self, w: &mut Writer, kind: &dyn LinkKind, parent: u32) {
        let Some(IpipLink { local, .. }) = kind.of() else { return };
        w.attr_u32(LINK, parent);
        w.attr_ip(LOCAL, *local);
        // As flannel sets it: the underlay may fragment rather than lose what is too long.
        w.attr(PMTUDISC, &[0]);
    }

    /// flannel binds its device to an address alone: the parent is then the link that has this address.
    fn read(&self, data: &[u8], parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        let (mut parent, mut local) = (0, IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        for (kind, value) in attrs(data) {
            match kind {
                LINK => parent = u32_at(value, 0),
                LOCAL => local = ip(value).unwrap_or(local),
                // A fixed remote end makes it a point-to-point tunnel, which is none of ours.
                REMOTE if value.iter().any(|b| *b != 0) => return None,
                _ => {}
            }
        }
        let parent = if parent == 0 { parents.of_address(local) } else { parents.of_index(parent) };
        Some(Arc::new(IpipLink { parent: parent?, local }))
    }
}
