// SPDX-License-Identifier: Apache-2.0
//! The way of packets to the addresses that peers publish: what the kernel does with them, and whether they can arrive.

use std::io;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::owner::PROTOCOL;
use weft_backends::register::{device_kind, makes_routes};
use weft_backends::{vxlan, wireguard};
use weft_netlink::rtnl::{Link, Route, mac_text};

use super::peer_port::{self, Question};
use super::tables::Tables;
use super::tunnel::Tunnel;
use crate::kernel::Kernel;
use crate::kernel::entries::{self, Device, LocalRoute, Lookup, MAIN, Packet, RouteKind, unspecified};
use crate::known_links::is_ours;
use crate::sources::{NodeSources, PeerAddress};

/// The device of the tunnel, where this node has none.
pub(crate) const USUAL_DEVICE: &str = "flannel.1";

/// A peer to which packets cannot arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFault {
    /// The address that it publishes.
    pub peer: IpAddr,
    /// Why packets cannot arrive there.
    pub fault: Fault,
}

/// An address of a link of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnAddress {
    /// The link.
    pub link: String,
    /// The length of the prefix.
    pub len: u8,
}

/// Why packets to a peer cannot arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// This node has the address itself.
    Own(OwnAddress),
    /// A local route keeps them on this node, and no link has the address.
    Kept(LocalRoute),
    /// The kernel refuses them.
    Refused {
        /// Its answer.
        errno: Errno,
        /// The destination of the route of the main table that refuses them, if it is one.
        route: Option<IpNet>,
    },
    /// No route leads there. The uplink is named.
    NoRoute(String),
    /// The main table has a route, and no policy rule asks it.
    NoRule,
    /// They leave by another link than the uplink.
    OtherLink(OtherLink),
    /// The MAC address of the next hop is written down.
    Permanent {
        /// The next hop.
        nexthop: IpAddr,
        /// The link.
        link: String,
        /// The MAC address, for people.
        mac: String,
    },
    /// The way takes smaller packets than those that the tunnel sends.
    SmallWay(SmallWay),
    /// The peer answers that nothing listens on the port of the tunnel.
    NoListener {
        /// The UDP port.
        port: u16,
        /// The device that receives on it.
        device: String,
    },
}

/// A way that takes smaller packets than those of a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SmallWay {
    /// The link by which they leave.
    pub link: String,
    /// The size in bytes of the largest packet that the link or the route takes.
    pub mtu: u32,
    /// The kernel has learned this size from an ICMP error, which anybody may have sent, and forgets it after some minutes.
    pub is_learned: bool,
    /// The device of the tunnel.
    pub device: String,
    /// The size in bytes of its largest packets on the way.
    pub needed: u32,
}

/// The link that packets take instead of the uplink.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherLink {
    /// Its name.
    pub link: String,
    /// The route that they take, if the kernel names it.
    pub route: Option<IpNet>,
    /// Its table.
    pub table: u32,
    /// The uplink.
    pub uplink: String,
    /// The way by the uplink, if the main table has one.
    pub way: Option<UplinkWay>,
}

/// How packets get to a peer by the uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UplinkWay {
    /// The next hop; `None` if the peer is on the same link.
    pub gateway: Option<IpAddr>,
    /// True if the main table sends them there, when it is asked.
    pub main_is_right: bool,
}

/// Asks the kernel for the way to each address that peers publish. The agent must have named the own addresses. Peers that packets do not reach
/// although the way is right are asked whether anything listens on the UDP port of the tunnel, if there is one.
///
/// # Errors
/// The kernel does not answer.
pub(super) fn read(tables: &Tables<'_>, sources: &NodeSources, tunnel: Option<Tunnel>) -> io::Result<Vec<PeerFault>> {
    let others = sources.peer_addresses.iter().filter(|peer| !sources.published.contains(&peer.addr));
    if !makes_routes(&sources.backend) || sources.published.is_empty() {
        return Ok(Vec::new());
    }
    let (mut kernel, port) = (Kernel::open()?, tunnel.and_then(Tunnel::port));
    let (mut found, mut silent) = (Vec::new(), Vec::new());
    for peer in others {
        let to = peer.addr;
        // The tunnel sends from the uplink, also if another address is published.
        let from = tables.first_here(&sources.uplink_addrs, to).unwrap_or_else(|| unspecified(to.is_ipv4()));
        let lookup = kernel.route(&Packet { from, to, proto: None, port: None }, None);
        match tables.fault(peer, &lookup, sources) {
            Some(fault) => found.push(PeerFault { peer: to, fault }),
            None => {
                let small = tables.small_way(peer, &lookup, &sources.backend);
                found.extend(small.map(|small| PeerFault { peer: to, fault: Fault::SmallWay(small) }));
                let at = peer.port.or(port).filter(|_| !peer.reached).map(|port| SocketAddr::new(to, port));
                silent.extend(at.map(|peer| Question { own: from, peer }));
            }
        }
    }
    kernel.correct_tables(found.iter_mut().filter_map(|found| match &mut found.fault {
        Fault::Kept(route) => Some(route),
        _ => None,
    }))?;
    let closed = |at: SocketAddr| {
        let (to, port) = (at.ip(), at.port());
        PeerFault { peer: to, fault: Fault::NoListener { port, device: tables.tunnel_device(to) } }
    };
    found.extend(peer_port::closed(&silent).into_iter().map(closed));
    Ok(found)
}

impl Tables<'_> {
    fn fault(&self, peer: &PeerAddress, lookup: &Lookup, sources: &NodeSources) -> Option<Fault> {
        let to = peer.addr;
        match lookup {
            Lookup::Route(route) if route.kind == RouteKind::Local => {
                Some(self.own(to).map_or_else(|| Fault::Kept(route.into()), Fault::Own))
            }
            Lookup::Route(route) => match route.kind {
                RouteKind::Unicast if !peer.reached => self.wrong_way(to, route, sources),
                RouteKind::Refuses(kind) => {
                    let errno = match kind {
                        libc::RTN_PROHIBIT => Errno::EACCES,
                        libc::RTN_UNREACHABLE => Errno::EHOSTUNREACH,
                        _ => Errno::EINVAL,
                    };
                    Some(Fault::Refused { errno, route: self.refusing(to) })
                }
                _ => None,
            },
            Lookup::Refused(Errno::ENETUNREACH) if !peer.reached => {
                // The agent itself says that its uplink is down.
                let uplink = self.uplinks(sources).find(|link| link.up)?;
                let has_route = self.routes_to(to).any(|(_, route)| !route.refuses() && self.runs(route.index));
                Some(match self.policy.asks_main(to.is_ipv4()) {
                    _ if !has_route => Fault::NoRoute(uplink.name.clone()),
                    true => Fault::Refused { errno: Errno::ENETUNREACH, route: None },
                    false => Fault::NoRule,
                })
            }
            Lookup::Refused(errno @ (Errno::EACCES | Errno::EINVAL | Errno::EHOSTUNREACH)) => {
                let route = self.refusing(to);
                (route.is_some() || !peer.reached).then_some(Fault::Refused { errno: *errno, route })
            }
            Lookup::Refused(_) | Lookup::Unreadable(_) => None,
        }
    }

    /// Returns the links by which packets should leave: those with a published address, and the one that the agent chose.
    fn uplinks<'a>(&'a self, sources: &'a NodeSources) -> impl Iterator<Item = &'a Link> {
        let is_published =
            |link: &Link| self.addrs.iter().any(|a| a.index == link.index && sources.published.contains(&a.addr));
        let is_uplink = move |link: &&Link| link.name == sources.uplink || (is_published(link) && !is_ours(link));
        self.links.iter().filter(is_uplink)
    }

    /// Returns the device that sends packets to such an address. That of the peer has the same name.
    fn tunnel_device(&self, to: IpAddr) -> String {
        let ours = || self.links.iter().filter(|link| is_ours(link));
        let of_family = ours().find(|link| link.name.contains("-v6") == to.is_ipv6());
        of_family.or_else(|| ours().next()).map_or(USUAL_DEVICE, |link| link.name.as_str()).to_owned()
    }

    /// Returns what is too small on the way to this address for the tunnel of the backend. Nodes that are reached without a tunnel get
    /// smaller packets.
    fn small_way(&self, peer: &PeerAddress, lookup: &Lookup, backend: &str) -> Option<SmallWay> {
        let Lookup::Route(route) = lookup else { return None };
        let to = peer.addr;
        let link = self.link(route.device).filter(|link| route.kind == RouteKind::Unicast && !is_ours(link))?;
        let is_direct = |route: &Route| {
            let is_of_tunnel = self.link(route.index).is_none_or(is_ours);
            route.protocol == PROTOCOL && route.gateway == Some(to) && !is_of_tunnel
        };
        if self.routes.iter().any(is_direct) {
            return None;
        }
        let tunnel = self.tunnel_to(peer, device_kind(backend)?)?;
        let mtu = route.mtu.map_or(link.mtu, |mtu| mtu.min(link.mtu));
        let is_learned = route.mtu_is_learned && mtu < link.mtu;
        let needed = tunnel.mtu + Device::from(tunnel.clone()).kind.overhead(to);
        (mtu < needed).then(|| SmallWay {
            link: link.name.clone(),
            mtu,
            is_learned,
            device: tunnel.name.clone(),
            needed,
        })
    }

    /// Returns the device of this kind that sends its packets to an address of a peer.
    fn tunnel_to(&self, peer: &PeerAddress, kind: &str) -> Option<&Link> {
        let is_ipv6 = peer.addr.is_ipv6();
        let ours = || self.links.iter().filter(|link| is_ours(link) && link.kind == kind);
        let of_family = ours().find(|link| link.name.contains("-v6") == is_ipv6);
        match kind {
            vxlan::DEVICE_KIND => of_family,
            // One device may carry both families. It sends to the endpoint of the peer alone, whichever addresses the peer publishes.
            wireguard::DEVICE_KIND => of_family.or_else(|| ours().next()).filter(|_| peer.port.is_some()),
            _ => ours().next().filter(|_| !is_ipv6),
        }
    }

    fn own(&self, to: IpAddr) -> Option<OwnAddress> {
        let addr = self.addrs.iter().find(|addr| addr.addr == to)?;
        Some(OwnAddress { link: self.link(addr.index)?.name.clone(), len: addr.len })
    }

    fn wrong_way(&self, to: IpAddr, taken: &entries::Route, sources: &NodeSources) -> Option<Fault> {
        let link = self.link(taken.device)?;
        let first = self.uplinks(sources).next()?;
        // The check `uplink` looks at links that are a part of another one.
        let is_right =
            |uplink: &Link| uplink.index == link.index || uplink.master == link.index || link.master == uplink.index;
        if self.uplinks(sources).any(is_right) {
            return self.permanent(taken.gateway.unwrap_or(to), link);
        }
        let longest = self.routes_to(to).filter(|(_, route)| !route.refuses()).max_by_key(|(net, _)| net.prefix_len());
        let by_uplink = self.routes_to(to).filter(|(_, route)| self.uplinks(sources).any(|up| up.index == route.index));
        let way = by_uplink.max_by_key(|(net, _)| net.prefix_len()).map(|(net, route)| {
            let is_longest = longest.is_some_and(|(longest, _)| longest.prefix_len() == net.prefix_len());
            UplinkWay { gateway: route.gateway, main_is_right: taken.table != MAIN && is_longest }
        });
        let (link, uplink) = (link.name.clone(), first.name.clone());
        Some(Fault::OtherLink(OtherLink { link, route: taken.prefix, table: taken.table, uplink, way }))
    }

    fn permanent(&self, nexthop: IpAddr, link: &Link) -> Option<Fault> {
        let mut of_link = self.neighbours.iter().filter(|neigh| neigh.index == link.index && !is_ours(link));
        let neigh = of_link.find(|neigh| neigh.is_permanent() && neigh.addr == nexthop && !neigh.mac.is_empty())?;
        Some(Fault::Permanent { nexthop, link: link.name.clone(), mac: mac_text(&neigh.mac) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::policy_rules::PolicyRules;

    #[test]
    fn the_device_for_an_address_of_a_peer_depends_on_the_backend_and_on_its_endpoint() {
        let link = |name: &str, kind: &str| Link { name: name.to_owned(), kind: kind.to_owned(), ..Link::default() };
        let vxlan = [link("flannel.1", "vxlan"), link("flannel-v6.1", "vxlan")];
        let both = [link("flannel-wg", "wireguard")];
        let separate = [link("flannel-wg", "wireguard"), link("flannel-wg-v6", "wireguard")];
        let policy = PolicyRules::default();
        for (links, addr, port, device) in [
            (&vxlan[..], "192.0.2.9", None, Some("flannel.1")),
            (&vxlan[..], "fd00::9", None, Some("flannel-v6.1")),
            (&vxlan[..1], "fd00::9", None, None),
            (&both[..], "192.0.2.9", Some(51820), Some("flannel-wg")),
            (&both[..], "fd00::9", Some(51820), Some("flannel-wg")),
            // The endpoint of the peer is its other address.
            (&both[..], "fd00::9", None, None),
            (&separate[..], "fd00::9", Some(51821), Some("flannel-wg-v6")),
            (&[link("flannel.ipip", "ipip")][..], "192.0.2.9", None, Some("flannel.ipip")),
            (&[link("flannel.ipip", "ipip")][..], "fd00::9", None, None),
        ] {
            let tables = Tables { links, addrs: &[], routes: &[], neighbours: &[], policy: &policy };
            let peer = PeerAddress { addr: addr.parse().unwrap(), reached: true, port };
            let found = tables.tunnel_to(&peer, &links[0].kind).map(|link| link.name.as_str());
            assert_eq!(found, device, "{addr} {port:?}");
        }
    }
}
