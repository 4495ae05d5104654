// SPDX-License-Identifier: Apache-2.0
//! What the host has inside Network besides its part of the cluster, and what a change of that means for the plan.

use std::collections::BTreeSet;
use std::rc::Rc;

use ipnet::IpNet;
use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_backends::index::Changed;
use weft_backends::state::{Key, Name};
use weft_subnet::connected::Connected;
use weft_subnet::lease::{Id, Lease};

use super::Plan;

/// This host's addresses and networks where no other node may have a subnet. What stands in the subnet of this lease (cni0), on the
/// devices of this backend and on these other `devices` is this node's own.
pub fn foreign_places(host: &Host, backend: &dyn Backend, own: &Lease, devices: &BTreeSet<Name>) -> Connected {
    let made = backend.device(host, own);
    let is_own = |name: &str| {
        made.keys().any(|key| matches!(key, Key::Link(link) if link.text() == name))
            || devices.iter().any(|link| link.text() == name)
    };
    host.connected.without(&own.subnets, &host.uplink.name.text(), is_own)
}

impl Plan {
    /// The facts of the host as they are planned with.
    pub fn seen(&self, mut host: Host) -> Host {
        host.connected = foreign_places(&host, &*self.backend, &self.own, &self.devices);
        host
    }

    /// The host has other addresses or routes, and is the same otherwise: plans those leases again that this concerns. `None`: more is
    /// different, and everything must be planned again ([`Plan::rebase`]). The host is one that [`Plan::seen`] returned.
    pub fn move_ground(&mut self, host: &Host) -> Option<Vec<Changed>> {
        let ground = |of: &Host| Host { routes: host.routes.clone(), connected: Connected::default(), ..of.clone() };
        if ground(host) != ground(&self.host) {
            return None;
        }
        let routes: Vec<IpNet> = self.host.routes.difference(&host.routes);
        self.host = host.clone();
        let judged = self.peers.connect(host.connected.clone());
        let mut changed = self.follow(judged);
        let concerned: BTreeSet<Id> =
            routes.iter().flat_map(|net| self.peers.published_in(*net)).map(|lease| lease.id.clone()).collect();
        let leases: Vec<Rc<Lease>> = concerned.iter().filter_map(|id| self.peers.get(id).cloned()).collect();
        for lease in leases {
            changed.extend(self.plan_peer(&lease));
        }
        changed.extend(self.plan_guard());
        Some(changed)
    }
}
