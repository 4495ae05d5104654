// SPDX-License-Identifier: Apache-2.0
//! Steps and words that several kinds of steps need.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_netlink::rtnl::Addr;

use super::explanation::Step;
use super::facts::{Agent, Device, Difference, Facts, Peer};
use crate::known_links::BRIDGE;
use crate::remedies::connect;
use crate::subnet_file::SubnetFile;

/// What to do about an entry that weft should have written.
pub(super) const REWRITE: &str =
    "a running agent writes it again: `systemctl status weft`; `weft plan` shows what it would write";

/// Returns the published addresses of a peer as text.
pub(super) fn publics(peer: &Peer) -> String {
    peer.public.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Returns what the plan of the agent wants in place of an entry whose name contains one of these texts.
pub(super) fn planned(facts: &Facts, entry: &str) -> Option<String> {
    let Agent::Answers(agent) = &facts.agent else { return None };
    let differs = |difference: &&Difference| difference.entry.starts_with(entry);
    let difference = agent.differences.as_ref()?.iter().find(differs)?;
    Some(difference.should_be.clone().unwrap_or_else(|| "no such entry".to_owned()))
}

/// The step at a pod of this node to which no route leads.
pub(super) fn no_device(facts: &Facts, step: &str, pod: IpAddr) -> Step {
    let step = Step::ok(step, format!("no device of this node leads to {pod}"));
    if let Some((subnet, address)) = address_of_bridge(facts, pod) {
        let because = format!("no route leads to {subnet} over {BRIDGE} although it has {address}");
        return step.broken(because, connect(subnet, address));
    }
    step.broken(
        format!("no device of this node leads to its pod {pod}: the bridge of the pods is down or was deleted"),
        "ip link set cni0 up, or create the pod again; `weft doctor` shows whether the bridge has an old subnet",
    )
}

/// Returns the subnet of a pod, and the address in it that the bridge of the pods has, if that is up.
fn address_of_bridge(facts: &Facts, pod: IpAddr) -> Option<(IpNet, IpAddr)> {
    let SubnetFile::Good(file) = &facts.subnet_file else { return None };
    let subnet = file.subnets.iter().find(|subnet| subnet.contains(&pod))?.trunc();
    let bridge = facts.bridge.as_ref().filter(|bridge| bridge.up)?;
    let is_its = |addr: &&Addr| addr.index == bridge.index && subnet.contains(&addr.addr);
    facts.addrs.iter().find(is_its).map(|addr| (subnet, addr.addr))
}

/// The step at a device that carries no packets.
pub(super) fn down(step: Step, device: &Device) -> Step {
    let name = &device.name;
    if device.up {
        step.broken(format!("{name} has no carrier"), format!("connect the other end of {name}, or set it up"))
    } else {
        step.broken(format!("{name} is down"), format!("ip link set {name} up"))
    }
}
