// SPDX-License-Identifier: Apache-2.0
//! The backends in addition to that of our lease while net-conf changes the backend (docs/adr/020-live-change.md).
//!
//! The next backend has its devices before our lease names it. The earlier ones keep theirs while a peer may use them. Our lease names the
//! earlier ones as other ways to reach us.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_backends::state::State;
use weft_backends::wireguard_key::DeviceSecrets;
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Id, Lease};
use weft_subnet::net_conf::NetConf;

use super::parsed_conf::ParsedConf;

/// Contributor of the devices of the next backend. No lease has an id that begins with a slash.
pub(super) const NEXT: &str = "/next";
/// Contributor of the devices of earlier backends.
pub(super) const EARLIER: &str = "/earlier";

/// A backend in addition to that of our lease.
pub struct ExtraBackend {
    /// The net-conf that names it.
    pub(super) text: String,
    pub(super) net_conf: NetConf,
    pub(super) backend: Box<dyn Backend>,
    /// The facts of the host, with the identities of this backend.
    pub(super) host: Host,
    /// Identifies it among the earlier ones. The latest has the largest number.
    pub(super) number: u64,
}

impl ExtraBackend {
    /// Returns the backend of this net-conf. `host` has its identities.
    pub fn new(conf: ParsedConf, host: Host) -> ExtraBackend {
        let ParsedConf { text, net_conf, backend } = conf;
        ExtraBackend { text, net_conf, backend, host, number: 0 }
    }

    /// Returns the type of its backend.
    pub fn kind(&self) -> &'static str {
        self.backend.kind()
    }

    /// Returns the text of the net-conf that names it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Returns its backend, with the facts of the host for it.
    pub fn planned(&self) -> (&dyn Backend, &Host) {
        (&*self.backend, &self.host)
    }

    fn update_host(&mut self, host: &Host) {
        let identities = std::mem::take(&mut self.host.identities);
        self.host = Host { identities, ..host.clone() };
    }

    /// Returns true if the other backend reaches every node that this one reaches, so that this one is not needed any more. Their
    /// options may differ, for example in the MTU.
    pub(super) fn is_replaced_by(&self, other: &dyn Backend) -> bool {
        self.backend.advertise(&self.host).is_ok_and(|attrs| other.understands(&attrs))
    }
}

/// All backends in addition to that of our lease.
#[derive(Default)]
pub(super) struct ExtraBackends {
    pub(super) next: Option<ExtraBackend>,
    /// In the order in which packets prefer them. The latest comes first, unless peers may not know it yet.
    earlier: Vec<ExtraBackend>,
    /// How many of the earlier backends come before that of our lease, because peers may not know yet that our lease names it.
    preferred: usize,
    /// Our lease names another backend than before, and peers have not had the time yet to learn of that.
    pub(super) is_settling: bool,
    /// The earlier backends that each lease needs, by number.
    needs: HashMap<Id, Vec<u64>>,
    /// The leases that need each earlier backend. The status is made after every event, so it must not search for them.
    pub(super) users: HashMap<u64, BTreeSet<Id>>,
    last_number: u64,
}

/// One of the backends of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Which {
    Current,
    Earlier(usize),
    Next,
}

impl ExtraBackends {
    /// Returns true if there is only the backend of our lease.
    pub(super) fn is_empty(&self) -> bool {
        self.next.is_none() && self.earlier.is_empty()
    }

    /// Notes which earlier backends a lease needs.
    pub(super) fn need(&mut self, id: &Id, mut numbers: Vec<u64>) {
        self.forget(id);
        numbers.sort_unstable();
        numbers.dedup();
        for number in &numbers {
            self.users.entry(*number).or_default().insert(id.clone());
        }
        if !numbers.is_empty() {
            self.needs.insert(id.clone(), numbers);
        }
    }

    /// Notes that a lease needs no earlier backend.
    pub(super) fn forget(&mut self, id: &Id) {
        for number in self.needs.remove(id).unwrap_or_default() {
            if let Some(users) = self.users.get_mut(&number) {
                users.remove(id);
            }
        }
    }

    pub(super) fn forget_all(&mut self) {
        self.needs.clear();
        self.users.clear();
    }

    pub(super) fn is_used(&self, number: u64) -> bool {
        self.users.get(&number).is_some_and(|users| !users.is_empty())
    }

    /// Iterates over the earlier backends in the order in which packets prefer them.
    pub(super) fn earlier(&self) -> impl Iterator<Item = &ExtraBackend> {
        self.earlier.iter()
    }

    /// Returns the earlier backend with this number.
    pub(super) fn numbered(&self, number: u64) -> Option<&ExtraBackend> {
        self.earlier.iter().find(|extra| extra.number == number)
    }

    /// Returns this backend. `None` for that of our lease, which is not here.
    pub(super) fn get(&self, which: Which) -> Option<&ExtraBackend> {
        match which {
            Which::Current => None,
            Which::Earlier(at) => self.earlier.get(at),
            Which::Next => self.next.as_ref(),
        }
    }

    /// Returns the number of this backend, if it is an earlier one.
    pub(super) fn earlier_number(&self, which: Which) -> Option<u64> {
        self.get(which).filter(|_| which != Which::Next).map(|extra| extra.number)
    }

    /// Removes the earlier backends for which `keep` returns false.
    pub(super) fn retain_earlier(&mut self, mut keep: impl FnMut(&ExtraBackend) -> bool) {
        let (mut at, mut preferred) = (0, 0);
        self.earlier.retain(|extra| {
            let stays = keep(extra);
            preferred += usize::from(stays && at < self.preferred);
            at += 1;
            stays
        });
        self.preferred = preferred;
        self.is_settling &= !self.earlier.is_empty();
    }

    /// Makes `before`, the backend that our lease named so far, an earlier one. Our lease names `next` from now on.
    ///
    /// Peers may not know `before` yet if the change to it was a moment ago. So it keeps its place in the order. `next` takes the place of the
    /// earlier backend that it replaces, or the last one. So packets to every peer go on as they did.
    pub(super) fn switch(&mut self, before: ExtraBackend, next: &dyn Backend) {
        self.last_number += 1;
        let number = self.last_number;
        self.earlier.insert(self.preferred, ExtraBackend { number, ..before });
        let is_replaced = |extra: &ExtraBackend| extra.number != number && extra.is_replaced_by(next);
        self.preferred = self.earlier.iter().position(is_replaced).unwrap_or(self.earlier.len());
        self.earlier.retain(|extra| !is_replaced(extra));
        self.is_settling = true;
    }

    /// Adds the earlier backends of a run that has ended, in the order in which its packets preferred them.
    pub(super) fn restore(&mut self, earlier: Vec<ExtraBackend>) {
        for extra in earlier.into_iter().rev() {
            self.last_number += 1;
            self.earlier.insert(0, ExtraBackend { number: self.last_number, ..extra });
        }
    }

    /// Lets packets go by the earlier backends until peers had the time to learn of our lease.
    pub(super) fn settle(&mut self) {
        self.preferred = self.earlier.len();
        self.is_settling = !self.earlier.is_empty();
    }

    /// Takes notice that peers had the time to learn of our lease, and of all the ways that it names.
    pub(super) fn settled(&mut self) {
        (self.preferred, self.is_settling) = (0, false);
        self.earlier.sort_by_key(|extra| Reverse(extra.number));
    }

    /// Returns true while packets go by an earlier backend to peers that know it.
    pub(super) fn sends_earlier(&self) -> bool {
        self.preferred > 0
    }

    pub(super) fn update_host(&mut self, host: &Host) {
        self.earlier.iter_mut().chain(&mut self.next).for_each(|extra| extra.update_host(host));
    }

    /// Iterates over the earlier backends that a lease needs.
    pub(super) fn used(&self) -> impl Iterator<Item = (&dyn Backend, &Host)> {
        self.earlier.iter().filter(|extra| self.is_used(extra.number)).map(|extra| (&*extra.backend, &extra.host))
    }

    /// Returns the first of these backends that makes no routes, or `current` if all of them make some.
    pub(super) fn without_routes_or<'a>(&'a self, current: &'a dyn Backend) -> &'a dyn Backend {
        let mut all = self.earlier.iter().chain(&self.next).map(|extra| &*extra.backend);
        all.find(|backend| !backend.makes_routes()).unwrap_or(current)
    }

    /// Returns the secrets of WireGuard devices, if one of these backends has any. The next one comes first, and then the earlier ones.
    pub(super) fn secrets(&self) -> Option<DeviceSecrets> {
        self.next.iter().chain(&self.earlier).find_map(|extra| extra.backend.secrets(&extra.host))
    }

    /// Returns what our lease would say for each of the earlier backends that can work on this host. The latest comes first, whatever packets
    /// prefer, so that the lease need not be written again when they prefer another one.
    pub(super) fn other_ways(&self, host: &Host) -> Vec<Attrs> {
        let way = |extra: &ExtraBackend| {
            let host = Host { identities: extra.host.identities.clone(), ..host.clone() };
            extra.backend.advertise(&host).ok()
        };
        let mut latest_first: Vec<&ExtraBackend> = self.earlier.iter().collect();
        latest_first.sort_by_key(|extra| Reverse(extra.number));
        latest_first.into_iter().filter_map(way).collect()
    }

    /// Returns the contributors of devices with their entries.
    pub(super) fn devices(&self, own: &Lease) -> [(Id, State); 2] {
        let devices = |extra: &ExtraBackend| extra.backend.device(&extra.host, own);
        let mut earlier = State::new();
        for (key, value) in self.earlier.iter().flat_map(devices) {
            // The first of several backends with one device counts.
            if earlier.get(&key).is_none() {
                earlier.insert(key, value);
            }
        }
        [(NEXT.into(), self.next.as_ref().map(devices).unwrap_or_default()), (EARLIER.into(), earlier)]
    }

    /// Returns the backends in the order in which they are preferred.
    pub(super) fn order(&self) -> Vec<Which> {
        let mut order: Vec<Which> = (0..self.earlier.len()).map(Which::Earlier).collect();
        order.insert(self.preferred, Which::Current);
        order.extend(self.next.as_ref().map(|_| Which::Next));
        order
    }
}
