// SPDX-License-Identifier: Apache-2.0
//! TUN devices: `IFLA_TUN_*` of linux/if_link.h. The kernel does not create them by a message, but for whoever opens /dev/net/tun.

use std::io;
use std::sync::Arc;

use netlink_packet_route::link::InfoData;
use weft_backends::link::LinkKind;
use weft_backends::state::Name;
use weft_backends::udp::TunLink;

use super::super::typed::attributes;
use super::Parents;

/// The attribute with the kind of the device, which is one byte.
const IFLA_TUN_TYPE: u16 = 3;
/// The value of that attribute for a device that carries Ethernet frames.
const IFF_TAP: u8 = 2;

/// The type tun.
pub(super) struct Codec;

impl super::Codec for Codec {
    fn name(&self) -> &'static str {
        "tun"
    }

    fn create(&self, _kind: &dyn LinkKind, _parent: u32) -> Option<InfoData> {
        None
    }

    /// The device is persistent, so it stays when its descriptor is closed here. The data path opens it again.
    fn create_without_message(&self, name: Name) -> Option<io::Result<()>> {
        Some(weft_udp::Device::open(&name.text()).map(drop).map_err(io::Error::other))
    }

    /// A kernel before 4.20 says nothing about a device but its type, which TAP devices share.
    fn read(&self, data: &[u8], _parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        let is_tap = |value: &[u8]| value.first() == Some(&IFF_TAP);
        let mut all = attributes(data, 0);
        let tap = all.any(|attribute| attribute.kind() == IFLA_TUN_TYPE && is_tap(attribute.value()));
        (!tap).then(|| Arc::new(TunLink) as Arc<dyn LinkKind>)
    }
}
