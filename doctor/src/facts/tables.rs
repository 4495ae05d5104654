// SPDX-License-Identifier: Apache-2.0
//! The tables of the kernel, as they were read at the start of an examination.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_netlink::rtnl::{Addr, Link, Neigh, Route};

use super::policy_rules::PolicyRules;
use crate::kernel::ends::first_here;
use crate::kernel::entries::unspecified;

/// The tables of the kernel that were read.
#[derive(Debug, Clone, Copy)]
pub struct Tables<'a> {
    /// The links.
    pub links: &'a [Link],
    /// The addresses.
    pub addrs: &'a [Addr],
    /// The main table.
    pub routes: &'a [Route],
    /// The neighbours.
    pub neighbours: &'a [Neigh],
    /// The policy rules.
    pub policy: &'a PolicyRules,
}

impl<'a> Tables<'a> {
    /// Returns the link with this index.
    pub(super) fn link(&self, index: u32) -> Option<&'a Link> {
        self.links.iter().find(|link| link.index == index)
    }

    /// Returns the first of the addresses `own` that has the family of `like`, and that a link of this node has ([`first_here`]).
    pub(super) fn first_here(&self, own: &[IpAddr], like: IpAddr) -> Option<IpAddr> {
        first_here(self.addrs, own, like)
    }

    /// Returns true if a link is up and has a carrier. The kernel may leave out the routes of others.
    pub(super) fn runs(&self, link: u32) -> bool {
        self.link(link).is_some_and(Link::is_running)
    }

    /// Returns the routes of the main table that lead to this address.
    pub(super) fn routes_to(&self, to: IpAddr) -> impl Iterator<Item = (IpNet, &Route)> {
        let any = unspecified(to.is_ipv4());
        let of_family = self.routes.iter().filter(move |route| route.v6 == to.is_ipv6());
        let net = move |route: &Route| IpNet::new(route.dst.unwrap_or(any), route.len).ok();
        of_family.filter_map(move |route| Some((net(route)?, route))).filter(move |(net, _)| net.contains(&to))
    }

    /// Returns the longest route to this address, if it refuses packets. Of two routes that are equally long, the metric decides, and both may
    /// be innocent.
    pub(super) fn refusing(&self, to: IpAddr) -> Option<IpNet> {
        let longest = self.routes_to(to).map(|(net, _)| net.prefix_len()).max()?;
        let mut longest = self.routes_to(to).filter(|(net, _)| net.prefix_len() == longest);
        let (net, first) = longest.next()?;
        (first.refuses() && longest.all(|(_, route)| route.refuses())).then_some(net)
    }
}
