// SPDX-License-Identifier: Apache-2.0
//! The delegate `weft-veth`: routed pods. Each pod has a veth pair and routes on the host; there is no bridge.
//!
//! The pod gets its addresses as /32 and /128, and default routes via 169.254.1.1 and fe80::1. These gateways stand for
//! the host's end of the pair. The host gets one route for each address of the pod. Each end is a permanent neighbour
//! of the other one, so neither ARP nor neighbour discovery is needed.
//!
//! Names and MAC addresses are derived from the container ID and the name of the interface. DEL and GC therefore need
//! no stored state. A MAC that is not random also keeps udev from replacing it.
//!
//! Invariant: ADD sends three datagrams. The first creates the pair, the second configures the pod, the third
//! configures the host. If ADD is killed in between, the next ADD completes the state, and DEL removes it.

mod add;
mod check;
mod encode;
mod gc;
mod params;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use weft_netlink::rtnl::Rtnl;

use crate::attachments::ValidAttachments;
use crate::env::Verb;
use crate::plugin::Call;
use crate::spec::Error;
use params::Params;

pub use params::{ALIAS, host_name};

/// The type of this plugin, by which a configuration names it.
pub const TYPE: &str = "weft-veth";
/// The pod's IPv4 gateway. No interface has this address: the pod reaches it by its permanent neighbour entry.
pub const GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1));
/// The pod's IPv6 gateway. The host's end of the pair has this address.
pub const GATEWAY6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));
/// Protocol number of the host's routes to pods. It differs from the agent's protocol number, because the agent removes
/// unwanted routes that carry its own.
pub const PROTOCOL: u8 = 91;

/// Handles one call and returns what goes to standard output.
///
/// # Errors
/// The error that goes to standard output.
pub fn answer(call: &Call) -> Result<Vec<u8>, Error> {
    let params = Params::new(call)?;
    match call.request.verb {
        Verb::Add => add::add(&params),
        Verb::Del => del(&params),
        Verb::Check => check::check(&params),
        Verb::Gc => gc::gc(&params, &ValidAttachments::read(&call.conf)?),
        Verb::Status => params.status(),
        Verb::Version => Ok(Vec::new()),
    }
}

/// Checks the configuration of an ADD, without a change to the node.
///
/// # Errors
/// The error that ADD would return for this configuration.
pub fn validate(call: &Call) -> Result<Vec<u8>, Error> {
    Params::new(call)?.check_ipam().map(|()| Vec::new())
}

/// Removes the pair, then releases the addresses. In this order no other pod gets an address while its packets are
/// still routed to this pair. Both steps are tried, and it is success if there is nothing to remove.
fn del(params: &Params<'_>) -> Result<Vec<u8>, Error> {
    let link = Rtnl::open().and_then(|mut host| host.remove_link_named(&params.host));
    let addresses = params.release();
    link.map_err(|error| {
        Error::from(error).details(format!("the host's end of the pod's veth pair is {}", params.host))
    })?;
    addresses.map(|()| Vec::new())
}
