// SPDX-License-Identifier: Apache-2.0
//! Which traffic rules this node wants, and what it waits for until they are in place. Writing them is [`crate::rules::keeper`]'s.

use std::net::IpAddr;

use weft_backends::masq::{self, Masquerade, Policy, Rules};

use super::Node;
use crate::kernel::Kernel;
use crate::rules::keeper::Desk;
use crate::status::RuleStatus;

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
        let nodes = || -> Vec<IpAddr> {
            let leases = self.plan.peers().believed().map(|lease| &lease.attrs);
            let both = |attrs: &weft_subnet::attrs::Attrs| {
                [attrs.public_ip.map(IpAddr::V4), attrs.public_ipv6.map(IpAddr::V6)].into_iter().flatten()
            };
            leases.flat_map(both).collect()
        };
        let masquerade = options.masquerade.as_ref().map(|how| Masquerade {
            fully_random: how.fully_random,
            except: conf.except.clone(),
            nodes: if conf.except_nodes { nodes() } else { Vec::new() },
        });
        let policy = Policy { masquerade, forward: options.forward };
        masq::rules(&self.plan.network().networks, &self.plan.own().subnets, &policy)
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

    /// For `weft status rules`.
    pub(crate) fn rules_status(&self) -> RuleStatus {
        let Some(desk) = &self.rules else { return RuleStatus::default() };
        let (state, wanted) = (desk.state.borrow(), desk.wanted.borrow());
        let text = wanted.as_ref().map(Rules::to_string).unwrap_or_default();
        RuleStatus {
            carrier: state.carrier.clone(),
            in_place: wanted.is_some() && state.in_place == *wanted,
            rules: text.lines().map(str::to_owned).collect(),
            writes: state.writes,
            mended: state.mended,
            guard: self.plan.guard(),
        }
    }
}
