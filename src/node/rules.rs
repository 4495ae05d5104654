// SPDX-License-Identifier: Apache-2.0
//! The traffic rules that this node wants, and what waits until they are in place. [`crate::firewall::reconciler`] writes them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use weft_backends::masq::{self, Masquerade, Policy, Rules};
use weft_backends::state::{Key, Seen};
use weft_subnet::cidr::Subnets;
use weft_subnet::network::Masquerading;

use super::Node;
use crate::firewall::guard;
use crate::firewall::reconciler::Handle;
use crate::kernel::Kernel;
use crate::observe::status::RuleStatus;

/// Where nodes are exceptions from masquerading, changes of nodes are passed on at most once in this time. A change of one node costs a
/// comparison of all of them, and runs a program where iptables carries the rules. The first change after a pause is passed on at once.
const NODES_EVERY: Duration = Duration::from_secs(1);

/// What the wanted rules were last computed from.
#[derive(Debug, Default)]
pub(super) struct Made {
    from: Option<(Basis, Instant)>,
    /// The nodes changed since then. The rules are computed again at this time.
    pub due: Option<Instant>,
    /// How often the rules were computed.
    pub times: u64,
}

/// Everything that the rules depend on, except the options.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Basis {
    networks: Subnets,
    own: Subnets,
    masquerade: Masquerading,
    /// The version of the set of node addresses.
    nodes: u64,
}

impl<K: Kernel> Node<K> {
    /// Gives the node its end of the reconciler. From now on the rules are kept in place.
    pub fn carry(&mut self, handle: Handle) {
        self.rules = Some(handle);
        self.want_rules();
        // With the guard, the lease says where our tunnel packets come from.
        self.republish();
    }

    /// Sends the wanted rules to the reconciler, unless they are the same as before.
    pub(super) fn want_rules(&mut self) {
        let Some(handle) = &self.rules else { return };
        let network = self.plan.network();
        // The nodes are not known yet. Until then, the rules of an earlier run stay as they are.
        if network.masquerade.except_nodes && !self.knows_peers() {
            return;
        }
        let (own, now) = (self.plan.own().subnets, Instant::now());
        let (masquerade, nodes) = (network.masquerade.clone(), self.plan.node_addresses().version());
        let basis = Basis { networks: network.networks, own, masquerade, nodes };
        self.made.due = None;
        if let Some((from, at)) = &self.made.from {
            if *from == basis {
                return;
            }
            let nodes_alone = Basis { nodes, ..from.clone() } == basis;
            if nodes_alone && now < *at + NODES_EVERY {
                self.made.due = Some(*at + NODES_EVERY);
                return;
            }
        }
        self.made.from = Some((basis, now));
        self.made.times += 1;
        let rules = self.wanted_rules();
        handle.wanted.send_if_modified(|wanted| {
            let changed = wanted.as_ref() != Some(&rules);
            if changed {
                *wanted = Some(rules);
            }
            changed
        });
    }

    fn wanted_rules(&self) -> Rules {
        let (options, conf) = (&self.world.options.rules, &self.plan.network().masquerade);
        let masquerade = options.masquerade.as_ref().map(|how| Masquerade {
            fully_random: how.fully_random,
            except: conf.except.clone(),
            nodes: self.plan.node_addresses().addresses().collect(),
        });
        let policy = Policy { masquerade, forward: options.forward };
        masq::rules(&self.plan.network().networks, &self.plan.own().subnets, &policy)
    }

    /// Adds the current state of the guard to the entries that the kernel notified about. Only the tables of the guard are read.
    pub(super) fn look_at_guard(&mut self, entries: &mut HashMap<Key, Option<Seen>>) {
        match self.passer.kernel().guard() {
            Ok(present) => {
                entries.extend(self.plan.guard_keys().map(|key| (key, None)));
                entries.extend(present.into_iter().map(|(key, seen)| (key, Some(seen))));
            }
            Err(error) => tracing::warn!(%error, "cannot read the tunnel guard: the next audit tries again"),
        }
    }

    /// Adds the current state of the fence to the entries that the kernel notified about.
    pub(super) fn look_at_fence(&mut self, entries: &mut HashMap<Key, Option<Seen>>) {
        match self.passer.kernel().fence() {
            Ok(present) => {
                entries.extend(self.plan.fence_keys().into_iter().map(|key| (key, None)));
                entries.extend(present.into_iter().map(|(key, seen)| (key, Some(seen))));
            }
            Err(error) => tracing::warn!(%error, "cannot read the fence: the next audit tries again"),
        }
    }

    /// The reconciler sent a new state. subnet.env may wait for it.
    pub fn ruled(&mut self) {
        let Some(handle) = &mut self.rules else { return };
        let state = handle.state.borrow_and_update().clone();
        let wanted = handle.wanted.borrow().clone();
        self.masquerading |= state.in_place.is_some() && state.in_place == wanted;
        self.world.metrics.rules(state.in_place.is_some(), state.writes, state.restored);
        self.publish_env();
    }

    /// The value of IPMASQ in subnet.env. `None`: the wanted rules were never in place yet, so subnet.env must not be written.
    pub(super) fn ipmasq(&self) -> Option<bool> {
        let wanted = self.rules.is_some() && self.world.options.rules.masquerade.is_some();
        match (wanted, self.masquerading) {
            (false, _) => Some(false),
            (true, true) => Some(true),
            (true, false) => None,
        }
    }

    /// Why the rules keep the node from being ready. Only masquerading counts, as in flannel.
    pub(crate) fn rules_blocker(&self) -> Option<String> {
        let handle = self.rules.as_ref().filter(|_| self.world.options.rules.masquerade.is_some())?;
        let state = handle.state.borrow();
        match (&state.error, &state.in_place) {
            (Some(error), _) => Some(format!("rules: {error}")),
            (None, None) => Some("rules: not written yet".to_owned()),
            (None, Some(_)) => None,
        }
    }

    /// What else is wrong with the rules, one sentence each.
    pub(crate) fn rules_warnings(&self) -> Vec<String> {
        let Some(handle) = &self.rules else { return Vec::new() };
        let state = handle.state.borrow();
        let error = state.error.iter().filter(|_| self.world.options.rules.masquerade.is_none());
        error.map(|text| format!("rules: {text}")).chain(state.warnings.iter().cloned()).collect()
    }

    /// What the kernel lacks of the tunnel guard; `None` also where the guard is off.
    pub(crate) fn guard_trouble(&self) -> Option<String> {
        let failures = self.passer.pending().iter().map(|(key, entry)| (key, entry.reason.as_str()));
        self.plan.guard().and_then(|_| guard::trouble(failures))
    }

    /// What the kernel lacks of the fence.
    pub(crate) fn fence_trouble(&self) -> Option<String> {
        self.passer.pending().fence_problem()
    }

    /// For `weft status rules`.
    pub(crate) fn rules_status(&self) -> RuleStatus {
        let fence = self.fence_trouble().or_else(|| self.plan.fence_text().map(|text| text.to_string()));
        let Some(handle) = &self.rules else { return RuleStatus { fence, ..RuleStatus::default() } };
        let (state, wanted) = (handle.state.borrow(), handle.wanted.borrow());
        let text = wanted.as_ref().map(Rules::to_string).unwrap_or_default();
        RuleStatus {
            carrier: state.carrier.clone(),
            in_place: wanted.is_some() && state.in_place == *wanted,
            rules: text.lines().map(str::to_owned).collect(),
            writes: state.writes,
            mended: state.restored,
            fence,
            guard: self.guard_trouble().or_else(|| self.plan.guard()),
        }
    }
}
