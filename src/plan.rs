// SPDX-License-Identifier: Apache-2.0
//! What this node wants in its kernel, kept up to date lease by lease. No effects: leases and host facts in, keys to look at out.

mod devices;
pub mod fence;
mod host_networks;
pub(crate) mod node_addresses;
pub mod old_routes;
mod other_backends;
mod peer;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::rc::Rc;

use weft_backends::backend::{Backend, Skip};
use weft_backends::diff::{self, Op};
use weft_backends::host::Host;
use weft_backends::index::{Changed, Index, OWN};
use weft_backends::owner::Ownership;
use weft_backends::state::{Key, Name, Observed, Seen, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, family};
use weft_subnet::env::SubnetEnv;
use weft_subnet::lease::{Age, Id, Lease, Record};
use weft_subnet::network::Network;
use weft_subnet::peers::{Change, Peers, Us};

pub use devices::MOST_DEVICES;
use fence::Fence;
pub use host_networks::foreign_places;
use other_backends::Others;

use crate::firewall::guard::{self, Roster};
use crate::log::lines::Lines;
use crate::options::Fences;
use crate::plan::node_addresses::NodeAddresses;

/// Contributes the tunnel guard's chains. The slash keeps it apart from every id of a store.
const GUARD: &str = "/guard";

/// The desired state of one node.
pub struct Plan {
    network: Network,
    backend: Box<dyn Backend>,
    others: Others,
    host: Host,
    own: Lease,
    peers: Peers,
    index: Index,
    /// Backend type of each planned peer that uses another than ours: for the MTU.
    foreign: HashMap<Id, &'static str>,
    skipped: HashMap<Id, String>,
    devices: BTreeSet<Name>,
    fence: Fence,
    guard: Option<Roster>,
    /// Counted only where they are exceptions from masquerading.
    node_addresses: NodeAddresses,
    /// Believed leases that wait until a device of another type or VNI goes, with the devices that each needs.
    no_room: BTreeMap<Id, Vec<Name>>,
    /// Devices of names that peers need, made by somebody else.
    strangers: BTreeSet<Name>,
    /// Believed leases that need one of them, with all that each needs.
    barred: BTreeMap<Id, Vec<Name>>,
    /// What this node does otherwise than net-conf says, for people.
    remark: Option<String>,
    /// What is said of leases, and how often.
    pub(crate) lines: Lines,
    /// The store assigns subnets: of leases that claim one VtepMAC the oldest counts.
    assigned: bool,
    /// How often it was said that two leases share a public address.
    shared_said: usize,
    /// How many leases were planned so far.
    #[cfg(test)]
    pub(crate) planned: usize,
}

impl Plan {
    /// A plan without peers.
    pub fn new(network: Network, backend: Box<dyn Backend>, mut host: Host, own: Lease) -> Plan {
        host.connected = foreign_places(&host, &*backend, &own, &BTreeSet::new());
        let peers = Peers::default();
        let mut plan = Plan {
            network,
            backend,
            others: Others::default(),
            host,
            own,
            peers,
            index: Index::default(),
            foreign: HashMap::new(),
            skipped: HashMap::new(),
            devices: BTreeSet::new(),
            fence: Fence::default(),
            guard: None,
            node_addresses: NodeAddresses::default(),
            no_room: BTreeMap::new(),
            strangers: BTreeSet::new(),
            barred: BTreeMap::new(),
            remark: None,
            lines: Lines::default(),
            assigned: false,
            shared_said: 0,
            #[cfg(test)]
            planned: 0,
        };
        plan.plan_devices();
        plan.peers.judge_for(plan.us());
        plan
    }

    /// For a store that assigns subnets, or does not. To be said before any lease is put.
    pub fn assigned(mut self, assigned: bool) -> Plan {
        self.assigned = assigned;
        self.index = Index::new(assigned);
        self.plan_devices();
        self.peers.judge_for(self.us());
        self
    }

    /// With these fences, and a tunnel guard if `guard`. Look at everything afterwards.
    pub fn fence(mut self, fences: Fences, guard: bool) -> Plan {
        self.fence = Fence::new(fences);
        self.guard = guard.then(Roster::default);
        self.plan_devices();
        self
    }

    /// What is wanted of the tunnel guard.
    pub fn guard_keys(&self) -> impl Iterator<Item = Key> {
        self.index.iter().map(|(key, _)| key).filter(|key| matches!(key, Key::Peer(_) | Key::Guard(_)))
    }

    /// The tunnel guard, for people; `None` = not asked for.
    pub fn guard(&self) -> Option<String> {
        self.guard.as_ref().map(Roster::to_string)
    }

    /// What is asked for and left out, for people.
    pub fn problem(&self) -> Vec<String> {
        self.fence.problem().into_iter().chain(self.remark.clone()).collect()
    }

    /// Another host, lease, network or backend: everything is planned again. Look at everything afterwards.
    pub fn rebase(&mut self, network: Network, backend: Box<dyn Backend>, mut host: Host, own: Lease) {
        host.connected = foreign_places(&host, &*backend, &own, &self.devices);
        (self.network, self.backend, self.host, self.own) = (network, backend, host, own);
        self.others.clear();
        self.peers.judge_for(self.us());
        self.index = Index::new(self.assigned);
        self.foreign.clear();
        self.devices.clear();
        self.guard.iter_mut().for_each(Roster::forget_all);
        self.no_room.clear();
        self.barred.clear();
        self.fence.forget_all();
        // What was said of a lease is not said again.
        let peers = &self.peers;
        self.skipped.retain(|id, _| peers.get(id).is_some());
        self.plan_devices();
        let believed: Vec<Rc<Lease>> = self.peers.believed().cloned().collect();
        let excepted = believed.iter().filter(|_| self.network.masquerade.except_nodes);
        self.node_addresses.replace(excepted.map(|lease| &**lease));
        for lease in believed {
            self.plan_peer(&lease);
        }
        self.plan_guard();
    }

    /// A record was put into the store.
    pub fn put(&mut self, record: Record) -> Vec<Changed> {
        self.guard.iter_mut().for_each(Roster::listed);
        let id = record.id.clone();
        let before = self.peers.reason(&id).map(str::to_owned);
        let changes = self.peers.put(record);
        // One that was believed is told of where the change is followed.
        let known = changes.iter().any(|change| change.id == id);
        if let Some(reason) = self.peers.reason(&id).filter(|reason| !known && before.as_deref() != Some(*reason)) {
            self.lines.say_aside(&id, reason);
        }
        self.follow(changes)
    }

    /// A record left the store.
    pub fn remove(&mut self, id: &Id) -> Vec<Changed> {
        let changes = self.peers.remove(id);
        self.follow(changes)
    }

    /// What is wanted at this key.
    pub fn desired(&self, key: &Key) -> Option<Value> {
        self.index.desired(key)
    }

    /// What must be written to make what is there equal to what is wanted.
    pub fn difference(&self, observed: &Observed, ours: impl Fn(&Key, &Seen) -> bool) -> Vec<Op> {
        diff::difference(self.index.iter(), |key| self.index.desired(key).is_some(), observed, ours)
    }

    /// The leases, judged.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The nodes' addresses; none where they are no exceptions from masquerading.
    pub fn node_addresses(&self) -> &NodeAddresses {
        &self.node_addresses
    }

    /// Why a believed lease has no or not all entries.
    pub fn skipped(&self, id: &Id) -> Option<&str> {
        self.skipped.get(id).map(String::as_str)
    }

    /// The keys of one peer.
    pub fn keys(&self, id: &Id) -> Vec<Key> {
        self.index.keys(id)
    }

    /// Whose entry this is.
    pub fn owner(&self, key: &Key) -> Option<&Id> {
        self.index.owner(key)
    }

    /// Believed leases that no backend can reach, wholly or in part.
    pub fn skipped_count(&self) -> usize {
        self.skipped.len()
    }

    /// Leases set aside, by judgement or by a backend.
    pub fn set_aside_count(&self) -> usize {
        self.peers.set_aside_len() + self.skipped.len()
    }

    /// Planned peers of another backend type than ours: paths to them may be asymmetric.
    pub fn all_foreign(&self) -> impl Iterator<Item = &Id> {
        self.foreign.keys()
    }

    /// The backend type of such a peer.
    pub fn foreign(&self, id: &Id) -> Option<&str> {
        self.foreign.get(id).copied()
    }

    /// Our lease.
    pub fn own(&self) -> &Lease {
        &self.own
    }

    /// The facts planned with; what is this node's own is no longer among the connected places.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// The net-conf planned with.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// What our lease should say now.
    pub fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let attrs = self.backend.advertise(host)?;
        Ok(if self.guard.is_some() { guard::with_tunnel_addresses(attrs, host) } else { attrs })
    }

    /// What tells our leftovers from other people's entries.
    pub fn ownership(&self, marked: impl IntoIterator<Item = Name>) -> Ownership {
        Ownership {
            devices: self.devices.iter().copied().chain(marked).collect(),
            networks: self.network.networks,
            own: self.own.subnets,
        }
    }

    /// The smallest MTU over the families and backends in use, bytes.
    pub fn mtu(&self) -> u32 {
        let families: Vec<Family> = self.own.subnets.iter().map(|net| family(&net)).collect();
        let kinds: BTreeSet<&'static str> = self.foreign.values().copied().collect();
        let others = kinds.into_iter().filter_map(|kind| self.others.made(kind));
        let backends = std::iter::once(&*self.backend).chain(others);
        backends
            .flat_map(|backend| families.iter().map(|family| backend.mtu(&self.host, *family)))
            .min()
            .unwrap_or(self.host.uplink.mtu)
    }

    /// What subnet.env should say; whether we masquerade is not the plan's to know.
    pub fn env(&self) -> SubnetEnv {
        SubnetEnv { networks: self.network.networks, subnets: self.own.subnets, mtu: self.mtu(), ipmasq: false }
    }

    fn follow(&mut self, changes: Vec<Change>) -> Vec<Changed> {
        let mut changed = Vec::new();
        for change in changes {
            if self.network.masquerade.except_nodes {
                self.node_addresses.follow(change.before.as_deref(), change.after.as_deref());
            }
            match &change.after {
                Some(lease) => {
                    self.say_shared(change.before.as_deref(), lease);
                    // Nearly always the only one: not copied.
                    if changed.is_empty() {
                        changed = self.plan_peer(lease);
                    } else {
                        changed.extend(self.plan_peer(lease));
                    }
                }
                None => {
                    if let Some(reason) = self.peers.reason(&change.id) {
                        self.lines.say_aside(&change.id, reason);
                    }
                    self.skipped.remove(&change.id);
                    self.foreign.remove(&change.id);
                    self.guard.iter_mut().for_each(|guard| guard.forget(&change.id));
                    self.no_room.remove(&change.id);
                    self.barred.remove(&change.id);
                    changed.extend(self.mind_fence(&change.id, &Age::default(), None));
                    let age = change.before.map(|lease| lease.age.clone()).unwrap_or_default();
                    changed.extend(self.unplan_peer(&change.id, &age));
                }
            }
        }
        self.note_devices(&changed);
        let freed = changed.iter().any(|(key, _, after)| matches!(key, Key::Link(_)) && after.is_none());
        if freed {
            changed.extend(self.use_room());
        }
        changed.extend(self.plan_guard());
        changed
    }

    /// The guard's chains, after devices or peers changed.
    fn plan_guard(&mut self) -> Vec<Changed> {
        let Some(guard) = &self.guard else { return Vec::new() };
        let links = self.devices.iter().filter_map(|name| self.index.desired(&Key::Link(*name)));
        let state = guard.chains(links);
        self.index.set(&Id::from(GUARD), &Age::default(), state)
    }

    fn plan_devices(&mut self) {
        let remark = self.backend.remark(&self.host);
        if let Some(remark) = remark.as_ref().filter(|now| self.remark.as_ref() != Some(*now)) {
            tracing::warn!("{remark}");
        }
        self.remark = remark;
        let state = self.backend.device(&self.host, &self.own);
        let changed = self.index.set(&Id::from(OWN), &Age::default(), state);
        self.note_devices(&changed);
        self.plan_fence();
    }

    /// Against what leases are judged now.
    fn us(&self) -> Us {
        let host = &self.host;
        let both = |v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>| -> Vec<IpAddr> {
            v4.map(IpAddr::V4).into_iter().chain(v6.map(IpAddr::V6)).collect()
        };
        let public = both(host.public_v4, host.public_v6);
        let mut uplink = both(host.uplink.v4, host.uplink.v6);
        uplink.retain(|ip| !public.contains(ip));
        Us {
            networks: self.network.networks,
            id: Some(self.own.id.clone()),
            own: self.own.subnets,
            public,
            uplink,
            connected: host.connected.clone(),
            assigned: self.assigned,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
