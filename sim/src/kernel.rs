// SPDX-License-Identifier: Apache-2.0
//! The kernel of one simulated machine: the kernel in memory of weft's own tests, which `tests/kernel/fake.rs` compares with Linux, and
//! around it what other programs have there: the uplink, its addresses, and routes of the host.

mod host;

use std::cell::{Cell, Ref, RefCell};
use std::io;
use std::net::IpAddr;
use std::rc::Rc;

use ipnet::{IpNet, Ipv4Net};
use weft::kernel::fake::FakeKernel;
use weft::kernel::{AddrInfo, Creator, Kernel, LinkInfo, Machine, Monitor, Notice, Outcome, RouteInfo, RouteLookup};
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, Name, Observed, ObservedValue, Route, Value};
use weft_backends::wireguard_key::DeviceSecrets;

use host::{Host, HostAddr, HostLink};

/// `IFA_F_PERMANENT`: no DHCP client manages the address.
pub const PERMANENT: u32 = 0x80;
/// RTPROT_STATIC: an administrator wrote the route.
pub const STATIC: u8 = 4;
/// RTPROT_DHCP: a DHCP client wrote the route.
pub const DHCP: u8 = 16;

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

    /// Returns all entries without a copy of them. Nothing can be written while the caller has them.
    pub fn borrow_entries(&self) -> Ref<'_, Observed> {
        self.fake.borrow_entries()
    }

    /// Returns what this function makes of the entries, without a copy of them.
    pub fn with_entries<T>(&self, read: impl FnOnce(&Observed) -> T) -> T {
        self.fake.with_entries(read)
    }

    /// Returns the number of entries.
    pub fn count(&self) -> usize {
        self.fake.borrow_entries().len()
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
        let links = host.links.iter().map(|(name, link)| link_info(*name, link)).collect();
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

fn link_info(name: Name, link: &HostLink) -> LinkInfo {
    let HostLink { index, mac, up, carrier } = *link;
    LinkInfo { index, name, mtu: 1500, mac, up, carrier: carrier && up, loopback: false, creator: Creator::Unknown }
}

impl Kernel for SimKernel {
    fn machine(&mut self) -> io::Result<Machine> {
        // The kernel in memory fails if the scenario lets dumps fail.
        self.fake.machine()?;
        let host = self.host.borrow();
        let mut machine = Machine {
            links: host.links.iter().map(|(name, link)| link_info(*name, link)).collect(),
            ..Machine::default()
        };
        let global = |addr: &HostAddr| {
            Some(AddrInfo { index: host.links.get(&addr.dev)?.index, net: addr.net, scope: 0, flags: addr.flags })
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

    fn set_secrets(&mut self, secrets: Option<DeviceSecrets>) {
        self.fake.set_secrets(secrets);
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
                    Op::Ensure(Key::Link(_) | Key::Addr(..), _)
                    | Op::Remove(Key::Link(_) | Key::Addr(..), _)
                    | Op::Recreate(..) => self.notify(Notice::Links),
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
