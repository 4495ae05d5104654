// SPDX-License-Identifier: Apache-2.0
//! What an uplink is chosen from: the links, addresses and routes of the machine without those of the pod network.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::state::Name;
use weft_subnet::cidr::{Family, Subnets, family};
use weft_subnet::evidence::Public;

use crate::kernel::{AddrInfo, LinkInfo, Machine, Maker, RouteInfo};

/// ifa_flags of linux/if_addr.h.
pub(super) const TEMPORARY: u32 = 0x01;
pub(super) const DAD_FAILED: u32 = 0x08;
pub(super) const DEPRECATED: u32 = 0x20;
pub(super) const TENTATIVE: u32 = 0x40;
pub(super) const PERMANENT: u32 = 0x80;

/// Links, addresses and routes among which an uplink is chosen.
#[derive(Debug, Clone)]
pub struct Ground<'a> {
    machine: &'a Machine,
    /// Which of IPv4 and IPv6 are in use.
    pub(super) families: (bool, bool),
    /// The subnet of our pods: its addresses are no uplink's.
    own: Subnets,
    /// Indexes of the links that can be no uplink.
    inner: HashSet<u32>,
    /// Addresses of the two families that win among their like.
    preferred: [Option<IpAddr>; 2],
}

impl<'a> Ground<'a> {
    /// `own` is the subnet of our pods, as far as it is known.
    pub fn new(machine: &'a Machine, families: (bool, bool), own: Subnets) -> Ground<'a> {
        let ours = |addr: &AddrInfo| global(addr.net.addr()) && inside(&own, addr.net.addr());
        let others = |addr: &AddrInfo| global(addr.net.addr()) && !inside(&own, addr.net.addr());
        let mut inner: HashSet<u32> = machine.addrs.iter().filter(|addr| ours(addr)).map(|addr| addr.index).collect();
        // An uplink may bear one of them besides its own.
        for addr in machine.addrs.iter().filter(|addr| others(addr)) {
            inner.remove(&addr.index);
        }
        let tunnels = machine.links.iter().filter(|link| link.maker != Maker::Unknown || of_pods(&link.name.text()));
        inner.extend(tunnels.map(|link| link.index));
        Ground { machine, families, own, inner, preferred: [None, None] }
    }

    /// With these addresses in use so far: they win among their like.
    #[must_use]
    pub fn preferring(mut self, (v4, v6): Public) -> Ground<'a> {
        self.preferred = [v4.map(IpAddr::V4), v6.map(IpAddr::V6)];
        self
    }

    /// Every address that this link may have had published, in the family by which a lease names its node.
    pub fn beside(&self, name: Name) -> Vec<Public> {
        let link = self.links().find(|link| link.name == name);
        let family = if self.families.0 { Family::V4 } else { Family::V6 };
        let ips = link.into_iter().flat_map(|link| self.addresses(link, family)).map(|addr| addr.net.addr());
        let public = |ip| match ip {
            IpAddr::V4(v4) => (Some(v4), None),
            IpAddr::V6(v6) => (None, Some(v6)),
        };
        ips.filter(|ip| global(*ip)).map(public).collect()
    }

    /// Without this link.
    #[must_use]
    pub(super) fn without(mut self, link: &LinkInfo) -> Ground<'a> {
        self.inner.insert(link.index);
        self
    }

    /// The links that can be uplinks, by index.
    pub(super) fn links(&self) -> impl Iterator<Item = &'a LinkInfo> {
        self.machine.links.iter().filter(|link| !self.inner.contains(&link.index))
    }

    /// The routes that are wanted and lead over such links, with the link.
    pub(super) fn routes(
        &self,
        wanted: impl Fn(&RouteInfo) -> bool,
    ) -> impl Iterator<Item = (&'a RouteInfo, &'a LinkInfo)> {
        self.machine.routes.iter().filter(move |route| wanted(route)).filter_map(|route| {
            let dev = route.dev?;
            Some((route, self.links().find(|link| link.name == dev)?))
        })
    }

    /// The link that has this address.
    pub(super) fn bearing(&self, ip: IpAddr) -> Option<&'a LinkInfo> {
        let addr = self.machine.addrs.iter().find(|addr| addr.net.addr() == ip && !inside(&self.own, ip))?;
        self.links().find(|link| link.index == addr.index)
    }

    /// The best address of a link: global before link-local, one of a subnet before a single address (a VIP), the one in use
    /// before others, settled before tentative, permanent before dynamic, lasting before temporary; deprecated never.
    pub(super) fn best(
        &self,
        link: &LinkInfo,
        family: Family,
        wanted: impl Fn(IpAddr) -> bool,
    ) -> Option<&'a AddrInfo> {
        let usable = |addr: &&AddrInfo| addr.flags & (DEPRECATED | DAD_FAILED) == 0 && wanted(addr.net.addr());
        let rank = |addr: &&AddrInfo| {
            // The same bit says "secondary" for IPv4, which is no defect.
            let temporary = addr.flags & TEMPORARY != 0 && matches!(addr.net, IpNet::V6(_));
            let preferred = self.preferred.contains(&Some(addr.net.addr()));
            (kind(addr), !preferred, addr.flags & TENTATIVE != 0, addr.flags & PERMANENT == 0, temporary)
        };
        self.addresses(link, family).filter(usable).min_by_key(rank)
    }

    /// The address that an uplink in use goes on with, where `before` is the preferred one; `None`: it has lost that one, and what
    /// is there instead may be of no use to peers (a VIP, a link-local address).
    pub(super) fn kept(&self, link: &LinkInfo, family: Family, before: Option<IpAddr>) -> Option<IpAddr> {
        let mut there = self.addresses(link, family).filter(|addr| addr.flags & DAD_FAILED == 0);
        let there = there.find(|addr| Some(addr.net.addr()) == before);
        let best = self.best(link, family, |_| true);
        let kept = match there {
            // A deprecated one is on the link all the same.
            Some(addr) => best.filter(|best| kind(best) <= kind(addr)).or(Some(addr)),
            None => best.filter(|best| kind(best) == GOOD || before.is_none()),
        };
        kept.map(|addr| addr.net.addr())
    }

    fn addresses(&self, link: &LinkInfo, family: Family) -> impl Iterator<Item = &'a AddrInfo> {
        let (index, own) = (link.index, self.own);
        let usable = move |addr: &&AddrInfo| addr.index == index && of(addr.net.addr()) == family;
        self.machine.addrs.iter().filter(usable).filter(move |addr| !inside(&own, addr.net.addr()))
    }

    /// `eth0 (10.0.0.1), eth1 (no address)`.
    pub(super) fn there(&self) -> String {
        let one = |link: &LinkInfo| {
            let ips = self.machine.addrs.iter().filter(|addr| addr.index == link.index);
            let ips: Vec<String> = ips.map(|addr| addr.net.addr().to_string()).collect();
            let ips = if ips.is_empty() { "no address".to_owned() } else { ips.join(" ") };
            format!("{} ({ips})", link.name)
        };
        // A node has a veth for every pod: the first dozen is enough to see what is wrong.
        let mut list: Vec<String> = self.links().filter(|link| !link.loopback).take(12).map(one).collect();
        if list.is_empty() {
            list.push("none but loopback".to_owned());
        }
        list.join(", ")
    }
}

/// Not link-local, and of a subnet: see [`kind`].
const GOOD: (bool, bool) = (false, false);

/// Link-local addresses, and single addresses (/32, /128): each comes behind the others. A VIP is such a single address.
fn kind(addr: &AddrInfo) -> (bool, bool) {
    (!global(addr.net.addr()), addr.net.prefix_len() == addr.net.max_prefix_len())
}

/// The devices of flannel's backends and the bridge of flannel's CNI plugin.
fn of_pods(name: &str) -> bool {
    let number = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    let vxlan = name.strip_prefix("flannel.").or_else(|| name.strip_prefix("flannel-v6."));
    ["cni0", "flannel.ipip", "flannel-wg", "flannel-wg-v6"].contains(&name)
        || vxlan.or_else(|| name.strip_prefix("flannel")).is_some_and(number)
}

fn inside(own: &Subnets, ip: IpAddr) -> bool {
    own.iter().any(|net| family(&net) == of(ip) && net.contains(&ip))
}

pub(super) fn global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_link_local() && !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local() && !ip.is_loopback(),
    }
}

pub(super) fn of(ip: IpAddr) -> Family {
    if ip.is_ipv4() { Family::V4 } else { Family::V6 }
}

pub(super) fn word(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}
