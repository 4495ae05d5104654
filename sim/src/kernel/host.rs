// SPDX-License-Identifier: Apache-2.0
//! What other programs have in the kernel of a machine: the uplink, its addresses, and routes of the host.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use weft_backends::owner::{KERNEL_PROTOCOL, PROTOCOL};
use weft_backends::state::{Key, Mac, Name, Observed, ObservedValue, Route, Value};

use super::SimKernel;

/// A link that weft did not make.
#[derive(Debug, Clone)]
pub(super) struct HostLink {
    pub(super) index: u32,
    pub(super) mac: Option<Mac>,
    pub(super) up: bool,
    pub(super) carrier: bool,
}

/// An address of an interface that weft did not make.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostAddr {
    pub(super) dev: Name,
    pub(super) net: IpNet,
    pub(super) flags: u32,
}

/// What is on a machine besides weft's entries.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) links: BTreeMap<Name, HostLink>,
    pub(super) addrs: Vec<HostAddr>,
    pub(super) next_index: u32,
}

fn route(value: Route, protocol: u8) -> ObservedValue {
    ObservedValue { value: Value::Route(value), protocol, mark: false }
}

impl SimKernel {
    /// Returns true if the host has an interface of this name that weft did not make.
    pub fn has_link(&self, link: Name) -> bool {
        self.host.borrow().links.contains_key(&link)
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
        host.addrs.retain(|addr| addr.dev != link);
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
            addrs.into_iter().filter(|addr| addr.dev == link).for_each(|addr| self.connect(addr.dev, addr.net));
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
        if host.addrs.iter().any(|addr| (addr.dev, addr.net) == (dev, net)) {
            return;
        }
        host.addrs.push(HostAddr { dev, net, flags });
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
        host.addrs.retain(|addr| (addr.dev, addr.net) != (dev, net));
        let of_dev: Vec<IpNet> = host.addrs.iter().filter(|addr| addr.dev == dev).map(|addr| addr.net).collect();
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
    pub(super) fn reaches(&self, dev: Name, ip: IpAddr) -> bool {
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
        host.addrs.iter().filter(|addr| usable(&addr.dev)).filter_map(|addr| v4(&addr.net)).collect()
    }
}
