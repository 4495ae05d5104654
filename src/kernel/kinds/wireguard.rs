// SPDX-License-Identifier: Apache-2.0
//! WireGuard devices. Their links have no attributes of their own: keys and port are in the generic netlink family `wireguard`.

use std::sync::Arc;

use netlink_packet_route::link::InfoData;
use weft_backends::link::LinkKind;
use weft_backends::wireguard::WireGuardLink;

use super::Parents;

/// The type wireguard.
pub(super) struct Codec;

impl super::Codec for Codec {
    fn name(&self) -> &'static str {
        "wireguard"
    }

    fn create(&self, _kind: &dyn LinkKind, _parent: u32) -> Option<InfoData> {
        None
    }

    /// The observation adds the key and the port.
    fn read(&self, _data: &[u8], _parents: &dyn Parents) -> Option<Arc<dyn LinkKind>> {
        Some(Arc::new(WireGuardLink { public: None, port: 0 }))
    }
}
