// SPDX-License-Identifier: Apache-2.0
//! The types of network device that the agent creates. Each type has one file here with its [`Codec`], and one line in [`ALL`].

mod ipip;
mod tun;
mod vxlan;
mod wireguard;

use std::io;
use std::sync::Arc;

use netlink_packet_route::link::{InfoData, InfoKind, LinkInfo};
use weft_backends::link::{Foreign, LinkKind};
use weft_backends::state::Name;

/// All types.
const ALL: &[&dyn Codec] = &[&vxlan::Codec, &ipip::Codec, &tun::Codec, &wireguard::Codec];

/// Writes and reads the attributes that only one type of device has (`IFLA_INFO_DATA` of linux/if_link.h).
pub trait Codec: Sync {
    /// Returns the kernel's name of the type (`IFLA_INFO_KIND`).
    fn name(&self) -> &'static str;

    /// Returns true if devices of this type have an FDB of their own.
    fn has_fdb(&self) -> bool {
        false
    }

    /// Returns the attributes of a device that is to be created. `parent` is the index of the outer device, 0 for none. Returns
    /// `None` for a device of another type.
    fn create(&self, kind: &dyn LinkKind, parent: u32) -> Option<InfoData>;

    /// Creates a device of a type that the kernel does not create by a message, in the network namespace of this thread. Returns `None`
    /// for all other types, and otherwise the reason if it fails.
    fn create_without_message(&self, _name: Name) -> Option<io::Result<()>> {
        None
    }

    /// Names the attribute that differs and can be changed in place, for messages.
    fn difference(&self, _want: &dyn LinkKind, _have: &dyn LinkKind) -> Option<&'static str> {
        None
    }

    /// Returns the attributes that remove this difference.
    fn alter(&self, _want: &dyn LinkKind) -> Option<InfoData> {
        None
    }

    /// Reads the attributes of an existing device. Returns `None` if the agent never creates a device like this.
    fn read(&self, data: &[u8], parents: &dyn Parents) -> Option<Arc<dyn LinkKind>>;
}

/// Finds the outer device of a tunnel.
pub trait Parents {
    /// Returns the link with this index.
    fn of_index(&self, index: u32) -> Option<Name>;
}

/// Returns the codec of a type, if the agent creates such devices.
pub fn codec(name: &str) -> Option<&'static dyn Codec> {
    ALL.iter().copied().find(|codec| codec.name() == name)
}

/// Returns the attribute that tells the kernel the type of a device, with the attributes of this type.
pub(super) fn link_info(name: &str, data: Option<InfoData>) -> Vec<LinkInfo> {
    let kind = LinkInfo::Kind(InfoKind::from(name));
    std::iter::once(kind).chain(data.map(LinkInfo::Data)).collect()
}

/// The type of an existing device, and its attributes as the kernel sent them.
#[derive(Clone)]
pub struct LinkType {
    codec: &'static dyn Codec,
    pub(super) data: Box<[u8]>,
}

impl LinkType {
    /// Keeps what the kernel says about a device. Returns `None` if the agent creates no devices of this type.
    pub fn new(name: &str, data: &[u8]) -> Option<LinkType> {
        Some(LinkType { codec: codec(name)?, data: data.into() })
    }

    /// Returns true if the device has an FDB of its own.
    pub fn has_fdb(&self) -> bool {
        self.codec.has_fdb()
    }

    /// Reads the attributes.
    pub fn kind(&self, parents: &dyn Parents) -> Arc<dyn LinkKind> {
        self.codec.read(&self.data, parents).unwrap_or_else(|| Arc::new(Foreign))
    }
}

impl PartialEq for LinkType {
    fn eq(&self, other: &LinkType) -> bool {
        self.codec.name() == other.codec.name() && self.data == other.data
    }
}

impl Eq for LinkType {}

impl std::fmt::Debug for LinkType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.codec.name(), self.data)
    }
}
