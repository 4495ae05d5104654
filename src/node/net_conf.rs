// SPDX-License-Identifier: Apache-2.0
//! net-conf, and what a change of it leads to while the agent runs.

use std::net::IpAddr;

use tokio::time::Instant;
use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_subnet::net_conf::NetConf;
use weft_subnet::text::Shown;

use super::Node;
use crate::kernel::Kernel;
use crate::plan::{ParsedConf, ignored_names};

/// Keys of net-conf whose change is applied only by a restart of the agent.
const NEED_RESTART: [&str; 3] = ["EnableIPv4", "EnableIPv6", "EnableNFTables"];
/// What the full pass after a new net-conf is for, in the history.
pub(super) const NET_CONF: &str = "another net-conf is applied";
/// Packets go the way of a new net-conf after this part of the grace time, and each node changes a port within it. With the default of a minute
/// it is 6 s. WireGuard needs that: if two nodes begin a handshake with each other in the same moment, both fail, and the kernel tries again
/// after 5 to 5.34 s.
pub(super) const SETTLING: u32 = 10;

/// The net-conf that is in force.
#[derive(Debug)]
pub(super) struct NetConfInForce {
    /// Its text, as it is in the store.
    pub(super) text: String,
    /// Why the net-conf in the store is not in force: it needs a restart, cannot be read, or cannot be applied on this node.
    pub(super) not_applied: Option<String>,
    /// The published addresses that the store has chosen for this node.
    pub(super) chosen: [Option<IpAddr>; 2],
}

impl NetConfInForce {
    pub(super) fn new(text: String, chosen: [Option<IpAddr>; 2]) -> NetConfInForce {
        NetConfInForce { text, not_applied: None, chosen }
    }
}

/// Logs the names that have no effect. They are also a remark of the status.
pub(super) fn log_ignored_names(net_conf: &NetConf) {
    if let Some(sentence) = ignored_names(net_conf) {
        tracing::warn!("{sentence}");
    }
}

/// What became of a net-conf that the store sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NetConfChange {
    /// It is the one in force.
    None,
    /// It cannot be applied, and the earlier one stays in force.
    Rejected,
    /// It is in force now, or begins to be. A full pass must follow.
    Applied,
}

/// Why a net-conf is not applied.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("net-conf: restart the agent to apply the change of {0}")]
    NeedsRestart(String),
    #[error(
        "net-conf: the commands of the backend extension begin and end with the agent: restart the agent on each node to apply the change \
         of {0}. Until then, nodes with the old and nodes with the new backend do not reach each other"
    )]
    Commands(String),
    #[error(
        "net-conf: {count} leases are not inside the new Network, the first is {first}: choose a Network that contains all \
         leases, or let these nodes give theirs back first (weft lease rm)"
    )]
    LeasesOutside { first: String, count: usize },
    #[error(
        "net-conf: the change of {keys} cannot be applied while packets go through {device}, because Linux fixes this when the \
         device is made: {remedy}restart the agent on all nodes, which loses packets meanwhile"
    )]
    FixedDevice { keys: String, device: String, remedy: String },
    #[error(
        "net-conf: the key of this node changes (weft rotate-key), and the store has not accepted our lease with it yet: the backend changes \
         after that"
    )]
    KeyChanges,
    #[error(
        "net-conf: the port and the mode of {device} change one after the other, so that packets find it: let all nodes have the new port \
         first, and change the mode then"
    )]
    PortAndMode { device: String },
    #[error(
        "net-conf: the port of {device} changes when the change of the mode has ended, because peers still need the port of now"
    )]
    PortDuringChange { device: String },
}

impl<K: Kernel> Node<K> {
    /// Applies this net-conf, if it is another one and needs no restart. If it changes a port, it is applied when it is the turn of this node.
    pub(super) fn apply_net_conf(&mut self, text: &str) -> NetConfChange {
        if let Some(turn) = self.change.turn.take_if(|turn| turn.text() != text)
            && self.is_other_mode(text)
        {
            // Other nodes have the port already, and see nothing but another mode in this net-conf.
            self.end_turn(&turn, Instant::now());
        }
        self.apply(text, true)
    }

    fn is_other_mode(&self, text: &str) -> bool {
        ParsedConf::parse(text).is_ok_and(|conf| self.changes_mode(&*conf.backend))
    }

    /// Returns true if this backend changes an option of that of our lease in such a way that the lease must name both.
    fn changes_mode(&self, backend: &dyn Backend) -> bool {
        backend.serves(&self.plan.net_conf().backend_type) && !self.plan.is_understood_by(backend)
    }

    /// Applies this net-conf. With `may_wait`, one that changes a port waits for the turn of this node.
    pub(super) fn apply(&mut self, text: &str, may_wait: bool) -> NetConfChange {
        if self.change.wanted.as_deref() == Some(text) {
            return NetConfChange::None;
        }
        // Whoever may write net-conf may begin the time for clear text again.
        self.change.resumed.take_if(|(of, _)| of.as_str() != text);
        let gave_up = self.give_up_change();
        let conf = match ParsedConf::parse(text) {
            Ok(conf) => conf,
            Err(reason) => {
                tracing::error!("the new {reason}; the old one stays in force");
                self.net_conf.not_applied = Some(format!("the new {reason}"));
                return NetConfChange::Rejected;
            }
        };
        // A start may have taken some keys from a newer net-conf than this text.
        if text == self.net_conf.text && conf.net_conf == *self.plan.net_conf() {
            self.net_conf.not_applied = None;
            return if gave_up { NetConfChange::Applied } else { NetConfChange::None };
        }
        let changed = self.plan.net_conf().differing_keys(&conf.net_conf);
        if let Err(refusal) = self.check_net_conf(&changed, &conf.net_conf, &*conf.backend) {
            self.refuse_net_conf(text, &refusal);
            return NetConfChange::Rejected;
        }
        log_ignored_names(&conf.net_conf);
        if !self.plan.is_understood_by(&*conf.backend) {
            self.give_up_key_change();
            return self.begin_change(conf);
        }
        self.net_conf.not_applied = None;
        if may_wait && self.waits_for_turn(text, &*conf.backend) {
            return if gave_up { NetConfChange::Applied } else { NetConfChange::None };
        }
        tracing::info!(keys = %Shown(&changed.join(" ")), "net-conf changed: applied");
        let ParsedConf { text, net_conf, backend } = conf;
        self.net_conf.text = text;
        let kept_ports = self.plan.ports_until_pass(&*backend, self.plan.host());
        let (host, own) = (Host { kept_ports, ..self.plan.host().clone() }, self.plan.own().clone());
        self.plan.rebase(net_conf, backend, host, own);
        self.update_own_lease();
        NetConfChange::Applied
    }

    /// Shows why this net-conf is refused, and remembers it if the reason may go away.
    fn refuse_net_conf(&mut self, text: &str, refusal: &Refusal) {
        let problem = refusal.to_string();
        // What is tried again after each full pass is logged once.
        if self.net_conf.not_applied.as_ref() != Some(&problem) {
            tracing::warn!("{problem}");
        }
        match refusal {
            Refusal::KeyChanges => self.change.postponed = Some(text.to_owned()),
            Refusal::FixedDevice { .. } if self.plan.is_changing() => self.change.postponed = Some(text.to_owned()),
            Refusal::PortDuringChange { .. } => self.change.postponed = Some(text.to_owned()),
            Refusal::LeasesOutside { .. } => self.change.tried_again = Some(text.to_owned()),
            _ => {}
        }
        self.net_conf.not_applied = Some(problem);
    }

    /// Checks that a change of these keys can be applied without a restart, and that no lease and no packet is lost by it.
    fn check_net_conf(&self, changed: &[String], net_conf: &NetConf, backend: &dyn Backend) -> Result<(), Refusal> {
        let among = |keys: &dyn Fn(&str) -> bool| {
            changed.iter().map(String::as_str).filter(|key| keys(key)).collect::<Vec<_>>().join(", ")
        };
        let fixed = among(&|key| NEED_RESTART.contains(&key));
        if !fixed.is_empty() {
            return Err(Refusal::NeedsRestart(fixed));
        }
        if backend.commands() != self.plan.commands().map(|(commands, _)| commands) {
            return Err(Refusal::Commands(among(&|key| key.starts_with("Backend."))));
        }
        if let Some((first, count)) = self.plan.outside(&net_conf.networks) {
            return Err(Refusal::LeasesOutside { first: Shown(&first).to_string(), count });
        }
        if let Some((device, key)) = self.plan.device_to_recreate(backend, self.plan.host()) {
            let remedy = key.map(|key| format!("change {key} in the same step, or ")).unwrap_or_default();
            let keys = among(&|key| key.starts_with("Backend."));
            return Err(Refusal::FixedDevice { keys, device: device.to_string(), remedy });
        }
        if self.is_key_uncertain() && !self.plan.is_understood_by(backend) {
            return Err(Refusal::KeyChanges);
        }
        self.check_port(backend)
    }

    /// Checks that no lease names a port, or has another way with a port, on which nobody listens.
    fn check_port(&self, backend: &dyn Backend) -> Result<(), Refusal> {
        let moved = self.plan.moved_port(backend).map(|device| device.to_string());
        if self.changes_mode(backend) {
            return moved.map_or(Ok(()), |device| Err(Refusal::PortAndMode { device }));
        }
        match moved.filter(|_| self.plan.has_earlier_mode()) {
            Some(device) => Err(Refusal::PortDuringChange { device }),
            None => Ok(()),
        }
    }
}
