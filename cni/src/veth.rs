// SPDX-License-Identifier: Apache-2.0
//! The delegate `weft-veth`: routed pods. A veth pair and host routes, no bridge.
//!
//! In the pod: its addresses as /32 and /128, and a default route over 169.254.1.1 and fe80::1, which are the other end of the
//! pair. On the host: a route for each address. Both ends are permanent neighbours of each other, so nothing on the way ever
//! asks for a hardware address. Names and hardware addresses follow from container id and interface: DEL and GC need no
//! memory, and udev, which gives new addresses to links whose address is random, leaves them alone.
//!
//! Invariant: the pair is made in one datagram, what is inside the pod in a second, what is on the host in a third. A kill
//! leaves a state that the next ADD completes and DEL removes.

mod add;
mod check;
mod encode;
mod gc;
mod plan;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::attachments::Known;
use crate::env::Verb;
use crate::plugin::Call;
use crate::rtnl::Rtnl;
use crate::spec::Error;
use plan::Plan;

pub use plan::{ALIAS, host_name};

/// The pod's IPv4 gateway: no interface has it, the neighbour entry alone makes it reachable.
pub const GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1));
/// The pod's IPv6 gateway: the host's end has it.
pub const GATEWAY6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));
/// Protocol number of the host's routes. Not the agent's: it removes routes of its own that it does not want.
pub const PROTOCOL: u8 = 91;

/// Answers one call.
///
/// # Errors
/// What goes to standard output.
pub fn answer(call: &Call) -> Result<Vec<u8>, Error> {
    let plan = Plan::new(call)?;
    match call.request.verb {
        Verb::Add => add::add(&plan),
        Verb::Del => del(&plan),
        Verb::Check => check::check(&plan),
        Verb::Gc => gc::gc(&plan, &Known::read(&call.conf)?),
        Verb::Status => plan.status(),
        Verb::Version => Ok(Vec::new()),
    }
}

/// Removes the pair, then gives the addresses back: nobody else gets one while packets for it still come here. Both are tried.
/// Their being gone is success.
fn del(plan: &Plan<'_>) -> Result<Vec<u8>, Error> {
    let link = Rtnl::open().and_then(|mut host| host.remove_link_named(&plan.host));
    let addresses = plan.release();
    link.map_err(|error| error.details(format!("of the pod, {}", plan.host)))?;
    addresses.map(|()| Vec::new())
}
