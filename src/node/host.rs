// SPDX-License-Identifier: Apache-2.0
//! The facts of the host with which the plan is made: its uplink, addresses and routes.

use std::time::Duration;

use tokio::time::Instant;
use weft_backends::host::{Host, Uplink};
use weft_backends::state::Name;

use super::Node;
use crate::kernel::{Kernel, Machine, MachineError};
use crate::lease::acquire;
use crate::log::chain;
use crate::observe::problem::{Problem, ProblemKind};
use crate::uplink::{self, Next, PickError, Picked};

/// Time for which the node waits for an uplink that is gone before it uses another one. A network daemon that is restarted,
/// or a DHCP client that renews its lease, gives the address back within seconds, and a change of the uplink costs every
/// peer an update.
pub(super) const UPLINK_WAIT: Duration = Duration::from_secs(10);

/// What is wrong with the uplink.
#[derive(Debug, Default)]
pub(super) struct UplinkState {
    /// Since when the uplink, or its address, is gone.
    pub(super) gone_since: Option<Instant>,
    /// When another uplink is used instead.
    pub(super) change_due: Option<Instant>,
    /// What was last logged about the published address of each family. It is logged once.
    logged: [Option<String>; 2],
    /// Why the facts of the host cannot be used.
    pub(super) problem: Option<String>,
    /// Why the link of the uplink carries no packets, if it does not.
    pub(super) link_problem: Option<Problem>,
}

impl UplinkState {
    /// Returns when another uplink is to be used.
    pub(super) fn next(&self) -> Option<Instant> {
        self.change_due
    }

    /// Returns true once when another uplink is to be used.
    pub(super) fn take_due(&mut self, now: Instant) -> bool {
        self.change_due.take_if(|due| *due <= now).is_some()
    }

    fn is_back(&mut self) {
        (self.gone_since, self.change_due) = (None, None);
    }

    /// Takes over the state of the link, and logs when it changes.
    fn look_at_link(&mut self, machine: &Machine, uplink: Name) {
        let before = std::mem::replace(&mut self.link_problem, link_problem(machine, uplink));
        match &self.link_problem {
            Some(problem) if before.as_ref() != Some(problem) => tracing::warn!("{problem}"),
            None if before.is_some() => tracing::info!(%uplink, "the link of the uplink carries packets again"),
            _ => {}
        }
    }

    fn log_remarks(&mut self, remarks: [Option<String>; 2]) {
        for (logged, remark) in self.logged.iter_mut().zip(remarks) {
            if let Some(text) = remark.filter(|text| logged.as_ref() != Some(text)) {
                tracing::warn!("uplink: {text}");
                *logged = Some(text);
            }
        }
    }
}

/// Why the plan keeps the uplink that it has, although the host no longer has it like that.
#[derive(Debug, thiserror::Error)]
enum UplinkProblem {
    /// It is gone, and another one could take its place.
    #[error("{lost}: {} ({}) is used instead if that lasts {} s", next.name, addresses(next), UPLINK_WAIT.as_secs())]
    Gone { lost: String, next: Box<Uplink> },
    /// It is gone, and there is no other.
    #[error("{}", chain(.0))]
    None(#[from] PickError),
}

/// Returns why a link carries no packets, if it does not. One that is gone altogether is another problem.
fn link_problem(machine: &Machine, uplink: Name) -> Option<Problem> {
    let link = machine.links.iter().find(|link| link.name == uplink)?;
    let problem = |text: String| Problem::new(ProblemKind::Uplink, format!("uplink: {uplink} {text}"));
    if !link.up {
        let command = format!("ip link set {uplink} up");
        return Some(problem(format!("is down; run: {command}")).with_command(command));
    }
    let remedy = "look at its cable, at the switch, or at the network of this virtual machine";
    (!link.carrier).then(|| problem(format!("has no carrier: {remedy}")))
}

fn addresses(uplink: &Uplink) -> String {
    uplink.addresses().map(|ip| ip.to_string()).collect::<Vec<_>>().join(" ")
}

impl<K: Kernel> Node<K> {
    /// Reads links, addresses and routes of the host. If they matter to the plan, it is made again, and the own lease is
    /// updated. Returns true if a full pass must follow.
    pub(super) fn refresh_host(&mut self) -> bool {
        let has_changed = self.take_over_host();
        // The fault is shown as long as it lasts, also while the host stays as it is.
        self.writable_attrs();
        has_changed
    }

    fn take_over_host(&mut self) -> bool {
        let machine = match self.passer.kernel().machine_towards(self.context.options.uplink.can_reach) {
            Ok(machine) => machine,
            Err(error) => {
                tracing::error!("{}", MachineError(error));
                return false;
            }
        };
        self.uplink.look_at_link(&machine, self.plan.host().uplink.name);
        let picked = match self.pick_uplink(&machine) {
            Ok(picked) => picked,
            Err(problem) => {
                let problem = problem.to_string();
                if self.uplink.problem.as_ref() != Some(&problem) {
                    tracing::warn!("uplink: {problem}");
                }
                self.uplink.problem = Some(problem);
                return false;
            }
        };
        self.uplink.problem = None;
        let now = self.plan.host();
        let host = acquire::host(&picked, &machine, self.plan.net_conf(), now.identities.clone());
        let host = Host { kept_ports: now.kept_ports.clone(), ..host };
        let host = self.plan.without_own_networks(host);
        if host == *now {
            return false;
        }
        if let Some(changed) = self.plan.update_host_networks(&host) {
            return !changed.is_empty();
        }
        let now = self.plan.host();
        if host.uplink != now.uplink || host.public_v4 != now.public_v4 || host.public_v6 != now.public_v6 {
            tracing::info!(uplink = ?host.uplink, "the uplink changed");
            self.save_later();
        }
        let own = self.plan.own().clone();
        self.plan.rebase_on(host, own);
        self.update_own_lease();
        true
    }

    /// Returns the uplink. One that is gone is waited for, and another one is used only when it stays away.
    fn pick_uplink(&mut self, machine: &Machine) -> Result<Picked, UplinkProblem> {
        let candidates = acquire::candidates(machine, self.plan.net_conf(), self.plan.own().subnets);
        let choice = &self.context.options.uplink;
        match uplink::next(choice, &candidates, &self.plan.host().uplink) {
            Ok(Next::Stay(picked)) => {
                self.uplink.is_back();
                self.uplink.log_remarks(uplink::remarks(choice, &candidates, &picked.uplink));
                Ok(picked)
            }
            Ok(Next::Gone { lost, next }) => {
                let since = *self.uplink.gone_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= UPLINK_WAIT {
                    self.uplink.is_back();
                    return Ok(next);
                }
                self.uplink.change_due = Some(since + UPLINK_WAIT);
                Err(UplinkProblem::Gone { lost, next: Box::new(next.uplink) })
            }
            Err(error) => {
                self.uplink.gone_since.get_or_insert_with(Instant::now);
                Err(error.into())
            }
        }
    }
}
