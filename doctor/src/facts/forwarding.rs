// SPDX-License-Identifier: Apache-2.0
//! The sysctls that say whether the kernel forwards the packets of pods.

use weft_netlink::rtnl::Link;

use super::tables::Tables;
use crate::known_links::{BRIDGE, is_ours};
use crate::sysctl;

/// The sysctls of forwarding.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Forwarding {
    /// net.ipv4.ip_forward.
    pub v4: Option<u64>,
    /// net.ipv6.conf.all.forwarding.
    pub v6: Option<u64>,
    /// The entries below net.ipv4.conf by which packets of pods arrive, and where the value is 0.
    pub off: Vec<String>,
}

/// Reads the sysctls for the links of pods, for those of weft, and for those of default routes.
pub(super) fn read(tables: &Tables<'_>) -> Forwarding {
    let Tables { links, routes, .. } = *tables;
    let is_default = |link: &Link| routes.iter().any(|route| route.dst.is_none() && route.index == link.index);
    let wanted = links.iter().filter(|link| link.name == BRIDGE || is_ours(link) || is_default(link));
    let names = wanted.map(|link| link.name.as_str()).chain(["default"]);
    let is_off = |name: &&str| sysctl::number(&format!("ipv4/conf/{name}/forwarding")) == Some(0);
    Forwarding {
        v4: sysctl::forwarding(true),
        v6: sysctl::forwarding(false),
        off: names.filter(is_off).map(str::to_owned).collect(),
    }
}
