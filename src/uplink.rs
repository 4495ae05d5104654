// SPDX-License-Identifier: Apache-2.0
//! Chooses the uplink from a snapshot of links, addresses and routes, without side effects.
//!
//! The first choice follows the same order as flannel (docs/flannel-formats.md, "Interface and public address"). After that, the interface
//! and its addresses stay in use as long as the machine has them, also over a restart of the agent. The reason is in
//! docs/adr/004-which-lease-is-ours.md, "Which address is published".

mod candidates;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use regex_lite::Regex;
use weft_backends::family::label;
use weft_backends::host::Uplink;
use weft_subnet::cidr::Family;

use crate::kernel::LinkInfo;
use crate::options::UplinkChoice;

use candidates::global;
pub use candidates::{Candidates, EarlierUse, Families, UsedUplink};

/// A chosen interface, and the addresses that the lease publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picked {
    /// The interface, with its address in each family in use.
    pub uplink: Uplink,
    /// The value of PublicIP, if IPv4 is in use.
    pub public_v4: Option<Ipv4Addr>,
    /// The value of PublicIPv6, if IPv6 is in use.
    pub public_v6: Option<Ipv6Addr>,
    /// The UDP port of this node's WireGuard device, if it is not that of net-conf.
    pub wireguard_port: Option<u16>,
}

/// What happens to an uplink that is in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// It stays in use, perhaps with another address that can be used at once.
    Stay(Picked),
    /// The interface or its address is gone. It may come back in a moment: for example, a network daemon that restarts removes an address
    /// and adds it again. If it does not come back, `next` is used.
    Gone {
        /// A sentence that says what is gone.
        lost: String,
        /// The choice without it.
        next: Picked,
    },
}

/// Why no uplink can be chosen. This may change without the operator, because an interface or an address may appear.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PickError {
    /// No interface matches the flags.
    #[error("no interface matches {wanted}; there is {there}{}", route_command(*.can_reach))]
    NoMatch {
        /// The flags with their values.
        wanted: String,
        /// The address of `--iface-can-reach`.
        can_reach: Option<IpAddr>,
        /// Interfaces with addresses.
        there: String,
    },
    /// There is no flag and no default route.
    #[error("no {family} default route to choose an interface by; give --iface; there is {there}")]
    NoDefaultRoute {
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// Interfaces with addresses.
        there: String,
    },
    /// The default routes of the two families use different interfaces.
    #[error("the default routes use {v4} for IPv4 and {v6} for IPv6, but both must use one interface; give --iface")]
    Split {
        /// The interface of the IPv4 default route.
        v4: String,
        /// The interface of the IPv6 default route.
        v6: String,
    },
    /// The interface has no address in a family that is in use.
    #[error("interface {link} has no usable {family} address; there is {there}")]
    NoAddress {
        /// The interface.
        link: String,
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// Interfaces with addresses.
        there: String,
    },
    /// The interface has only a link-local address left, which peers cannot use. This happens for a moment when a link is set down and up
    /// again, because the kernel removes its IPv6 addresses.
    #[error("{link} lost {lost} and has only a link-local address")]
    LinkLocal {
        /// The interface.
        link: String,
        /// The address that was in use.
        lost: IpAddr,
    },
    /// The interface has the MTU 0.
    #[error("interface {0} has MTU 0: set one with `ip link set {0} mtu 1500`")]
    NoMtu(String),
    /// The value of the flag is not a regular expression.
    #[error("--iface-regex {0} is not a regular expression")]
    BadRegex(String),
}

/// Returns the command that shows what the kernel answers for the address of `--iface-can-reach`.
fn route_command(can_reach: Option<IpAddr>) -> String {
    can_reach.map(|ip| format!("; `ip route get {ip}` shows how the kernel reaches {ip}")).unwrap_or_default()
}

/// An interface, and the address by which it was found, if it was found by one.
type Found<'a> = (&'a LinkInfo, Option<IpAddr>);

/// Returns the flags that choose an interface, as text. The text is empty if there are none.
pub fn flags(choice: &UplinkChoice) -> String {
    let flags = |flag: &str, values: &[String]| values.iter().map(|v| format!("{flag} {v}")).collect::<Vec<_>>();
    let mut all = flags("--iface", &choice.ifaces);
    all.extend(flags("--iface-regex", &choice.regexes));
    all.extend(choice.can_reach.map(|ip| format!("--iface-can-reach {ip}")));
    all.join(", ")
}

/// Returns a remark for each family in which a single address (/32 or /128) is published and a restart would choose another one. There is no
/// remark if the flags name the address.
pub fn remarks(choice: &UplinkChoice, candidates: &Candidates<'_>, now: &Uplink) -> [Option<String>; 2] {
    let of_link = |link: &LinkInfo, family: Family| {
        let told = match family {
            Family::V4 => choice.public_ip.is_some(),
            Family::V6 => choice.public_ipv6.is_some(),
        };
        let ip = now.address(family).filter(|ip| !told && !choice.ifaces.contains(&ip.to_string()))?;
        let net = candidates.replacement(link, ip)?;
        let (length, flag) = if ip.is_ipv4() { (32, "--public-ip") } else { (128, "--public-ipv6") };
        Some(format!(
            "{ip}/{length} of {} stays the published address although {net} is there now: restart the agent to publish {}, or \
             give {flag}={ip} to keep {ip} over restarts",
            now.name,
            net.addr()
        ))
    };
    let link = candidates.links().find(|link| link.name == now.name);
    Family::BOTH.map(|family| of_link(link?, family))
}

/// Chooses an uplink as flannel does at its start. The uplink that was in use before comes first, if the flags allow it.
///
/// # Errors
/// No interface can be used; see [`PickError`].
pub fn pick(choice: &UplinkChoice, candidates: &Candidates<'_>) -> Result<Picked, PickError> {
    let (link, by) = if is_named(choice) { explicit(choice, candidates)? } else { implicit(choice, candidates)? };
    let address =
        |family: Family| match by {
            Some(ip) if Family::of(ip) == family => Ok(ip),
            _ => candidates.best(link, family, |_| true).map(|addr| addr.net.addr()).ok_or_else(|| {
                PickError::NoAddress { link: link.name.to_string(), family: label(family), there: candidates.list() }
            }),
        };
    let [v4, v6] = candidates.families_in_use().map(|family| family.map(address).transpose());
    picked(choice, link, [v4?, v6?])
}

/// Decides whether the uplink in use stays. It stays as long as the interface and its addresses exist, even if the flags would choose another
/// one now. Another address of the same interface is used at once, unless peers may not reach it, and given up when the published address of the
/// flags, by which the interface was chosen, comes back. Everything else is used only if the loss lasts.
///
/// # Errors
/// No interface can be used; see [`PickError`].
pub fn next(choice: &UplinkChoice, candidates: &Candidates<'_>, now: &Uplink) -> Result<Next, PickError> {
    let link = candidates.links().find(|link| link.name == now.name);
    let candidates = &candidates.clone().preferring((now.v4, now.v6));
    let both = candidates.families_in_use();
    let mut lost = None;
    if let Some(link) = link {
        // The address that chose the interface may have been away for a while. The lease names it, so it is used again.
        let told = with_public_address(choice, candidates).filter(|(on, _)| !is_named(choice) && on.name == link.name);
        let kept = both.map(|family| {
            let before = now.address(family?);
            let told = told.map(|(_, ip)| ip).filter(|ip| family == Some(Family::of(*ip)));
            let kept = told.or_else(|| candidates.kept(link, family?, before));
            lost = lost.or(before.filter(|_| kept.is_none()));
            kept
        });
        if both.iter().zip(kept).all(|(family, kept)| family.is_none() || kept.is_some()) {
            return picked(choice, link, kept).map(Next::Stay);
        }
    }
    let local = |picked: &Picked, ip: IpAddr| picked.uplink.address(Family::of(ip)).is_some_and(|ip| !global(ip));
    let chosen = pick(choice, candidates).and_then(|next| match lost {
        Some(lost) if next.uplink.name == now.name && local(&next, lost) => {
            Err(PickError::LinkLocal { link: now.name.to_string(), lost })
        }
        _ => Ok(next),
    });
    // The routes of the interface may still exist when its addresses are gone. Then the choice must leave out this interface.
    let next = match (chosen, link) {
        (Err(error), Some(link)) => pick(choice, &candidates.clone().without(link)).map_err(|_| error)?,
        (chosen, _) => chosen?,
    };
    if next.uplink == *now {
        return Ok(Next::Stay(next));
    }
    let lost = match lost {
        Some(ip) => format!("{} lost {ip}", now.name),
        None if link.is_some() => format!("{} lost its address", now.name),
        None => format!("{} is gone", now.name),
    };
    Ok(Next::Gone { lost, next })
}

fn picked(choice: &UplinkChoice, link: &LinkInfo, ips: [Option<IpAddr>; 2]) -> Result<Picked, PickError> {
    if link.mtu == 0 {
        return Err(PickError::NoMtu(link.name.to_string()));
    }
    let v4 = ips[0].and_then(|ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None });
    let v6 = ips[1].and_then(|ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None });
    Ok(Picked {
        uplink: Uplink { name: link.name, mtu: link.mtu, v4, v6 },
        public_v4: v4.map(|ip| choice.public_ip.unwrap_or(ip)),
        public_v6: v6.map(|ip| choice.public_ipv6.unwrap_or(ip)),
        wireguard_port: choice.wireguard_port,
    })
}

/// Chooses by flags: first `--iface`, then `--iface-regex`, then `--iface-can-reach`.
fn explicit<'a>(choice: &UplinkChoice, candidates: &Candidates<'a>) -> Result<Found<'a>, PickError> {
    if let Some(found) = choice.ifaces.iter().find_map(|wanted| by_name_or_ip(candidates, wanted)) {
        return Ok(found);
    }
    for text in &choice.regexes {
        let regex = Regex::new(text).map_err(|_| PickError::BadRegex(text.clone()))?;
        if let Some(found) = by_regex(candidates, &regex) {
            return Ok(found);
        }
    }
    if let Some(found) = choice.can_reach.and_then(|ip| reaching(candidates, ip)) {
        return Ok((found, None));
    }
    Err(PickError::NoMatch { wanted: flags(choice), can_reach: choice.can_reach, there: candidates.list() })
}

/// Returns true if flags choose the interface.
fn is_named(choice: &UplinkChoice) -> bool {
    !choice.ifaces.is_empty() || !choice.regexes.is_empty() || choice.can_reach.is_some()
}

/// Returns the interface that has the published address of the flags, and this address.
fn with_public_address<'a>(choice: &UplinkChoice, candidates: &Candidates<'a>) -> Option<(&'a LinkInfo, IpAddr)> {
    let Families { v4, v6 } = candidates.families;
    let public = choice.public_ip.map(IpAddr::V4).filter(|_| v4);
    let ip = public.or(choice.public_ipv6.map(IpAddr::V6).filter(|_| v6))?;
    Some((candidates.link_with(ip)?, ip))
}

/// Chooses without these flags: first the interface that has the published address, then the one that was in use, then that of the default
/// routes.
fn implicit<'a>(choice: &UplinkChoice, candidates: &Candidates<'a>) -> Result<Found<'a>, PickError> {
    if let Some((link, ip)) = with_public_address(choice, candidates) {
        return Ok((link, Some(ip)));
    }
    if let Some(link) = candidates.link_in_use() {
        return Ok((link, None));
    }
    let default = |family| {
        default_link(candidates, family)
            .ok_or_else(|| PickError::NoDefaultRoute { family: label(family), there: candidates.list() })
    };
    let link = match candidates.families {
        Families { v4: true, v6: true } => {
            let (v4, v6) = (default(Family::V4)?, default(Family::V6)?);
            if v4.index != v6.index {
                return Err(PickError::Split { v4: v4.name.to_string(), v6: v6.name.to_string() });
            }
            v4
        }
        Families { v4: false, v6: true } => default(Family::V6)?,
        Families { v6: false, .. } => default(Family::V4)?,
    };
    Ok((link, None))
}

fn by_name_or_ip<'a>(candidates: &Candidates<'a>, wanted: &str) -> Option<Found<'a>> {
    match wanted.parse::<IpAddr>() {
        Ok(ip) => candidates.link_with(ip).map(|link| (link, Some(ip))),
        Err(_) => candidates.links().find(|link| link.name.is(wanted)).map(|link| (link, None)),
    }
}

/// Compares the addresses of all interfaces first, and then their names. Among those that match, the interface that was in use comes first.
fn by_regex<'a>(candidates: &Candidates<'a>, regex: &Regex) -> Option<Found<'a>> {
    let links = || candidates.link_in_use().into_iter().chain(candidates.links());
    for link in links() {
        let best = |family| candidates.best(link, family, |ip| regex.is_match(&ip.to_string()));
        if let Some(addr) = candidates.families_in_use().into_iter().flatten().find_map(best) {
            return Some((link, Some(addr.net.addr())));
        }
    }
    links().find(|link| regex.is_match(&link.name.text())).map(|link| (link, None))
}

/// Returns the interface that was in use, if it has a route to this address. Otherwise returns the interface that the kernel names, so
/// that policy rules and all routing tables count.
///
/// For an address inside Network, the kernel may name a device of pods, which cannot be an uplink. In that case the interface of the
/// longest prefix is returned, among the routes of other programs.
fn reaching<'a>(candidates: &Candidates<'a>, ip: IpAddr) -> Option<&'a LinkInfo> {
    if let Some(link) = candidates.link_with(ip) {
        return Some(link);
    }
    let holding = || candidates.routes(|route| route.net.contains(&ip));
    if let Some(link) = candidates.link_in_use().filter(|before| holding().any(|(_, link)| link.index == before.index))
    {
        return Some(link);
    }
    let lookup = candidates.lookup()?;
    if let Some(link) = candidates.links().find(|link| link.index == lookup.index) {
        return Some(link);
    }
    let holding = holding();
    holding.min_by_key(|(route, _)| (u8::MAX - route.net.prefix_len(), route.metric)).map(|(_, link)| link)
}

fn default_link<'a>(candidates: &Candidates<'a>, family: Family) -> Option<&'a LinkInfo> {
    let usable = candidates.routes(|route| route.net.prefix_len() == 0 && Family::of(route.net.addr()) == family);
    usable.min_by_key(|(route, _)| route.metric).map(|(_, link)| link)
}

#[cfg(test)]
mod tests;
