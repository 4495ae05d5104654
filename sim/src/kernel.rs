// SPDX-License-Identifier: Apache-2.0
//! The kernel of one simulated machine: the kernel in memory of weft's own tests, which `tests/kernel/fake.rs` compares with Linux, and
//! around it what other programs have there: the uplink, its addresses, and routes of the host.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;

use ipnet::{IpNet, Ipv4Net};
use weft::kernel::fake::FakeKernel;
use weft::kernel::{AddrInfo, Creator, Kernel, LinkInfo, Machine, Monitor, Notice, Outcome, RouteInfo, RouteLookup};
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::owner::{KERNEL_PROTOCOL, PROTOCOL};
use weft_backends::state::{Key, Mac, Name, Observed, ObservedValue, Route, Value};

/// `IFA_F_PERMANENT`: no DHCP client manages the address.
pub const PERMANENT: u32 = 0x80;
/// RTPROT_STATIC: an administrator wrote the route.
pub const STATIC: u8 = 4;
/// RTPROT_DHCP: a DHCP client wrote the route.
pub const DHCP: u8 = 16;

/// A link that weft did not make.
#[derive(Debug, Clone)]
struct HostLink {
    index: u32,
    mac: Option<Mac>,
    up: bool,
    carrier: bool,
}

/// What is on a machine besides weft's entries.
#[derive(Debug, Default)]
struct Host {
    links: BTreeMap<Name, HostLink>,
    addrs: Vec<(Name, IpNet, u32)>,
    next_index: u32,
}

/// The kernel of a machine. Clones are the same machine.
#[derive(Debug, Clone)]
pub struct SimKernel {
    fake: FakeKernel,
    host: Rc<RefCell<Host>>,
    /// Notifications are lost.
    deaf: Rc<Cell<bool>>,
    writes: Rc<Cell<u64>>,
    /// Counts all changes.
    version: Rc<Cell<u64>>,
}

/// Returns the name of an interface. The names in this program are all valid.
pub fn name(text: &str) -> Name {
    Name::new(text).unwrap_or_else(|| panic!("{text} is no name of an interface"))
}

fn route(value: Route, protocol: u8) -> ObservedValue {
    ObservedValue { value: Value::Route(value), protocol, mark: false }
}

impl Default for SimKernel {
    fn default() -> SimKernel {
        let fake = FakeKernel::new(Machine::default(), PROTOCOL);
        let host = Rc::new(RefCell::new(Host { next_index: 2, ..Host::default() }));
        SimKernel { fake, host, deaf: Rc::default(), writes: Rc::default(), version: Rc::default() }
    }
}

impl SimKernel {
    /// Removes everything, as a boot does. Interface indexes go on, so that they differ from those before.
    pub fn boot(&self) {
        for key in self.fake.entries().keys().copied().collect::<Vec<_>>() {
            self.fake.disturb(key, None, false);
        }
        let mut host = self.host.borrow_mut();
        (host.links, host.addrs) = Default::default();
        drop(host);
        self.changed();
    }

    /// Returns how many operations of weft changed an entry.
    pub fn writes(&self) -> u64 {
        self.writes.get()
    }

    /// Returns a number that differs after each change of the kernel.
    pub fn version(&self) -> u64 {
        self.version.get()
    }

    /// Loses all notifications from now on, or no more. Then the reader learns that some were lost.
    pub fn lose_notifications(&self, lose: bool) {
        self.deaf.set(lose);
        if !lose {
            self.fake.notify(Notice::Lost);
        }
    }

    /// Returns all entries, also those of other programs.
    pub fn entries(&self) -> Observed {
        self.fake.entries()
    }

    /// Returns what this function makes of the entries, without a copy of them.
    pub fn with_entries<T>(&self, read: impl FnOnce(&Observed) -> T) -> T {
        self.fake.with_entries(read)
    }

    /// Returns true if the host has an interface of this name that weft did not make.
    pub fn has_link(&self, link: Name) -> bool {
        self.host.borrow().links.contains_key(&link)
    }

    fn notify(&self, notice: Notice) {
        if !self.deaf.get() {
            self.fake.notify(notice);
        }
    }

    /// Tells the kernel in memory which links exist, and announces a change of links.
    fn changed(&self) {
        self.version.set(self.version.get() + 1);
        let host = self.host.borrow();
        let links = host.links.iter().map(|(name, link)| link_info(*name, link, 1500)).collect();
        self.fake.set_links(links);
        drop(host);
        self.notify(Notice::Links);
    }

    /// Writes or deletes an entry as another program does.
    pub fn disturb(&self, key: Key, seen: Option<ObservedValue>) {
        self.version.set(self.version.get() + 1);
        self.fake.disturb(key, seen.clone(), false);
        match key {
            Key::Link(_) | Key::Addr(..) => self.notify(Notice::Links),
            key => {
                self.notify(Notice::Entry(key, seen));
                if matches!(key, Key::Route(..)) {
                    self.notify(Notice::Routes);
                }
            }
        }
    }

    /// Creates an Ethernet interface that is up and has a carrier.
    pub fn add_link(&self, link: Name, mac: Mac) {
        let mut host = self.host.borrow_mut();
        let index = host.next_index;
        host.next_index += 1;
        host.links.insert(link, HostLink { index, mac: Some(mac), up: true, carrier: true });
        drop(host);
        self.changed();
    }

    /// Deletes an interface with its addresses and routes. Linux also deletes the tunnels that are bound to it.
    pub fn delete_link(&self, link: Name) {
        let mut host = self.host.borrow_mut();
        host.links.remove(&link);
        host.addrs.retain(|(dev, ..)| *dev != link);
        drop(host);
        self.remove_routes(|_, route, _| route.dev() == Some(link));
        let bound =
            |seen: &ObservedValue| matches!(&seen.value, Value::Link(device) if device.kind.parent() == Some(link));
        let entries = self.fake.entries();
        let tunnels: Vec<Key> = entries.iter().filter(|(_, seen)| bound(seen)).map(|(key, _)| *key).collect();
        tunnels.into_iter().for_each(|key| self.disturb(key, None));
        self.changed();
    }

    /// Sets an interface up or down. Down, it loses its IPv4 routes. Up again, it has only those of its addresses.
    pub fn set_up(&self, link: Name, up: bool) {
        if let Some(link) = self.host.borrow_mut().links.get_mut(&link) {
            link.up = up;
        }
        if up {
            let addrs = self.host.borrow().addrs.clone();
            addrs.into_iter().filter(|(dev, ..)| *dev == link).for_each(|(dev, net, _)| self.connect(dev, net));
        } else {
            self.remove_routes(|_, route, _| route.dev() == Some(link));
        }
        self.changed();
    }

    /// Plugs the cable in or out. Without a carrier, Linux removes nexthop objects, and with them the routes through them.
    pub fn set_carrier(&self, link: Name, carrier: bool) {
        if let Some(link) = self.host.borrow_mut().links.get_mut(&link) {
            link.carrier = carrier;
        }
        if !carrier {
            let through_object = |route: &Route, seen: &ObservedValue| {
                seen.protocol == PROTOCOL && matches!(route, Route::Unicast { .. }) && route.dev() == Some(link)
            };
            self.remove_routes(|_, route, seen| through_object(route, seen));
        }
        self.changed();
    }

    fn remove_routes(&self, goes: impl Fn(&IpNet, &Route, &ObservedValue) -> bool) {
        let entries = self.fake.entries();
        let gone = entries.iter().filter_map(|(key, seen)| match (key, &seen.value) {
            (Key::Route(net, _), Value::Route(route)) if goes(net, route, seen) => Some(*key),
            _ => None,
        });
        gone.collect::<Vec<_>>().into_iter().for_each(|key| self.disturb(key, None));
    }

    /// Writes the route that Linux makes for an address.
    fn connect(&self, dev: Name, net: IpNet) {
        if net.prefix_len() < net.max_prefix_len() {
            let key = Key::Route(net.trunc(), 0);
            self.disturb(key, Some(route(Route::Device { dev }, KERNEL_PROTOCOL)));
        }
    }

    /// Adds an address.
    pub fn add_address(&self, dev: Name, net: IpNet, flags: u32) {
        let mut host = self.host.borrow_mut();
        if host.addrs.iter().any(|(on, there, _)| (*on, *there) == (dev, net)) {
            return;
        }
        host.addrs.push((dev, net, flags));
        let is_up = host.links.get(&dev).is_some_and(|link| link.up);
        drop(host);
        if is_up {
            self.connect(dev, net);
        }
        self.changed();
    }

    /// Removes an address, with the route that Linux made for it unless another address needs it. With the last address of an interface,
    /// Linux removes its plain routes.
    pub fn remove_address(&self, dev: Name, net: IpNet) {
        let mut host = self.host.borrow_mut();
        host.addrs.retain(|(on, there, _)| (*on, *there) != (dev, net));
        let of_dev: Vec<IpNet> = host.addrs.iter().filter(|(on, ..)| *on == dev).map(|(_, net, _)| *net).collect();
        drop(host);
        let (is_last, is_needed) = (of_dev.is_empty(), of_dev.iter().any(|other| other.trunc() == net.trunc()));
        self.remove_routes(|to, route, seen| {
            let plain = seen.protocol != PROTOCOL || !matches!(route, Route::Unicast { .. });
            let connected = *to == net.trunc() && seen.protocol == KERNEL_PROTOCOL && !is_needed;
            route.dev() == Some(dev) && (connected || (is_last && plain))
        });
        self.changed();
    }

    /// Adds a route through a gateway, in the place of one that is there. Returns false where Linux refuses this: the interface is down or does
    /// not reach the gateway.
    pub fn add_route(&self, net: IpNet, via: IpAddr, dev: Name, protocol: u8) -> bool {
        let is_possible = self.is_up(dev) && self.reaches(dev, via);
        if is_possible {
            let value = route(Route::Unicast { via, dev, onlink: false }, protocol);
            self.disturb(Key::Route(net, 0), Some(value));
        }
        is_possible
    }

    /// Returns true if this address is in a network to which this interface is connected.
    fn reaches(&self, dev: Name, ip: IpAddr) -> bool {
        self.fake.with_entries(|entries| {
            entries.iter().any(|(key, seen)| match (key, &seen.value) {
                (Key::Route(net, _), Value::Route(Route::Device { dev: over })) => *over == dev && net.contains(&ip),
                _ => false,
            })
        })
    }

    /// Returns true if this interface of the host is up.
    pub fn is_up(&self, dev: Name) -> bool {
        self.host.borrow().links.get(&dev).is_some_and(|link| link.up)
    }

    /// Returns true if packets can leave by this interface.
    pub fn is_usable(&self, dev: Name, entries: &Observed) -> bool {
        match entries.get(&Key::Link(dev)).map(|seen| &seen.value) {
            Some(Value::Link(device)) => {
                device.up && device.kind.parent().is_none_or(|parent| self.is_usable(parent, entries))
            }
            _ => self.host.borrow().links.get(&dev).is_some_and(|link| link.up && link.carrier),
        }
    }

    /// Returns the IPv4 addresses of interfaces that can receive packets.
    pub fn addresses(&self) -> Vec<Ipv4Addr> {
        let host = self.host.borrow();
        let usable = |dev: &Name| host.links.get(dev).is_some_and(|link| link.up && link.carrier);
        let v4 = |net: &IpNet| match net.addr() {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        };
        host.addrs.iter().filter(|(dev, ..)| usable(dev)).filter_map(|(_, net, _)| v4(net)).collect()
    }

    /// Returns why Linux refuses this operation because of an interface of the host.
    fn refusal(&self, op: &Op) -> Option<Outcome> {
        let Op::Ensure(Key::Route(..), Value::Route(Route::Unicast { dev, .. } | Route::Device { dev })) = op else {
            return None;
        };
        let link = self.host.borrow().links.get(dev)?.clone();
        if !link.up || !link.carrier {
            return Some(Outcome::Retry(format!("{op}: ENETDOWN")));
        }
        let Op::Ensure(_, Value::Route(Route::Unicast { via, onlink: false, .. })) = op else { return None };
        (!self.reaches(*dev, *via)).then(|| Outcome::Retry(format!("{op}: ENETUNREACH")))
    }
}

fn link_info(name: Name, link: &HostLink, mtu: u32) -> LinkInfo {
    let HostLink { index, mac, up, carrier } = *link;
    LinkInfo { index, name, mtu, mac, up, carrier: carrier && up, loopback: false, creator: Creator::Unknown }
}

impl Kernel for SimKernel {
    fn machine(&mut self) -> io::Result<Machine> {
        // The kernel in memory fails if the scenario lets dumps fail.
        self.fake.machine()?;
        let host = self.host.borrow();
        let mut machine = Machine {
            links: host.links.iter().map(|(name, link)| link_info(*name, link, 1500)).collect(),
            ..Machine::default()
        };
        let global = |(dev, net, flags): &(Name, IpNet, u32)| {
            Some(AddrInfo { index: host.links.get(dev)?.index, net: *net, scope: 0, flags: *flags })
        };
        machine.addrs = host.addrs.iter().filter_map(global).collect();
        self.fake.with_entries(|entries| {
            let mut index = 1000;
            for (key, seen) in entries.iter() {
                match (key, &seen.value) {
                    (Key::Link(name), Value::Link(link)) => {
                        index += 1;
                        let creator = if seen.mark { Creator::ThisAgent } else { Creator::Unknown };
                        let (mtu, mac, up, carrier, loopback) = (link.mtu, link.mac, link.up, link.up, false);
                        machine.links.push(LinkInfo { index, name: *name, mtu, mac, up, carrier, loopback, creator });
                    }
                    (Key::Addr(dev, net), _) => {
                        let index = machine.links.iter().find(|link| link.name == *dev).map(|link| link.index);
                        machine.addrs.extend(index.map(|index| AddrInfo {
                            index,
                            net: *net,
                            scope: 0,
                            flags: PERMANENT,
                        }));
                    }
                    (Key::Route(net, metric), Value::Route(route)) if seen.protocol != PROTOCOL => {
                        machine.routes.push(route_info((*net, *metric), *route, seen.protocol));
                    }
                    _ => {}
                }
            }
        });
        Ok(machine)
    }

    fn look_up_route(&mut self, to: IpAddr) -> io::Result<Option<RouteLookup>> {
        self.fake.look_up_route(to)
    }

    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed> {
        self.fake.observe(devices)
    }

    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(ops.len());
        for op in ops {
            if let Some(refused) = self.refusal(op) {
                outcomes.push(refused);
                continue;
            }
            let outcome = self.fake.apply(std::slice::from_ref(op)).pop().unwrap_or(Outcome::Done);
            self.writes.set(self.writes.get() + 1);
            self.version.set(self.version.get() + 1);
            // Linux announces to weft what weft itself has written.
            if outcome == Outcome::Done {
                match op {
                    Op::Ensure(Key::Link(_) | Key::Addr(..), _) | Op::Recreate(..) => self.notify(Notice::Links),
                    Op::Remove(Key::Link(_) | Key::Addr(..), _) => self.notify(Notice::Links),
                    op => {
                        let key = op.key();
                        let now = self.fake.with_entries(|entries| entries.get(&key).cloned());
                        self.notify(Notice::Entry(key, now));
                    }
                }
            }
            outcomes.push(outcome);
        }
        self.fake.take_ops();
        outcomes
    }
}

fn route_info((net, metric): (IpNet, u32), route: Route, protocol: u8) -> RouteInfo {
    let (via, reach) = match route {
        Route::Unicast { via, .. } => (Some(via), Reach::Gateway),
        Route::Device { dev } => (None, Reach::Link(dev)),
        Route::Blackhole | Route::Unreachable | Route::Other => (None, Reach::Gateway),
    };
    RouteInfo { net, metric, dev: route.dev(), via, reach, protocol }
}

impl Monitor for SimKernel {
    async fn next(&mut self) -> io::Result<Vec<Notice>> {
        self.fake.next().await
    }
}

/// Returns the prefix of a default route.
pub fn everywhere() -> IpNet {
    IpNet::V4(Ipv4Net::default())
}
