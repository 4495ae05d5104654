// SPDX-License-Identifier: Apache-2.0
//! What is in the kernel. A dump is complete, or an error. If a route uses a link that appeared between two dumps, everything is
//! read again.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use weft_backends::host::Reach;
use weft_backends::owner::{KERNEL_PROTOCOL, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_backends::wireguard::WireGuardLink;
use weft_subnet::cidr::Family;

use super::decode::{self, Nexthop, RouteFacts};
use super::encode::{self, dump};
use super::link_messages::{self, LinkFacts, Links, is_alias_of_weft};
use super::linux::LinuxKernel;
use super::socket::{Netlink, empty_if_absent};
use super::wire::messages;
use super::wireguard_peers::unless_refused;
use super::{AddrInfo, Creator, LinkInfo, Machine, RouteInfo, RouteLookup};

/// How often everything is read again while links come and go.
const TRIES: u32 = 5;

/// Reads all links.
pub(super) fn links(netlink: &mut Netlink) -> io::Result<Links> {
    let data = netlink.dump(libc::RTM_GETLINK, link_messages::dump_links)?;
    let replies = messages(&data).filter(|m| m.kind == libc::RTM_NEWLINK);
    Ok(replies.filter_map(|m| link_messages::read_link(m.payload)).map(|l| (l.info.index, l)).collect())
}

/// Reads all addresses.
pub(super) fn addresses(netlink: &mut Netlink) -> io::Result<Vec<AddrInfo>> {
    let data = netlink.dump(libc::RTM_GETADDR, link_messages::dump_addresses)?;
    let replies = messages(&data).filter(|m| m.kind == libc::RTM_NEWADDR);
    Ok(replies.filter_map(|m| link_messages::read_address(m.payload)).collect())
}

/// Returns true if this link has IPv6 routes that expire, which the kernel creates from router advertisements. For this the kernel
/// walks over all its IPv6 routes.
///
/// # Errors
/// The socket cannot be opened, or the dump failed.
pub(crate) fn has_advertised_routes(link: Name) -> io::Result<bool> {
    let index = match if_nametoindex(link.as_bytes()) {
        Err(Errno::ENODEV) => return Ok(false),
        index => index?,
    };
    let family = libc::AF_INET6 as u8;
    let data = Netlink::open()?.dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes_of(w, flags, family, index))?;
    let mut replies = messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE && m.payload.first() == Some(&family));
    Ok(replies.any(|m| decode::is_advertised(m.payload, index)))
}

impl LinuxKernel {
    /// Implements [`super::Kernel::machine`].
    pub(super) fn observe_machine(&mut self) -> io::Result<Machine> {
        let links = links(&mut self.netlink)?;
        let addrs = addresses(&mut self.netlink)?;
        let routes = self.dump_routes()?;
        let ours = |l: &LinkFacts| l.alias == self.options.alias;
        let routes = routes
            .iter()
            .filter(|r| ![self.options.protocol, weft_cni::veth::PROTOCOL].contains(&r.protocol))
            .filter(|r| !links.get(&r.index).is_some_and(ours))
            .map(|r| {
                // The kernel gives the link lo to an IPv6 route that refuses packets, and they leave by none.
                let link = links.get(&r.index).filter(|_| r.kind == libc::RTN_UNICAST);
                let dev = link.map(|l| l.info.name);
                let reach = match (dev, r.via) {
                    (Some(dev), None) if !r.other_form => Reach::Link(dev),
                    _ => Reach::Gateway,
                };
                RouteInfo { net: r.net, metric: r.metric, dev, via: r.via, reach, protocol: r.protocol }
            })
            .collect();
        let creator = |l: &LinkFacts| if ours(l) { Creator::ThisAgent } else { l.info.creator };
        let mut links: Vec<_> = links.into_values().map(|l| LinkInfo { creator: creator(&l), ..l.info }).collect();
        links.sort_by_key(|l| l.index);
        Ok(Machine { links, addrs, routes, lookup: None })
    }

    /// Implements [`super::Kernel::look_up_route`].
    pub(super) fn ask_for_route(&mut self, to: IpAddr) -> io::Result<Option<RouteLookup>> {
        // The kernel refuses the question where it has no route or a rule forbids the packet, and for an address family that it lacks.
        let Ok(data) = self.netlink.request(|w| encode::get_route(w, to))? else { return Ok(None) };
        Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE).find_map(|m| decode::route_lookup(m.payload)))
    }

    /// Implements [`super::Kernel::observe`].
    pub(super) fn observe_entries(&mut self, devices: &[Name]) -> io::Result<Observed> {
        until_complete(|| self.try_observe(devices))
    }

    /// Reads everything once. Returns `None` if a route uses a link that was not there when the links were read.
    fn try_observe(&mut self, devices: &[Name]) -> io::Result<Option<Observed>> {
        let mut links = links(&mut self.netlink)?;
        self.restore_aliases(&mut links);
        self.index.borrow_mut().keep_devices(|index| links.contains_key(&index));
        let addrs = addresses(&mut self.netlink)?;
        let wanted: HashSet<Name> = devices.iter().copied().collect();
        let alias = self.options.alias.clone();
        let of_interest: Vec<&LinkFacts> =
            links.values().filter(|l| wanted.contains(&l.info.name) || l.alias == alias).collect();
        let known = of_interest.iter().map(|l| (l.info.name, l.info.index)).collect();
        let mut found: Vec<(Key, ObservedValue)> = Vec::new();
        for link in &of_interest {
            let protocol = if is_alias_of_weft(&link.alias) { PROTOCOL } else { 0 };
            let mut value = link.value(&links);
            if value.kind.of::<WireGuardLink>().is_some() {
                let read = self.observe_wireguard(link.info.name);
                if let Some((kind, entries)) = unless_refused(link.info.name, read)? {
                    value.kind = Arc::new(kind);
                    found.extend(entries);
                }
            }
            let value = Value::link(value);
            found.push((Key::Link(link.info.name), ObservedValue { value, protocol, mark: link.alias == alias }));
        }
        for link in of_interest {
            let (name, index) = (link.info.name, link.info.index);
            let own = addrs.iter().filter(|a| a.index == index);
            found.extend(own.map(|a| (Key::Addr(name, a.net), Value::Addr.into())));
            self.dump_neighbours(name, index, &mut found)?;
            if link.has_fdb() {
                self.dump_fdb(name, index, &mut found)?;
            }
        }
        found.extend(self.guard.observe()?);
        found.extend(self.fence.observe(&mut self.netlink)?);
        let routes = self.dump_routes()?;
        self.adopt_nexthops(&routes)?;
        self.known = known;
        Ok(with_routes(found, &routes, &links).map(|found| self.one_value_per_key(found)))
    }

    /// Sets our alias again on devices of ours that lost it. Without it they would look like devices of another program.
    fn restore_aliases(&mut self, links: &mut Links) {
        let alias = self.options.alias.clone();
        self.made.retain(|index| links.contains_key(index));
        for (index, link) in links.iter_mut() {
            if link.alias == alias {
                self.made.insert(*index);
            } else if self.made.contains(index) && !is_alias_of_weft(&link.alias) {
                // If this fails, the next observation tries again.
                let _ = self.netlink.request(|w| link_messages::set_alias(w, *index, &alias));
                link.alias.clone_from(&alias);
            }
        }
    }

    /// Returns one value for each key. If the kernel has several routes with one key, the value equals no desired one, and all of them
    /// are deleted before the route is written again. Nothing is deleted if the kernel itself created one of them. In that case a
    /// route of ours beside it (the address was added after our route) has a value, so that it can be removed.
    fn one_value_per_key(&mut self, mut found: Vec<(Key, ObservedValue)>) -> Observed {
        found.sort_by_key(|f| f.0);
        (self.doubled, self.shared_with_kernel) = (HashMap::new(), HashSet::new());
        for several in found.chunk_by_mut(|one, other| one.0 == other.0) {
            let (key @ Key::Route(..), 2..) = (several[0].0, several.len()) else { continue };
            let by = |protocol| several.iter().any(|(_, seen)| seen.protocol == protocol);
            let kernels = by(KERNEL_PROTOCOL);
            let protocol = if kernels && !by(self.options.protocol) { KERNEL_PROTOCOL } else { self.options.protocol };
            for (_, seen) in several.iter_mut() {
                seen.value = Value::Route(weft_backends::state::Route::Other);
                if kernels {
                    seen.protocol = protocol;
                }
            }
            if kernels {
                self.shared_with_kernel.insert(key);
            } else {
                self.doubled.insert(key, several.len());
            }
        }
        found.into_iter().collect()
    }

    /// Adds the permanent neighbours on a device.
    fn dump_neighbours(&mut self, name: Name, index: u32, found: &mut Vec<(Key, ObservedValue)>) -> io::Result<()> {
        let data = self.netlink.dump(libc::RTM_GETNEIGH, |w, _, flags| dump::neighbours(w, flags, index))?;
        for n in messages(&data).filter(|m| m.kind == libc::RTM_NEWNEIGH).filter_map(|m| decode::neighbour(m.payload)) {
            if let (false, true, true, Some(dst), Some(mac)) = (n.fdb, n.lasting, n.index == index, n.dst, n.mac)
                && !dst.is_multicast()
            {
                found.push((Key::Neigh(name, dst), Value::Neigh(mac).into()));
            }
        }
        Ok(())
    }

    /// Adds the FDB entries of a device.
    fn dump_fdb(&mut self, name: Name, index: u32, found: &mut Vec<(Key, ObservedValue)>) -> io::Result<()> {
        let data = self.netlink.dump(libc::RTM_GETNEIGH, |w, _, flags| dump::fdb(w, flags, index))?;
        let mut shared = self.index.borrow_mut();
        shared.fdb.retain(|(i, _)| *i != index);
        for n in messages(&data).filter(|m| m.kind == libc::RTM_NEWNEIGH).filter_map(|m| decode::neighbour(m.payload)) {
            let (true, true, true, Some(mac)) = (n.fdb, n.lasting, n.index == index, n.mac) else { continue };
            let dst = n.dst.unwrap_or(std::net::Ipv4Addr::UNSPECIFIED.into());
            // A MAC has one destination. The kernel adds more only to multicast MACs and to the MAC that is zero.
            shared.fdb.insert((index, mac));
            found.push((Key::Fdb(name, mac), Value::Fdb(dst).into()));
        }
        Ok(())
    }

    /// Reads the routes of both families. Routes through nexthop objects get the gateway of the object.
    fn dump_routes(&mut self) -> io::Result<Vec<RouteFacts>> {
        let mut routes: Vec<RouteFacts> = Vec::new();
        for family in Family::BOTH.map(Family::number) {
            let dump = self.netlink.dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes(w, flags, family));
            let data = empty_if_absent(dump)?;
            let replies =
                messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE && m.payload.first() == Some(&family));
            routes.extend(replies.filter_map(|m| decode::route(m.payload)));
        }
        // If the sysctl nexthop_compat_mode is 0, the kernel sends only the id.
        if routes.iter().any(|r| r.nexthop != 0 && r.index == 0 && !r.other_form) {
            let nexthops = self.dump_nexthops()?;
            for r in routes.iter_mut().filter(|r| r.index == 0 && !r.other_form) {
                if let Some(n) = nexthops.get(&r.nexthop) {
                    (r.via, r.index, r.onlink) = (n.via, n.index, n.onlink);
                }
            }
        }
        Ok(routes)
    }

    fn dump_nexthops(&mut self) -> io::Result<HashMap<u32, Nexthop>> {
        let answer = self.netlink.dump(encode::RTM_GETNEXTHOP, |w, _, flags| dump::nexthops(w, flags));
        let data = empty_if_absent(answer)?;
        let replies = messages(&data).filter(|m| m.kind == encode::RTM_NEWNEXTHOP);
        Ok(replies.map(|m| decode::nexthop(m.payload)).map(|n| (n.id, n)).collect())
    }

    /// Updates the index of nexthops. Deletes our nexthops that no route uses: those of an earlier run, or of routes that another
    /// program has deleted.
    fn adopt_nexthops(&mut self, routes: &[RouteFacts]) -> io::Result<()> {
        let in_use: HashSet<u32> = routes.iter().map(|r| r.nexthop).filter(|id| *id != 0).collect();
        let mut unused = Vec::new();
        if !self.adopted {
            for n in self.dump_nexthops()?.into_values().filter(|n| self.index.borrow().in_range(n.id)) {
                match n.protocol == self.options.protocol {
                    true if !in_use.contains(&n.id) => unused.push(n.id),
                    true => {}
                    false => self.index.borrow_mut().reserve(n.id),
                }
            }
            self.adopted = true;
        }
        {
            let mut shared = self.index.borrow_mut();
            // Nothing else removes the routes of other programs that are gone.
            shared.forget_routes();
            for r in routes {
                let key = Key::Route(r.net, r.metric);
                match r.nexthop {
                    0 => shared.saw_plain(&key),
                    id => shared.saw(key, id, r.protocol == self.options.protocol),
                }
            }
            unused.extend(shared.orphans(&in_use));
        }
        self.delete_nexthops(&unused);
        Ok(())
    }
}

/// Reads until a reading is complete.
///
/// # Errors
/// A reading failed, or none of them was complete.
fn until_complete<T>(mut read: impl FnMut() -> io::Result<Option<T>>) -> io::Result<T> {
    for _ in 0..TRIES {
        if let Some(complete) = read()? {
            return Ok(complete);
        }
    }
    Err(io::Error::new(io::ErrorKind::Interrupted, "links kept coming and going during a dump"))
}

/// Adds the routes to what was found. Returns `None` if a route uses a link that is not among these.
fn with_routes(
    mut found: Vec<(Key, ObservedValue)>,
    routes: &[RouteFacts],
    links: &Links,
) -> Option<Vec<(Key, ObservedValue)>> {
    found.reserve(routes.len());
    for r in routes {
        let dev = links.get(&r.index).map(|l| l.info.name);
        if dev.is_none() && r.index != 0 {
            return None;
        }
        let seen = ObservedValue { value: Value::Route(r.value(dev)), protocol: r.protocol, mark: r.nexthop != 0 };
        found.push((Key::Route(r.net, r.metric), seen));
    }
    Some(found)
}

#[cfg(test)]
mod tests;
