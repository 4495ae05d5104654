// SPDX-License-Identifier: Apache-2.0
//! Defects that weft had once. The simulator switches them on again, one at a time, and must then find them (`sim/tests/seeds.rs`).
//! Without the feature `old-defects`, which only the simulator has, [`is_back`] is always false and costs nothing.

/// A defect that was mended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "old-defects", derive(serde::Serialize, serde::Deserialize))]
pub enum Defect {
    /// At each start, static routes inside Network were taken for flannel's and removed.
    ForeignRoutesRemoved,
    /// A lease that covers the LAN of a node was believed.
    LanLeasesBelieved,
    /// A start without the store used the saved lease although it had ended, and another node might have the subnet.
    EndedLeasesUsed,
    /// A virtual address that came to a node with DHCP was published at once, and a lease that names our address was ours whatever subnet.env says.
    VirtualAddressesPublished,
    /// A device of weft could be chosen as uplink while the uplink had no address.
    OwnDeviceChosen,
    /// A device of another program was taken over when the lease of a peer asked for its VNI.
    ForeignDevicesSeized,
    /// The routes of a lease stayed although a newer lease with the same VtepMAC had the forwarding entry, so the other node got the packets.
    CopiedMacsBelieved,
}

/// Returns true if this defect is switched on.
#[cfg(not(feature = "old-defects"))]
#[inline]
pub const fn is_back(_: Defect) -> bool {
    false
}

#[cfg(feature = "old-defects")]
mod switch {
    use std::cell::Cell;

    use super::Defect;

    thread_local! {
        static DEFECT: Cell<Option<Defect>> = const { Cell::new(None) };
    }

    /// Switches a defect on for this thread.
    pub fn bring_back(defect: Option<Defect>) {
        DEFECT.set(defect);
    }

    /// Returns true if this defect is switched on.
    pub fn is_back(defect: Defect) -> bool {
        DEFECT.get() == Some(defect)
    }
}
#[cfg(feature = "old-defects")]
pub use switch::{bring_back, is_back};
