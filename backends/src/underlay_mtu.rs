// SPDX-License-Identifier: Apache-2.0
//! `Backend.MTU` of net-conf: the MTU of the underlay, for backends that add their header to each packet.

use crate::host::Uplink;
use crate::options::{BadOption, Options};
use crate::skip::Skip;

/// Why `Backend.MTU` is refused.
#[derive(Debug, thiserror::Error)]
#[error("Backend.MTU in net-conf is {mtu}: give the underlay's MTU, at least {least}, or 0 for the interface's")]
struct SmallMtu {
    mtu: u32,
    least: u32,
}

/// The MTU of the underlay in bytes. `None` means that of the uplink.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UnderlayMtu(Option<u32>);

impl UnderlayMtu {
    /// Reads the option, which is 0 or at least `least`.
    pub(crate) fn read(options: &Options, least: u32) -> Result<UnderlayMtu, BadOption> {
        match options.number("MTU", 0..=65535, 0)? {
            0 => Ok(UnderlayMtu(None)),
            mtu if mtu < least => Err(Skip::new(SmallMtu { mtu, least }).into()),
            mtu => Ok(UnderlayMtu(Some(mtu))),
        }
    }

    /// Returns the MTU that counts on this node: that of the uplink, unless the option is smaller.
    pub(crate) fn on(self, uplink: &Uplink) -> u32 {
        self.0.map_or(uplink.mtu, |mtu| mtu.min(uplink.mtu))
    }

    /// Returns a sentence for people if the uplink carries less than the option says.
    pub(crate) fn remark(self, uplink: &Uplink) -> Option<String> {
        let (name, carries) = (uplink.name, uplink.mtu);
        let mtu = self.0.filter(|mtu| *mtu > carries)?;
        Some(format!(
            "Backend.MTU in net-conf is {mtu}, but the uplink {name} carries {carries}: this node uses {carries}"
        ))
    }
}
