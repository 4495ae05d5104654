// SPDX-License-Identifier: Apache-2.0
//! The traffic rules that this node wants, and what waits until they are in place. [`crate::firewall::reconciler`] writes
//! them.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::{Key, ObservedValue};
use weft_backends::traffic_rules::{self, Masquerade, Policy, Rules};
use weft_subnet::cidr::Subnets;
use weft_subnet::net_conf::MasqueradeExceptions;

use super::Node;
use crate::firewall::guard;
use crate::firewall::reconciler::{Handle, State};
use crate::kernel::Kernel;
use crate::observe::history::{Change, HistoryRecord};
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::status::RuleStatus;

/// If the nodes are exceptions from masquerading, changes of nodes are passed on at most once in this time. A change of one
/// node costs a comparison of all of them, and with iptables, a comparison runs a program. The first change after a
/// pause is passed on at once.
const NODES_INTERVAL: Duration = Duration::from_secs(1);

/// The traffic rules of the node.
#[derive(Debug, Default)]
pub(super) struct TrafficRules {
    /// The node's end of the reconciler. `None` while the rules have no reconciler.
    pub(super) reconciler: Option<Handle>,
    /// What the wanted rules were last computed from, and when.
    computed: Option<(Inputs, Instant)>,
    /// The nodes changed since then, and the rules are computed again at this time.
    pub(super) due: Option<Instant>,
    /// How often the rules were computed.
    pub(super) computations: u64,
    /// The wanted rules were in place once, so subnet.env may say IPMASQ=true.
    were_in_place: bool,
    /// The writes when the history was last told.
    recorded: Writes,
}

impl TrafficRules {
    /// Returns when [`Node::update_rules`] has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due
    }
}

/// How often the rules were written.
#[derive(Debug, Clone, Copy, Default)]
struct Writes {
    all: u64,
    /// How many of these writes restored them.
    restored: u64,
}

/// Everything that the rules depend on, except the options.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Inputs {
    networks: Subnets,
    own: Subnets,
    masquerade: MasqueradeExceptions,
    /// The version of the set of node addresses.
    nodes: u64,
}

impl<K: Kernel> Node<K> {
    /// Gives the node its end of the reconciler. From now on the rules are kept in place.
    pub fn attach_rules(&mut self, reconciler: Handle) {
        self.rules.reconciler = Some(reconciler);
        self.update_rules();
        // With the guard, the lease says where our tunnel packets come from.
        self.update_own_lease();
    }

    /// Computes the wanted rules and sends them to the reconciler, unless they are the same as before.
    pub(super) fn update_rules(&mut self) {
        let net_conf = self.plan.net_conf();
        // The nodes are not known yet. Until then, the rules of an earlier run stay as they are.
        if self.rules.reconciler.is_none() || (net_conf.masquerade.except_nodes && !self.knows_peers()) {
            return;
        }
        let (own, now) = (self.plan.own().subnets, Instant::now());
        let (masquerade, nodes) = (net_conf.masquerade.clone(), self.plan.node_addresses().version());
        let inputs = Inputs { networks: net_conf.networks, own, masquerade, nodes };
        self.rules.due = None;
        if let Some((before, at)) = &self.rules.computed {
            if *before == inputs {
                return;
            }
            let only_nodes_changed = Inputs { nodes, ..before.clone() } == inputs;
            if only_nodes_changed && now < *at + NODES_INTERVAL {
                self.rules.due = Some(*at + NODES_INTERVAL);
                return;
            }
        }
        self.rules.computed = Some((inputs, now));
        self.rules.computations += 1;
        let rules = self.wanted_rules();
        let Some(reconciler) = &self.rules.reconciler else { return };
        reconciler.wanted.send_if_modified(|wanted| {
            let changed = wanted.as_ref() != Some(&rules);
            if changed {
                *wanted = Some(rules);
            }
            changed
        });
    }

    fn wanted_rules(&self) -> Rules {
        let (options, conf) = (&self.context.options.rules, &self.plan.net_conf().masquerade);
        let masquerade = options.masquerade.as_ref().map(|how| Masquerade {
            fully_random: how.fully_random,
            except: conf.except.clone(),
            nodes: self.plan.node_addresses().addresses().collect(),
        });
        let policy = Policy { masquerade, forward: options.forward };
        traffic_rules::rules(&self.plan.net_conf().networks, &self.plan.own().subnets, &policy)
    }

    /// Adds the current state of the guard to the entries that the kernel notified about. Only the tables of the guard are read.
    pub(super) fn observe_guard(&mut self, entries: &mut HashMap<Key, Option<ObservedValue>>) {
        match self.passer.kernel().guard() {
            Ok(present) => {
                entries.extend(self.plan.guard_keys().map(|key| (key, None)));
                entries.extend(present.into_iter().map(|(key, seen)| (key, Some(seen))));
            }
            Err(error) => tracing::warn!(%error, "cannot read the tunnel guard: the next audit tries again"),
        }
    }

    /// Adds the current state of the fence to the entries that the kernel notified about.
    pub(super) fn observe_fence(&mut self, entries: &mut HashMap<Key, Option<ObservedValue>>) {
        match self.passer.kernel().fence() {
            Ok(present) => {
                entries.extend(self.plan.fence_keys().into_iter().map(|key| (key, None)));
                entries.extend(present.into_iter().map(|(key, seen)| (key, Some(seen))));
            }
            Err(error) => tracing::warn!(%error, "cannot read the fence: the next audit tries again"),
        }
    }

    /// Takes over a new state of the reconciler. subnet.env may wait for it.
    pub fn rules_changed(&mut self) {
        let Some(reconciler) = &mut self.rules.reconciler else { return };
        let state = reconciler.state.borrow_and_update().clone();
        let wanted = reconciler.wanted.borrow().clone();
        self.rules.were_in_place |= state.in_place.is_some() && state.in_place == wanted;
        self.context.reporter.metrics.rules(state.in_place.is_some(), state.writes, state.restored);
        self.record_rules(&state);
        self.write_subnet_file();
    }

    fn record_rules(&mut self, state: &State) {
        let now = Writes { all: state.writes, restored: state.restored };
        let before = std::mem::replace(&mut self.rules.recorded, now);
        if now.all == before.all {
            return;
        }
        let event = if now.restored > before.restored {
            "another program changed the traffic rules"
        } else {
            "other traffic rules are wanted"
        };
        let lines = state.in_place.as_ref().map_or(0, |rules| rules.to_string().lines().count());
        let after = Some(format!("{lines} rules in {}", state.filter));
        self.context.recorder.add(HistoryRecord {
            cause: "rules".to_owned(),
            event: event.to_owned(),
            done: usize::try_from(now.all - before.all).unwrap_or(usize::MAX),
            changes: vec![Change { entry: "traffic rules".to_owned(), after, ..Change::default() }],
            ..HistoryRecord::default()
        });
    }

    /// Returns the value of IPMASQ in subnet.env, or `None` if subnet.env must not be written because the wanted rules were
    /// never in place yet.
    pub(super) fn ipmasq(&self) -> Option<bool> {
        let is_wanted = self.rules.reconciler.is_some() && self.context.options.rules.masquerade.is_some();
        match (is_wanted, self.rules.were_in_place) {
            (false, _) => Some(false),
            (true, true) => Some(true),
            (true, false) => None,
        }
    }

    /// Returns why the rules keep the node from being ready. Only masquerading counts, as in flannel.
    pub(super) fn rules_fault(&self) -> Option<String> {
        let is_wanted = self.context.options.rules.masquerade.is_some();
        let state = self.rules.reconciler.as_ref().filter(|_| is_wanted)?.state.borrow();
        match (&state.error, &state.in_place) {
            (Some(error), _) => Some(format!("rules: {error}")),
            (None, None) => Some("rules: not written yet".to_owned()),
            (None, Some(_)) => None,
        }
    }

    /// Returns what else is wrong with the rules.
    pub(super) fn rules_warnings(&self) -> Vec<Problem> {
        let Some(reconciler) = &self.rules.reconciler else { return Vec::new() };
        let state = reconciler.state.borrow();
        let error = state.error.iter().filter(|_| self.context.options.rules.masquerade.is_none());
        let error = error.map(|text| Problem::new(ProblemKind::Rules, format!("rules: {text}")));
        error.chain(state.warnings.iter().cloned()).collect()
    }

    /// Returns what the kernel lacks of the tunnel guard, or `None` if nothing, or if the guard is off.
    pub(super) fn guard_problem(&self) -> Option<String> {
        let failures = self.passer.pending().iter().map(|(key, entry)| (key, entry.reason.as_str()));
        self.plan.guard().and_then(|_| guard::missing(failures))
    }

    /// Returns what the kernel lacks of the fence.
    pub(super) fn fence_problem(&self) -> Option<String> {
        self.passer.pending().fence_problem()
    }

    /// Returns what `weft status rules` shows.
    pub(super) fn rules_status(&self) -> RuleStatus {
        let fence = self.fence_problem().or_else(|| self.plan.fence_text().map(|text| text.to_string()));
        let Some(reconciler) = &self.rules.reconciler else { return RuleStatus { fence, ..RuleStatus::default() } };
        let (state, wanted) = (reconciler.state.borrow(), reconciler.wanted.borrow());
        let text = wanted.as_ref().map(Rules::to_string).unwrap_or_default();
        RuleStatus {
            filter: state.filter.clone(),
            in_place: wanted.is_some() && state.in_place == *wanted,
            rules: text.lines().map(str::to_owned).collect(),
            writes: state.writes,
            mended: state.restored,
            fence,
            guard: self.guard_problem().or_else(|| self.plan.guard()),
        }
    }
}
