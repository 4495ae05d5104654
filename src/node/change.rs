// SPDX-License-Identifier: Apache-2.0
//! A change of the backend while the agent runs, step by step (docs/adr/020-live-change.md):
//!
//! 1. The devices of the next backend are made beside those of the present one.
//! 2. When they stand, our lease names the next backend, with the present one as another way to reach us.
//! 3. Peers get some seconds to learn of that. Then packets go the new way to each peer whose lease names it.
//! 4. When no peer has needed an earlier backend for the grace time, its devices go.

use std::collections::HashMap;
use std::fmt;

use tokio::time::Instant;
use weft_backends::backend::{Backend, Skip};
use weft_backends::host::Host;
use weft_backends::identity::Identities;
use weft_backends::state::Key;

use super::Node;
use super::clear_text::ClearTextTime;
use super::net_conf::{NET_CONF, NetConfChange, SETTLING};
use super::port::Turn;
use crate::kernel::{Kernel, MachineError};
use crate::lease::acquire::identities;
use crate::plan::{ExtraBackend, FirstLeases, NextBackend, ParsedConf};

/// An earlier backend is kept for this many grace times for nodes of which nothing tells whether they have followed
/// ([`Backend::knows_options_of_flannel`]). With the default that is ten minutes. A ConfigMap reaches a node within two.
const GUESSING: u32 = 10;

/// How far a change is, as far as the plan does not know it.
#[derive(Debug, Default)]
pub(super) struct Change {
    /// The net-conf that names the next backend.
    pub(super) wanted: Option<String>,
    /// A net-conf that cannot be applied before the change of the backend or of the key that is under way has ended.
    pub(super) postponed: Option<String>,
    /// A net-conf that could not be applied, for a reason that may go away: its backend got no identities on this node, or leases are not
    /// inside its Network. It is tried again after the next full pass.
    pub(super) tried_again: Option<String>,
    /// A net-conf that changes a port, until it is the turn of this node.
    pub(super) turn: Option<Turn>,
    /// The net-conf in the store at the start, if it names another backend than our lease.
    pub(super) at_start: Option<String>,
    /// A full pass has compared the devices of the next backend.
    is_compared: bool,
    /// When packets begin to go the new way.
    sends_at: Option<Instant>,
    /// Since when no peer has needed an earlier backend, by its number.
    unused_since: HashMap<u64, Instant>,
    /// Since when an earlier backend is kept for nodes that may have followed without a sign of it in their leases, by its number.
    guessed_since: HashMap<u64, Instant>,
    /// Since when our lease names a backend that encrypts. `None` if no earlier backend may send in clear text.
    pub(super) clear_text: Option<ClearTextTime>,
    /// Since when that was so in an earlier run, and the net-conf in the store at the start. The store may not have accepted the lease of
    /// that run. Then this run makes the same change again, and its time has begun already.
    pub(super) resumed: Option<(String, ClearTextTime)>,
}

impl Change {
    /// Returns the state at the start of the agent, with the net-conf that is to be applied after the first pass, and with what an earlier
    /// run saved about clear text.
    pub(super) fn at_start(wanted: Option<String>, clear_text: Option<ClearTextTime>) -> Change {
        let resumed = wanted.clone().zip(clear_text);
        Change { at_start: wanted, clear_text, resumed, ..Change::default() }
    }
}

/// Why a backend has no new identities on this node.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoIdentities {
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error(transparent)]
    Kept(#[from] Skip),
}

impl<K: Kernel> Node<K> {
    /// Begins a change to the backend of this net-conf. A full pass must follow, which makes its devices.
    pub(super) fn begin_change(&mut self, conf: ParsedConf) -> NetConfChange {
        let text = conf.text.clone();
        let identities = match self.identities_for(&*conf.backend) {
            Ok(identities) => identities,
            Err(reason) => {
                if let Some(problem) = self.cannot_change(conf.backend.kind(), &reason) {
                    tracing::error!("{problem}");
                }
                self.change.tried_again = Some(text);
                return NetConfChange::Rejected;
            }
        };
        self.net_conf.not_applied = None;
        let (before, next) = (self.plan.net_conf().backend_type.clone(), conf.backend.kind());
        tracing::info!(before, next, "net-conf changes the backend: the devices of the next one are made first");
        let host = Host { identities, ..self.plan.host().clone() };
        self.plan.prepare(ExtraBackend::new(conf, host));
        self.change.wanted = Some(text);
        self.change.is_compared = false;
        NetConfChange::Applied
    }

    /// Shows in the status that the next backend cannot work on this node. Returns the sentence if it is new, so that it is logged once.
    fn cannot_change(&mut self, kind: &str, reason: &dyn fmt::Display) -> Option<String> {
        let before = &self.plan.net_conf().backend_type;
        let problem = format!(
            "net-conf: the backend {kind} cannot work on this node: {reason}. The node stays on {before}, and tries again"
        );
        let shown = self.net_conf.not_applied.replace(problem.clone());
        (shown.as_ref() != Some(&problem)).then_some(problem)
    }

    /// Returns the identities of the next backend: those that it had before, or those of devices that stand, or new ones.
    fn identities_for(&mut self, backend: &dyn Backend) -> Result<Identities, NoIdentities> {
        if let Some(identities) = self.plan.earlier_identities(backend) {
            return Ok(identities);
        }
        let machine = self.passer.kernel().machine().map_err(MachineError)?;
        Ok(identities::of_next_backend(backend, &machine, &self.context.secrets, &self.plan.own().attrs)?)
    }

    /// Gives the next backend up, because net-conf no longer names it. Returns true if there was one.
    pub(super) fn give_up_change(&mut self) -> bool {
        self.change.postponed = None;
        self.change.tried_again = None;
        let had_one = self.change.wanted.take().is_some();
        if had_one {
            self.plan.give_up_next();
            // Its devices must go even if the net-conf in its place cannot be applied.
            self.schedule.audit_by(Instant::now(), NET_CONF);
        }
        had_one
    }

    /// Takes notice that a full pass has ended.
    pub(super) fn pass_ended_in_change(&mut self) {
        self.change.is_compared = self.kernel_problem.is_none();
        if self.change.is_compared
            && let Some(text) = self.change.tried_again.take()
            && self.apply_net_conf(&text) == NetConfChange::Applied
        {
            self.schedule.audit_by(Instant::now(), NET_CONF);
        }
        self.continue_change(Instant::now());
    }

    /// Returns when [`Node::continue_change`] has something to do.
    pub(super) fn next_step_of_change(&self) -> Option<Instant> {
        let grace = self.context.options.change_grace;
        let unused = self.change.unused_since.values().map(|since| *since + grace);
        let drops = unused.chain(self.change.guessed_since.values().map(|since| *since + grace * GUESSING));
        let turn = self.change.turn.as_ref().map(Turn::at);
        drops.chain(turn).chain(self.change.sends_at).chain(self.clear_text_end(Instant::now())).min()
    }

    /// Does the next step of a change, if it is time for it.
    pub(super) fn continue_change(&mut self, now: Instant) {
        if !self.plan.is_changing() {
            return;
        }
        if self.change.is_compared {
            self.switch_if_ready();
        }
        self.end_clear_text(now);
        self.send_current_if_settled(now);
        self.drop_unused(now);
    }

    /// Lets our lease name the next backend when its devices stand.
    fn switch_if_ready(&mut self) {
        let Some(NextBackend { kind, devices, problem }) = self.plan.next() else { return };
        // Peers that are not known yet would count as new ones, which are never reached in clear text.
        if self.plan.next_ends_clear_text() && !self.knows_peers() {
            return;
        }
        let problem = problem.or_else(|| self.missing_device(&devices)).or_else(|| self.next_tunnel_problem());
        if let Some(problem) = problem {
            if let Some(problem) = self.cannot_change(kind, &problem) {
                tracing::warn!("{problem}");
            }
            return;
        }
        let before = self.plan.net_conf().backend_type.clone();
        let Some(text) = self.plan.switch_to_next(self.net_conf.text.clone()) else { return };
        self.clear_text_after_change(&before, Instant::now());
        tracing::info!(before, now = kind, "the backend changes: our lease names the new one and the earlier one");
        (self.net_conf.text, self.net_conf.not_applied) = (text, None);
        self.change.wanted = None;
        self.change.sends_at = None;
        self.update_own_lease();
        // A restart must find when the change began.
        self.save_now();
        self.schedule.audit_by(Instant::now(), NET_CONF);
    }

    /// Returns which of these devices does not carry packets, and why.
    fn missing_device(&self, devices: &[Key]) -> Option<String> {
        let foreign = self.passer.foreign_devices();
        let problem = |key: &Key| match key {
            Key::Link(name) if foreign.contains(name) => Some(format!("another program made the device {name}")),
            key => {
                let pending = self.passer.pending().get(key).filter(|pending| !pending.works)?;
                Some(format!("{key}: {}", pending.reason))
            }
        };
        devices.iter().find_map(problem)
    }

    /// Lets packets go the way that our lease names, some time after the store has accepted the lease.
    fn send_current_if_settled(&mut self, now: Instant) {
        if !self.plan.is_settling() {
            // The earlier backends may have gone while packets still went by them.
            self.change.sends_at = None;
            return;
        }
        // Peers choose the way by what the lease says beside its addresses, which an administrator may have chosen.
        let is_accepted = self.plan.own().attrs.same_but_addresses(&self.wanted_attrs());
        if self.own_lease.tasks.is_call_open() || !is_accepted {
            self.change.sends_at = None;
            return;
        }
        let settling = self.context.options.change_grace / SETTLING;
        if *self.change.sends_at.get_or_insert(now + settling) <= now {
            self.change.sends_at = None;
            // A change that was taken back at once left packets where they were.
            if self.plan.sends_earlier() {
                tracing::info!(
                    backend = self.plan.net_conf().backend_type,
                    "packets go by the new backend from now on"
                );
            }
            self.plan.send_current();
            // A restart must not let packets go the earlier way again.
            self.save_now();
            self.schedule.audit_by(now, "packets go by the new backend from now on");
        }
    }

    /// Removes the earlier backends that no peer has needed for the grace time.
    fn drop_unused(&mut self, now: Instant) {
        let earlier: Vec<u64> = self.plan.earlier().map(|(number, _)| number).collect();
        self.change.unused_since.retain(|number, _| earlier.contains(number));
        self.change.guessed_since.retain(|number, _| earlier.contains(number));
        // Peers may send by an earlier backend as long as our lease, as they know it, names that one.
        if self.plan.is_settling() || !self.has_list() {
            self.change.unused_since.clear();
            self.change.guessed_since.clear();
            return;
        }
        for number in earlier {
            if !self.is_time_over(number, now) {
                continue;
            }
            let backend = self.plan.earlier_kind(number);
            match self.plan.users(number, 0).count {
                0 => tracing::info!(backend, "no peer needs the earlier backend any more: it is removed"),
                users => {
                    tracing::warn!(users, "nodes that may not have followed are reached as net-conf says from now on")
                }
            }
            self.change.unused_since.remove(&number);
            self.change.guessed_since.remove(&number);
            self.plan.drop_earlier(number);
            self.update_own_lease();
            self.save_later();
            self.schedule.audit_by(now, "no peer needs the earlier backend any more");
        }
        self.apply_postponed();
    }

    /// Returns true if no peer has needed this earlier backend for the grace time, or if it is only a guess that peers need it, and the time
    /// for that is over.
    fn is_time_over(&mut self, number: u64, now: Instant) -> bool {
        let (grace, change) = (self.context.options.change_grace, &mut self.change);
        if !self.plan.is_earlier_used(number) {
            change.guessed_since.remove(&number);
            return now >= *change.unused_since.entry(number).or_insert(now) + grace;
        }
        change.unused_since.remove(&number);
        let is_guess = self.plan.is_earlier_guessed(number);
        is_guess && now >= *change.guessed_since.entry(number).or_insert(now) + grace * GUESSING
    }

    /// Applies the net-conf that had to wait, unless the backend still changes.
    pub(super) fn apply_postponed(&mut self) {
        if !self.plan.is_changing()
            && let Some(text) = self.change.postponed.take()
            && self.apply_net_conf(&text) == NetConfChange::Applied
        {
            self.schedule.audit_by(Instant::now(), NET_CONF);
        }
    }

    /// Names the peers that still need an earlier backend.
    pub(super) fn change_warnings(&self) -> Vec<String> {
        let refused = self.refused_warning();
        if self.plan.is_settling() {
            return refused.into_iter().collect();
        }
        let now = &self.plan.net_conf().backend_type;
        let warning = |number: u64| {
            let (kind, users) = (self.plan.earlier_kind(number), self.plan.users(number, FirstLeases::NAMED));
            let (count, remark) = (users.count, self.clear_text_remark(self.plan.refuses(kind)));
            (count > 0).then(|| {
                format!(
                    "net-conf changed the backend to {now}, and {count} nodes still need the earlier {kind}: {users}{remark}. They are \
                     down, cannot use {now}, or run flannel, which follows no change before its restart: see what weft status says there, \
                     replace flannel by weft, and remove the lease of a node that does not come back (weft lease rm ID)"
                )
            })
        };
        self.plan.earlier().filter_map(|(number, _)| warning(number)).chain(refused).collect()
    }
}
