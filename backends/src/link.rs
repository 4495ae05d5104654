// SPDX-License-Identifier: Apache-2.0
//! Network devices of ours. What all devices have is in [`Link`]; what belongs to one type alone is behind [`LinkKind`], so that a
//! backend brings its own type of device without a change here. How the kernel is told of a type: `src/kernel/kinds/`.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use weft_subnet::cidr::Family;

use crate::state::{Mac, Name};

/// A network device, as it should be or as it is.
#[derive(Debug, Clone)]
pub struct Link {
    /// Its type, with the attributes of this type.
    pub kind: Arc<dyn LinkKind>,
    /// Bytes. Changed in place.
    pub mtu: u32,
    /// Changed in place; `None` where the type has none (ipip).
    pub mac: Option<Mac>,
    /// Administratively up. Changed in place.
    pub up: bool,
}

impl Link {
    /// What must be done with the device `have`, so that it is like this one.
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

/// How far a device is from the wanted one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// It is as it should be.
    None,
    /// It can be changed in place, and keeps what stands on it.
    Alter,
    /// Only a new device will do: an attribute differs that the kernel fixes when it makes the device.
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

/// A type of network device, with the attributes that only this type has. Implemented by a plain struct, next to its backend.
pub trait LinkKind: Any + Send + Sync + fmt::Debug + fmt::Display {
    /// The kernel's name of the type (`IFLA_INFO_KIND`); empty for a device that is never made.
    fn name(&self) -> &'static str;

    /// The device that the packets leave by, if it is bound to one.
    fn parent(&self) -> Option<Name> {
        None
    }

    /// What the underlay sees of its packets, for the tunnel guard; `None` for what is no tunnel or needs no guard.
    fn outer(&self) -> Option<(Family, Outer)> {
        None
    }

    /// The key of net-conf that the name of the device contains, if one does. A change of that key leads to a second device, which can
    /// stand beside the first one.
    fn named_after(&self) -> Option<&'static str> {
        None
    }

    /// The sysctls of the device below net/ipv4/conf that its packets need, each with its value.
    fn ipv4_settings(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// What must be done with a device of the kind `have`, so that it is of this one.
    fn compare(&self, have: &dyn LinkKind) -> Difference;

    /// True when both are of one type and all their attributes are equal.
    fn is_equal(&self, other: &dyn LinkKind) -> bool;
}

impl dyn LinkKind {
    /// This kind as the type that a backend knows.
    pub fn of<K: LinkKind>(&self) -> Option<&K> {
        (self as &dyn Any).downcast_ref()
    }
}

/// A device of any other type, which bears a name of ours: never wanted, always replaced.
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

    fn compare(&self, have: &dyn LinkKind) -> Difference {
        if self.is_equal(have) { Difference::None } else { Difference::Recreate }
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of::<Foreign>().is_some()
    }
}
