// SPDX-License-Identifier: Apache-2.0
//! The commands of the own backend, if it has any ([`crate::extension`] runs them).

use std::sync::Arc;

use weft_backends::commands::{CommandPeer, Commands, Variable};

use super::Plan;

impl Plan {
    /// Returns the commands of the own backend, and the variables of the one that runs when this node has its lease.
    pub fn commands(&self) -> Option<(&Arc<Commands>, Vec<Variable>)> {
        Some((self.backend.commands()?, self.backend.own_variables(&self.own)))
    }

    /// Iterates over the peers for which commands run. They are computed from the believed leases. They change only with
    /// [`Plan::peers_version`].
    pub fn command_peers(&self) -> impl Iterator<Item = CommandPeer> {
        let served = self.peers.believed().filter(|lease| self.backend.serves(&lease.attrs.backend_type));
        served.filter_map(|lease| self.backend.command_peer(lease))
    }
}
