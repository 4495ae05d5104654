// SPDX-License-Identifier: Apache-2.0
//! The links, addresses and routes among which an uplink is chosen: those of the machine, without those of the pod network.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::owner::is_flannels_device;
use weft_backends::state::Name;
use weft_subnet::cidr::{Family, Subnets, family};
use weft_subnet::evidence::Public;
use weft_subnet::old_defects::{Defect, is_back};

use crate::kernel::{AddrInfo, Creator, LinkInfo, Machine, RouteInfo, RouteLookup};

/// ifa_flags of linux/if_addr.h.
pub(super) const TEMPORARY: u32 = 0x01;
pub(super) const DAD_FAILED: u32 = 0x08;
pub(super) const DEPRECATED: u32 = 0x20;
pub(super) const TENTATIVE: u32 = 0x40;
pub(super) const PERMANENT: u32 = 0x80;

/// Which families are in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Families {
    /// IPv4 is in use.
    pub v4: bool,
    /// IPv6 is in use.
    pub v6: bool,
}

/// Links, addresses and routes among which an uplink is chosen.
#[derive(Debug, Clone)]
pub struct Candidates<'a> {
    machine: &'a Machine,
    pub(super) families: Families,
    /// The subnet of this node's pods. An address in it does not belong to an uplink.
    own: Subnets,
    /// Indexes of the links that cannot be an uplink.
    inner: HashSet<u32>,
    /// What was in use before.
    before: EarlierUse,
}

/// What was in use before a choice, by an earlier run or by the running agent. It counts only if the machine still has it.
#[derive(Debug, Clone, Default)]
pub struct EarlierUse {
    /// The flags that choose an interface are the same now as then. If they differ, the interface is chosen again, and only the addresses
    /// below count.
    pub same_flags: bool,
    /// The uplink that this node saved.
    pub saved: Option<UsedUplink>,
    /// The addresses that the own lease names, or that the running agent uses.
    pub published: Option<Public>,
}

/// An uplink that was in use.
#[derive(Debug, Clone)]
pub struct UsedUplink {
    /// Its name, if it is known.
    pub name: Option<Name>,
    /// Its addresses.
    pub ips: Public,
}

impl<'a> Candidates<'a> {
    /// Collects the candidates of this machine. `own` is the subnet of this node's pods, if it is known.
    pub fn new(machine: &'a Machine, families: Families, own: Subnets) -> Candidates<'a> {
        let ours = |addr: &AddrInfo| global(addr.net.addr()) && inside(&own, addr.net.addr());
        let others = |addr: &AddrInfo| global(addr.net.addr()) && !inside(&own, addr.net.addr());
        let mut inner: HashSet<u32> = machine.addrs.iter().filter(|addr| ours(addr)).map(|addr| addr.index).collect();
        // An uplink may have one of them in addition to its own.
        for addr in machine.addrs.iter().filter(|addr| others(addr)) {
            inner.remove(&addr.index);
        }
        let tunnels = machine.links.iter().filter(|link| link.creator != Creator::Unknown || of_pods(link.name));
        inner.extend(tunnels.map(|link| link.index));
        if is_back(Defect::OwnDeviceChosen) {
            inner.clear();
        }
        Candidates { machine, families, own, inner, before: EarlierUse::default() }
    }

    /// Adds the addresses that were in use so far. They are preferred to other addresses of the same kind.
    #[must_use]
    pub fn preferring(self, published: Public) -> Candidates<'a> {
        self.after(EarlierUse { published: Some(published), ..EarlierUse::default() })
    }

    /// Adds everything that was in use so far.
    #[must_use]
    pub fn after(mut self, before: EarlierUse) -> Candidates<'a> {
        self.before = before;
        self
    }

    /// Returns the link that was in use, if the flags permit it, and it is up, has a carrier, and has an address that was in use. The one
    /// that this node saved comes first. Any other link with such an address counts only if it has a default route, because a VIP may
    /// have moved to a dummy device, and the address in a lease is only what the store says.
    pub(super) fn link_in_use(&self) -> Option<&'a LinkInfo> {
        let EarlierUse { same_flags: true, saved, published } = &self.before else { return None };
        let serves = |link: &&LinkInfo| self.serves(link);
        let named = saved.as_ref().and_then(|used| {
            let mut links = self.links().filter(serves);
            links.find(|link| Some(link.name) == used.name && self.has(link, used.ips))
        });
        let all = saved.iter().map(|used| used.ips).chain(*published);
        let mut with_address =
            all.filter_map(|ips| self.links().filter(serves).find(|l| self.has(l, ips) && self.leads_out(l)));
        named.or_else(|| with_address.next())
    }

    /// Returns true if this link has one of these addresses.
    fn has(&self, link: &LinkInfo, (v4, v6): Public) -> bool {
        let wanted = [v4.map(IpAddr::V4), v6.map(IpAddr::V6)];
        wanted.into_iter().flatten().any(|ip| self.find(link, ip).is_some())
    }

    /// Returns this address on this link, unless another machine has it, too.
    pub(super) fn find(&self, link: &LinkInfo, ip: IpAddr) -> Option<&'a AddrInfo> {
        let mut unique = self.addresses(link, Family::of(ip)).filter(|addr| addr.flags & DAD_FAILED == 0);
        unique.find(|addr| addr.net.addr() == ip)
    }

    /// Returns true if this link is up and has an address in each family in use.
    fn serves(&self, link: &LinkInfo) -> bool {
        let has = |family| self.best(link, family, |_| true).is_some();
        link.up && link.carrier && self.families_in_use().into_iter().flatten().all(has)
    }

    fn leads_out(&self, link: &LinkInfo) -> bool {
        !link.loopback && self.routes(|route| route.net.prefix_len() == 0).any(|(_, over)| over.index == link.index)
    }

    /// Returns every address that an earlier run may have published, in the family by which a lease names its node: those of this link,
    /// and those of each link that [`Candidates::link_in_use`] would choose because of its address.
    pub fn possible_addresses(&self, name: Name) -> Vec<Public> {
        let other = |link: &LinkInfo| self.before.same_flags && self.serves(link) && self.leads_out(link);
        let links = self.links().filter(|link| link.name == name || other(link));
        let family = if self.families.v4 { Family::V4 } else { Family::V6 };
        let ips = links.flat_map(|link| self.addresses(link, family)).map(|addr| addr.net.addr());
        let public = |ip| match ip {
            IpAddr::V4(v4) => (Some(v4), None),
            IpAddr::V6(v6) => (None, Some(v6)),
        };
        ips.filter(|ip| global(*ip)).map(public).collect()
    }

    /// Returns the candidates without this link.
    #[must_use]
    pub(super) fn without(mut self, link: &LinkInfo) -> Candidates<'a> {
        self.inner.insert(link.index);
        self
    }

    /// Returns the families in use, each in its place.
    pub(super) fn families_in_use(&self) -> [Option<Family>; 2] {
        [self.families.v4.then_some(Family::V4), self.families.v6.then_some(Family::V6)]
    }

    /// Returns the links that can be uplinks, by index.
    pub(super) fn links(&self) -> impl Iterator<Item = &'a LinkInfo> {
        self.machine.links.iter().filter(|link| !self.inner.contains(&link.index))
    }

    /// Returns the routes that match and use such links, with the link.
    pub(super) fn routes(
        &self,
        wanted: impl Fn(&RouteInfo) -> bool,
    ) -> impl Iterator<Item = (&'a RouteInfo, &'a LinkInfo)> {
        self.machine.routes.iter().filter(move |route| wanted(route)).filter_map(|route| {
            let dev = route.dev?;
            Some((route, self.links().find(|link| link.name == dev)?))
        })
    }

    /// Returns the kernel's route to the address of `--iface-can-reach`.
    pub(super) fn lookup(&self) -> Option<RouteLookup> {
        self.machine.lookup
    }

    /// Returns true if the kernel chose this address as the source of packets to the address of `--iface-can-reach`. A temporary one
    /// does not count, because it changes every few hours.
    fn is_source(&self, addr: &AddrInfo) -> bool {
        let chosen = RouteLookup { index: addr.index, source: Some(addr.net.addr()) };
        self.lookup() == Some(chosen) && !is_temporary(addr)
    }

    /// Returns the link that has this address.
    pub(super) fn link_with(&self, ip: IpAddr) -> Option<&'a LinkInfo> {
        let addr = self.machine.addrs.iter().find(|addr| addr.net.addr() == ip && !inside(&self.own, ip))?;
        self.links().find(|link| link.index == addr.index)
    }

    /// Returns the best address of a link. The order is: global before link-local, an address with a subnet before a single address, which
    /// may be a VIP, an address in use before others, the source address that the kernel chose, a checked one before a tentative one, a
    /// permanent one before a dynamic one, and a stable one before a temporary one. A deprecated address is never chosen.
    pub(super) fn best(
        &self,
        link: &LinkInfo,
        family: Family,
        wanted: impl Fn(IpAddr) -> bool,
    ) -> Option<&'a AddrInfo> {
        let usable = |addr: &&AddrInfo| addr.flags & (DEPRECATED | DAD_FAILED) == 0 && wanted(addr.net.addr());
        let rank = |addr: &&AddrInfo| {
            let (flags, used, source) = (addr.flags, self.used(addr.net.addr()), self.is_source(addr));
            let (kind, used) = if is_back(Defect::VirtualAddressesPublished) { (GOOD, 0) } else { (kind(addr), used) };
            (kind, used, !source, flags & TENTATIVE != 0, flags & PERMANENT == 0, is_temporary(addr))
        };
        self.addresses(link, family).filter(usable).min_by_key(rank)
    }

    /// Returns 0 for an address that is published, 1 for one that was saved, and 2 for others.
    fn used(&self, ip: IpAddr) -> u8 {
        let among = |(v4, v6): Public| [v4.map(IpAddr::V4), v6.map(IpAddr::V6)].contains(&Some(ip));
        match (self.before.published, self.before.saved.as_ref()) {
            (Some(ips), _) if among(ips) => 0,
            (_, Some(used)) if among(used.ips) => 1,
            _ => 2,
        }
    }

    /// Returns the address with which an uplink in use continues. `None` if it has lost `before`, and peers may not reach the other
    /// addresses (a VIP, a link-local address).
    ///
    /// The address in use stays while it is on the link, whatever its prefix length is. The only address in a cloud is often a single
    /// one, and somebody may add another one. An address that is deprecated, or link-local, is replaced by a better one.
    pub(super) fn kept(&self, link: &LinkInfo, family: Family, before: Option<IpAddr>) -> Option<IpAddr> {
        let best = self.best(link, family, |_| true);
        if is_back(Defect::VirtualAddressesPublished) && best.is_some() {
            return best.map(|addr| addr.net.addr());
        }
        let kept = match before.and_then(|ip| self.find(link, ip)) {
            Some(addr) if addr.flags & DEPRECATED == 0 && global(addr.net.addr()) => Some(addr),
            Some(addr) => best.filter(|best| kind(best) <= kind(addr)).or(Some(addr)),
            None => best.filter(|best| kind(best) == GOOD || before.is_none()),
        };
        kept.map(|addr| addr.net.addr())
    }

    /// Returns what a new choice would use instead of this single address, which is on the link.
    pub(super) fn replacement(&self, link: &LinkInfo, ip: IpAddr) -> Option<IpNet> {
        let single = self.find(link, ip).is_some_and(|addr| kind(addr) == SINGLE);
        let best = self.best(link, Family::of(ip), |_| true).filter(|best| single && kind(best) == GOOD);
        best.map(|addr| addr.net)
    }

    fn addresses(&self, link: &LinkInfo, family: Family) -> impl Iterator<Item = &'a AddrInfo> {
        let (index, own) = (link.index, self.own);
        let usable = move |addr: &&AddrInfo| addr.index == index && Family::of(addr.net.addr()) == family;
        self.machine.addrs.iter().filter(usable).filter(move |addr| !inside(&own, addr.net.addr()))
    }

    /// Returns the links with their addresses as text for people, such as `eth0 (10.0.0.1), eth1 (no address)`. If IPv6 is wanted and the
    /// kernel seems to have none, the text says so.
    pub(super) fn list(&self) -> String {
        let one = |link: &LinkInfo| {
            let ips = self.machine.addrs.iter().filter(|addr| addr.index == link.index);
            let ips: Vec<String> = ips.map(|addr| addr.net.addr().to_string()).collect();
            let ips = if ips.is_empty() { "no address".to_owned() } else { ips.join(" ") };
            format!("{} ({ips})", link.name)
        };
        // A node has a veth for every pod. The first twelve are enough to see what is wrong.
        let mut list: Vec<String> = self.links().filter(|link| !link.loopback).take(12).map(one).collect();
        if list.is_empty() {
            list.push("none but loopback".to_owned());
        }
        list.join(", ") + if self.lacks_ipv6() { NO_IPV6 } else { "" }
    }

    /// Returns true if IPv6 is in use and no link has an address of it. With IPv6, the loopback interface has ::1.
    fn lacks_ipv6(&self) -> bool {
        self.families.v6 && !self.machine.addrs.iter().any(|addr| addr.net.addr().is_ipv6())
    }
}

const NO_IPV6: &str = ", and no IPv6 address at all, not even ::1. Is IPv6 switched off by ipv6.disable=1 on the command line of the kernel \
                       (/proc/cmdline), or by net.ipv6.conf.all.disable_ipv6?";

/// The kind of an address, in the order in which addresses are preferred: single addresses, which may be VIPs, and link-local addresses come
/// after the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct AddrKind {
    is_link_local: bool,
    /// It is a /32 or a /128.
    is_single: bool,
}

const GOOD: AddrKind = AddrKind { is_link_local: false, is_single: false };
const SINGLE: AddrKind = AddrKind { is_link_local: false, is_single: true };

fn kind(addr: &AddrInfo) -> AddrKind {
    AddrKind { is_link_local: !global(addr.net.addr()), is_single: addr.net.prefix_len() == addr.net.max_prefix_len() }
}

/// Returns true for a temporary IPv6 address. For IPv4 the same bit means "secondary", which does not matter here.
fn is_temporary(addr: &AddrInfo) -> bool {
    addr.flags & TEMPORARY != 0 && matches!(addr.net, IpNet::V6(_))
}

/// Returns true for the devices of flannel's backends and the bridge of flannel's CNI plugin. A second TUN device of flannel would be
/// `flannel1`.
fn of_pods(name: Name) -> bool {
    let text = name.text();
    let is_number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    text == "cni0" || is_flannels_device(name) || text.strip_prefix("flannel").is_some_and(is_number)
}

fn inside(own: &Subnets, ip: IpAddr) -> bool {
    !is_back(Defect::OwnDeviceChosen) && own.iter().any(|net| family(&net) == Family::of(ip) && net.contains(&ip))
}

pub(super) fn global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_link_local() && !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local() && !ip.is_loopback(),
    }
}
