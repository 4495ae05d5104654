// SPDX-License-Identifier: Apache-2.0
//! A kernel in memory, for tests of the agent. It records operations, and a test can make operations fail, change entries as another
//! program would, and send notices.

use std::cell::{Ref, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::rc::Rc;

use ipnet::IpNet;
use tokio::sync::Notify;
use weft_backends::diff::{Op, device};
use weft_backends::link::{Difference, Link};
use weft_backends::owner::{KERNEL_PROTOCOL, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_backends::wireguard_key::DeviceSecrets;

use super::{Kernel, LinkInfo, Machine, Monitor, Notice, Outcome, RouteLookup, Session, errno};

/// What all clones share.
#[derive(Debug, Default)]
struct Inside {
    machine: Machine,
    entries: Observed,
    ops: Vec<Op>,
    failing: HashMap<Key, Outcome>,
    broken: Option<io::ErrorKind>,
    /// IPv4 routes have their gateway themselves, instead of a nexthop object.
    plain_routes: bool,
    observations: usize,
    notices: VecDeque<Notice>,
    sessions: Vec<Session>,
    secrets: Option<DeviceSecrets>,
}

/// The kernel, and also its monitor. Clones share one content.
#[derive(Debug, Clone, Default)]
pub struct FakeKernel {
    inside: Rc<RefCell<Inside>>,
    rings: Rc<Notify>,
    protocol: u8,
}

impl FakeKernel {
    /// Returns an empty kernel of this host. Routes and links that are written get this protocol.
    pub fn new(machine: Machine, protocol: u8) -> FakeKernel {
        let inside = Inside { machine, ..Inside::default() };
        FakeKernel { inside: Rc::new(RefCell::new(inside)), rings: Rc::default(), protocol }
    }

    /// Makes the kernel one without nexthop objects. Each IPv4 route then has its gateway itself.
    pub fn without_nexthop_objects(self) -> FakeKernel {
        self.inside.borrow_mut().plain_routes = true;
        self
    }

    /// Returns the secrets of WireGuard devices that were set last.
    pub fn secrets(&self) -> Option<DeviceSecrets> {
        self.inside.borrow().secrets.clone()
    }

    /// Returns all entries.
    pub fn entries(&self) -> Observed {
        self.inside.borrow().entries.clone()
    }

    /// Returns all entries without a copy of them. Nothing can be written while the caller has them.
    pub fn borrow_entries(&self) -> Ref<'_, Observed> {
        Ref::map(self.inside.borrow(), |inside| &inside.entries)
    }

    /// Returns what this function makes of the entries, without a copy of them.
    pub fn with_entries<T>(&self, read: impl FnOnce(&Observed) -> T) -> T {
        read(&self.inside.borrow().entries)
    }

    /// Returns the operations since the last call.
    pub fn take_ops(&self) -> Vec<Op> {
        std::mem::take(&mut self.inside.borrow_mut().ops)
    }

    /// Returns how often `observe` was called.
    pub fn observations(&self) -> usize {
        self.inside.borrow().observations
    }

    /// Sets the traffic with the peers of WireGuard devices.
    pub fn set_sessions(&self, sessions: Vec<Session>) {
        self.inside.borrow_mut().sessions = sessions;
    }

    /// Gives every operation on this key this outcome. With `None`, they succeed again.
    pub fn fail(&self, key: Key, outcome: Option<Outcome>) {
        let failing = &mut self.inside.borrow_mut().failing;
        match outcome {
            Some(outcome) => failing.insert(key, outcome),
            None => failing.remove(&key),
        };
    }

    /// Makes `machine` and `observe` fail. With `None`, they succeed again.
    pub fn break_dumps(&self, kind: Option<io::ErrorKind>) {
        self.inside.borrow_mut().broken = kind;
    }

    /// Writes (`Some`) or deletes (`None`) an entry as another program would. If `notify` is true, the monitor sends a notice. As in
    /// Linux, a deleted link takes its entries along, and its notice is [`Notice::Links`].
    pub fn disturb(&self, key: Key, seen: Option<ObservedValue>, notify: bool) {
        {
            let entries = &mut self.inside.borrow_mut().entries;
            match (seen.clone(), key) {
                (Some(seen), _) => {
                    entries.insert(key, seen);
                }
                (None, Key::Link(name)) => entries.retain(|k, s| device(k, &s.value) != Some(name)),
                (None, _) => {
                    entries.remove(&key);
                }
            }
        }
        let is_link = matches!(key, Key::Link(_) | Key::Addr(..));
        if notify {
            self.notify(if is_link { Notice::Links } else { Notice::Entry(key, seen) });
        }
    }

    /// Changes the links, addresses and other routes. The monitor sends notices of links and routes.
    pub fn set_machine(&self, machine: Machine) {
        self.inside.borrow_mut().machine = machine;
        self.notify(Notice::Links);
        self.notify(Notice::Routes);
    }

    /// Changes the links of other programs. No notice is sent.
    pub fn set_links(&self, links: Vec<LinkInfo>) {
        self.inside.borrow_mut().machine.links = links;
    }

    /// Makes the monitor send a notice.
    pub fn notify(&self, notice: Notice) {
        self.inside.borrow_mut().notices.push_back(notice);
        self.rings.notify_one();
    }
}

impl Inside {
    /// Returns the outcome of an operation that Linux would refuse, or that the test lets fail.
    fn refusal(&mut self, op: &Op) -> Option<Outcome> {
        let (Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value)) = op;
        let present = self.entries.get(key).cloned();
        if let Some(outcome) = self.failing.get(key) {
            if let (Outcome::Partly { .. }, Value::Link(link), None) = (outcome, value, &present) {
                // The link is created without the attribute that was refused.
                let value = Value::link(Link { mtu: 0, ..(**link).clone() });
                self.entries.insert(*key, ObservedValue { value, protocol: 0, mark: true });
            }
            return Some(outcome.clone());
        }
        if matches!(op, Op::Remove(..)) {
            return None;
        }
        match (key, value, present) {
            (Key::Link(_), _, Some(ObservedValue { mark: false, protocol: PROTOCOL, .. })) => {
                Some(Outcome::Fatal("another weft agent of this host made it".to_owned()))
            }
            (Key::Link(_), Value::Link(want), Some(ObservedValue { value: Value::Link(have), .. }))
                if want.compare(&have) == Difference::Recreate && matches!(op, Op::Ensure(..)) =>
            {
                Some(Outcome::Retry("a link of this name exists with other fixed attributes".to_owned()))
            }
            (Key::Link(_), ..) => None,
            _ => {
                let name = device(key, value)?;
                let is_there = self.entries.contains_key(&Key::Link(name))
                    || self.machine.links.iter().any(|link| link.name == name);
                (!is_there).then(|| Outcome::Retry(format!("no link {name}")))
            }
        }
    }

    /// When the last IPv4 address of a device is removed, Linux also removes the IPv4 neighbours on this device, and the IPv4 routes over it that
    /// use no nexthop object (`fib_disable_ip` in net/ipv4/fib_frontend.c). IPv6 keeps both.
    fn address_removed(&mut self, name: Name, net: IpNet) {
        let another = |key: &Key| matches!(key, Key::Addr(dev, IpNet::V4(_)) if *dev == name);
        if matches!(net, IpNet::V6(_)) || self.entries.keys().any(another) {
            return;
        }
        let plain_routes = self.plain_routes;
        let goes = |key: &Key, value: &Value| match key {
            Key::Neigh(_, ip) => ip.is_ipv4() && device(key, value) == Some(name),
            Key::Route(IpNet::V4(_), _) => plain_routes && device(key, value) == Some(name),
            _ => false,
        };
        self.entries.retain(|key, seen| !goes(key, &seen.value));
    }

    /// Removes the prefixes of a WireGuard peer together with it, as Linux does.
    fn peer_removed(&mut self, name: Name, peer: &Value) {
        let Value::WgPeer(peer) = peer else { return };
        let its = |value: &Value| matches!(value, Value::AllowedIp(key) if **key == peer.key);
        self.entries.retain(|key, seen| !(matches!(key, Key::AllowedIp(dev, _) if *dev == name) && its(&seen.value)));
    }

    /// Returns false for a prefix of a WireGuard peer that is not there: the adapter asks Linux not to add the peer.
    fn has_peer_of(&self, key: &Key, value: &Value) -> bool {
        match (key, value) {
            (Key::AllowedIp(name, _), Value::AllowedIp(peer)) => {
                self.entries.contains_key(&Key::WgPeer(*name, peer.id()))
            }
            _ => true,
        }
    }
}

impl Kernel for FakeKernel {
    fn machine(&mut self) -> io::Result<Machine> {
        let inside = self.inside.borrow();
        inside.broken.map_or_else(|| Ok(inside.machine.clone()), |kind| Err(kind.into()))
    }

    fn set_secrets(&mut self, secrets: Option<DeviceSecrets>) {
        self.inside.borrow_mut().secrets = secrets;
    }

    /// Answers with the route of the longest prefix. This kernel has no policy rules, and only the main table.
    fn look_up_route(&mut self, to: IpAddr) -> io::Result<Option<RouteLookup>> {
        let Machine { links, routes, .. } = &self.inside.borrow().machine;
        let holding = routes.iter().filter(|route| route.net.contains(&to));
        let dev = holding.min_by_key(|route| (u8::MAX - route.net.prefix_len(), route.metric)).and_then(|r| r.dev);
        let link = links.iter().find(|link| Some(link.name) == dev);
        Ok(link.map(|link| RouteLookup { index: link.index, source: None }))
    }

    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed> {
        let mut inside = self.inside.borrow_mut();
        inside.observations += 1;
        if let Some(kind) = inside.broken {
            return Err(kind.into());
        }
        let marked = |name: &Name| inside.entries.get(&Key::Link(*name)).is_some_and(|seen| seen.mark);
        let wanted = |k: &Key, s: &ObservedValue| {
            matches!(k, Key::Route(..))
                || k.is_of_guard()
                || k.is_of_fence()
                || device(k, &s.value).is_some_and(|name| devices.contains(&name) || marked(&name))
        };
        Ok(inside.entries.iter().filter(|(k, s)| wanted(k, s)).map(|(k, s)| (*k, s.clone())).collect())
    }

    fn sessions(&mut self, devices: &[Name]) -> io::Result<Vec<Session>> {
        let inside = self.inside.borrow();
        Ok(inside.sessions.iter().filter(|session| devices.contains(&session.device)).cloned().collect())
    }

    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let mut inside = self.inside.borrow_mut();
        let mut outcomes = Vec::with_capacity(ops.len());
        for op in ops {
            inside.ops.push(op.clone());
            let (Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value)) = op.clone();
            if let Some(outcome) = inside.refusal(op) {
                outcomes.push(outcome);
                continue;
            }
            let kernels = |seen: &ObservedValue| matches!(key, Key::Route(..)) && seen.protocol == KERNEL_PROTOCOL;
            if !matches!(op, Op::Remove(..)) && inside.entries.get(&key).is_some_and(kernels) {
                outcomes.push(errno::kernels_own(op));
                continue;
            }
            if let (Op::Remove(..) | Op::Recreate(..), Key::Link(name)) = (op, key) {
                inside.entries.retain(|k, s| device(k, &s.value) != Some(name));
            }
            let is_route = matches!(key, Key::Route(..));
            if matches!(op, Op::Remove(..)) {
                let removed = inside.entries.remove(&key);
                match (removed, key) {
                    (Some(_), Key::Addr(name, net)) => inside.address_removed(name, net),
                    (Some(seen), Key::WgPeer(name, _)) => inside.peer_removed(name, &seen.value),
                    _ => {}
                }
            } else if inside.has_peer_of(&key, &value) {
                let is_link = matches!(key, Key::Link(_));
                let (protocol, mark) = (if is_route || is_link { self.protocol } else { 0 }, is_link);
                inside.entries.insert(key, ObservedValue { value, protocol, mark });
            }
            outcomes.push(Outcome::Done);
        }
        outcomes
    }
}

impl Monitor for FakeKernel {
    async fn next(&mut self) -> io::Result<Vec<Notice>> {
        loop {
            let notices: Vec<Notice> = self.inside.borrow_mut().notices.drain(..).collect();
            if !notices.is_empty() {
                return Ok(notices);
            }
            self.rings.notified().await;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;

    use weft_backends::host::Reach;
    use weft_backends::link::{Foreign, Link};
    use weft_backends::state::{Mac, Route};

    use super::super::{AddrInfo, Creator, RouteInfo};

    /// Returns a machine whose only link, eth0, has the default route, the route to 192.168.0.0/24, and these addresses in this order.
    pub(crate) fn machine(addrs: &[&str]) -> Machine {
        let eth0 = Name::new("eth0").unwrap();
        let (carrier, creator) = (true, Creator::Unknown);
        let link = LinkInfo { index: 2, name: eth0, mtu: 1500, mac: None, up: true, carrier, loopback: false, creator };
        let addr = |net: &&str| AddrInfo { index: 2, net: net.parse().unwrap(), scope: 0, flags: 0x80 };
        let route = |net: &str, reach| RouteInfo {
            net: net.parse().unwrap(),
            metric: 0,
            dev: Some(eth0),
            via: None,
            reach,
            protocol: KERNEL_PROTOCOL,
        };
        let routes = vec![route("0.0.0.0/0", Reach::Gateway), route("192.168.0.0/24", Reach::Link(eth0))];
        Machine { links: vec![link], addrs: addrs.iter().map(addr).collect(), routes, lookup: None }
    }

    #[tokio::test]
    async fn it_records_operations_fails_on_demand_and_sends_notices() {
        let mut fake = FakeKernel::new(Machine::default(), 90);
        let dev = Name::new("flannel.1").unwrap();
        let neigh = (Key::Neigh(dev, "10.1.2.0".parse().unwrap()), Value::Neigh(Mac([2; 6])));
        let route = (Key::Route("10.1.2.0/24".parse().unwrap(), 0), Value::Route(Route::Device { dev }));
        assert_eq!(fake.apply(&[Op::Ensure(neigh.0, neigh.1.clone())]), [Outcome::Retry("no link flannel.1".into())]);
        let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
        assert_eq!(fake.apply(&[Op::Ensure(Key::Link(dev), Value::link(link))]), [Outcome::Done]);
        fake.take_ops();
        fake.fail(route.0, Some(Outcome::Retry("not now".into())));
        let ops = [Op::Ensure(neigh.0, neigh.1.clone()), Op::Ensure(route.0, route.1.clone())];
        assert_eq!(fake.apply(&ops), [Outcome::Done, Outcome::Retry("not now".into())]);
        assert_eq!(fake.take_ops(), ops);
        assert_eq!(fake.observe(&[]).unwrap().len(), 2, "a device with our alias is observed without being named");
        assert_eq!(fake.observe(&[dev]).unwrap().get(&neigh.0).unwrap().value, neigh.1);
        fake.fail(route.0, None);
        fake.apply(&ops);
        assert_eq!(fake.entries().get(&route.0).unwrap().protocol, 90);
        fake.disturb(neigh.0, None, true);
        assert_eq!(fake.next().await.unwrap(), [Notice::Entry(neigh.0, None)]);
        fake.disturb(Key::Link(dev), None, true);
        assert_eq!(fake.next().await.unwrap(), [Notice::Links]);
        assert!(fake.entries().is_empty());
        fake.break_dumps(Some(io::ErrorKind::Interrupted));
        assert!(fake.observe(&[]).is_err() && fake.machine().is_err());
    }
}
