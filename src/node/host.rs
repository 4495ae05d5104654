// SPDX-License-Identifier: Apache-2.0
//! What the plan is made with besides leases: net-conf and the facts of the machine. A change of either plans everything again.

use std::time::{Duration, Instant};

use super::Node;
use crate::kernel::Kernel;
use crate::{report, start, sysctls};

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
        let (network, backend) = match start::parse(text) {
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
            let text = format!("net-conf: the change of {} is applied by a restart of the agent", fixed.join(", "));
            tracing::warn!("{text}");
            self.restart_wanted = Some(text);
            return false;
        }
        tracing::info!(keys = %changed.join(" "), "net-conf changed: applied");
        (self.restart_wanted, self.config) = (None, text.to_owned());
        let (host, own) = (self.plan.host().clone(), self.plan.own().clone());
        self.plan.rebase(network, backend, host, own);
        self.republish();
        true
    }

    /// Brings the sysctls to what packets need, or says what a person has to do.
    pub(super) fn look_at_sysctls(&mut self) {
        let problems = sysctls::ensure(&self.plan, self.world.options.manage_sysctls);
        problems.iter().filter(|text| !self.sysctl_problems.contains(text)).for_each(|text| tracing::warn!("{text}"));
        self.sysctl_problems = problems;
        self.next_sysctls = Instant::now() + SYSCTLS_EVERY;
    }

    /// Reads links, addresses and foreign routes; plans again and publishes when they matter. True when they did.
    pub(super) fn look_at_host(&mut self) -> bool {
        let machine = match self.passer.kernel().machine() {
            Ok(machine) => machine,
            Err(error) => {
                tracing::error!("{}", start::unreadable(&error));
                return false;
            }
        };
        let choice = report::sticky(&self.world.options.uplink, &machine, self.plan.host());
        let picked = start::pick(&choice, &machine, self.plan.network()).and_then(|picked| {
            match picked.gives_up(&self.plan.host().uplink) {
                Some(lost) => Err(format!("{} lost {lost} and has only a link-local address", picked.uplink.name)),
                None => Ok(picked),
            }
        });
        let picked = match picked {
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
        let host = start::host(&picked, &machine, (now.vtep_mac_v4, now.vtep_mac_v6));
        if host == *now {
            return false;
        }
        if host.uplink != now.uplink || host.public_v4 != now.public_v4 || host.public_v6 != now.public_v6 {
            tracing::info!(uplink = ?host.uplink, "the uplink changed");
            self.unsaved();
        }
        let own = self.plan.own().clone();
        if let Ok((network, backend)) = start::parse(&self.config) {
            self.plan.rebase(network, backend, host, own);
        }
        self.republish();
        true
    }
}
