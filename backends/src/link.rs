// SPDX-License-Identifier: Apache-2.0
//! Our network devices. What all devices have is in [`Link`]. What belongs to one type is behind [`LinkKind`], so that a backend can have its
//! own type of device without a change here. `src/kernel/kinds/` has the netlink attributes of each type.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use weft_subnet::cidr::Family;

use crate::mac::Mac;
use crate::name::Name;

/// A network device, as it should be or as it is.
#[derive(Debug, Clone)]
pub struct Link {
    /// Its type, with the attributes of this type.
    pub kind: Arc<dyn LinkKind>,
    /// The MTU in bytes. It can be changed in place.
    pub mtu: u32,
    /// The Ethernet address, which can be changed in place. `None` if the type has none (ipip).
    pub mac: Option<Mac>,
    /// True if it is administratively up. It can be changed in place.
    pub up: bool,
}

impl Link {
    /// Returns the UDP port on which it listens now, if that port can change in place. `None` if the device is down.
    pub fn listening_port(&self) -> Option<u16> {
        self.kind.listen_port().filter(|_| self.up)
    }

    /// Returns what must be done with the device `have`, so that it is like this one.
    pub fn compare(&self, have: &Link) -> Difference {
        let same = self.mtu == have.mtu && self.up == have.up && (self.mac.is_none() || self.mac == have.mac);
        match self.kind.compare(&*have.kind) {
            Difference::None if !same => Difference::Alter,
            difference => difference,
        }
    }
}

impl PartialEq for Link {
    fn eq(&self, other: &Link) -> bool {
        let common = |link: &Link| (link.mtu, link.mac, link.up);
        common(self) == common(other) && self.kind.is_equal(&*other.kind)
    }
}

impl Eq for Link {}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mtu {}", self.kind, self.mtu)?;
        if let Some(mac) = self.mac {
            write!(f, " address {mac}")?;
        }
        f.write_str(if self.up { " up" } else { " down" })
    }
}

/// What must be done with a device, so that it is like the wanted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// Nothing.
    None,
    /// It can be changed in place, and keeps its entries.
    Alter,
    /// It must be created again, because an attribute differs that the kernel cannot change.
    Recreate,
}

/// What a firewall sees of the packets that a tunnel device sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outer {
    /// UDP to this port.
    Udp(u16),
    /// IPv4 in IPv4, protocol 4.
    Ipip,
}

/// A type of network device, with the attributes that only this type has. The file of a backend has a struct that implements it.
pub trait LinkKind: Any + Send + Sync + fmt::Debug + fmt::Display {
    /// Returns the kernel's name of the type (`IFLA_INFO_KIND`). It is empty for a device that is never made.
    fn name(&self) -> &'static str;

    /// Returns the outer device, if this one is bound to one.
    fn parent(&self) -> Option<Name> {
        None
    }

    /// Returns what its packets look like on the underlay, for the tunnel guard. `None` if it is no tunnel, or needs no guard.
    fn outer(&self) -> Option<(Family, Outer)> {
        None
    }

    /// Returns the UDP port on which it receives the packets of its tunnel, if the attributes of the link do not contain it. `None` if there
    /// is none, or if the port is not known.
    fn listen_port(&self) -> Option<u16> {
        None
    }

    /// Returns the key of net-conf whose value is part of the device's name, if there is one. A change of that key leads to a second device,
    /// which can exist beside the first one.
    fn named_after(&self) -> Option<&'static str> {
        None
    }

    /// Returns the sysctls of the device below net/ipv4/conf that its packets need, with their values.
    fn ipv4_settings(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// Returns what must be done with a device of the kind `have`, so that it is of this kind. Without an attribute that can be changed in
    /// place, a device that differs is created again.
    fn compare(&self, have: &dyn LinkKind) -> Difference {
        if self.is_equal(have) { Difference::None } else { Difference::Recreate }
    }

    /// Returns true if both are of the same type and all their attributes are equal.
    fn is_equal(&self, other: &dyn LinkKind) -> bool;
}

impl dyn LinkKind {
    /// Returns this kind as a type that a backend knows.
    pub fn of<K: LinkKind>(&self) -> Option<&K> {
        (self as &dyn Any).downcast_ref()
    }
}

/// A device of any other type that has one of our names. It is never wanted, and always replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Foreign;

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("of another type")
    }
}

impl LinkKind for Foreign {
    fn name(&self) -> &'static str {
        ""
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of::<Foreign>().is_some()
    }
}
