// SPDX-License-Identifier: Apache-2.0
//! Links for which a sysctl switches IPv6 off.

use weft_netlink::rtnl::Link;

use super::ways::WayFacts;
use crate::known_links::BRIDGE;
use crate::sysctl;

/// Returns the IPv6 entries that are switched off: those of the links that pods' packets pass, and the one for links that are
/// made later.
pub(super) fn disabled(links: &[Link], ways: &WayFacts) -> Vec<String> {
    let carries = |link: &Link| ways.to_peers.iter().any(|way| way.link == link.name && way.example.addr().is_ipv6());
    let is_ours = |link: &Link| link.name == BRIDGE || link.name.starts_with("flannel-v6.") || carries(link);
    let ours = links.iter().filter(|link| is_ours(link));
    let names = ours.map(|link| link.name.as_str()).chain(["default"]);
    let disabled =
        names.filter(|name| sysctl::number(&format!("ipv6/conf/{name}/disable_ipv6")).is_none_or(|value| value != 0));
    disabled.map(str::to_owned).collect()
}
