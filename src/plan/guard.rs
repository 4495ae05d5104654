// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard in the plan: the chains and the peers that may send packets into the tunnel.

use weft_backends::index::Changed;
use weft_backends::state::Key;
use weft_subnet::lease::{Age, Id};

use super::Plan;
use crate::firewall::guard::TunnelPeers;

/// Contributor of the tunnel guard's chains. No lease has an id that begins with a slash.
const GUARD: &str = "/guard";

impl Plan {
    /// Adds the tunnel guard if `guard` is true. This must be called before the first [`Plan::put`].
    pub fn with_tunnel_guard(mut self, guard: bool) -> Plan {
        self.guard = guard.then(TunnelPeers::default);
        self
    }

    /// Returns the keys of the tunnel guard.
    pub fn guard_keys(&self) -> impl Iterator<Item = Key> {
        self.index.iter().map(|(key, _)| key).filter(Key::is_of_guard)
    }

    /// Describes the tunnel guard. Returns `None` if the flags ask for none.
    pub fn guard(&self) -> Option<String> {
        self.guard.as_ref().map(TunnelPeers::to_string)
    }

    /// Plans the chains of the tunnel guard, after devices or peers changed.
    pub(super) fn plan_guard(&mut self) -> Vec<Changed> {
        let Some(guard) = &self.guard else { return Vec::new() };
        let links = self.devices.iter().filter_map(|name| self.index.desired(&Key::Link(*name)));
        let state = guard.chains(links);
        self.index.set(&Id::from(GUARD), &Age::default(), state)
    }
}
