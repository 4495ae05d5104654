// SPDX-License-Identifier: Apache-2.0
//! The size of the packets that a way takes: that of its link, that of its route, or one that the kernel has learned from a router.

use std::net::IpAddr;

use super::explanation::Step;
use super::facts::{Device, Route};
use crate::remedies;

/// Adds the size in bytes of the largest packet that a route takes to the step of this route, and where the kernel has this size from, if neither
/// the route nor its device has it.
pub(super) fn sized(step: Step, route: &Route, device: Option<&Device>) -> Step {
    let Some(mtu) = [route.mtu, device.map(|device| device.mtu)].into_iter().flatten().min() else { return step };
    let is = if is_learned(route, device) { format!("{}; {}", step.is, learned(route)) } else { step.is.clone() };
    Step { is, ..step.mtu(mtu) }
}

/// Returns the step of the outer route of a tunnel with its MTU. The step is broken if the largest packets of the tunnel do not fit. `through` is
/// the device of the route.
pub(super) fn fits(step: Step, remote: IpAddr, tunnel: &Device, route: &Route, through: &Device) -> Step {
    let (step, needed) = (sized(step, route, Some(through)), tunnel.mtu + tunnel.kind.overhead(remote));
    let Some(mtu) = step.mtu.filter(|mtu| *mtu < needed) else { return step };
    let step = step.should_be(format!("an MTU of at least {needed}"));
    let becomes = format!("a packet of {} bytes becomes one of {needed} bytes in the tunnel", tunnel.mtu);
    // Nobody has configured such a size on this node, and it may end by itself. So nothing on this node has to be changed for it.
    if is_learned(route, Some(through)) {
        return step.broken(
            format!(
                "{becomes}, and a router has said that the way to {remote} takes {mtu} bytes (an ICMP message, which may be wrong or \
                 forged); smaller packets pass"
            ),
            remedies::learned_mtu(remote, needed),
        );
    }
    step.broken(
        format!("{becomes}, and the way to {remote} by {} takes {mtu} bytes; smaller packets pass", through.name),
        format!("raise the MTU of the way to {needed}, or restart the agent, which takes the MTU of its uplink"),
    )
}

/// Returns true if the size is one that the kernel has learned for this destination alone.
fn is_learned(route: &Route, device: Option<&Device>) -> bool {
    route.mtu_is_learned && device.is_none_or(|device| route.mtu.is_some_and(|mtu| mtu < device.mtu))
}

/// Says where a learned size is from.
fn learned(route: &Route) -> String {
    let end = route.expires_s.map_or_else(|| "later".to_owned(), |seconds| format!("in {seconds} s"));
    format!("the kernel has learned the MTU from a router and forgets it {end}")
}
