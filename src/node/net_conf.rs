// SPDX-License-Identifier: Apache-2.0
//! net-conf, and what a change of it leads to while the agent runs.

use std::net::IpAddr;

use weft_subnet::text::Shown;

use super::Node;
use crate::kernel::Kernel;
use crate::lease::acquire;

/// Keys of net-conf whose change is applied only by a restart of the agent.
const NEED_RESTART: [&str; 6] =
    ["EnableIPv4", "Network", "EnableIPv6", "IPv6Network", "EnableNFTables", "Backend.Type"];

/// The net-conf that is in force.
#[derive(Debug)]
pub(super) struct NetConf {
    /// Its text, as it is in the store.
    pub(super) text: String,
    /// Why the net-conf in the store is not in force: it needs a restart, or cannot be read.
    pub(super) not_applied: Option<String>,
    /// The public addresses that the store has chosen for this node.
    pub(super) chosen: [Option<IpAddr>; 2],
}

impl NetConf {
    pub(super) fn new(text: String, chosen: [Option<IpAddr>; 2]) -> NetConf {
        NetConf { text, not_applied: None, chosen }
    }
}

/// What became of a net-conf that the store sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NetConfChange {
    /// It is the one in force.
    None,
    /// It cannot be applied, and the earlier one stays in force.
    Rejected,
    /// It is in force now. A full pass must follow.
    Applied,
}

impl<K: Kernel> Node<K> {
    /// Applies this net-conf, if it is another one and needs no restart.
    pub(super) fn apply_net_conf(&mut self, text: &str) -> NetConfChange {
        if text == self.net_conf.text {
            self.net_conf.not_applied = None;
            return NetConfChange::None;
        }
        let (network, backend) = match acquire::parse(text) {
            Ok(parsed) => parsed,
            Err(reason) => {
                tracing::error!("the new {reason}; the old one stays in force");
                self.net_conf.not_applied = Some(format!("the new {reason}"));
                return NetConfChange::Rejected;
            }
        };
        let changed = self.plan.network().same_except(&network);
        let fixed: Vec<&str> = changed.iter().map(String::as_str).filter(|key| NEED_RESTART.contains(key)).collect();
        if !fixed.is_empty() {
            let text = format!("net-conf: restart the agent to apply the change of {}", fixed.join(", "));
            tracing::warn!("{text}");
            self.net_conf.not_applied = Some(text);
            return NetConfChange::Rejected;
        }
        tracing::info!(keys = %Shown(&changed.join(" ")), "net-conf changed: applied");
        (self.net_conf.not_applied, self.net_conf.text) = (None, text.to_owned());
        let (host, own) = (self.plan.host().clone(), self.plan.own().clone());
        self.plan.rebase(network, backend, host, own);
        self.update_own_lease();
        NetConfChange::Applied
    }
}
