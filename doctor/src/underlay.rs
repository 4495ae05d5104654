// SPDX-License-Identifier: Apache-2.0
//! The way of packets to the addresses that peers publish: what the kernel does with them, and whether they can arrive.

use std::io;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::backend::makes_routes;
use weft_netlink::rtnl::{Addr, Link, Neigh, Route, mac_text};

use super::finding::{NodeFinding, finding};
use super::kernel::Kernel;
use super::kernel::entries::{self, Lookup, Packet, RouteKind};
use super::node::{NodeFacts, NodeSources};
use super::peer_port;
use super::policy_rules::PolicyRules;
use super::way_findings::main_rule;
use super::ways::{is_ours, unspecified};

const MAIN: u32 = libc::RT_TABLE_MAIN as u32;
/// A policy rule with this preference comes before those of VPNs.
const RULE: u32 = 100;
/// The device of the tunnel, where this node has none.
const USUAL_DEVICE: &str = "flannel.1";

/// An address that a peer publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerAddress {
    /// The address.
    pub addr: IpAddr,
    /// False if the agent knows that packets do not reach the peer.
    pub reached: bool,
    /// The UDP port of its tunnel, if it may be another one than that of this node.
    pub port: Option<u16>,
}

/// Why packets to a peer cannot arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// This node has the address itself: the link and the length of the prefix, if a link has it.
    Own(Option<(String, u8)>),
    /// The kernel refuses them. The route is that of the main table which does.
    Refused(Errno, Option<IpNet>),
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
    /// The peer answers that nothing listens on the port of the tunnel.
    NoListener {
        /// The UDP port.
        port: u16,
        /// The device that receives on it.
        device: String,
    },
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

/// The tables of the kernel that were read.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// The links.
    pub links: &'a [Link],
    /// The addresses.
    pub addrs: &'a [Addr],
    /// The main table.
    pub routes: &'a [Route],
    /// The neighbours.
    pub neighbours: &'a [Neigh],
    /// The policy rules.
    pub policy: &'a PolicyRules,
}

/// Asks the kernel for the way to each address that peers publish. The agent must have named the own addresses. Peers that packets do not reach
/// although the way is right are asked whether anything listens on the UDP port of the tunnel, if there is one.
///
/// # Errors
/// The kernel does not answer.
pub fn read(tables: &Tables<'_>, sources: &NodeSources, port: Option<u16>) -> io::Result<Vec<(IpAddr, Fault)>> {
    let others = sources.peer_addresses.iter().filter(|peer| !sources.published.contains(&peer.addr));
    if !makes_routes(&sources.backend) || sources.published.is_empty() {
        return Ok(Vec::new());
    }
    let mut kernel = Kernel::open()?;
    let (mut found, mut silent) = (Vec::new(), Vec::new());
    for peer in others {
        let to = peer.addr;
        // An address of the other side of a NAT is none of this node.
        let is_here = |own: &&IpAddr| tables.addrs.iter().any(|addr| addr.addr == **own);
        let own = sources.published.iter().filter(is_here).find(|own| own.is_ipv4() == to.is_ipv4());
        let from = own.copied().unwrap_or_else(|| unspecified(to));
        let lookup = kernel.route(&Packet { from, to, proto: None, port: None }, None);
        match tables.fault(peer, &lookup, sources) {
            Some(fault) => found.push((to, fault)),
            None if !peer.reached => {
                silent.extend(peer.port.or(port).map(|port| (from, SocketAddr::new(to, port))));
            }
            None => {}
        }
    }
    let closed = |at: SocketAddr| {
        let (to, port) = (at.ip(), at.port());
        (to, Fault::NoListener { port, device: tables.tunnel_device(to) })
    };
    found.extend(peer_port::closed(&silent).into_iter().map(closed));
    Ok(found)
}

impl Tables<'_> {
    fn fault(&self, peer: &PeerAddress, lookup: &Lookup, sources: &NodeSources) -> Option<Fault> {
        let to = peer.addr;
        match lookup {
            Lookup::Route(route) if route.kind == RouteKind::Local => Some(Fault::Own(self.own(to))),
            Lookup::Route(route) => match route.kind {
                RouteKind::Unicast if !peer.reached => self.wrong_way(to, route, sources),
                RouteKind::Refuses(libc::RTN_PROHIBIT) => Some(Fault::Refused(Errno::EACCES, self.refusing(to))),
                RouteKind::Refuses(libc::RTN_UNREACHABLE) => {
                    Some(Fault::Refused(Errno::EHOSTUNREACH, self.refusing(to)))
                }
                RouteKind::Refuses(_) => Some(Fault::Refused(Errno::EINVAL, self.refusing(to))),
                _ => None,
            },
            Lookup::Refused(Errno::ENETUNREACH) if !peer.reached => {
                // The agent itself says that its uplink is down.
                let uplink = self.uplinks(sources).find(|link| link.up)?;
                let has_route = self.routes_to(to).any(|(_, route)| !route.refuses && self.runs(route.index));
                Some(match self.policy.asks_main(to.is_ipv4()) {
                    _ if !has_route => Fault::NoRoute(uplink.name.clone()),
                    true => Fault::Refused(Errno::ENETUNREACH, None),
                    false => Fault::NoRule,
                })
            }
            Lookup::Refused(errno @ (Errno::EACCES | Errno::EINVAL | Errno::EHOSTUNREACH)) => {
                let route = self.refusing(to);
                (route.is_some() || !peer.reached).then_some(Fault::Refused(*errno, route))
            }
            Lookup::Refused(_) | Lookup::Unreadable(_) => None,
        }
    }

    /// Returns true if a link is up and has a carrier. The kernel may leave out the routes of others.
    pub(super) fn runs(&self, link: u32) -> bool {
        self.links.iter().any(|one| one.index == link && one.is_running())
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

    fn own(&self, to: IpAddr) -> Option<(String, u8)> {
        let addr = self.addrs.iter().find(|addr| addr.addr == to)?;
        let link = self.links.iter().find(|link| link.index == addr.index)?;
        Some((link.name.clone(), addr.len))
    }

    /// Returns the routes of the main table that lead to this address.
    fn routes_to(&self, to: IpAddr) -> impl Iterator<Item = (IpNet, &Route)> {
        let any = unspecified(to);
        let of_family = self.routes.iter().filter(move |route| route.v6 == to.is_ipv6());
        let net = move |route: &Route| IpNet::new(route.dst.unwrap_or(any), route.len).ok();
        of_family.filter_map(move |route| Some((net(route)?, route))).filter(move |(net, _)| net.contains(&to))
    }

    /// Returns the longest route to this address, if it refuses packets. Of two routes that are equally long, the metric decides, and both may
    /// be innocent.
    fn refusing(&self, to: IpAddr) -> Option<IpNet> {
        let longest = self.routes_to(to).map(|(net, _)| net.prefix_len()).max()?;
        let mut longest = self.routes_to(to).filter(|(net, _)| net.prefix_len() == longest);
        let (net, first) = longest.next()?;
        (first.refuses && longest.all(|(_, route)| route.refuses)).then_some(net)
    }

    fn wrong_way(&self, to: IpAddr, taken: &entries::Route, sources: &NodeSources) -> Option<Fault> {
        let link = self.links.iter().find(|link| link.index == taken.device)?;
        let first = self.uplinks(sources).next()?;
        // The check `uplink` looks at links that are a part of another one.
        let is_right =
            |uplink: &Link| uplink.index == link.index || uplink.master == link.index || link.master == uplink.index;
        if self.uplinks(sources).any(is_right) {
            return self.permanent(taken.gateway.unwrap_or(to), link);
        }
        let longest = self.routes_to(to).filter(|(_, route)| !route.refuses).max_by_key(|(net, _)| net.prefix_len());
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
        let neigh = of_link.find(|neigh| neigh.permanent && neigh.addr == nexthop && !neigh.mac.is_empty())?;
        Some(Fault::Permanent { nexthop, link: link.name.clone(), mac: mac_text(&neigh.mac) })
    }
}

/// Packets to peers do not leave this node, or leave it by a wrong way.
pub(super) fn underlay(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut groups: Vec<(&Fault, Vec<IpAddr>)> = Vec::new();
    for (peer, fault) in &facts.underlay {
        match groups.iter_mut().find(|(known, _)| *known == fault) {
            Some((_, peers)) => peers.push(*peer),
            None => groups.push((fault, vec![*peer])),
        }
    }
    groups.iter().map(|(fault, peers)| describe(fault, peers)).collect()
}

fn describe(fault: &Fault, peers: &[IpAddr]) -> NodeFinding {
    let peer = peers[0];
    let who = if peers.len() == 1 { peer.to_string() } else { format!("{peer} and {} more peers", peers.len() - 1) };
    let ip = if peer.is_ipv6() { "ip -6" } else { "ip" };
    match fault {
        Fault::Own(Some((link, len))) => finding(
            format!(
                "{who} is the address of another node, and an address of {link} here, too: packets to that node do not leave this one"
            ),
            format!(
                "{ip} addr del {peer}/{len} dev {link}; on kube-ipvs0, take it out of the externalIPs of the services"
            ),
        ),
        Fault::Own(None) => finding(
            format!("{who} is the address of another node, and a local route keeps packets to it on this one"),
            format!("{ip} route del local {peer}; `{ip} route show table local` shows the route"),
        ),
        Fault::Refused(errno, Some(route)) => {
            let kind = match errno {
                Errno::EACCES => "prohibit",
                Errno::EHOSTUNREACH => "unreachable",
                _ => "blackhole",
            };
            finding(
                format!("the main table has a route that refuses packets to {who}: {kind} {route}"),
                format!("{ip} route del {kind} {route}; then find the program that writes it"),
            )
        }
        Fault::Refused(errno, None) => finding(
            format!(
                "the kernel refuses packets to {who} ({}): a policy rule, or a route of another table",
                errno.desc()
            ),
            format!(
                "`{ip} rule` shows the rules and their tables; {ip} rule del with the preference of the one that is wrong"
            ),
        ),
        Fault::NoRoute(uplink) => finding(
            format!("no route leads to {who}, although the uplink {uplink} is up: its default route is gone"),
            format!(
                "{ip} route add default via GATEWAY dev {uplink}; or let the program that manages {uplink} do it (DHCP)"
            ),
        ),
        Fault::NoRule => finding(
            format!("no policy rule asks the main table, which has a route to {who}"),
            main_rule(if peer.is_ipv6() { "-6 " } else { "" }),
        ),
        Fault::OtherLink(other) => other_link(other, (peer, &who), ip),
        Fault::Permanent { nexthop, link, mac } => finding(
            format!(
                "packets do not reach {who}, and the MAC address of {nexthop} on {link} is permanent ({mac}), so nothing corrects it"
            ),
            format!("{ip} neigh del {nexthop} dev {link}; then find the program that writes it"),
        ),
        Fault::NoListener { port, device } => {
            let answer = if peers.len() == 1 { "answers" } else { "answer" };
            no_listener(&format!("{who} {answer}"), *port, device)
        }
    }
}

fn no_listener(who_answers: &str, port: u16, device: &str) -> NodeFinding {
    let evidence = format!(
        "{who_answers} that nothing listens on UDP port {port} there: its {device} is down or gone, its agent uses another Port, or a rule there rejects the packets"
    );
    let remedy = format!(
        "on that node: `ip -d link show {device}` shows the state and the port, `weft status` the problems of its agent; restart the agent, which makes the device again"
    );
    finding(evidence, remedy)
}

fn other_link(other: &OtherLink, (peer, who): (IpAddr, &str), ip: &str) -> NodeFinding {
    let OtherLink { link, route, table, uplink, way } = other;
    let table = if *table == MAIN { "main".to_owned() } else { table.to_string() };
    let route = route.map(|route| format!("{route}, ")).unwrap_or_default();
    let evidence = format!(
        "packets to {who}, which do not arrive, leave over {link} ({route}table {table}) instead of the uplink {uplink}, as a VPN wants it"
    );
    let host = IpNet::from(peer);
    let command = match way {
        Some(UplinkWay { main_is_right: true, .. }) => format!("{ip} rule add to {host} lookup main pref {RULE}"),
        Some(UplinkWay { gateway: Some(gateway), .. }) => format!("{ip} route add {host} via {gateway} dev {uplink}"),
        Some(UplinkWay { gateway: None, .. }) => format!("{ip} route add {host} dev {uplink}"),
        None => format!("`{ip} route get {peer}` shows the route"),
    };
    finding(
        evidence,
        format!("{command}; then exclude the addresses of nodes in the program that sends packets over {link}"),
    )
}
