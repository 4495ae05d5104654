// SPDX-License-Identifier: Apache-2.0
//! Choice of the external interface: a pure pick over a snapshot of links, addresses and routes, in flannel's order
//! (flannel-compat.md section 6).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use regex_lite::Regex;
use weft_backends::host::Uplink;
use weft_subnet::cidr::Family;

use crate::kernel::{AddrInfo, LinkInfo, Machine, RouteInfo};
use crate::options::UplinkChoice;

/// ifa_flags of linux/if_addr.h.
const TEMPORARY: u32 = 0x01;
const DAD_FAILED: u32 = 0x08;
const DEPRECATED: u32 = 0x20;
const TENTATIVE: u32 = 0x40;
const PERMANENT: u32 = 0x80;

/// The interface, and what is published about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picked {
    /// The external interface with its address in each family in use.
    pub uplink: Uplink,
    /// PublicIP, when IPv4 is in use.
    pub public_v4: Option<Ipv4Addr>,
    /// PublicIPv6, when IPv6 is in use.
    pub public_v6: Option<Ipv6Addr>,
}

impl Picked {
    /// The address that this pick would give up for a link-local one. For a running node that is an interface that is being set
    /// up (IPv6 addresses go with a link that is set down), and peers could not use a link-local address: nothing to publish.
    pub fn gives_up(&self, before: &Uplink) -> Option<IpAddr> {
        let v4 = |ip: Option<Ipv4Addr>| ip.is_some_and(|ip| ip.is_link_local());
        let v6 = |ip: Option<Ipv6Addr>| ip.is_some_and(|ip| ip.is_unicast_link_local());
        let (now, same) = (&self.uplink, self.uplink.name == before.name);
        if same && v4(now.v4) && !v4(before.v4) {
            return before.v4.map(IpAddr::V4);
        }
        before.v6.filter(|_| same && v6(now.v6) && !v6(before.v6)).map(IpAddr::V6)
    }
}

/// Why there is no external interface. May change by itself: an interface can come, an address too.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PickError {
    /// Nothing that was asked for exists.
    #[error("no interface matches {wanted}; there is {there}")]
    NoMatch {
        /// The flags with their values.
        wanted: String,
        /// Interfaces with addresses.
        there: String,
    },
    /// No flag, and no default route.
    #[error("no {family} default route to choose an interface by; give --iface; there is {there}")]
    NoDefaultRoute {
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// Interfaces with addresses.
        there: String,
    },
    /// Dual-stack over two interfaces.
    #[error("the default routes use {v4} for IPv4 and {v6} for IPv6, but both must use one interface; give --iface")]
    Split {
        /// IPv4's.
        v4: String,
        /// IPv6's.
        v6: String,
    },
    /// The interface lacks a family in use.
    #[error("interface {link} has no usable {family} address; there is {there}")]
    NoAddress {
        /// The interface.
        link: String,
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// Interfaces with addresses.
        there: String,
    },
    /// No MTU.
    #[error("interface {0} has MTU 0: set one with `ip link set {0} mtu 1500`")]
    NoMtu(String),
    /// Not a regular expression.
    #[error("--iface-regex {0} is not a regular expression")]
    BadRegex(String),
}

/// An interface, and the address by which it was found.
type Found<'a> = (&'a LinkInfo, Option<IpAddr>);

/// Chooses. `families`: which of IPv4, IPv6 are in use.
pub fn pick(choice: &UplinkChoice, machine: &Machine, families: (bool, bool)) -> Result<Picked, PickError> {
    let asked = !choice.ifaces.is_empty() || !choice.regexes.is_empty() || choice.can_reach.is_some();
    let (link, by) = if asked { explicit(choice, machine, families)? } else { implicit(choice, machine, families)? };
    if link.mtu == 0 {
        return Err(PickError::NoMtu(link.name.to_string()));
    }
    let address = |family: Family, used: bool| match by {
        _ if !used => Ok(None),
        Some(ip) if of(ip) == family => Ok(Some(ip)),
        _ => best_address(machine, link, family).map(Some).ok_or_else(|| PickError::NoAddress {
            link: link.name.to_string(),
            family: word(family),
            there: there(machine),
        }),
    };
    let v4 = address(Family::V4, families.0)?.and_then(|ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None });
    let v6 = address(Family::V6, families.1)?.and_then(|ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None });
    Ok(Picked {
        uplink: Uplink { name: link.name, mtu: link.mtu, v4, v6 },
        public_v4: v4.map(|ip| choice.public_ip.unwrap_or(ip)),
        public_v6: v6.map(|ip| choice.public_ipv6.unwrap_or(ip)),
    })
}

/// `--iface`, then `--iface-regex`, then `--iface-can-reach`.
fn explicit<'a>(choice: &UplinkChoice, machine: &'a Machine, families: (bool, bool)) -> Result<Found<'a>, PickError> {
    if let Some(found) = choice.ifaces.iter().find_map(|wanted| by_name_or_ip(machine, wanted)) {
        return Ok(found);
    }
    for text in &choice.regexes {
        let regex = Regex::new(text).map_err(|_| PickError::BadRegex(text.clone()))?;
        if let Some(found) = by_regex(machine, &regex, families) {
            return Ok(found);
        }
    }
    if let Some(found) = choice.can_reach.and_then(|ip| reaching(machine, ip)) {
        return Ok((found, None));
    }
    let flags = |flag: &str, values: &[String]| values.iter().map(|v| format!("{flag} {v}")).collect::<Vec<_>>();
    let mut wanted = flags("--iface", &choice.ifaces);
    wanted.extend(flags("--iface-regex", &choice.regexes));
    wanted.extend(choice.can_reach.map(|ip| format!("--iface-can-reach {ip}")));
    Err(PickError::NoMatch { wanted: wanted.join(", "), there: there(machine) })
}

/// The interface that bears the public address, else that of the default routes.
fn implicit<'a>(choice: &UplinkChoice, machine: &'a Machine, families: (bool, bool)) -> Result<Found<'a>, PickError> {
    let public = choice.public_ip.map(IpAddr::V4).filter(|_| families.0);
    let public = public.or(choice.public_ipv6.map(IpAddr::V6).filter(|_| families.1));
    if let Some((ip, link)) = public.and_then(|ip| Some((ip, bearing(machine, ip)?))) {
        return Ok((link, Some(ip)));
    }
    let default = |family| {
        default_link(machine, family)
            .ok_or_else(|| PickError::NoDefaultRoute { family: word(family), there: there(machine) })
    };
    let link = match families {
        (true, true) => {
            let (v4, v6) = (default(Family::V4)?, default(Family::V6)?);
            if v4.index != v6.index {
                return Err(PickError::Split { v4: v4.name.to_string(), v6: v6.name.to_string() });
            }
            v4
        }
        (false, true) => default(Family::V6)?,
        (_, false) => default(Family::V4)?,
    };
    Ok((link, None))
}

fn by_name_or_ip<'a>(machine: &'a Machine, wanted: &str) -> Option<Found<'a>> {
    match wanted.parse::<IpAddr>() {
        Ok(ip) => bearing(machine, ip).map(|link| (link, Some(ip))),
        Err(_) => machine.links.iter().find(|link| link.name.as_str() == wanted).map(|link| (link, None)),
    }
}

/// Addresses of all interfaces first, names after.
fn by_regex<'a>(machine: &'a Machine, regex: &Regex, families: (bool, bool)) -> Option<Found<'a>> {
    for link in &machine.links {
        let used = |addr: &&AddrInfo| match of(addr.net.addr()) {
            Family::V4 => families.0,
            Family::V6 => families.1,
        };
        let usable = |addr: &&AddrInfo| addr.index == link.index && addr.flags & (DEPRECATED | DAD_FAILED) == 0;
        let mut ips = machine.addrs.iter().filter(usable).filter(used).map(|addr| addr.net.addr());
        if let Some(ip) = ips.find(|ip| regex.is_match(&ip.to_string())) {
            return Some((link, Some(ip)));
        }
    }
    machine.links.iter().find(|link| regex.is_match(link.name.as_str())).map(|link| (link, None))
}

/// The interface of the longest prefix that holds this address, as the kernel would route to it.
fn reaching(machine: &Machine, ip: IpAddr) -> Option<&LinkInfo> {
    if let Some(link) = bearing(machine, ip) {
        return Some(link);
    }
    let holding = machine.routes.iter().filter(|route| route.net.contains(&ip));
    let best = holding.min_by_key(|route| (u8::MAX - route.net.prefix_len(), route.metric))?;
    link_of(machine, best)
}

fn default_link(machine: &Machine, family: Family) -> Option<&LinkInfo> {
    let default = |route: &&RouteInfo| route.net.prefix_len() == 0 && of(route.net.addr()) == family;
    let usable =
        machine.routes.iter().filter(default).filter_map(|route| Some((route.metric, link_of(machine, route)?)));
    usable.min_by_key(|(metric, _)| *metric).map(|(_, link)| link)
}

fn link_of<'a>(machine: &'a Machine, route: &RouteInfo) -> Option<&'a LinkInfo> {
    let dev = route.dev?;
    machine.links.iter().find(|link| link.name == dev)
}

fn bearing(machine: &Machine, ip: IpAddr) -> Option<&LinkInfo> {
    let addr = machine.addrs.iter().find(|addr| addr.net.addr() == ip)?;
    machine.links.iter().find(|link| link.index == addr.index)
}

/// Global before link-local, settled before tentative, permanent before dynamic, lasting before temporary; deprecated never.
fn best_address(machine: &Machine, link: &LinkInfo, family: Family) -> Option<IpAddr> {
    let usable = |addr: &&AddrInfo| {
        addr.index == link.index && of(addr.net.addr()) == family && addr.flags & (DEPRECATED | DAD_FAILED) == 0
    };
    let rank = |addr: &&AddrInfo| {
        // The same bit says "secondary" for IPv4, which is no defect.
        let temporary = addr.flags & TEMPORARY != 0 && matches!(addr.net, IpNet::V6(_));
        (!global(addr.net.addr()), addr.flags & TENTATIVE != 0, addr.flags & PERMANENT == 0, temporary)
    };
    machine.addrs.iter().filter(usable).min_by_key(rank).map(|addr| addr.net.addr())
}

fn global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_link_local() && !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local() && !ip.is_loopback(),
    }
}

fn of(ip: IpAddr) -> Family {
    if ip.is_ipv4() { Family::V4 } else { Family::V6 }
}

fn word(family: Family) -> &'static str {
    match family {
        Family::V4 => "IPv4",
        Family::V6 => "IPv6",
    }
}

/// `eth0 (10.0.0.1), eth1 (no address)`.
fn there(machine: &Machine) -> String {
    let one = |link: &LinkInfo| {
        let ips = machine.addrs.iter().filter(|addr| addr.index == link.index);
        let ips: Vec<String> = ips.map(|addr| addr.net.addr().to_string()).collect();
        let ips = if ips.is_empty() { "no address".to_owned() } else { ips.join(" ") };
        format!("{} ({ips})", link.name)
    };
    // A node has a veth for every pod: the first dozen is enough to see what is wrong.
    let mut list: Vec<String> = machine.links.iter().filter(|link| !link.loopback).take(12).map(one).collect();
    if list.is_empty() {
        list.push("none but loopback".to_owned());
    }
    list.join(", ")
}

#[cfg(test)]
#[path = "uplink/tests.rs"]
mod tests;
