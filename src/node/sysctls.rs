// SPDX-License-Identifier: Apache-2.0
//! The sysctls that packets of pods need. The kernel announces no change of a sysctl, so they are checked regularly.

use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::lease::Id;

use super::Node;
use crate::kernel::Kernel;
use crate::observe::problem::Problem;
use crate::offload::ChecksumOffload;
use crate::options::Options;
use crate::sysctls;
use crate::sysctls::loosened::{Loosened, Wanted};

/// Time between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The state of the sysctls.
#[derive(Debug)]
pub(super) struct Sysctls {
    /// What is wrong.
    pub(super) problems: Vec<Problem>,
    loosened: Loosened,
    /// The checksum offload of the tunnel devices. It is checked with the sysctls, because nobody announces its changes either.
    offload: ChecksumOffload,
    /// The lease because of which rp_filter is loosened. It stays the same while that lease is a reason.
    pub(super) loosened_for: Option<Id>,
    pub(super) next_check: Instant,
}

impl Sysctls {
    /// Returns a state in which a check is due at once. The values that were changed are remembered in files beside subnet.env.
    pub(super) fn new(options: &Options, now: Instant) -> Sysctls {
        let loosened = Loosened::new(&options.subnet_file);
        let offload = ChecksumOffload::new(&options.subnet_file, options.tx_checksum_off);
        Sysctls { problems: Vec::new(), loosened, offload, loosened_for: None, next_check: now }
    }

    /// Returns when the next check is due.
    pub(super) fn next(&self) -> Option<Instant> {
        Some(self.next_check)
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next_check <= now
    }
}

impl<K: Kernel> Node<K> {
    /// Sets the sysctls that packets need and the checksum offload, or reports what the operator has to set.
    pub(super) fn check_sysctls(&mut self) {
        let write = self.context.options.manage_sysctls;
        let mut problems = sysctls::ensure(&self.plan, write);
        self.sysctls.loosened_for = self.reason_to_loosen();
        let for_change = self.plan.is_changing().then(|| self.loosening_in_change());
        let wanted = for_change.or_else(|| self.sysctls.loosened_for.as_ref().map(|id| self.wanted_loosening(id)));
        problems.extend(self.sysctls.loosened.ensure(wanted.as_ref(), write));
        problems.extend(self.sysctls.offload.ensure(self.plan.devices()));
        let new = problems.iter().filter(|problem| !self.sysctls.problems.contains(problem));
        new.for_each(|problem| tracing::warn!("{problem}"));
        self.sysctls.problems = problems;
        self.sysctls.next_check = Instant::now() + CHECK_INTERVAL;
    }

    /// Returns a peer that uses another backend than this node. The paths to and from it are asymmetric, and strict reverse
    /// path filtering drops the packets. Only a peer whose entries are in the kernel is a reason to loosen the filter: a
    /// lease that is merely in the store is not.
    fn reason_to_loosen(&self) -> Option<Id> {
        let pending = self.passer.pending();
        let is_programmed = |id: &&Id| {
            let keys = self.plan.keys(id);
            let exists = |key| pending.get(key).is_none_or(|pending| pending.stands);
            keys.iter().any(|key| self.plan.winner(key) == Some(id)) && keys.iter().all(exists)
        };
        // The last reason counts as long as its lease is planned, because entries that wait for a retry are back in a moment.
        let last = self.sysctls.loosened_for.as_ref().filter(|id| self.plan.other_backend(id).is_some());
        last.or_else(|| self.plan.peers_of_other_backends().find(is_programmed)).cloned()
    }

    /// While the backend changes, peers switch one after the other, so packets arrive over both devices. This is loosened before our lease
    /// names the next backend, because the first packets follow at once.
    fn loosening_in_change(&self) -> Wanted {
        let names = self.plan.devices().chain([self.plan.host().uplink.name]).collect();
        Wanted { names, why: "the backend changes: replies may arrive over another interface".to_owned() }
    }

    fn wanted_loosening(&self, id: &Id) -> Wanted {
        let names = self.plan.devices().chain([self.plan.host().uplink.name]).collect();
        let (theirs, ours) = (self.plan.other_backend(id).unwrap_or_default(), &self.plan.net_conf().backend_type);
        let why = format!("lease {id} uses {theirs} and this node {ours}: replies may arrive over another interface");
        Wanted { names, why }
    }
}
