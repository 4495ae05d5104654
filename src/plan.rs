// SPDX-License-Identifier: Apache-2.0
//! The desired state of this node, kept up to date lease by lease. Leases and facts of the host go in, and changes of entries come out.
//! There are no effects.

mod change;
pub mod claims;
mod clear_text;
mod devices;
mod extension;
mod extra_backends;
pub mod fence;
mod guard;
mod host_networks;
mod mtu;
pub(crate) mod node_addresses;
mod other_backends;
mod parsed_conf;
mod peer;
mod probes;
mod tunnel;
mod waiting;
mod wide_routes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use weft_backends::backend::{Backend, Skip};
use weft_backends::diff::{self, Op};
use weft_backends::host::Host;
use weft_backends::identity::Identities;
use weft_backends::index::{Changed, Index};
use weft_backends::owner::Ownership;
use weft_backends::register::TYPES;
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Age, Id, Lease, Record};
use weft_subnet::net_conf::NetConf;
use weft_subnet::peers::{PeerChange, Peers, Us};

pub use change::{FirstLeases, NextBackend};
use clear_text::ClearText;
pub use devices::{DeviceProblem, MAX_DEVICES};
pub use extra_backends::ExtraBackend;
use extra_backends::ExtraBackends;
use fence::Fence;
pub use host_networks::foreign_networks;
use other_backends::{OtherBackends, OtherTypes};
pub use parsed_conf::{ConfError, ParsedConf, ignored_names};
pub use peer::LeaseIdentity;
pub use tunnel::PlannedTunnel;
use waiting::Waiting;

use crate::firewall::guard::{TunnelPeers, with_tunnel_addresses};
use crate::log::leases::LeaseLog;
use crate::plan::node_addresses::NodeAddresses;

/// The desired state of one node.
pub struct Plan {
    net_conf: NetConf,
    backend: Box<dyn Backend>,
    other_backends: OtherBackends,
    /// The next backend and the earlier ones, while net-conf changes the backend.
    extra_backends: ExtraBackends,
    clear_text: ClearText,
    host: Host,
    own: Lease,
    peers: Peers,
    index: Index,
    /// The backend type of each planned peer whose type differs from ours. It is needed for the MTU.
    other_types: OtherTypes,
    /// The believed leases that have no entries or not all of them, each with the reason.
    unplanned: HashMap<Id, String>,
    devices: BTreeSet<Name>,
    fence: Fence,
    guard: Option<TunnelPeers>,
    /// The addresses of all nodes. It stays empty unless they are exceptions from masquerading.
    node_addresses: NodeAddresses,
    /// Believed leases that wait for room for their devices.
    waiting: Waiting,
    /// Devices that peers need and that other programs made.
    foreign_devices: BTreeSet<Name>,
    /// Believed leases that need foreign devices, with these devices.
    blocked: BTreeMap<Id, Vec<Name>>,
    /// Describes what this node does otherwise than net-conf says.
    remark: Option<String>,
    /// Limits how often a lease is logged.
    pub(crate) lease_log: LeaseLog,
    /// True if the store assigns subnets. Then the oldest of the leases with one VtepMAC wins, otherwise the newest.
    assigned: bool,
    /// Grows whenever a lease is planned or leaves the plan.
    peers_version: u64,
    /// How often it was logged that two leases have one published address.
    shared_logged: usize,
    /// Number of leases that were planned so far.
    #[cfg(test)]
    pub(crate) planned: usize,
}

impl Plan {
    /// Returns a plan without peers.
    pub fn new(net_conf: NetConf, backend: Box<dyn Backend>, mut host: Host, own: Lease) -> Plan {
        host.connected = foreign_networks(&host, &*backend, &own, &BTreeSet::new());
        let peers = Peers::default().with_ports(TYPES.ports);
        let mut plan = Plan {
            net_conf,
            backend,
            other_backends: OtherBackends::default(),
            extra_backends: ExtraBackends::default(),
            clear_text: ClearText::default(),
            host,
            own,
            peers,
            index: Index::default(),
            other_types: OtherTypes::default(),
            unplanned: HashMap::new(),
            devices: BTreeSet::new(),
            fence: Fence::default(),
            guard: None,
            node_addresses: NodeAddresses::default(),
            waiting: Waiting::default(),
            foreign_devices: BTreeSet::new(),
            blocked: BTreeMap::new(),
            remark: None,
            lease_log: LeaseLog::default(),
            assigned: false,
            peers_version: 0,
            shared_logged: 0,
            #[cfg(test)]
            planned: 0,
        };
        plan.plan_devices();
        plan.peers.judge_for(plan.us());
        plan
    }

    /// Sets whether the store assigns subnets. This must be called before the first [`Plan::put`].
    pub fn with_assigned_subnets(mut self, assigned: bool) -> Plan {
        self.assigned = assigned;
        self.index = Index::new(assigned);
        self.plan_devices();
        self.peers.judge_for(self.us());
        self
    }

    /// Describes what flags or net-conf ask for, but this node does not do.
    pub fn problems(&self) -> Vec<String> {
        let fence = self.fence.left_out().into_iter().chain(self.fence.problem());
        fence.chain(self.remark.clone()).collect()
    }

    /// Plans everything again for another net-conf, backend, host or own lease. A full pass is necessary afterwards.
    pub fn rebase(&mut self, net_conf: NetConf, backend: Box<dyn Backend>, host: Host, own: Lease) {
        (self.net_conf, self.backend) = (net_conf, backend);
        self.rebase_on(host, own);
    }

    /// Plans everything again for another host or own lease. A full pass is necessary afterwards.
    pub fn rebase_on(&mut self, host: Host, own: Lease) {
        (self.host, self.own) = (host, own);
        self.plan_everything();
    }

    fn plan_everything(&mut self) {
        self.host.connected = foreign_networks(&self.host, &*self.backend, &self.own, &self.devices);
        self.other_backends.clear();
        self.extra_backends.update_host(&self.host);
        self.extra_backends.forget_all();
        self.clear_text.forget_refusals();
        self.peers_version += 1;
        self.peers.judge_for(self.us());
        self.index = Index::new(self.assigned);
        self.other_types.clear();
        self.devices.clear();
        self.guard.iter_mut().for_each(TunnelPeers::forget_all);
        self.waiting.clear();
        self.blocked.clear();
        self.fence.clear(self.extra_backends.without_routes_or(&*self.backend));
        // The reasons stay, so that they are not logged again.
        let peers = &self.peers;
        self.unplanned.retain(|id, _| peers.get(id).is_some());
        self.plan_devices();
        let believed: Vec<Arc<Lease>> = self.peers.believed().cloned().collect();
        let excepted = believed.iter().filter(|_| self.net_conf.masquerade.except_nodes);
        self.node_addresses.replace(excepted.map(|lease| &**lease));
        for lease in believed {
            self.plan_peer(&lease);
        }
        self.plan_guard();
    }

    /// Takes over a record that was written into the store.
    pub fn put(&mut self, record: Record) -> Vec<Changed> {
        self.guard.iter_mut().for_each(TunnelPeers::listed);
        let id = record.id.clone();
        let before = self.peers.reason(&id).map(str::to_owned);
        let changes = self.peers.put(record);
        // If the lease was believed, `apply_changes` logs the reason.
        let known = changes.iter().any(|change| change.id == id);
        if let Some(reason) = self.peers.reason(&id).filter(|reason| !known && before.as_deref() != Some(*reason)) {
            self.lease_log.log_set_aside(&id, reason);
        }
        self.apply_changes(changes)
    }

    /// Takes notice that a record was removed from the store.
    pub fn remove(&mut self, id: &Id) -> Vec<Changed> {
        let changes = self.peers.remove(id);
        self.apply_changes(changes)
    }

    /// Returns the desired value of this key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.index.desired(key)
    }

    /// Returns the operations that make the observed state equal to the desired state. `ours` says which observed entries may be
    /// removed.
    pub fn difference(&self, observed: &Observed, ours: impl Fn(&Key, &ObservedValue) -> bool) -> Vec<Op> {
        diff::difference(self.index.iter(), |key| self.index.desired(key).is_some(), observed, ours)
    }

    /// Returns the judged leases.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Returns the addresses of the nodes. There are none unless they are exceptions from masquerading.
    pub fn node_addresses(&self) -> &NodeAddresses {
        &self.node_addresses
    }

    /// Returns why a believed lease has no entries, or not all of them.
    pub fn unplanned(&self, id: &Id) -> Option<&str> {
        self.unplanned.get(id).map(String::as_str)
    }

    /// Returns the keys to which a lease contributes.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        self.index.keys(id)
    }

    /// Returns the lease whose contribution to this key counts.
    pub fn winner(&self, key: &Key) -> Option<&Id> {
        self.index.winner(key)
    }

    /// Returns how many believed leases have no entries, or not all of them.
    pub fn unplanned_count(&self) -> usize {
        self.unplanned.len()
    }

    /// Returns how many leases are set aside: those that are not believed, and those that are unplanned.
    pub fn set_aside_count(&self) -> usize {
        self.peers.not_believed_len() + self.unplanned.len()
    }

    /// Iterates over the planned peers whose backend type differs from ours. The paths to them may be asymmetric.
    pub fn peers_of_other_backends(&self) -> impl Iterator<Item = &Id> {
        self.other_types.ids()
    }

    /// Returns the backend type of a peer if it differs from ours.
    pub fn other_backend(&self, id: &Id) -> Option<&str> {
        self.other_types.get(id)
    }

    /// Returns the own lease.
    pub fn own(&self) -> &Lease {
        &self.own
    }

    /// Returns the facts of the host, without the networks that are this node's part of the cluster.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the backend of our lease.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Returns net-conf.
    pub fn net_conf(&self) -> &NetConf {
        &self.net_conf
    }

    /// Returns the attributes that the own lease should have.
    ///
    /// # Errors
    /// The backend cannot work on this host.
    pub fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let ways = self.extra_backends.other_ways(host);
        let mut attrs = self.backend.advertise(host)?.with_other_ways(&ways);
        // A way in the lease is a type and its data. Peers that use udp also need the address from which its packets come.
        attrs.tunnel_ip = attrs.tunnel_ip.or_else(|| ways.iter().find_map(|way| way.tunnel_ip));
        Ok(if self.guard.is_some() { with_tunnel_addresses(attrs, host) } else { attrs })
    }

    /// Returns true if weft makes the routes to the peers. Otherwise another program makes them, and a route that is there may be its own.
    pub fn makes_routes(&self) -> bool {
        self.backend.makes_routes()
    }

    /// Returns the identities of our devices, now that our lease in the store says this.
    pub fn identities_after(&self, lease: &Attrs) -> Identities {
        self.backend.follow(&self.host.identities, lease)
    }

    /// Returns the rules that tell entries of ours from those of other programs. `marked` are the devices with our mark.
    pub fn ownership(&self, marked: impl IntoIterator<Item = Name>) -> Ownership {
        Ownership {
            devices: self.devices.iter().copied().chain(marked).collect(),
            networks: self.net_conf.networks,
            own: self.own.subnets,
        }
    }

    /// Plans the leases that these changes made believed, and removes the entries of those that are believed no more.
    fn apply_changes(&mut self, changes: Vec<PeerChange>) -> Vec<Changed> {
        let mut changed = Vec::new();
        for change in changes {
            if self.net_conf.masquerade.except_nodes {
                self.node_addresses.follow(change.before.as_deref(), change.after.as_deref());
            }
            match &change.after {
                Some(lease) => {
                    self.log_shared_address(change.before.as_deref(), lease);
                    // Nearly always there is only one change. Its result is not copied.
                    if changed.is_empty() {
                        changed = self.plan_peer(lease);
                    } else {
                        changed.extend(self.plan_peer(lease));
                    }
                }
                None => {
                    let age = change.before.map(|lease| lease.age.clone()).unwrap_or_default();
                    changed.extend(self.forget_peer(&change.id, &age));
                }
            }
        }
        if changed.iter().any(|one| matches!(one.key, Key::Link(_)) && one.after.is_none()) {
            changed.extend(self.plan_waiting_leases());
        }
        changed.extend(self.plan_guard());
        changed
    }

    /// Removes everything that the plan knows of a lease that is believed no more.
    fn forget_peer(&mut self, id: &Id, age: &Age) -> Vec<Changed> {
        if let Some(reason) = self.peers.reason(id) {
            self.lease_log.log_set_aside(id, reason);
        }
        self.unplanned.remove(id);
        self.other_types.remove(id);
        self.extra_backends.forget(id);
        self.clear_text.forget(id);
        self.guard.iter_mut().for_each(|guard| guard.forget(id));
        self.waiting.remove(id);
        self.blocked.remove(id);
        let mut changed = self.plan_fence_exceptions(id, &Age::default(), None);
        changed.extend(self.unplan_peer(id, age));
        changed
    }

    /// Plans this node's own devices and the fence.
    fn plan_devices(&mut self) {
        let remark = self.backend.remark(&self.host);
        if let Some(remark) = remark.as_ref().filter(|now| self.remark.as_ref() != Some(*now)) {
            tracing::warn!("{remark}");
        }
        self.remark = remark;
        self.plan_all_devices();
        self.plan_fence();
    }

    /// Returns the facts of this node against which leases are judged.
    fn us(&self) -> Us {
        let host = &self.host;
        let public: Vec<IpAddr> = host.published().collect();
        let uplink = host.uplink.addresses().filter(|ip| !public.contains(ip)).collect();
        Us {
            networks: self.net_conf.networks,
            id: Some(self.own.id.clone()),
            own: self.own.subnets,
            public,
            ports: (TYPES.ports)(&self.own.attrs),
            uplink,
            connected: host.connected.clone(),
            assigned: self.assigned,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
