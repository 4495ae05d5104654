// SPDX-License-Identifier: Apache-2.0
//! Sends probes to the peers, and says which ones packets do not reach (docs/adr/026-probes.md). Probes change nothing in the kernel, and
//! never make the node not ready.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use weft_backends::family::label;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::source::RecordChange;
use weft_subnet::text::Shown;

use super::Node;
use crate::kernel::Kernel;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::status::{PeerProbe, PeerState, Suspect};
use crate::plan::Plan;
use crate::probe::cause::Cause;
use crate::probe::echo::{Answer, EchoError};
use crate::probe::examine::Packet;
use crate::probe::samples::Loss;
use crate::probe::{Change, Outgoing, Prober, Slot, Target, Turn};

/// Returns where a peer is in this family, or in the other one if it has only that.
fn target_of_turn(plan: &Plan, lease: &Lease, family: Family) -> Option<Target> {
    plan.probe_target(lease, family).or_else(|| plan.probe_targets(lease).next())
}

/// Number of unreachable peers that a problem names.
const MAX_NAMED: usize = 3;

/// The result of a probe.
#[derive(Debug)]
pub struct Probed {
    pub(super) sent: Outgoing,
    pub(super) answer: Result<Answer, EchoError>,
}

/// The probes of a node, and where their results go.
#[derive(Debug)]
pub(super) struct Probes {
    pub(super) prober: Prober,
    results: mpsc::UnboundedSender<Probed>,
    /// A random number, from which the place is made where the first round begins. It is another one on each node, so that not all nodes
    /// ask the same peer at once.
    pub(super) begin: Option<usize>,
    /// The peers that the log called unreachable, by place and family. Their recovery is logged, too.
    logged: BTreeSet<Slot>,
}

impl<K: Kernel> Node<K> {
    /// Lets the node send probes from now on, unless the options say otherwise. Their results are for [`Node::probe_ended`]. This must run
    /// in a [`tokio::task::LocalSet`].
    pub fn start_probes(&mut self) -> mpsc::UnboundedReceiver<Probed> {
        let (results, received) = mpsc::unbounded_channel();
        if !self.context.options.probe {
            return received;
        }
        let mut random = [0; 2];
        // Without a random number, the round begins at another place than on nodes with another subnet.
        if getrandom::fill(&mut random).is_err() {
            random = (weft_netlink::hash::stable(self.plan.own().id.bytes()) as u16).to_ne_bytes();
        }
        let begin = Some(u16::from_ne_bytes(random).into());
        let prober = Prober::new(Instant::now());
        self.probes = Some(Probes { prober, results, begin, logged: BTreeSet::new() });
        received
    }

    /// Returns when [`Node::probe`] has something to do.
    pub(super) fn next_probe(&self) -> Option<Instant> {
        let has_peers = self.knows_peers() && !self.plan.peers().is_empty();
        self.probes.as_ref().filter(|_| has_peers).map(|probes| probes.prober.next())
    }

    /// Takes notice of leases that changed. Their peers are asked soon.
    pub(super) fn probe_changed(&mut self, changes: &[RecordChange]) {
        let now = Instant::now();
        if let Some(probes) = &mut self.probes {
            changes
                .iter()
                .filter_map(RecordChange::written)
                .for_each(|record| probes.prober.lease_changed(&record.id, now));
        }
    }

    /// Sends the packets that are due, if there are any.
    pub(super) fn probe(&mut self, now: Instant) {
        if self.next_probe().is_none_or(|at| at > now) {
            if self.plan.peers().is_empty() {
                self.probes.iter_mut().for_each(|probes| {
                    probes.prober.forget_peers();
                    probes.logged.clear();
                });
                // No further result would correct them.
                self.publish_unreachable();
            }
            return;
        }
        while let Some(outgoing) = self.next_packet(now) {
            let Some(probes) = &self.probes else { return };
            let results = probes.results.clone();
            tokio::task::spawn_local(async move {
                let answer = outgoing.send().await;
                // The agent may have ended.
                let _ = results.send(Probed { sent: outgoing, answer });
            });
        }
    }

    /// Returns the next packet that is due, if there is one.
    pub(super) fn next_packet(&mut self, now: Instant) -> Option<Outgoing> {
        let (plan, probes) = (&self.plan, self.probes.as_mut()?);
        let prober = &mut probes.prober;
        let current = |(place, family): Slot| {
            let (found, lease) = plan.peers().believed_from(place)?;
            plan.probe_target(lease, family).filter(|_| found == place)
        };
        if let Some(outgoing) = prober.examine(now, current) {
            return Some(outgoing);
        }
        let targets = plan.peers().len() * plan.own().subnets.iter().count();
        let target = match prober.turn(targets, now)? {
            Turn::Changed(id) => target_of_turn(plan, plan.peers().get(&id)?, prober.family)?,
            Turn::Next => {
                if let Some(begin) = probes.begin.take() {
                    prober.cursor = begin % plan.peers().len().max(1);
                }
                let mut found = plan.peers().believed_from(prober.cursor);
                if found.is_none() {
                    prober.begin_round();
                    found = plan.peers().believed_from(0);
                }
                let (place, lease) = found?;
                prober.cursor = place + 1;
                target_of_turn(plan, lease, prober.family)?
            }
        };
        prober.ask(target, now)
    }

    /// Takes notice that a probe was answered or lost.
    pub fn probe_ended(&mut self, probed: Probed) {
        let now = Instant::now();
        let Some(probes) = &mut self.probes else { return };
        let Probed { sent, answer } = probed;
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                let text = error.to_string();
                if probes.prober.problem.as_ref() != Some(&text) {
                    tracing::warn!("probes: {text}");
                }
                return probes.prober.not_sent(&sent, text, now);
            }
        };
        probes.prober.problem = None;
        let changed = probes.prober.ended(&sent, answer, now);
        if sent.packet != Packet::Connection {
            self.context.reporter.metrics.probe(answer.round_trip);
        }
        self.publish_unreachable();
        if let Some(change) = changed {
            self.log_probe(&sent.target, change, now);
        }
    }

    /// Sets the metrics of the peers that packets do not reach.
    fn publish_unreachable(&self) {
        let Some(Probes { prober, .. }) = &self.probes else { return };
        let mut by_cause = Cause::WORDS.map(|word| (word, 0));
        for (_, cause) in prober.unreachable() {
            by_cause.iter_mut().filter(|(word, _)| *word == cause.word()).for_each(|(_, count)| *count += 1);
        }
        self.context.reporter.metrics.unreachable(&by_cause, prober.smallest_mtu());
    }

    fn log_probe(&mut self, target: &Target, change: Change, now: Instant) {
        let Some(lease) = self.probed_lease(target) else { return };
        let Change::Faulty(cause) = change else {
            if self.probes.as_mut().is_some_and(|probes| probes.logged.remove(&target.slot())) {
                tracing::info!(lease = %lease.id, "packets reach the peer again");
            }
            return;
        };
        // While nobody has answered, one problem says so for all.
        if self.probe_cause(&lease).is_none() || !self.plan.lease_log.due(&lease.id, now) {
            return;
        }
        let reason = self.unreachable_reason(&lease, target, cause);
        tracing::warn!(lease = %lease.id, reason, "packets do not reach a peer");
        if let Some(probes) = &mut self.probes {
            probes.logged.insert(target.slot());
        }
    }

    fn probed_lease(&self, target: &Target) -> Option<Arc<Lease>> {
        let (place, lease) = self.plan.peers().believed_from(target.place)?;
        (place == target.place).then(|| lease.clone())
    }

    /// Returns why packets do not reach this peer, if that is known.
    pub(super) fn probe_cause(&self, lease: &Lease) -> Option<(Target, Cause)> {
        let prober = &self.probes.as_ref()?.prober;
        // Without an unreachable peer, this must cost nothing for each peer.
        prober.unreachable().next()?;
        self.plan.probe_targets(lease).find_map(|target| Some((target, prober.cause(&target)?)))
    }

    /// Returns the sentence that says why packets do not reach a peer, and what to do.
    pub(super) fn unreachable_reason(&self, lease: &Lease, target: &Target, cause: Cause) -> String {
        let (address, outer) = (target.address, self.outer_protocol(lease, target));
        let uplink = &self.plan.host().uplink;
        match (cause, target.published) {
            (Cause::Underlay, Some(published)) => format!(
                "neither its tunnel address {address} nor its published address {published} answers: the node is down or cut off, or \
                 {published} is the address of a wrong interface (give that node --iface or --public-ip)"
            ),
            (Cause::Underlay | Cause::Tunnel, None) => format!(
                "its published address {address} does not answer: the node is down or cut off, or {address} is the address of a wrong \
                 interface (give that node --iface or --public-ip)"
            ),
            (Cause::Tunnel, Some(published)) => format!(
                "its published address {published} answers, its tunnel address {address} does not: a firewall between the nodes, or on \
                 one of them, drops {outer}"
            ),
            (Cause::OneDirection, published) => format!(
                "its packets arrive here, and it does not answer ours: a firewall drops {} from this node to {}",
                if published.is_some() { outer.as_str() } else { "packets" },
                published.unwrap_or(address)
            ),
            (Cause::Mtu(mtu), _) => {
                let value = self.carried_by_underlay(target, mtu);
                let setting = match self.has_underlay_option() {
                    true => format!("Backend.MTU in net-conf to {value}"),
                    false => format!("the MTU of the uplink {} to {value} on every node", uplink.name),
                };
                format!(
                    "packets of {mtu} bytes reach it, and larger ones do not, although the MTU is {}: some link of the path carries \
                     only {value} bytes. Raise its MTU, or set {setting}",
                    target.mtu
                )
            }
        }
    }

    /// Returns what the packets to this address of a peer look like on the underlay, as text for people. If the peer has both families, the
    /// text says which one is meant.
    fn outer_protocol(&self, lease: &Lease, target: &Target) -> String {
        let outer = self.plan.outer_protocol(lease, target.family);
        let family = Family::of(target.published.unwrap_or(target.address));
        match self.plan.probe_targets(lease).count() {
            2 => format!("{outer} over {}", label(family)),
            _ => outer,
        }
    }

    /// Returns the same as [`Node::unreachable_reason`] for programs.
    fn suspect(&self, lease: &Lease, target: &Target, cause: Cause) -> Option<Suspect> {
        let address = target.published.unwrap_or(target.address);
        match (cause, target.published) {
            (Cause::Underlay, _) | (Cause::Tunnel, None) => Some(Suspect::Silent(address)),
            (Cause::Tunnel | Cause::OneDirection, Some(_)) => {
                Some(Suspect::Dropped(self.outer_protocol(lease, target)))
            }
            (Cause::OneDirection, None) => Some(Suspect::Dropped("packets".to_owned())),
            (Cause::Mtu(_), _) if self.has_underlay_option() => None,
            (Cause::Mtu(mtu), _) => Some(Suspect::UplinkMtu(self.carried_by_underlay(target, mtu))),
        }
    }

    /// Returns what some link of the path to a peer carries, in bytes, if `mtu` is the largest packet that reaches the peer.
    fn carried_by_underlay(&self, target: &Target, mtu: u16) -> u32 {
        u32::from(mtu) + self.plan.underlay_mtu().saturating_sub(target.mtu.into())
    }

    /// Returns true if `Backend.MTU` is smaller than the MTU of the uplink. To lower the MTU of the uplink would help, too, but the operator
    /// has chosen to set the option.
    fn has_underlay_option(&self) -> bool {
        self.plan.underlay_mtu() < self.plan.host().uplink.mtu
    }

    /// Returns the number of peers that packets do not reach. One whose entries wait for another attempt may be among them.
    pub(super) fn unreachable_count(&self) -> usize {
        self.probes.as_ref().map_or(0, |probes| probes.prober.unreachable().count())
    }

    /// Returns what probes found, for `weft status`.
    pub(super) fn probe_warnings(&self) -> Vec<Problem> {
        let Some(Probes { prober, .. }) = &self.probes else { return Vec::new() };
        // Without the own device no packet reaches anybody, and what is wrong with it is said already.
        if self.device_problem().is_some() {
            return Vec::new();
        }
        let not_sent = prober.problem.iter().map(|problem| format!("probes: {problem}"));
        let families = Family::BOTH.into_iter().filter(|family| self.plan.own().subnets.of(*family).is_some());
        let silent = families.clone().filter_map(|family| Some((family, prober.silence(family)?)));
        let of_family =
            |family| if families.clone().count() > 1 { format!(" over {}", label(family)) } else { String::new() };
        let unanswered = silent.map(|(family, silent)| {
            format!(
                "no peer has answered an echo request{} since the start, neither through the tunnel nor at its published address ({silent} \
                 were asked several times): either ICMP is filtered in this network (--probe=off turns probes off), or this node is cut \
                 off from all others: check its uplink {} and its firewall",
                of_family(family),
                self.plan.host().uplink.name
            )
        });
        let mut all: Vec<Problem> = Problem::each(ProblemKind::Probes, not_sent.chain(unanswered)).collect();
        let unreachable: Vec<Arc<Lease>> =
            prober.unreachable().filter_map(|(target, _)| self.probed_lease(target)).collect();
        if !unreachable.is_empty() {
            let name = |lease: &Arc<Lease>| format!("{} ({})", lease.subnets, Shown(&lease.attrs.owner().to_string()));
            let names: Vec<String> = unreachable.iter().take(MAX_NAMED).map(name).collect();
            let more = if unreachable.len() > MAX_NAMED { ", ..." } else { "" };
            let at_least = if prober.is_full() { "at least " } else { "" };
            let text = format!(
                "packets do not reach {at_least}{} of {} peers: {}{more}; weft mesh has the causes",
                unreachable.len(),
                self.plan.peers().len(),
                names.join(", ")
            );
            all.push(Problem::new(ProblemKind::Unreachable, text));
        }
        all
    }

    /// Returns what is known of the way to this peer, for `weft status` and `weft mesh`.
    pub(super) fn peer_probe(&self, lease: &Lease) -> Option<PeerProbe> {
        let prober = &self.probes.as_ref()?.prober;
        // The family in which more is wrong is shown.
        let found = self.plan.probe_targets(lease).filter_map(|target| {
            let sample = prober.sample(&target)?;
            Some((target, sample, prober.cause(&target)))
        });
        let (target, sample, cause) =
            found.min_by_key(|(_, sample, cause)| (cause.is_none(), Reverse(sample.loss().lost)))?;
        let Loss { lost, asked } = sample.loss();
        Some(PeerProbe {
            address: target.address.to_string(),
            round_trip_us: sample.round_trip().map(|trip| u64::try_from(trip.as_micros()).unwrap_or(u64::MAX)),
            lost,
            asked,
            mtu: sample.mtu(),
            silent: sample.is_silent(),
            cause: cause.map(|cause| cause.word().to_owned()),
            suspect: cause.and_then(|cause| self.suspect(lease, &target, cause)),
        })
    }

    /// Returns the state of a programmed peer that packets do not reach, with the reason.
    pub(super) fn unreachable(&self, lease: &Lease) -> Option<(PeerState, Option<String>)> {
        let (target, cause) = self.probe_cause(lease)?;
        Some((PeerState::Unreachable, Some(self.unreachable_reason(lease, &target, cause))))
    }
}
