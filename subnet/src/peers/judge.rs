// SPDX-License-Identifier: Apache-2.0
//! Is a lease possible at all? Depends on the lease and on us, not on other leases.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::Us;
use super::claims::Claim;
use crate::cidr::{Family, Subnets, family};
use crate::lease::Lease;

/// Why this lease cannot be: names the field and its content. `None` when it can.
pub(super) fn impossible(us: &Us, lease: &Lease) -> Option<String> {
    if lease.subnets == Subnets::default() {
        return Some("grants no subnet".to_owned());
    }
    let concerns = enabled(us, &lease.subnets);
    if concerns == Subnets::default() {
        return Some(format!("subnet {} is of a family that net-conf does not enable", lease.subnets));
    }
    concerns
        .iter()
        .find_map(|net| misplaced(us, net))
        .or_else(|| {
            let own = &us.own;
            own.overlaps(&concerns).then(|| format!("subnet {} overlaps our own {own}", lease.subnets))
        })
        .or_else(|| concerns.iter().find_map(|net| over_this_node(us, net)))
        .or_else(|| unreachable(us, lease))
}

/// What a possible lease claims on this node.
pub(super) fn claim(us: &Us, lease: &Lease) -> Claim {
    let public =
        Subnets { v4: lease.attrs.public_ip.map(Ipv4Net::from), v6: lease.attrs.public_ipv6.map(Ipv6Net::from) };
    Claim { subnets: enabled(us, &lease.subnets), public: enabled(us, &public) }
}

/// A subnet that holds an address of this node, or of its LAN, would take this node's own traffic.
fn over_this_node(us: &Us, net: IpNet) -> Option<String> {
    if let Some(ip) = us.public.iter().chain(&us.uplink).find(|ip| net.contains(*ip)) {
        return Some(format!("subnet {net} contains {ip}, our own address"));
    }
    let (place, link) = us.connected.overlapping(net)?;
    Some(if place.prefix_len() == place.max_prefix_len() {
        format!("subnet {net} contains {}, an address of this node ({link})", place.addr())
    } else {
        format!("subnet {net} overlaps {place}, to which this node is connected by {link}")
    })
}

/// The families that net-conf enables: a dual-stack lease concerns an IPv4-only node by its IPv4 half alone, as in flannel.
pub(super) fn enabled(us: &Us, subnets: &Subnets) -> Subnets {
    Subnets { v4: subnets.v4.filter(|_| us.networks.v4.is_some()), v6: subnets.v6.filter(|_| us.networks.v6.is_some()) }
}

fn misplaced(us: &Us, net: IpNet) -> Option<String> {
    match us.networks.of(family(&net)) {
        Some(network) if !network.contains(&net) => Some(format!("subnet {net} is outside our Network {network}")),
        _ => None,
    }
}

/// Public addresses are judged in the families that the network uses; what a flannel node says in the other is noise (an
/// IPv6-only one says 0.0.0.0).
fn unreachable(us: &Us, lease: &Lease) -> Option<String> {
    let v4 = lease.attrs.public_ip.map(IpAddr::V4).filter(|_| us.networks.of(Family::V4).is_some());
    let v6 = lease.attrs.public_ipv6.map(IpAddr::V6).filter(|_| us.networks.of(Family::V6).is_some());
    if v4.is_none() && v6.is_none() {
        return Some("has no public address of a family in use".to_owned());
    }
    let fault = |(field, ip): (&str, IpAddr)| {
        if let Some(own) = us.own.iter().find(|own| own.contains(&ip)) {
            return Some(format!("{field} {ip} lies inside our own subnet {own}"));
        }
        let what = match ip {
            _ if us.public.contains(&ip) => "our own address: two nodes publish it",
            _ if us.uplink.contains(&ip) => "the address of this node's uplink, which this node does not publish",
            _ => unusable(ip)?,
        };
        Some(format!("{field} {ip} is {what}"))
    };
    v4.map(|ip| ("PublicIP", ip)).into_iter().chain(v6.map(|ip| ("PublicIPv6", ip))).find_map(fault)
}

/// What kind of address it is that no other node can have.
fn unusable(ip: IpAddr) -> Option<&'static str> {
    let link_local = |v6: Ipv6Addr| v6.is_unicast_link_local();
    match ip {
        _ if ip.is_unspecified() => Some("the unspecified address"),
        _ if ip.is_loopback() => Some("a loopback address"),
        _ if ip.is_multicast() => Some("a multicast address"),
        IpAddr::V4(v4) if v4.is_broadcast() => Some("the broadcast address"),
        IpAddr::V6(v6) if link_local(v6) => Some("a link-local address"),
        IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => Some("an IPv4-mapped address"),
        _ => None,
    }
}
