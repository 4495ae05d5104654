// SPDX-License-Identifier: Apache-2.0
//! Whether a lease can be used on this node at all. This depends on the lease and on this node, and not on other leases.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;

use super::claims::Claim;
use super::{PortsOf, Us};
use crate::backend_types::differ;
use crate::cidr::{Family, Subnets, family};
use crate::lease::Lease;
use crate::old_defects::{Defect, is_back};

/// Why a lease cannot be used on this node, whatever other leases say. It names the field of the lease and its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Impossible {
    #[error("grants no subnet")]
    NoSubnet,
    #[error("subnet {0} is of a family that net-conf does not enable")]
    OtherFamily(Subnets),
    #[error("subnet {net} is outside our Network {network}")]
    OutsideNetwork { net: IpNet, network: IpNet },
    #[error("subnet {subnets} overlaps our own {own}")]
    OverlapsOurs { subnets: Subnets, own: Subnets },
    #[error("subnet {net} contains {ip}, our own address")]
    ContainsPublicAddress { net: IpNet, ip: IpAddr },
    #[error("subnet {net} contains {ip}, an address of this node ({link})")]
    ContainsAddress { net: IpNet, ip: IpAddr, link: String },
    #[error("subnet {net} overlaps {connected}, to which this node is connected by {link}")]
    OverlapsConnected { net: IpNet, connected: IpNet, link: String },
    #[error("has no published address of a family in use")]
    NoPublicAddress,
    #[error("{field} {ip} lies inside our own subnet {own}")]
    InsideOurSubnet { field: &'static str, ip: IpAddr, own: IpNet },
    #[error("{field} {ip} is {what}")]
    PublicAddress { field: &'static str, ip: IpAddr, what: &'static str },
}

/// Checks whether this lease can be used on this node. The answer depends on the lease and on this node, and not on other leases.
///
/// # Errors
/// It cannot, and why.
pub(super) fn check(us: &Us, ports: PortsOf, lease: &Lease) -> Result<(), Impossible> {
    if lease.subnets == Subnets::default() {
        return Err(Impossible::NoSubnet);
    }
    let concerns = enabled(us, &lease.subnets);
    if concerns == Subnets::default() {
        return Err(Impossible::OtherFamily(lease.subnets));
    }
    for net in concerns.iter() {
        check_network(us, net)?;
    }
    if us.own.overlaps(&concerns) {
        return Err(Impossible::OverlapsOurs { subnets: lease.subnets, own: us.own });
    }
    for net in concerns.iter() {
        check_addresses_of_this_node(us, net)?;
    }
    check_public_addresses(us, ports, lease)
}

/// Returns what a usable lease claims on this node.
pub(super) fn claim(us: &Us, lease: &Lease) -> Claim {
    Claim { subnets: enabled(us, &lease.subnets), public: enabled(us, &lease.attrs.public_addresses()) }
}

/// Checks that this subnet does not contain an address of this node or of its LAN. It would take this node's own traffic otherwise.
fn check_addresses_of_this_node(us: &Us, net: IpNet) -> Result<(), Impossible> {
    if is_back(Defect::LanLeasesBelieved) {
        return Ok(());
    }
    if let Some(ip) = us.public.iter().chain(&us.uplink).find(|ip| net.contains(*ip)) {
        return Err(Impossible::ContainsPublicAddress { net, ip: *ip });
    }
    let Some((connected, link)) = us.connected.overlapping(net) else { return Ok(()) };
    let link = link.to_string();
    Err(if connected.prefix_len() == connected.max_prefix_len() {
        Impossible::ContainsAddress { net, ip: connected.addr(), link }
    } else {
        Impossible::OverlapsConnected { net, connected, link }
    })
}

/// Returns the subnets of the families that net-conf enables. As in flannel, an IPv4-only node uses only the IPv4 half of a dual-stack
/// lease.
pub(super) fn enabled(us: &Us, subnets: &Subnets) -> Subnets {
    subnets.in_families_of(&us.networks)
}

fn check_network(us: &Us, net: IpNet) -> Result<(), Impossible> {
    match us.networks.of(family(&net)) {
        Some(network) if !network.contains(&net) => Err(Impossible::OutsideNetwork { net, network }),
        _ => Ok(()),
    }
}

/// Checks the published addresses of the families that the network uses. What a flannel node publishes for the other family has no meaning:
/// an IPv6-only one publishes 0.0.0.0.
fn check_public_addresses(us: &Us, ports: PortsOf, lease: &Lease) -> Result<(), Impossible> {
    let v4 = lease.attrs.public_ip.map(IpAddr::V4).filter(|_| us.networks.of(Family::V4).is_some());
    let v6 = lease.attrs.public_ipv6.map(IpAddr::V6).filter(|_| us.networks.of(Family::V6).is_some());
    if v4.is_none() && v6.is_none() {
        return Err(Impossible::NoPublicAddress);
    }
    for (field, ip) in v4.map(|ip| ("PublicIP", ip)).into_iter().chain(v6.map(|ip| ("PublicIPv6", ip))) {
        if let Some(own) = us.own.iter().find(|own| own.contains(&ip)) {
            return Err(Impossible::InsideOurSubnet { field, ip, own });
        }
        let what = match ip {
            _ if us.public.contains(&ip) => publishes_our_address(us, ports, lease, ip),
            _ if us.uplink.contains(&ip) => Some("the address of this node's uplink, which this node does not publish"),
            _ => impossible(ip),
        };
        if let Some(what) = what {
            return Err(Impossible::PublicAddress { field, ip, what });
        }
    }
    Ok(())
}

/// Returns what is wrong with a lease that names an address that we publish, too. Nothing is wrong if both leases name a port and the ports
/// differ: then both nodes are behind one NAT.
pub(super) fn publishes_our_address(us: &Us, ports: PortsOf, lease: &Lease, ip: IpAddr) -> Option<&'static str> {
    let family = usize::from(ip.is_ipv6());
    let theirs = (ports.0)(&lease.attrs)[family];
    match (us.ports[family], theirs) {
        (ours, theirs) if differ(ours, theirs) => None,
        (Some(_), Some(_)) => Some("our own address, with our own port: two nodes publish both"),
        _ => Some("our own address: two nodes publish it"),
    }
}

/// Returns what kind of address this is, if no other node can have such an address.
fn impossible(ip: IpAddr) -> Option<&'static str> {
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
