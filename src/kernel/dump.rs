// SPDX-License-Identifier: Apache-2.0
//! Dumps and what is made of them. A dump is complete or an error; a route over a link that appeared between two dumps means: look again.

use std::collections::{HashMap, HashSet};
use std::io;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use weft_backends::host::Reach;
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Key, Name, Observed, Seen, Value};

use super::decode::{self, LinkFacts, Links, Nexthop, RouteFacts};
use super::encode::{self, dump};
use super::linux::LinuxKernel;
use super::socket::{Netlink, absent};
use super::wire::messages;
use super::{AddrInfo, LinkInfo, Machine, Maker, RouteInfo};
use weft_backends::owner::PROTOCOL;

/// How often a look is repeated while links come and go.
const TRIES: u32 = 5;

/// All links.
pub(super) fn links(netlink: &mut Netlink) -> io::Result<Links> {
    let data = netlink.dump(libc::RTM_GETLINK, dump::links)?;
    let news = messages(&data).filter(|m| m.kind == libc::RTM_NEWLINK);
    Ok(news.filter_map(|m| decode::link(m.payload)).map(|l| (l.info.index, l)).collect())
}

/// All addresses.
pub(super) fn addresses(netlink: &mut Netlink) -> io::Result<Vec<AddrInfo>> {
    let data = netlink.dump(libc::RTM_GETADDR, dump::addresses)?;
    let news = messages(&data).filter(|m| m.kind == libc::RTM_NEWADDR);
    Ok(news.filter_map(|m| decode::address(m.payload)).collect())
}

/// Whether this link has IPv6 routes that expire, as the kernel makes them of router advertisements. Costs the kernel a walk over
/// all its IPv6 routes.
///
/// # Errors
/// No netlink socket, or a failed dump.
pub(crate) fn has_advertised_routes(link: Name) -> io::Result<bool> {
    let index = match if_nametoindex(link.as_bytes()) {
        Err(Errno::ENODEV) => return Ok(false),
        index => index?,
    };
    let family = libc::AF_INET6 as u8;
    let data = Netlink::open()?.dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes_of(w, flags, family, index))?;
    let mut news = messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE);
    Ok(news.any(|m| decode::is_advertised(m.payload, index)))
}

/// The alias of a device that an agent of this host made, this one or another: `weft FILE`.
pub(super) fn is_wefts(alias: &str) -> bool {
    alias.starts_with("weft ")
}

fn seen(value: Value) -> Seen {
    Seen { value, protocol: 0, mark: false }
}

impl LinuxKernel {
    /// [`super::Kernel::machine`].
    pub(super) fn look_at_machine(&mut self) -> io::Result<Machine> {
        let links = links(&mut self.netlink)?;
        let addrs = addresses(&mut self.netlink)?;
        let routes = self.dump_routes()?;
        let ours = |l: &LinkFacts| l.alias == self.options.alias;
        let routes = routes
            .iter()
            .filter(|r| ![self.options.protocol, weft_cni::veth::PROTOCOL].contains(&r.protocol))
            .filter(|r| !links.get(&r.index).is_some_and(ours))
            .map(|r| {
                let dev = links.get(&r.index).map(|l| l.info.name);
                let reach = match (dev, r.via) {
                    (Some(dev), None) if r.kind == libc::RTN_UNICAST && !r.strange => Reach::Link(dev),
                    _ => Reach::Gateway,
                };
                RouteInfo { net: r.net, metric: r.metric, dev, via: r.via, reach, protocol: r.protocol }
            })
            .collect();
        let maker = |l: &LinkFacts| if ours(l) { Maker::ThisAgent } else { l.info.maker };
        let mut links: Vec<_> = links.into_values().map(|l| LinkInfo { maker: maker(&l), ..l.info }).collect();
        links.sort_by_key(|l| l.index);
        Ok(Machine { links, addrs, routes })
    }

    /// [`super::Kernel::observe`].
    pub(super) fn look(&mut self, devices: &[Name]) -> io::Result<Observed> {
        for _ in 0..TRIES {
            if let Some(observed) = self.look_once(devices)? {
                return Ok(observed);
            }
        }
        Err(io::Error::new(io::ErrorKind::Interrupted, "links kept coming and going during a dump"))
    }

    fn look_once(&mut self, devices: &[Name]) -> io::Result<Option<Observed>> {
        let mut links = links(&mut self.netlink)?;
        self.restore_aliases(&mut links);
        let addrs = addresses(&mut self.netlink)?;
        let wanted: HashSet<Name> = devices.iter().copied().collect();
        let ours = |l: &LinkFacts| l.alias == self.options.alias;
        let of_interest: Vec<&LinkFacts> =
            links.values().filter(|l| wanted.contains(&l.info.name) || ours(l)).collect();
        let known = of_interest.iter().map(|l| (l.info.name, l.info.index)).collect();
        let mut found: Vec<(Key, Seen)> = Vec::new();
        for link in &of_interest {
            let protocol = if is_wefts(&link.alias) { PROTOCOL } else { 0 };
            let value = Value::link(link.value(&links, &addrs));
            found.push((Key::Link(link.info.name), Seen { value, protocol, mark: ours(link) }));
        }
        for link in of_interest {
            let (name, index) = (link.info.name, link.info.index);
            let own = addrs.iter().filter(|a| a.index == index);
            found.extend(own.map(|a| (Key::Addr(name, a.net), seen(Value::Addr))));
            self.neighbours(name, index, &mut found)?;
            if link.has_fdb() {
                self.fdb(name, index, &mut found)?;
            }
        }
        found.extend(self.guard.observe()?);
        found.extend(self.fence.observe(&mut self.netlink)?);
        let routes = self.dump_routes()?;
        for r in &routes {
            let dev = links.get(&r.index).map(|l| l.info.name);
            if dev.is_none() && r.index != 0 {
                return Ok(None);
            }
            let value = Value::Route(r.value(dev));
            found.push((Key::Route(r.net, r.metric), Seen { value, protocol: r.protocol, mark: r.nexthop != 0 }));
        }
        self.adopt(&routes)?;
        self.known = known;
        Ok(Some(self.assemble(found)))
    }

    /// Gives our alias back to devices of ours that lost it: without it they would be taken for somebody else's.
    fn restore_aliases(&mut self, links: &mut Links) {
        let alias = self.options.alias.clone();
        self.made.retain(|index| links.contains_key(index));
        for (index, link) in links.iter_mut() {
            if link.alias == alias {
                self.made.insert(*index);
            } else if self.made.contains(index) && !is_wefts(&link.alias) {
                // What does not work is tried again at the next look.
                let _ = self.netlink.request(|w| encode::link_alias(w, *index, &alias));
                link.alias.clone_from(&alias);
            }
        }
    }

    /// One value per key. A key that the kernel has more than once gets a value that equals no desired one, and is cleared
    /// before it is written again; but nothing is cleared where one of its routes is the kernel's own. What is ours beside that one
    /// (the address came after our route) is shown, so that it can be removed.
    fn assemble(&mut self, mut found: Vec<(Key, Seen)>) -> Observed {
        found.sort_by_key(|f| f.0);
        (self.doubled, self.beside_kernels) = (HashMap::new(), HashSet::new());
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
                self.beside_kernels.insert(key);
            } else {
                self.doubled.insert(key, several.len());
            }
        }
        found.into_iter().collect()
    }

    fn neighbours(&mut self, name: Name, index: u32, found: &mut Vec<(Key, Seen)>) -> io::Result<()> {
        let data = self.netlink.dump(libc::RTM_GETNEIGH, |w, _, flags| dump::neighbours(w, flags, index))?;
        for n in messages(&data).filter(|m| m.kind == libc::RTM_NEWNEIGH).filter_map(|m| decode::neighbour(m.payload)) {
            if let (false, true, true, Some(dst), Some(mac)) = (n.fdb, n.lasting, n.index == index, n.dst, n.mac)
                && !dst.is_multicast()
            {
                found.push((Key::Neigh(name, dst), seen(Value::Neigh(mac))));
            }
        }
        Ok(())
    }

    fn fdb(&mut self, name: Name, index: u32, found: &mut Vec<(Key, Seen)>) -> io::Result<()> {
        let data = self.netlink.dump(libc::RTM_GETNEIGH, |w, _, flags| dump::fdb(w, flags, index))?;
        let mut shared = self.index.borrow_mut();
        shared.fdb.retain(|(i, _)| *i != index);
        for n in messages(&data).filter(|m| m.kind == libc::RTM_NEWNEIGH).filter_map(|m| decode::neighbour(m.payload)) {
            let (true, true, true, Some(mac)) = (n.fdb, n.lasting, n.index == index, n.mac) else { continue };
            let dst = n.dst.unwrap_or(std::net::Ipv4Addr::UNSPECIFIED.into());
            // One destination per MAC: the kernel appends further ones to multicast and zero addresses only.
            shared.fdb.insert((index, mac));
            found.push((Key::Fdb(name, mac), seen(Value::Fdb(dst))));
        }
        Ok(())
    }

    /// Routes of both families; those through nexthop objects resolved.
    fn dump_routes(&mut self) -> io::Result<Vec<RouteFacts>> {
        let mut routes: Vec<RouteFacts> = Vec::new();
        for family in [2, 10] {
            match self.netlink.dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes(w, flags, family)) {
                Ok(data) => routes.extend(
                    messages(&data)
                        .filter(|m| m.kind == libc::RTM_NEWROUTE && m.payload.first() == Some(&family))
                        .filter_map(|m| decode::route(m.payload)),
                ),
                Err(e) if absent(&e) => {}
                Err(e) => return Err(e),
            }
        }
        // With nexthop_compat_mode off the kernel shows the id alone.
        if routes.iter().any(|r| r.nexthop != 0 && r.index == 0 && !r.strange) {
            let nexthops = self.dump_nexthops()?;
            for r in routes.iter_mut().filter(|r| r.index == 0 && !r.strange) {
                if let Some(n) = nexthops.get(&r.nexthop) {
                    (r.via, r.index, r.onlink) = (n.via, n.index, n.onlink);
                }
            }
        }
        Ok(routes)
    }

    fn dump_nexthops(&mut self) -> io::Result<HashMap<u32, Nexthop>> {
        let answer = self.netlink.dump(encode::RTM_GETNEXTHOP, |w, _, flags| dump::nexthops(w, flags));
        let data = match answer {
            Ok(data) => data,
            Err(e) if absent(&e) => return Ok(HashMap::new()),
            Err(e) => return Err(e),
        };
        let news = messages(&data).filter(|m| m.kind == encode::RTM_NEWNEXTHOP);
        Ok(news.map(|m| decode::nexthop(m.payload)).map(|n| (n.id, n)).collect())
    }

    /// Brings the index up to date, and deletes the nexthops of ours that carry nothing: an earlier run's, or those of
    /// routes that someone else has deleted.
    fn adopt(&mut self, routes: &[RouteFacts]) -> io::Result<()> {
        let in_use: HashSet<u32> = routes.iter().map(|r| r.nexthop).filter(|id| *id != 0).collect();
        let mut waste = Vec::new();
        if !self.adopted {
            for n in self.dump_nexthops()?.into_values().filter(|n| self.index.borrow().in_range(n.id)) {
                match n.protocol == self.options.protocol {
                    true if !in_use.contains(&n.id) => waste.push(n.id),
                    true => {}
                    false => self.index.borrow_mut().reserve(n.id),
                }
            }
            self.adopted = true;
        }
        {
            let mut shared = self.index.borrow_mut();
            for r in routes {
                let key = Key::Route(r.net, r.metric);
                match r.nexthop {
                    0 => shared.saw_plain(&key),
                    id => shared.saw(key, id, r.protocol == self.options.protocol),
                }
            }
            waste.extend(shared.orphans(&in_use));
        }
        self.delete_nexthops(&waste);
        Ok(())
    }
}
