// SPDX-License-Identifier: Apache-2.0
//! The entries of one peer, and what happens when two leases name one identity (a VtepMAC, or a public key of WireGuard): the kernel has
//! one entry for it. The lease that does not have it gets no routes either, because its traffic would go to the other node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use weft_backends::backend::Planned;
use weft_backends::diff;
use weft_backends::index::{Beaten, Changed, Contributor, MOST_CONTRIBUTORS};
use weft_backends::options::BadOption;
use weft_backends::register::TYPES;
use weft_backends::state::{Key, Name, State, Value};
use weft_backends::vxlan::VtepMac;
use weft_backends::wireguard_key::KeyPair;
use weft_subnet::lease::{Age, Id, Lease};
use weft_subnet::text::Shown;

use super::change::Reached;
use super::{Plan, clear_text};

/// Maximum number of leases that are logged because they share a published address with another one. The status names all of them.
const MAX_SHARED_LOGGED: usize = 10;

/// An identity that a lease names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseIdentity {
    /// What it is, such as `VtepMAC 02:00:00:00:00:01`.
    pub name: String,
    /// What a person does on a copy of a machine so that it gets another identity.
    pub remedy: &'static str,
    /// Where the lease says that the node with this identity is, with the port if several nodes may be at one address.
    at: Option<(IpAddr, Option<u16>)>,
}

impl LeaseIdentity {
    /// Returns the identity that this entry contains, if it contains one.
    fn of(key: &Key, value: &Value) -> Option<LeaseIdentity> {
        Some(match (key, value) {
            (Key::Fdb(_, mac), Value::Fdb(to)) => {
                LeaseIdentity { name: format!("VtepMAC {mac}"), remedy: VtepMac::REMEDY, at: Some((*to, None)) }
            }
            (Key::WgPeer(..), Value::WgPeer(peer)) => {
                let at = peer.endpoint.map(|endpoint| (endpoint.ip(), Some(endpoint.port())));
                LeaseIdentity { name: format!("PublicKey {}", peer.key), remedy: KeyPair::REMEDY, at }
            }
            _ => return None,
        })
    }
}

/// What one lease leads to.
struct OfLease {
    state: State,
    /// Why it is not reached, or not by every family.
    reasons: Vec<String>,
    /// The type of the backend that reaches it.
    kind: &'static str,
}

/// An identity that a lease names, and that another one has.
struct OfOther<'a> {
    /// The device with the entry of this identity.
    device: Name,
    identity: LeaseIdentity,
    beaten: Beaten<'a>,
}

impl Plan {
    /// Returns the believed leases that have no entries or not all of them, in the order of their ids.
    pub fn unplanned_leases(&self) -> impl Iterator<Item = &Lease> {
        let mut ids: Vec<&Id> = self.unplanned.keys().collect();
        ids.sort_unstable();
        ids.into_iter().filter_map(|id| Some(&**self.peers.get(id)?))
    }

    /// Returns the identities that this lease names and that belong to another lease, each with that lease.
    pub fn clashes(&self, lease: &Lease) -> Vec<(LeaseIdentity, &Lease)> {
        let ports = (TYPES.ports)(&lease.attrs);
        let public = |(ip, port): (IpAddr, Option<u16>)| {
            let (is_same, theirs) = match ip {
                IpAddr::V4(ip) => (lease.attrs.public_ip == Some(ip), ports[0]),
                IpAddr::V6(ip) => (lease.attrs.public_ipv6 == Some(ip), ports[1]),
            };
            is_same && (port.is_none() || theirs.is_none() || port == theirs)
        };
        let clash = |key: Key| {
            let value = self.index.desired(&key)?;
            let identity = LeaseIdentity::of(&key, &value)?;
            let winner = self.index.winner(&key).filter(|id| **id != lease.id && !identity.at.is_some_and(public))?;
            Some((identity, &**self.peers.get(winner)?))
        };
        self.index.keys(&lease.id).into_iter().filter_map(clash).collect()
    }

    /// Plans one lease, and the other leases that get or lose an identity because of it.
    pub(super) fn plan_peer(&mut self, lease: &Lease) -> Vec<Changed> {
        let before = self.first_contributors(&lease.id);
        let mut changed = self.plan_alone(lease);
        changed.extend(self.replan_contributors(&lease.id, before));
        changed
    }

    /// Removes all entries of a lease, and plans the other leases that get an identity because of it.
    pub(super) fn unplan_peer(&mut self, id: &Id, age: &Age) -> Vec<Changed> {
        self.peers_version += 1;
        let before = self.first_contributors(id);
        let mut changed = self.index.set(id, age, State::new());
        self.update_devices(&changed);
        changed.extend(self.replan_contributors(id, before));
        changed
    }

    /// Plans one lease and no other.
    fn plan_alone(&mut self, lease: &Lease) -> Vec<Changed> {
        #[cfg(test)]
        {
            self.planned += 1;
        }
        self.peers_version += 1;
        let mut of_lease = self.entries_of(lease);
        self.keep_off_identities_of_others(lease, &mut of_lease);
        self.note_reasons(lease, &of_lease.reasons);
        let is_reached = self.is_reached(&of_lease);
        let OfLease { mut state, kind, .. } = of_lease;
        match &mut self.guard {
            Some(guard) if !is_reached => guard.forget(&lease.id),
            Some(guard) => state.extend(guard.peer(lease)),
            None => {}
        }
        // A lease that is not reached must not lower the MTU, nor loosen rp_filter.
        if kind != self.backend.kind() && is_reached {
            self.other_types.insert(&lease.id, kind);
        } else {
            self.other_types.remove(&lease.id);
        }
        let mut changed = self.index.set(&lease.id, &lease.age, state);
        self.update_devices(&changed);
        changed.extend(self.plan_fence_exceptions(&lease.id, &lease.age, Some(&lease.attrs)));
        changed
    }

    /// Removes the entries that would send traffic for this lease to another node, which has an identity that this lease names. The entry of
    /// the identity stays a contribution, for the time when the other lease is gone.
    fn keep_off_identities_of_others(&self, lease: &Lease, of_lease: &mut OfLease) {
        for OfOther { device, identity, beaten } in self.identities_of_others(&of_lease.state, lease) {
            of_lease.reasons.push(self.clash(&identity, lease, beaten));
            of_lease.state.retain(|key, value| !key.reaches() || diff::device(key, value) != Some(device));
        }
    }

    /// Keeps for the status why this lease is not reached, or not by every family, and logs a reason that is new.
    fn note_reasons(&mut self, lease: &Lease, reasons: &[String]) {
        if reasons.is_empty() {
            self.unplanned.remove(&lease.id);
            return;
        }
        let reason = reasons.join("; ");
        if self.unplanned.get(&lease.id) != Some(&reason) {
            self.lease_log.log_set_aside(&lease.id, &reason);
        }
        self.unplanned.insert(lease.id.clone(), reason);
    }

    /// Returns true if packets go to this lease.
    fn is_reached(&self, of_lease: &OfLease) -> bool {
        // A lease that lost its MAC to another one still contributes the FDB entry, but no packet is sent to its subnet.
        let has_entries = of_lease.state.keys().any(Key::reaches);
        // A peer of a tunnel has no entries. During a change, its packets may come by another device already.
        let may_be_by_tunnel = !self.extra_backends.is_empty() && of_lease.reasons.is_empty();
        has_entries || (may_be_by_tunnel && self.tunnel_kind() == Some(of_lease.kind))
    }

    /// Returns what this lease leads to, without regard to other leases.
    fn entries_of(&mut self, lease: &Lease) -> OfLease {
        self.extra_backends.forget(&lease.id);
        self.clear_text.allow(&lease.id);
        let is_simple = self.extra_backends.is_empty() && lease.attrs.other_ways.is_none();
        let by_ways = if is_simple { None } else { self.plan_by_ways(lease) };
        let reached = match by_ways.map_or_else(|| self.plan_by_type(lease), Ok) {
            Ok(reached) => reached,
            Err(bad) => {
                return OfLease { state: State::new(), reasons: vec![bad.to_string()], kind: self.backend.kind() };
            }
        };
        let Reached { planned: Planned { mut state, skipped }, kind } = reached;
        let problems = self.remove_unwanted_devices(lease, &mut state);
        let mut reasons: Vec<String> = problems.iter().map(ToString::to_string).collect();
        reasons.extend(skipped.iter().map(ToString::to_string));
        OfLease { state, reasons, kind }
    }

    /// Plans a lease by the backend of its type.
    fn plan_by_type(&mut self, lease: &Lease) -> Result<Reached, BadOption> {
        let kind = lease.attrs.backend_type.as_str();
        if let Some(reason) = clear_text::refusal(&*self.backend, kind) {
            // The backend extension refuses leases of other types, too, and encrypts nothing.
            if self.backend.encrypts() {
                self.clear_text.refuse(&lease.id);
            }
            return Err(reason.into());
        }
        let backend = match self.backend.serves(kind) {
            true => &*self.backend,
            false => self.other_backends.get_or_make(kind, &self.net_conf)?,
        };
        Ok(Reached { planned: backend.plan(&self.host, &self.own, lease), kind: backend.kind() })
    }

    /// Returns the identities that this lease names and that belong to another one, which names them at another address.
    fn identities_of_others(&self, state: &State, lease: &Lease) -> Vec<OfOther<'_>> {
        let identities = state.iter().filter(|(key, _)| key.is_identity());
        let of_others = identities.filter_map(|(key, value)| {
            let beaten = self.index.beaten_by((key, value), &lease.id, &lease.age)?;
            Some(OfOther { device: *key.device()?, identity: LeaseIdentity::of(key, value)?, beaten })
        });
        of_others.collect()
    }

    /// Returns the reason why a lease is not reached although it is believed: another lease has its identity.
    fn clash(&self, identity: &LeaseIdentity, lease: &Lease, beaten: Beaten<'_>) -> String {
        let name = &identity.name;
        let Beaten::By(winner) = beaten else {
            return format!(
                "more than {MOST_CONTRIBUTORS} leases have {name}, and no more count: {} is not reached",
                lease.subnets
            );
        };
        let other = self.peers.get(winner);
        let at = other.map(|other| format!(" ({}, {})", other.subnets, other.attrs.owner())).unwrap_or_default();
        let older = other.is_some_and(|other| (&other.age, &other.id) < (&lease.age, &lease.id));
        let (age, subnet, winner) = (if older { "older" } else { "newer" }, lease.subnets, Shown(winner));
        format!("{name} is also that of the {age} lease {winner}{at}, which counts: {subnet} is not reached")
    }

    /// Returns the first contributors of each identity that this lease names, as [`Index::first`](weft_backends::index::Index::first)
    /// does.
    fn first_contributors(&self, id: &Id) -> BTreeMap<Key, Vec<Contributor>> {
        let keys = self.index.keys(id).into_iter().filter(Key::is_identity);
        keys.map(|key| (key, self.index.first(&key, None))).collect()
    }

    /// Plans again the other leases for which something is different after a change of this lease. `before` are the first contributors of
    /// its identities before the change. There are at most [`MOST_CONTRIBUTORS`] for an identity. Their own contributions stay the same, so
    /// no further lease follows from them.
    fn replan_contributors(&mut self, id: &Id, mut before: BTreeMap<Key, Vec<Contributor>>) -> Vec<Changed> {
        let now = self.first_contributors(id);
        for key in now.keys() {
            // The lease did not name this identity before.
            before.entry(*key).or_insert_with(|| self.index.first(key, Some(id)));
        }
        let mut affected: BTreeSet<Id> = BTreeSet::new();
        for (key, was) in before {
            let now = now.get(&key).cloned().unwrap_or_else(|| self.index.first(&key, None));
            // The reason of a lease that does not have the identity names the first contributor and its address.
            let first = now.first().map(|one| &one.id);
            let same_first = first == was.first().map(|one| &one.id) && first != Some(id);
            let same = |one: &&Contributor| same_first && was.contains(one) && now.contains(one);
            affected.extend(was.iter().chain(&now).filter(|one| !same(one)).map(|one| one.id.clone()));
        }
        affected.remove(id);
        let leases: Vec<Arc<Lease>> = affected.iter().filter_map(|id| self.peers.get(id).cloned()).collect();
        leases.iter().flat_map(|lease| self.plan_alone(lease)).collect()
    }

    /// Logs that a lease has the published address of another one, when that is new.
    pub(super) fn log_shared_address(&mut self, before: Option<&Lease>, lease: &Lease) {
        let public = |lease: &Lease| (lease.attrs.public_ip, lease.attrs.public_ipv6, (TYPES.ports)(&lease.attrs));
        if self.shared_logged >= MAX_SHARED_LOGGED || before.is_some_and(|before| public(before) == public(lease)) {
            return;
        }
        if let Some(other) = self.peers.sharing(lease) {
            self.shared_logged += 1;
            let (one, other) = (Shown(&lease.id), Shown(&other.id));
            tracing::warn!(lease = %one, %other, "two leases publish one address: one of the nodes is not reached");
        }
    }
}
