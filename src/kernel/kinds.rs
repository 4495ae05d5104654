// SPDX-License-Identifier: Apache-2.0
//! The types of network device that the agent makes: how the kernel is told of one, and how its answer is read. A type is one file
//! here with its [`Codec`], and one line in [`ALL`].

mod ipip;
mod vxlan;

use std::net::IpAddr;
use std::sync::Arc;

use weft_backends::link::{Foreign, LinkKind};
use weft_backends::state::Name;

use super::wire::Writer;

/// Every type.
const ALL: &[&dyn Codec] = &[&vxlan::Codec, &ipip::Codec];

/// How one type of device is written into and read from messages of rtnetlink (`IFLA_INFO_DATA` of linux/if_link.h).
pub trait Codec: Sync {
    /// The kernel's name of the type (`IFLA_INFO_KIND`).
    fn name(&self) -> &'static str;

    /// True when devices of this type have forwarding entries of their own.
    fn has_fdb(&self) -> bool {
        false
    }

    /// Appends the attributes of a device that is to be made. `parent` is the index of the outer device, 0 for none. Appends nothing
    /// for a kind of another type.
    fn create(&self, w: &mut Writer, kind: &dyn LinkKind, parent: u32);

    /// What of a standing device can be changed in place and differs, for people.
    fn difference(&self, _want: &dyn LinkKind, _have: &dyn LinkKind) -> Option<&'static str> {
        None
    }

    /// Appends the attributes that make this difference good.
    fn alter(&self, _w: &mut Writer, _want: &dyn LinkKind) {}

    /// Reads the attributes of a device that exists; `None` when it has a form that the agent never makes.
    fn read(&self, data: &[u8], parents: &dyn Parents) -> Option<Arc<dyn LinkKind>>;
}

/// Who the outer device of a tunnel is.
pub trait Parents {
    /// The link of this index.
    fn of_index(&self, index: u32) -> Option<Name>;
    /// The link that has this address.
    fn of_address(&self, address: IpAddr) -> Option<Name>;
}

/// The codec of this type, if the agent makes such devices.
pub fn codec(name: &str) -> Option<&'static dyn Codec> {
    ALL.iter().copied().find(|codec| codec.name() == name)
}

/// The type and attributes of a device, as the kernel told them.
#[derive(Clone)]
pub struct Told {
    codec: &'static dyn Codec,
    data: Box<[u8]>,
}

impl Told {
    /// Keeps what the kernel told of a device, if it is of a type that the agent makes.
    pub fn new(name: &str, data: &[u8]) -> Option<Told> {
        Some(Told { codec: codec(name)?, data: data.into() })
    }

    /// See [`Codec::has_fdb`].
    pub fn has_fdb(&self) -> bool {
        self.codec.has_fdb()
    }

    /// The kind of the device.
    pub fn kind(&self, parents: &dyn Parents) -> Arc<dyn LinkKind> {
        self.codec.read(&self.data, parents).unwrap_or_else(|| Arc::new(Foreign))
    }
}

impl PartialEq for Told {
    fn eq(&self, other: &Told) -> bool {
        self.codec.name() == other.codec.name() && self.data == other.data
    }
}

impl Eq for Told {}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.codec.name(), self.data)
    }
}
