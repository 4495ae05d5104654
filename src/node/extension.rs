// SPDX-License-Identifier: Apache-2.0
//! The commands of the backend extension. [`crate::extension`] runs them.

use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::Instant;
use weft_subnet::lease::Lease;

use super::Node;
use crate::extension::Wanted;
use crate::extension::peers::Progress;
use crate::kernel::Kernel;
use crate::observe::status::PeerState;
use crate::options::NetConfCommands;

impl<K: Kernel> Node<K> {
    /// Starts the commands that are due, if the backend has commands. The loop calls this once after every event.
    pub fn update_extension(&mut self) {
        // A start without the flag does not come so far. No other path may lead to commands either.
        if self.context.options.net_conf_commands == NetConfCommands::Refuse {
            return;
        }
        let now = Instant::now();
        let plan = &self.plan;
        let Some((commands, own)) = plan.commands() else { return };
        let peers = || plan.command_peers().collect();
        // An empty first list may be that of a store that was wiped.
        let is_certain = self.passer.keep_stale_until.is_none_or(|until| until <= now);
        let was_ready = self.extension.problem(&own).is_none();
        let wanted = Wanted {
            commands,
            own,
            version: plan.peers_version(),
            peers: if self.knows_peers() { Some(&peers) } else { None },
            may_remove: self.has_list() && is_certain,
        };
        self.extension.update(&wanted, now);
        if !was_ready && self.extension.problem(&wanted.own).is_none() {
            self.write_subnet_file();
        }
    }

    /// Returns what is notified when a command has ended.
    pub fn command_ended(&self) -> Arc<Notify> {
        self.extension.ended()
    }

    /// Returns why pods must not start yet, if the command after the lease has not succeeded.
    pub(super) fn extension_problem(&self) -> Option<String> {
        let (_, own) = self.plan.commands()?;
        self.extension.problem(&own)
    }

    /// Returns how far the command for this peer is, if it has not succeeded.
    pub(super) fn command_state(&self, lease: &Lease) -> Option<(PeerState, Option<String>)> {
        match self.extension.peers().progress(&lease.subnets) {
            (Progress::Done, _) => None,
            (Progress::Pending, _) => {
                Some((PeerState::Pending, Some("the command for this peer has not ended yet".to_owned())))
            }
            (Progress::Failed, reason) => Some((PeerState::Failed, reason.map(str::to_owned))),
        }
    }
}
