// SPDX-License-Identifier: Apache-2.0
//! The tables of the kernel, as they were read at the start of an examination.

use std::net::IpAddr;

use weft_netlink::rtnl::{Addr, Link, Neigh, Route};

use super::policy_rules::PolicyRules;
use crate::kernel::ends::first_here;

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
}
