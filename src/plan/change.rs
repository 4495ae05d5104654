// SPDX-License-Identifier: Apache-2.0
//! A plan with several backends, while net-conf changes the backend (docs/adr/020-live-change.md).

use std::collections::BTreeMap;
use std::fmt;

use weft_backends::backend::{Backend, Planned};
use weft_backends::host::Host;
use weft_backends::identity::Identities;
use weft_backends::index::OWN;
use weft_backends::link::Difference;
use weft_backends::state::{Key, Name, Route, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Id, Lease};
use weft_subnet::text::Shown;

use super::extra_backends::{EARLIER, ExtraBackend, NEXT, Which};
use super::parsed_conf::ParsedConf;
use super::wide_routes::{self, WideRoutes};
use super::{Plan, clear_text};

/// What one lease leads to, and by which backend it is reached.
pub(super) struct Reached {
    pub(super) planned: Planned,
    pub(super) kind: &'static str,
}

/// How many leases something is true for, and the first of them by id.
pub struct FirstLeases<'a> {
    /// How many there are.
    pub count: usize,
    /// The first of them.
    pub first: Vec<&'a Lease>,
}

impl FirstLeases<'_> {
    /// Number of leases that a problem names.
    pub const NAMED: usize = 5;
}

/// Names the first leases with their nodes.
impl fmt::Display for FirstLeases<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.first.iter().map(|lease| format!("{} ({})", Shown(&lease.id), lease.attrs.owner()));
        let more = if self.count > self.first.len() { ", ..." } else { "" };
        write!(f, "{}{more}", named.collect::<Vec<_>>().join(", "))
    }
}

/// The next backend, which our lease does not name yet.
pub struct NextBackend {
    /// Its type.
    pub kind: &'static str,
    /// The keys of the entries of its devices.
    pub devices: Vec<Key>,
    /// Why it cannot work on this host.
    pub problem: Option<String>,
}

impl Plan {
    /// Plans a lease by its ways ([`Plan::usable`]). The entries of all of them stand, so that packets arrive whatever way the peer
    /// prefers. Only the first that reaches the peer gets the routes. Returns `None` if there is none.
    pub(super) fn plan_by_ways(&mut self, lease: &Lease) -> Option<Reached> {
        let main = Attrs { other_ways: None, ..lease.attrs.clone() };
        let others = lease.attrs.other_ways();
        let ways: Vec<Lease> = [main].into_iter().chain(others).map(|attrs| Lease { attrs, ..lease.clone() }).collect();
        let follows = self.backend.understands(&ways[0].attrs);
        // The type alone says that a node encrypts. An option says only by which device it is reached.
        let encrypts = self.backend.serves(&ways[0].attrs.backend_type);
        if encrypts {
            self.clear_text.followed(&lease.id);
        }
        let mut found: Vec<(Which, Planned)> = Vec::new();
        let mut needed: Vec<u64> = Vec::new();
        for (which, at) in self.usable(lease, &ways, encrypts) {
            let Some((backend, host)) = self.backend_of(which) else { continue };
            found.push((which, backend.plan(host, &self.own, &ways[at])));
            // The peer may know this way only, or prefer it.
            if at == 0 && !follows {
                needed.extend(self.extra_backends.earlier_number(which));
            }
        }
        let best = found.iter().position(|(_, planned)| planned.skipped.is_empty()).unwrap_or(0);
        if found.is_empty() {
            return None;
        }
        let (which, mut planned) = found.remove(best);
        let reached_by = self.backend_of(which).and_then(|(backend, host)| backend.tunnel(host, &self.own));
        for (key, value) in found.into_iter().flat_map(|(_, planned)| planned.state) {
            if planned.state.get(&key).is_some() {
                continue;
            }
            match (key, reached_by) {
                // A tunnel has one route for all peers. This longer one replaces that of the other way in place. To remove the other route
                // would not be enough, because removals may be held.
                (Key::Route(..), Some(tunnel)) => {
                    planned.state.insert(key, Value::Route(Route::Device { dev: tunnel.device }));
                }
                (Key::Route(..), None) => {}
                _ => {
                    planned.state.insert(key, value);
                }
            }
        }
        wide_routes::insert(&mut planned.state, self.wide_routes().to_peer(which, lease));
        needed.extend(self.extra_backends.earlier_number(which));
        self.extra_backends.need(&lease.id, needed);
        let kind = self.backend_of(which).map_or(self.backend.kind(), |(backend, _)| backend.kind());
        Some(Reached { planned, kind })
    }

    /// Returns the backends by which packets may go to this lease, in the order in which they are preferred, each with the place of the
    /// first way that it understands. `encrypts` says whether the lease names the type of ours.
    ///
    /// If there is none, and the lease names one way alone, a node of flannel may have other options than it says. Then the first backend
    /// of its type counts, so that it is reached as before the change. The agent's own tunnel counts for every lease of its type, because it
    /// sends to whatever port the lease names ([`Plan::tunnel_peers`]).
    fn usable(&self, lease: &Lease, ways: &[Lease], encrypts: bool) -> Vec<(Which, usize)> {
        let mut order = self.extra_backends.order();
        order.retain(|which| match (which, self.backend_of(*which)) {
            (Which::Earlier(_), Some((backend, _))) => self.may_send_by(backend.kind(), lease, encrypts),
            _ => true,
        });
        let place = |which: &Which, by_type: bool| {
            let (backend, host) = self.backend_of(*which)?;
            let may_guess = || ways.len() == 1 || backend.tunnel(host, &self.own).is_some();
            let fits = |way: &Lease| match by_type {
                true => backend.serves(&way.attrs.backend_type) && !backend.knows_options_of_flannel() && may_guess(),
                false => backend.understands(&way.attrs),
            };
            Some((*which, ways.iter().position(fits)?))
        };
        let found: Vec<(Which, usize)> = order.iter().filter_map(|which| place(which, false)).collect();
        if !found.is_empty() {
            return found;
        }
        order.iter().find_map(|which| place(which, true)).into_iter().collect()
    }

    /// Returns the routes of all backends to all of Network, while there are several backends.
    fn wide_routes(&self) -> WideRoutes {
        let devices = self.extra_backends.order().into_iter().filter_map(|which| {
            let (backend, host) = self.backend_of(which)?;
            Some((which, backend.device(host, &self.own)))
        });
        WideRoutes::of(devices, self.leaves_wide_routes_out())
    }

    /// Returns true if packets to peers may take the default route, because one of several backends makes no routes. Then no device gets all
    /// packets to Network. When packets go the way of a backend that encrypts, its device does, and what has no way there is not sent in clear text.
    fn leaves_wide_routes_out(&self) -> bool {
        let may_pass = self.extra_backends.next.is_some() || self.is_settling() || !self.refuses("");
        may_pass && self.all_backends().any(|(backend, ..)| !backend.makes_routes())
    }

    /// Plans the devices of our lease's backend, and those of the next and the earlier ones.
    pub(super) fn plan_all_devices(&mut self) {
        let own = (Id::from(OWN), self.backend.device(&self.host, &self.own));
        let extra = self.extra_backends.devices(&self.own);
        let leaves_out = self.leaves_wide_routes_out();
        for (contributor, mut state) in std::iter::once(own).chain(extra) {
            if leaves_out {
                wide_routes::leave_out(&mut state);
            }
            let changed = self.index.set(&contributor, &Age::default(), state);
            self.update_devices(&changed);
        }
    }

    /// Iterates over all backends with the facts of the host for each, and true for the next one, which our lease does not name yet.
    /// The backend of our lease comes first.
    pub(super) fn all_backends(&self) -> impl Iterator<Item = (&dyn Backend, &Host, bool)> {
        let earlier = self.extra_backends.earlier().map(|extra| (&*extra.backend, &extra.host, false));
        let next = self.extra_backends.next.iter().map(|extra| (&*extra.backend, &extra.host, true));
        std::iter::once((&*self.backend, &self.host, false)).chain(earlier).chain(next)
    }

    pub(super) fn backend_of(&self, which: Which) -> Option<(&dyn Backend, &Host)> {
        match which {
            Which::Current => Some((&*self.backend, &self.host)),
            Which::Earlier(_) | Which::Next => self.extra_backends.get(which).map(ExtraBackend::planned),
        }
    }

    /// Returns true while there is another backend than that of our lease.
    pub fn is_changing(&self) -> bool {
        !self.extra_backends.is_empty()
    }

    /// Returns true for an entry of a device that this node needs for its lease, or for the next or an earlier backend.
    pub fn is_device_of_ours(&self, key: &Key) -> bool {
        self.index.winner(key).is_some_and(|id| [OWN, NEXT, EARLIER].contains(&&**id))
    }

    /// Returns the device that would have to be deleted and made again for this backend, and the key of net-conf that would give it
    /// another name. Packets would be lost.
    pub fn device_to_recreate(&self, backend: &dyn Backend, host: &Host) -> Option<(Name, Option<&'static str>)> {
        let devices = backend.device(host, &self.own);
        devices.iter().find_map(|(key, value)| {
            let (Key::Link(name), Value::Link(wanted)) = (key, value) else { return None };
            let Some(Value::Link(have)) = self.index.desired(key).filter(|_| self.is_device_of_ours(key)) else {
                return None;
            };
            (wanted.compare(&have) == Difference::Recreate).then(|| (*name, wanted.kind.named_after()))
        })
    }

    /// Returns the device of ours that gets another UDP port with this backend, if there is one.
    pub fn moved_port(&self, backend: &dyn Backend) -> Option<Name> {
        let mut ports = backend.listen_ports(&self.host, &self.own).into_iter();
        ports.find_map(|(name, wanted)| {
            let have = self.wanted_port(name).filter(|_| self.is_own_device(&Key::Link(name)))?;
            (have != wanted).then_some(name)
        })
    }

    /// Returns the UDP port that this device should have, if it has one.
    fn wanted_port(&self, name: Name) -> Option<u16> {
        match self.index.desired(&Key::Link(name))? {
            Value::Link(link) => link.kind.listen_port(),
            _ => None,
        }
    }

    /// Returns the UDP ports on which our devices go on to listen until a full pass has given them those of this backend. `host` has its
    /// identities.
    pub fn ports_until_pass(&self, backend: &dyn Backend, host: &Host) -> BTreeMap<Name, u16> {
        let mut kept = self.host.kept_ports.clone();
        for (name, wanted) in backend.listen_ports(host, &self.own) {
            let is_ours = self.is_device_of_ours(&Key::Link(name));
            let have = kept.get(&name).copied().or_else(|| self.wanted_port(name).filter(|_| is_ours));
            match have.filter(|have| *have != wanted) {
                Some(have) => kept.insert(name, have),
                None => kept.remove(&name),
            };
        }
        kept
    }

    /// Returns the kept ports, now that a full pass has found these devices listening on these ports. One that does not listen keeps the
    /// port that it had, because it may come back with that one.
    pub fn ports_after_pass(&self, listening: &BTreeMap<Name, u16>) -> BTreeMap<Name, u16> {
        let kept = self.wireguard_devices().filter_map(|name| {
            let have = *listening.get(&name).or_else(|| self.host.kept_ports.get(&name))?;
            (Some(have) != self.wanted_port(name)).then_some((name, have))
        });
        kept.collect()
    }

    /// Sets the ports on which our devices go on to listen. No entry depends on them.
    pub fn keep_ports(&mut self, kept: BTreeMap<Name, u16>) {
        self.host.kept_ports = kept;
        self.extra_backends.update_host(&self.host);
    }

    /// Returns true if an earlier backend has the type of our lease's backend, so that both may use one device.
    pub fn has_earlier_mode(&self) -> bool {
        self.extra_backends.earlier().any(|extra| self.backend.serves(extra.kind()))
    }

    /// Returns true if another backend can follow that of our lease without a change of our lease: only options differ that concern
    /// this node alone.
    pub fn is_understood_by(&self, backend: &dyn Backend) -> bool {
        self.backend.advertise(&self.host).is_ok_and(|attrs| backend.understands(&attrs))
    }

    /// Returns the identities of an earlier backend that this one replaces, if there is one.
    pub fn earlier_identities(&self, backend: &dyn Backend) -> Option<Identities> {
        let same = self.extra_backends.earlier().find(|extra| extra.is_replaced_by(backend));
        same.map(|extra| extra.host.identities.clone())
    }

    /// Plans the devices of this backend in addition to those of our lease's backend. A full pass is necessary afterwards.
    pub fn prepare(&mut self, next: ExtraBackend) {
        self.extra_backends.next = Some(next);
        self.plan_everything();
    }

    /// Gives the next backend up. A full pass is necessary afterwards.
    pub fn give_up_next(&mut self) {
        if self.extra_backends.next.take().is_some() {
            self.plan_everything();
        }
    }

    /// Returns true if the backend of our lease sends in clear text, and the next one encrypts and allows none.
    pub fn next_ends_clear_text(&self) -> bool {
        let next = self.extra_backends.next.as_ref();
        next.is_some_and(|next| clear_text::refusal(&*next.backend, self.backend.kind()).is_some())
    }

    /// Returns the next backend, if there is one.
    pub fn next(&self) -> Option<NextBackend> {
        let next = self.extra_backends.next.as_ref()?;
        let problem = next.backend.advertise(&next.host).err().map(|skip| skip.to_string());
        let devices = next.backend.device(&next.host, &self.own).keys().copied().collect();
        Some(NextBackend { kind: next.backend.kind(), devices, problem })
    }

    /// Makes the next backend that of our lease. The one before becomes an earlier one. Packets still go the way that they went. Returns the
    /// text of net-conf that is in force now. A full pass is necessary afterwards.
    pub fn switch_to_next(&mut self, text_before: String) -> Option<String> {
        let ExtraBackend { text, net_conf, backend, mut host, .. } = self.extra_backends.next.take()?;
        // Its device may stand already, as that of an earlier backend, and listen on another port.
        host.kept_ports = self.ports_until_pass(&*backend, &host);
        self.begin_clear_text(&*backend);
        let before = Host { identities: self.host.identities.clone(), ..host.clone() };
        let net_conf = std::mem::replace(&mut self.net_conf, net_conf);
        let backend = std::mem::replace(&mut self.backend, backend);
        self.host = host;
        let before = ExtraBackend::new(ParsedConf { text: text_before, net_conf, backend }, before);
        self.extra_backends.switch(before, &*self.backend);
        self.plan_everything();
        Some(text)
    }

    /// Adds backends that our lease had before the agent was started again, in the order in which packets preferred them. If `sends_earlier` is
    /// true, packets still go by them until peers had the time to learn of our lease. This must be called before the first [`Plan::put`].
    pub fn with_earlier(mut self, earlier: Vec<ExtraBackend>, sends_earlier: bool) -> Plan {
        self.extra_backends.restore(earlier);
        // Peers do not know that our lease names the present backend, if it does not, as far as this node knows.
        if sends_earlier || !self.backend.understands(&self.own.attrs) {
            self.extra_backends.settle();
        }
        self.plan_all_devices();
        self
    }

    /// Returns true while packets go an earlier way to peers that know it.
    pub fn sends_earlier(&self) -> bool {
        self.extra_backends.sends_earlier()
    }

    /// Returns true while peers may not know yet which backend our lease names, because it named another one until a moment ago.
    pub fn is_settling(&self) -> bool {
        self.extra_backends.is_settling
    }

    /// Lets packets go the way of our lease's backend to peers that know it. A full pass is necessary afterwards.
    pub fn send_current(&mut self) {
        self.extra_backends.settled();
        self.plan_everything();
    }

    /// Returns the numbers of the earlier backends with the net-conf of each, in the order in which packets prefer them.
    pub fn earlier(&self) -> impl Iterator<Item = (u64, &str)> {
        self.extra_backends.earlier().map(|extra| (extra.number, extra.text.as_str()))
    }

    /// Returns the type of an earlier backend.
    pub fn earlier_kind(&self, number: u64) -> &'static str {
        self.extra_backends.numbered(number).map_or("", ExtraBackend::kind)
    }

    /// Returns the leases that need an earlier backend, of which at most so many are named.
    pub fn users(&self, number: u64, most: usize) -> FirstLeases<'_> {
        let Some(users) = self.extra_backends.users.get(&number) else {
            return FirstLeases { count: 0, first: Vec::new() };
        };
        let first = users.iter().take(most).filter_map(|id| self.peers.get(id)).map(|lease| &**lease).collect();
        FirstLeases { count: users.len(), first }
    }

    /// Returns true if a peer needs this earlier backend.
    pub fn is_earlier_used(&self, number: u64) -> bool {
        self.extra_backends.is_used(number)
    }

    /// Returns true if this earlier backend has the type of our lease's backend, and leases of flannel do not show which of the two reaches
    /// their nodes.
    pub fn is_earlier_guessed(&self, number: u64) -> bool {
        self.extra_backends.numbered(number).is_some_and(|extra| {
            extra.backend.kind() == self.backend.kind() && !extra.backend.knows_options_of_flannel()
        })
    }

    /// Removes an earlier backend. A full pass is necessary afterwards.
    pub fn drop_earlier(&mut self, number: u64) {
        self.extra_backends.retain_earlier(|extra| extra.number != number);
        self.plan_everything();
    }

    /// Returns the first believed lease, or our own one, that is not inside these networks, and how many they are.
    pub fn outside(&self, networks: &Subnets) -> Option<(Id, usize)> {
        let is_outside =
            |lease: &&Lease| lease.subnets.iter().any(|net| !networks.iter().any(|all| all.contains(&net)));
        let believed = self.peers.believed().map(|lease| &**lease);
        let mut outside = std::iter::once(&self.own).chain(believed).filter(is_outside);
        outside.next().map(|first| (first.id.clone(), 1 + outside.count()))
    }
}
