// SPDX-License-Identifier: Apache-2.0
//! What the plan is made with besides leases: net-conf and the facts of the machine. A change of either plans everything again.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use weft_subnet::lease::Id;
use weft_subnet::text::Shown;

use super::Node;
use crate::kernel::{Kernel, Machine};
use crate::lease::acquire;
use crate::log::chain;
use crate::sysctls;
use crate::sysctls::loosened::Wanted;
use crate::uplink::{self, Next, Picked};

/// So long an uplink that is gone is waited for before the node moves to another one: a daemon that is restarted, or a DHCP client
/// that renews, gives the address back within seconds, and a move costs every peer an update.
pub(super) const UPLINK_AWAY: Duration = Duration::from_secs(10);

/// Between two looks at the sysctls.
const SYSCTLS_EVERY: Duration = Duration::from_secs(10);
/// Keys of net-conf that only a restart of the agent applies.
const ONLY_BY_RESTART: [&str; 6] =
    ["EnableIPv4", "Network", "EnableIPv6", "IPv6Network", "EnableNFTables", "Backend.Type"];

impl<K: Kernel> Node<K> {
    /// Applies another net-conf. True when everything must be looked at.
    pub(super) fn configured(&mut self, text: &str) -> bool {
        if text == self.config {
            self.restart_wanted = None;
            return false;
        }
        let (network, backend) = match acquire::parse(text) {
            Ok(parsed) => parsed,
            Err(reason) => {
                tracing::error!("the new {reason}; the old one stays in force");
                self.restart_wanted = Some(format!("the new {reason}"));
                return false;
            }
        };
        let changed = self.plan.network().same_except(&network);
        let fixed: Vec<&str> = changed.iter().map(String::as_str).filter(|key| ONLY_BY_RESTART.contains(key)).collect();
        if !fixed.is_empty() {
            let text = format!("net-conf: restart the agent to apply the change of {}", fixed.join(", "));
            tracing::warn!("{text}");
            self.restart_wanted = Some(text);
            return false;
        }
        tracing::info!(keys = %Shown(&changed.join(" ")), "net-conf changed: applied");
        (self.restart_wanted, self.config) = (None, text.to_owned());
        let (host, own) = (self.plan.host().clone(), self.plan.own().clone());
        self.plan.rebase(network, backend, host, own);
        self.republish();
        true
    }

    /// Brings the sysctls to what packets need, or says what a person has to do.
    pub(super) fn look_at_sysctls(&mut self) {
        let write = self.world.options.manage_sysctls;
        let mut problems = sysctls::ensure(&self.plan, write);
        self.loosened_by = self.mixed();
        let wanted = self.loosened_by.as_ref().map(|id| self.loosely(id));
        problems.extend(self.loosened.ensure(wanted.as_ref(), write));
        problems.iter().filter(|text| !self.sysctl_problems.contains(text)).for_each(|text| tracing::warn!("{text}"));
        self.sysctl_problems = problems;
        self.next_sysctls = Instant::now() + SYSCTLS_EVERY;
    }

    /// Several backends at once make asymmetric paths, which strict reverse path filtering drops. Only a peer whose entries are in the
    /// kernel is a reason to loosen it, not one that is merely in the store.
    fn mixed(&self) -> Option<Id> {
        let pending = self.passer.pending();
        let programmed = |id: &&Id| {
            let keys = self.plan.keys(id);
            let carries = |key| pending.get(key).is_none_or(|pending| pending.stands);
            keys.iter().any(|key| self.plan.owner(key) == Some(id)) && keys.iter().all(carries)
        };
        // Once loosened for a lease it stays so while that lease is planned: entries that wait for a retry are back in a moment.
        let last = self.loosened_by.as_ref().filter(|id| self.plan.other_backend(id).is_some());
        last.or_else(|| self.plan.peers_of_other_backends().find(programmed)).cloned()
    }

    fn loosely(&self, id: &Id) -> Wanted {
        let names = self.plan.devices().chain([self.plan.host().uplink.name]).collect();
        let (theirs, ours) = (self.plan.other_backend(id).unwrap_or_default(), &self.plan.network().backend_type);
        Wanted {
            names,
            why: format!("lease {id} uses {theirs} and this node {ours}: replies may arrive over another interface"),
        }
    }

    /// Reads links, addresses and foreign routes; plans again and publishes when they matter. True when they did.
    pub(super) fn look_at_host(&mut self) -> bool {
        let machine = match self.passer.kernel().machine() {
            Ok(machine) => machine,
            Err(error) => {
                tracing::error!("{}", acquire::unreadable(&error));
                return false;
            }
        };
        let picked = match self.follow_uplink(&machine) {
            Ok(picked) => picked,
            Err(problem) => {
                if self.host_problem.as_ref() != Some(&problem) {
                    tracing::warn!("uplink: {problem}");
                }
                self.host_problem = Some(problem);
                return false;
            }
        };
        self.host_problem = None;
        let now = self.plan.host();
        let host = acquire::host(&picked, &machine, self.plan.network(), now.identities.clone());
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
            self.unsaved();
        }
        let own = self.plan.own().clone();
        if let Ok((network, backend)) = acquire::parse(&self.config) {
            self.plan.rebase(network, backend, host, own);
        }
        self.republish();
        true
    }

    /// The uplink as it is now. One that is gone is waited for: other choices count only when it stays away.
    fn follow_uplink(&mut self, machine: &Machine) -> Result<Picked, String> {
        let ground = acquire::ground(machine, self.plan.network(), self.plan.own().subnets);
        let next = uplink::next(&self.world.options.uplink, &ground, &self.plan.host().uplink);
        if let Ok(Next::Stay(picked)) = next {
            (self.uplink_gone, self.uplink_due) = (None, None);
            let remarks = uplink::remarks(&self.world.options.uplink, &ground, &picked.uplink);
            for (said, remark) in self.uplink_said.iter_mut().zip(remarks) {
                if let Some(text) = remark.filter(|text| said.as_ref() != Some(text)) {
                    tracing::warn!("uplink: {text}");
                    *said = Some(text);
                }
            }
            return Ok(picked);
        }
        let since = *self.uplink_gone.get_or_insert_with(Instant::now);
        match next {
            Ok(Next::Stay(picked)) => Ok(picked),
            Ok(Next::Gone { next, .. }) if since.elapsed() >= UPLINK_AWAY => {
                (self.uplink_gone, self.uplink_due) = (None, None);
                Ok(next)
            }
            Ok(Next::Gone { lost, next }) => {
                self.uplink_due = Some(since + UPLINK_AWAY);
                let ips = [next.uplink.v4.map(IpAddr::V4), next.uplink.v6.map(IpAddr::V6)];
                let ips: Vec<String> = ips.into_iter().flatten().map(|ip| ip.to_string()).collect();
                let (name, ips, away) = (next.uplink.name, ips.join(" "), UPLINK_AWAY.as_secs());
                Err(format!("{lost}: {name} ({ips}) is used instead if that lasts {away} s"))
            }
            Err(error) => Err(chain(&error)),
        }
    }
}
