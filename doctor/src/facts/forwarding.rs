// SPDX-License-Identifier: Apache-2.0
//! The sysctls that say whether the kernel forwards the packets of pods.

use std::collections::BTreeSet;

use nix::libc;
use weft_netlink::rtnl::{Link, Route};

use super::tables::Tables;
use crate::known_links::{BRIDGE, is_ours};
use crate::sysctl;

/// RTPROT_RA of linux/rtnetlink.h, which the crate libc lacks.
const RTPROT_RA: u8 = 9;

/// The sysctls of forwarding.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Forwarding {
    /// net.ipv4.ip_forward.
    pub v4: Option<u64>,
    /// net.ipv6.conf.all.forwarding.
    pub v6: Option<u64>,
    /// The entries below net.ipv4.conf by which packets of pods arrive, and where the value is 0.
    pub off: Vec<String>,
    /// The links that lose IPv6 routes of router advertisements if forwarding is turned on, because accept_ra is 1.
    pub advertised: BTreeSet<String>,
}

/// Reads the sysctls for the links of pods, for those of weft, and for those of default routes.
pub(super) fn read(tables: &Tables<'_>) -> Forwarding {
    let Tables { links, routes, .. } = *tables;
    let is_default = |link: &Link| routes.iter().any(|route| route.dst.is_none() && route.index == link.index);
    let wanted = links.iter().filter(|link| link.name == BRIDGE || is_ours(link) || is_default(link));
    let names = wanted.map(|link| link.name.as_str()).chain(["default"]);
    let is_off = |name: &&str| sysctl::number(&format!("ipv4/conf/{name}/forwarding")) == Some(0);
    // The kernel gives such routes an end. Routes of other programs that have the same protocol have none.
    let is_advertised = |route: &&Route| {
        route.v6 && route.expires.is_some() && [libc::RTPROT_KERNEL, RTPROT_RA].contains(&route.protocol)
    };
    let advertised =
        routes.iter().filter(is_advertised).filter_map(|route| Some(tables.link(route.index)?.name.as_str()));
    let is_accepted = |name: &&str| sysctl::number(&format!("ipv6/conf/{name}/accept_ra")) == Some(1);
    Forwarding {
        v4: sysctl::forwarding(true),
        v6: sysctl::forwarding(false),
        off: names.filter(is_off).map(str::to_owned).collect(),
        advertised: advertised.filter(is_accepted).map(str::to_owned).collect(),
    }
}
