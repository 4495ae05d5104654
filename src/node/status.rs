// SPDX-License-Identifier: Apache-2.0
//! The values from which [`crate::observe`] makes readiness and metrics, and the answer to `weft status`.

use std::collections::{HashMap, HashSet};

use tokio::time::Instant;
use weft_backends::state::Key;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Id, Lease};

use super::Node;
use super::wireguard::Sessions;
use crate::firewall::guard;
use crate::kernel::Kernel;
use crate::observe::fault::{Fault, FaultKind};
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::report::{self, NodeState, PeerCounts, PeerList};
use crate::observe::status::{Peer, PeerState, Status, joined, now_ms};
use crate::pass::Pending;
use crate::plan::{claims, ignored_names};

/// Numbers of peers whose entries could not be written. They are counted again only when the pending entries change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FailureCounts {
    /// The version of the pending entries that were counted.
    pub(super) version: u64,
    pub(super) pending: usize,
    pub(super) failed: usize,
}

/// Peers whose entries could not be written.
pub(super) struct PeerFailures {
    /// Peers with an entry that will be tried again, and none that was refused.
    pending: HashSet<Id>,
    /// Peers with an entry that the kernel refused, and its reason.
    failed: HashMap<Id, String>,
}

impl<K: Kernel> Node<K> {
    /// Brings readiness, metrics and systemd's status up to date, and lets pods start when the node can carry their packets.
    pub fn report(&mut self) {
        self.count_failures();
        let state = self.state();
        self.context.reporter.publish(&state);
        if state.pods_may_start() {
            self.context.conflist.keep(Instant::now());
        }
    }

    /// Returns the answer to `weft status`.
    pub(super) fn status(&mut self) -> Status {
        let sessions = self.sessions();
        let (now, state) = (Instant::now(), self.state());
        let (ready, problems) = self.problems(&state);
        let uplink = &self.plan.host().uplink;
        let remarks = self.context.conflist.remark().into_iter().chain(self.context.recorder.remark(now_ms()));
        let remarks = remarks.chain(ignored_names(self.plan.net_conf()));
        Status {
            ready,
            problems,
            subnet: state.subnets.to_string(),
            lease_ttl_s: self.own_lease.ttl.map(|(at, ttl)| ttl.saturating_sub(now - at).as_secs()),
            public: self.plan.own().attrs.published().collect(),
            network: self.plan.net_conf().networks.to_string(),
            backend: state.backend,
            // Not the types in the lease, because udp and alloc have none there.
            other_ways: self.plan.earlier().map(|(number, _)| self.plan.earlier_kind(number).to_owned()).collect(),
            mtu: self.plan.mtu(),
            health_port: self.context.options.health.map(|address| address.port()),
            uplink: format!("{} {} mtu {}", uplink.name, joined(uplink.addresses(), " "), uplink.mtu),
            uplink_name: uplink.name.to_string(),
            uplink_addresses: uplink.addresses().collect(),
            store_silent_s: (now - self.store.last_answer).as_secs(),
            store_trouble: self.store.error.clone(),
            peers: self.shown_peers(&sessions),
            last_pass: self.statistics.last_pass.clone(),
            last_error: self.statistics.last_error.clone(),
            audit_interval_s: self.schedule.audit_interval.as_secs_f64(),
            wireguard_audit_s: self.wireguard.interval().map(|interval| interval.as_secs_f64()),
            full_passes: self.statistics.full_passes.iter().map(|(cause, n)| ((*cause).to_owned(), *n)).collect(),
            next_audit_s: self.schedule.next_audit.saturating_duration_since(now).as_secs_f64(),
            held: state.peers.held,
            rules: self.rules_status(),
            tunnel: self.tunnel_status(),
            tunnel_port: self.plan.hidden_port(),
            ..report::starting(self.context.store.describe(), Vec::new(), remarks.collect())
        }
    }

    /// Returns whether the node is ready, and everything that is wrong. What prevents readiness stands first.
    pub(super) fn problems(&self, state: &NodeState) -> (bool, Vec<Problem>) {
        let mut problems: Vec<Problem> = state.problems().collect();
        let ready = problems.is_empty();
        problems.extend(self.warnings());
        (ready, problems)
    }

    pub(super) fn state(&self) -> NodeState {
        let commands = self.extension.peers().counts();
        NodeState {
            subnets: self.plan.own().subnets,
            backend: self.plan.net_conf().backend_type.clone(),
            peer_list: self.peers.list.clone(),
            peers: PeerCounts {
                believed: self.plan.peers().len(),
                pending: self.statistics.failure_counts.pending + commands.pending,
                failed: self.statistics.failure_counts.failed + commands.failed,
                held: self.peers.hold.len(),
                set_aside: self.plan.set_aside_count(),
                unreachable: self.unreachable_count(),
                unplanned: self.plan.unplanned_count(),
                in_clear_text: self.plan.clear_text_count(),
            },
            faults: self.faults(),
            lease_missing: self.own_lease.missing.map(str::to_owned),
            store_fails: self.store.error.is_some(),
        }
    }

    /// Returns what is wrong with this node itself, whatever the store and the peers do.
    fn faults(&self) -> Vec<Fault> {
        let uplink = self.uplink.problem.as_ref().or(self.own_lease.unwritable.as_ref());
        let uplink = uplink.map(|problem| format!("uplink: {problem}"));
        [
            (FaultKind::Device, self.device_problem()),
            (FaultKind::Kernel, self.kernel_problem.clone()),
            (FaultKind::SubnetFile, self.subnet_file_problem.clone()),
            (FaultKind::TrafficRules, self.rules_fault()),
            (FaultKind::Uplink, uplink),
            (FaultKind::LeaseLost, self.own_lease.lost.clone()),
            (FaultKind::LeaseContested, self.contest_problem()),
            (FaultKind::Tunnel, self.tunnel_problem()),
            (FaultKind::Extension, self.extension_problem()),
        ]
        .into_iter()
        .filter_map(|(kind, text)| text.map(|text| Fault { kind, text }))
        .collect()
    }

    /// Returns what is wrong although the node can be ready, the most urgent first.
    pub(super) fn warnings(&self) -> Vec<Problem> {
        let mut all: Vec<Problem> = self.uplink.link_problem.clone().into_iter().collect();
        all.extend(Problem::each(ProblemKind::Device, self.device_warnings()));
        all.extend(Problem::each(ProblemKind::Fight, self.passer.fights()));
        if let PeerList::Saved(text) = &self.peers.list {
            all.push(Problem::new(ProblemKind::PeerList, text));
        }
        all.extend(Problem::each(ProblemKind::Cni, self.context.conflist.problem()));
        all.extend(Problem::each(ProblemKind::Store, self.context.store.remark()));
        let unwritten = self.own_lease.error.as_ref().map(|text| format!("own lease: {text}"));
        let not_renewed = self.own_lease.not_renewed.as_ref().map(|text| format!("own lease is not renewed: {text}"));
        all.extend(Problem::each(ProblemKind::Lease, unwritten.into_iter().chain(not_renewed)));
        let not_applied = self.net_conf.not_applied.iter().cloned();
        all.extend(Problem::each(ProblemKind::NetConf, not_applied.chain(self.change_warnings())));
        all.extend(Problem::each(ProblemKind::Tunnel, self.data_path.port_problems()));
        all.extend(self.sysctls.problems.iter().cloned());
        all.extend(self.rules_warnings());
        all.extend(Problem::each(ProblemKind::LeftOut, self.plan.problems()));
        all.extend(Problem::each(ProblemKind::Fence, self.fence_problem()));
        all.extend(Problem::each(ProblemKind::Claims, claims::problems(&self.plan)));
        all.extend(Problem::each(ProblemKind::Extension, self.extension.removal_problem()));
        all.extend(self.probe_warnings());
        let guard = self.guard_problem().map(|text| format!("tunnel guard: {text}"));
        all.extend(Problem::each(ProblemKind::Guard, guard));
        all
    }

    /// Returns why the own device carries no packets, if so: the kernel lacks the device, its address, or an attribute that packets
    /// need.
    pub(super) fn device_problem(&self) -> Option<String> {
        // Without the link there is no address and no route either, and what is missing of these is not the cause.
        let is_link = |(key, _): &(&Key, &Pending)| matches!(key, Key::Link(_));
        let missing = self.pending_of_own_device().filter(|(_, pending)| !pending.works);
        let cause = missing.max_by_key(is_link);
        cause.map(|(key, pending)| format!("{key}: {}", pending.reason))
    }

    /// Returns what the own device lacks although it carries packets. Nothing waits for it.
    fn device_warnings(&self) -> impl Iterator<Item = String> {
        let lacking = self.pending_of_own_device().filter(|(_, pending)| pending.works);
        lacking.map(|(key, pending)| format!("{key}: {}; packets pass meanwhile", pending.reason))
    }

    fn pending_of_own_device(&self) -> impl Iterator<Item = (&Key, &Pending)> {
        // Where one route of a device leads to all peers, it is a part of the device.
        let is_own =
            |key: &Key| matches!(key, Key::Link(_) | Key::Addr(..) | Key::Route(..)) && self.plan.is_own_device(key);
        self.passer.pending().iter().filter(move |(key, _)| is_own(key))
    }

    fn count_failures(&mut self) {
        let version = self.passer.pending().version();
        if self.statistics.failure_counts.version != version {
            let PeerFailures { pending, failed } = self.peer_failures();
            self.statistics.failure_counts = FailureCounts { version, pending: pending.len(), failed: failed.len() };
        }
    }

    pub(super) fn peer_failures(&self) -> PeerFailures {
        let (mut pending, mut failed) = (HashSet::new(), HashMap::new());
        for (key, entry) in self.passer.pending().iter().filter(|(key, _)| !guard::is_of_guard_or_fence(key)) {
            let Some(id) = self.plan.winner(key) else { continue };
            if entry.retry {
                pending.insert(id.clone());
            } else {
                failed.insert(id.clone(), entry.reason.clone());
            }
        }
        pending.retain(|id| !failed.contains_key(id));
        PeerFailures { pending, failed }
    }

    /// Returns every peer, sorted by subnet.
    fn shown_peers(&self, sessions: &Sessions) -> Vec<Peer> {
        let failures = self.peer_failures();
        let held: HashSet<&Id> = self.peers.hold.held().collect();
        let believed = self.plan.peers().believed_unordered().map(|lease| {
            let (state, reason) = self.peer_state(lease, &failures, &held);
            let keys = if sessions.is_empty() { Vec::new() } else { self.plan.keys(&lease.id) };
            let peer = Peer {
                not_encrypted: self.plan.is_in_clear_text(&lease.id),
                sessions: keys.iter().filter_map(|key| sessions.get(key).cloned()).collect(),
                probe: self.peer_probe(lease),
                ..Peer::of(lease, state, reason)
            };
            (lease.subnets, &lease.id, peer)
        });
        let not_believed = self.plan.peers().not_believed().map(|(id, reason, lease)| match lease {
            Some(lease) => (lease.subnets, id, Peer::of(lease, PeerState::SetAside, Some(reason.to_owned()))),
            None => (Subnets::default(), id, Peer::unreadable(id, reason.to_owned())),
        });
        let mut all: Vec<(Subnets, &Id, Peer)> = believed.chain(not_believed).collect();
        all.sort_unstable_by_key(|(subnets, id, _)| (*subnets, *id));
        all.into_iter().map(|(_, _, peer)| peer).collect()
    }

    pub(super) fn peer_state(
        &self,
        lease: &Lease,
        failures: &PeerFailures,
        held: &HashSet<&Id>,
    ) -> (PeerState, Option<String>) {
        if let Some(reason) = failures.failed.get(&lease.id) {
            (PeerState::Failed, Some(reason.clone()))
        } else if failures.pending.contains(&lease.id) {
            (PeerState::Pending, self.first_pending_reason(&lease.id))
        } else if held.contains(&lease.id) {
            (PeerState::Held, Some("gone from the store all of a sudden; kept for the grace time".to_owned()))
        } else if let Some(reason) = self.plan.unplanned(&lease.id) {
            (PeerState::SetAside, Some(reason.to_owned()))
        } else if let Some(state) = self.command_state(lease) {
            state
        } else if let Some(unreachable) = self.unreachable(lease) {
            unreachable
        } else {
            (PeerState::Programmed, claims::remark(&self.plan, lease))
        }
    }

    fn first_pending_reason(&self, id: &Id) -> Option<String> {
        let keys = self.plan.keys(id).into_iter().filter(|key| !guard::is_of_guard_or_fence(key));
        keys.into_iter().find_map(|key| self.passer.pending().get(&key)).map(|pending| pending.reason.clone())
    }
}
