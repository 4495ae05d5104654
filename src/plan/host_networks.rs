// SPDX-License-Identifier: Apache-2.0
//! The host's networks inside Network, except its own part of the cluster, and what a change of them means for the plan.

use std::collections::BTreeSet;

use ipnet::IpNet;
use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_backends::index::Changed;
use weft_backends::state::{Key, Name};
use weft_subnet::connected::Connected;
use weft_subnet::lease::{Id, Lease};

use super::Plan;

/// Returns the addresses and networks of this host that no other node may have as its subnet. Those in the subnet of the lease `own`
/// (cni0), on the devices of `backend` and on `devices` are this node's part of the cluster. They are left out.
pub fn foreign_networks(host: &Host, backend: &dyn Backend, own: &Lease, devices: &BTreeSet<Name>) -> Connected {
    let made = backend.device(host, own);
    let is_own = |name: &str| {
        made.keys().any(|key| matches!(key, Key::Link(link) if link.text() == name))
            || devices.iter().any(|link| link.text() == name)
    };
    host.connected.without(&own.subnets, &host.uplink.name.text(), is_own)
}

/// Returns true if nothing but the routes and networks of these hosts may differ.
fn differ_in_networks_alone(one: &Host, other: &Host) -> bool {
    let Host { uplink, public_v4, public_v6, wireguard_port, kept_ports, identities, routes: _, connected: _ } = one;
    let addresses = (uplink, *public_v4, *public_v6) == (&other.uplink, other.public_v4, other.public_v6);
    let ports = (*wireguard_port, kept_ports) == (other.wireguard_port, &other.kept_ports);
    addresses && ports && *identities == other.identities
}

impl Plan {
    /// Returns these facts of the host as the plan uses them: without the networks that are this node's part of the cluster.
    pub fn without_own_networks(&self, mut host: Host) -> Host {
        host.connected = foreign_networks(&host, &*self.backend, &self.own, &self.devices);
        host
    }

    /// Uses the host's new addresses and routes, and plans those leases again that they concern. The host must come from
    /// [`Plan::without_own_networks`].
    ///
    /// Returns `None` if the host differs in anything else. Then everything must be planned again ([`Plan::rebase`]).
    pub fn update_host_networks(&mut self, host: &Host) -> Option<Vec<Changed>> {
        if !differ_in_networks_alone(host, &self.host) {
            return None;
        }
        let routes: Vec<IpNet> = self.host.routes.difference(&host.routes);
        self.host = host.clone();
        self.extra_backends.update_host(host);
        let judged = self.peers.connect(host.connected.clone());
        let mut changed = self.apply_changes(judged);
        let concerned: BTreeSet<Id> =
            routes.iter().flat_map(|net| self.peers.published_in(*net)).map(|lease| lease.id.clone()).collect();
        changed.extend(self.plan_again(&concerned.into_iter().collect::<Vec<_>>()));
        changed.extend(self.plan_guard());
        Some(changed)
    }
}
