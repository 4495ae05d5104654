// SPDX-License-Identifier: Apache-2.0
//! Whose entry is it? A key that we desire is ours whoever wrote it; this module answers for all the others.

use std::collections::BTreeSet;

use weft_subnet::cidr::Subnets;

use crate::host::OnLink;
use crate::state::{Key, Name, Seen};

/// `rtm_protocol` of every route and nexthop that weft writes.
pub const PROTOCOL: u8 = 90;

/// What tells our leftovers from other people's entries.
#[derive(Debug, Clone, Default)]
pub struct Ownership {
    /// Devices that are ours: those in the plan, those of flannel's names for our VNI, those with our ifalias of this instance.
    pub devices: BTreeSet<Name>,
    /// Our Network.
    pub networks: Subnets,
    /// Our own subnet: never a leftover (cni0's connected route).
    pub own: Subnets,
    /// subnet.env, as found at start, named this same Network: then routes without protocol (0, or boot 3) whose gateway is
    /// on-link are an earlier flannel host-gw's.
    pub flannel_was_here: bool,
}

impl Ownership {
    /// True when an entry that is not desired may be removed.
    pub fn ours(&self, key: &Key, seen: &Seen, on_link: &OnLink) -> bool {
        let _ = (key, seen, on_link);
        false
    }
}
