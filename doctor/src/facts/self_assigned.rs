// SPDX-License-Identifier: Apache-2.0
//! Links of weft and of pods to which a program gave an address that it chose itself (RFC 3927). Such a program takes every link for one
//! that needs DHCP, and when nobody answers, it helps itself. It may also write a default route over the link of a pod.

use std::net::IpAddr;

use weft_netlink::rtnl::{Addr, Link};

use super::tables::Tables;
use crate::known_links::{bridge, is_of_routed_pod, is_ours};
use crate::processes::ProcessList;

/// The programs that do so.
const PROGRAMS: [&str; 3] = ["dhcpcd", "avahi-autoipd", "connmand"];
/// The length of the prefix of such addresses. A single one, such as that of a DNS server of this node, was given on purpose.
const LENGTH: u8 = 16;

/// The links that have such addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelfAssigned {
    /// The first link.
    pub link: String,
    /// Its address.
    pub addr: IpAddr,
    /// Number of links.
    pub count: usize,
    /// The program, if one of those that are known runs.
    pub program: Option<&'static str>,
}

/// Returns the links of weft, the bridge of pods, its ports and the links of routed pods that have such addresses, if there are any.
pub(super) fn read(tables: &Tables<'_>, processes: &ProcessList) -> Option<SelfAssigned> {
    let bridge = bridge(tables.links).map(|link| link.index);
    let is_watched = |link: &Link| {
        let is_port = bridge.is_some_and(|bridge| link.index == bridge || link.master == bridge);
        is_port || is_ours(link) || is_of_routed_pod(link)
    };
    let is_self_assigned =
        |addr: &Addr| matches!(addr.addr, IpAddr::V4(v4) if v4.is_link_local() && addr.len == LENGTH);
    let all = tables.addrs.iter().filter(|addr| is_self_assigned(addr));
    let mut all = all.filter_map(|addr| Some((tables.link(addr.index).filter(|link| is_watched(link))?, addr.addr)));
    let (link, addr) = all.next()?;
    let program = PROGRAMS.into_iter().find(|program| processes.named(&[program]).next().is_some());
    Some(SelfAssigned { link: link.name.clone(), addr, count: 1 + all.count(), program })
}
