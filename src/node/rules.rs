// SPDX-License-Identifier: Apache-2.0
//! Which traffic rules this node wants, and what it waits for until they are in place. Writing them is [`crate::firewall::reconciler`]'s.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use weft_backends::masq::{self, Masquerade, Policy, Rules};
use weft_backends::state::{Key, Seen};
use weft_subnet::cidr::Subnets;
use weft_subnet::network::Masquerading;

use super::Node;
use crate::firewall::guard;
use crate::firewall::reconciler::Desk;
use crate::kernel::Kernel;
use crate::plan::fence;
use crate::status::RuleStatus;

/// Where nodes are exceptions from masquerading, they are passed on once in this time at most: a change of one costs a look at all
/// of them, and a program where iptables carries the rules. The first change after a calm goes on at once.
const NODES_EVERY: Duration = Duration::from_secs(1);

/// What the rules were last made from.
#[derive(Debug, Default)]
pub(super) struct Made {
    from: Option<(Basis, Instant)>,
    /// The nodes changed since, too soon to make the rules again.
    pub due: Option<Instant>,
    /// How often.
    pub times: u64,
}

/// All that decides what the rules say, besides our options.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Basis {
    networks: Subnets,
    own: Subnets,
    masquerade: Masquerading,
    /// Version of the nodes' addresses.
    nodes: u64,
}

impl<K: Kernel> Node<K> {
    /// From now on rules are looked after.
    pub fn carry(&mut self, desk: Desk) {
        self.rules = Some(desk);
        self.want_rules();
        // The lease says where our tunnel packets come from, if it must.
        self.republish();
    }

    /// Tells the keeper what is wanted now; the same again is no news.
    pub(super) fn want_rules(&mut self) {
        let Some(desk) = &self.rules else { return };
        let network = self.plan.network();
        // Nobody knows the nodes yet; an earlier run's rules do.
        if network.masquerade.except_nodes && !self.knows_peers() {
            return;
        }
        let (own, now) = (self.plan.own().subnets, Instant::now());
        let (masquerade, nodes) = (network.masquerade.clone(), self.plan.nodes().version());
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
        desk.wanted.send_if_modified(|wanted| {
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
            nodes: self.plan.nodes().addresses().collect(),
        });
        let policy = Policy { masquerade, forward: options.forward };
        masq::rules(&self.plan.network().networks, &self.plan.own().subnets, &policy)
    }

    /// Adds to what the kernel announced the guard as it is now. Its own table only is read, whatever else there is.
    pub(super) fn look_at_guard(&mut self, entries: &mut HashMap<Key, Option<Seen>>) {
        match self.passer.kernel().guard() {
            Ok(there) => {
                entries.extend(self.plan.guard_keys().map(|key| (key, None)));
                entries.extend(there.into_iter().map(|(key, seen)| (key, Some(seen))));
            }
            Err(error) => tracing::warn!(%error, "cannot read the tunnel guard: the next audit tries again"),
        }
    }

    /// Adds to what the kernel announced the fence as it is now.
    pub(super) fn look_at_fence(&mut self, entries: &mut HashMap<Key, Option<Seen>>) {
        match self.passer.kernel().fence() {
            Ok(there) => {
                entries.extend(self.plan.fence_keys().into_iter().map(|key| (key, None)));
                entries.extend(there.into_iter().map(|(key, seen)| (key, Some(seen))));
            }
            Err(error) => tracing::warn!(%error, "cannot read the fence: the next audit tries again"),
        }
    }

    /// The keeper has news. subnet.env may wait for them.
    pub fn ruled(&mut self) {
        let Some(desk) = &mut self.rules else { return };
        let state = desk.state.borrow_and_update().clone();
        let wanted = desk.wanted.borrow().clone();
        self.masquerading |= state.in_place.is_some() && state.in_place == wanted;
        self.world.metrics.rules(state.in_place.is_some(), state.writes, state.mended);
        self.publish_env();
    }

    /// What IPMASQ in subnet.env says; `None`: rules that are wanted were never in place, so the container runtime must not
    /// be told yet.
    pub(super) fn ipmasq(&self) -> Option<bool> {
        let wanted = self.rules.is_some() && self.world.options.rules.masquerade.is_some();
        match (wanted, self.masquerading) {
            (false, _) => Some(false),
            (true, true) => Some(true),
            (true, false) => None,
        }
    }

    /// Why the node is not ready, if it is for its rules: only masquerading counts, as in flannel.
    pub(crate) fn rules_blocker(&self) -> Option<String> {
        let desk = self.rules.as_ref().filter(|_| self.world.options.rules.masquerade.is_some())?;
        let state = desk.state.borrow();
        match (&state.trouble, &state.in_place) {
            (Some(trouble), _) => Some(format!("rules: {trouble}")),
            (None, None) => Some("rules: not written yet".to_owned()),
            (None, Some(_)) => None,
        }
    }

    /// What else is wrong with the rules.
    pub(crate) fn rules_remarks(&self) -> Vec<String> {
        let Some(desk) = &self.rules else { return Vec::new() };
        let state = desk.state.borrow();
        let trouble = state.trouble.iter().filter(|_| self.world.options.rules.masquerade.is_none());
        trouble.map(|text| format!("rules: {text}")).chain(state.remarks.iter().cloned()).collect()
    }

    /// What the kernel has not of the tunnel guard; `None` also where nobody asked for one.
    pub(crate) fn guard_trouble(&self) -> Option<String> {
        self.plan.guard().and_then(|_| guard::trouble(self.passer.pending()))
    }

    /// What the kernel has not of the fence.
    pub(crate) fn fence_trouble(&self) -> Option<String> {
        fence::trouble(self.passer.pending())
    }

    /// For `weft status rules`.
    pub(crate) fn rules_status(&self) -> RuleStatus {
        let fence = self.fence_trouble().or_else(|| self.plan.fence_text().map(|text| text.to_string()));
        let Some(desk) = &self.rules else { return RuleStatus { fence, ..RuleStatus::default() } };
        let (state, wanted) = (desk.state.borrow(), desk.wanted.borrow());
        let text = wanted.as_ref().map(Rules::to_string).unwrap_or_default();
        RuleStatus {
            carrier: state.carrier.clone(),
            in_place: wanted.is_some() && state.in_place == *wanted,
            rules: text.lines().map(str::to_owned).collect(),
            writes: state.writes,
            mended: state.mended,
            fence,
            guard: self.guard_trouble().or_else(|| self.plan.guard()),
        }
    }
}
