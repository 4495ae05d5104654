// SPDX-License-Identifier: Apache-2.0
//! The type of a WireGuard device.

use std::fmt;

use crate::link::{Difference, LinkKind};
use crate::wireguard_key::PublicKey;

/// Its kind.
pub const DEVICE_KIND: &str = "wireguard";

/// A WireGuard device. All its attributes can be changed in place, so weft takes over a device of flannel with its sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireGuardLink {
    /// The public key that belongs to the private key of the device. `None` if the device has no key, or if it was not read.
    pub public: Option<PublicKey>,
    /// The UDP port on which the device listens. It is 0 if it was not read.
    pub port: u16,
}

impl fmt::Display for WireGuardLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "wireguard port {}", self.port)?;
        match self.public {
            Some(public) => write!(f, " key {public}"),
            None => f.write_str(" without a key"),
        }
    }
}

impl LinkKind for WireGuardLink {
    fn name(&self) -> &'static str {
        DEVICE_KIND
    }

    fn listen_port(&self) -> Option<u16> {
        (self.port != 0).then_some(self.port)
    }

    fn compare(&self, have: &dyn LinkKind) -> Difference {
        match have.of::<WireGuardLink>() {
            Some(have) if have == self => Difference::None,
            Some(_) => Difference::Alter,
            None => Difference::Recreate,
        }
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of() == Some(self)
    }
}
