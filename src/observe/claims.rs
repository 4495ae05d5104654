// SPDX-License-Identifier: Apache-2.0
//! Two nodes that claim the same thing, said to people: an address, or the MAC of a vxlan device. Whatever the agent decides, one of
//! the two nodes is cut off from others, and only a person can tell which of them is right.

use std::net::IpAddr;

use weft_backends::backend::TYPES;
use weft_subnet::lease::Lease;
use weft_subnet::text::Shown;

use crate::plan::Plan;

/// So many of each kind are named one by one.
const NAMED: usize = 5;

/// What is claimed twice, as sentences. Walks over all leases.
pub fn problems(plan: &Plan) -> Vec<String> {
    let mut all = cut(plan.peers().naming_us().map(|(ip, lease)| our_address(plan, ip, lease)).collect());
    all.extend(cut(our_identity(plan)));
    all.extend(cut(clashes(plan)));
    all.extend(cut(shared(plan)));
    all
}

/// Why a peer that has all its entries may not be reached, if others claim its address.
pub fn remark(plan: &Plan, lease: &Lease) -> Option<String> {
    let other = plan.peers().sharing(lease)?;
    Some(format!("its public address is that of {}, too: one of the two nodes is not reached", named(other)))
}

fn cut(mut all: Vec<String>) -> Vec<String> {
    let more = all.len().saturating_sub(NAMED);
    if more > 0 {
        all.truncate(NAMED);
        all.push(format!("and {more} more of this kind: see the peers"));
    }
    all
}

/// A lease, for people.
fn named(lease: &Lease) -> String {
    format!("lease {} (subnet {}, {})", Shown(&lease.id), lease.subnets, lease.attrs.owner())
}

fn our_address(plan: &Plan, ip: IpAddr, lease: &Lease) -> String {
    let own = plan.own();
    format!(
        "two nodes publish {ip}: this node, with lease {} (subnet {}), and {}; they do not reach each other. Give one of them \
         another address (--public-ip, --iface), or remove the lease that no node holds (weft lease rm)",
        own.id,
        own.subnets,
        named(lease)
    )
}

fn our_identity(plan: &Plan) -> Vec<String> {
    let text = |lease: &Lease| {
        let shared = plan.host().identities.shared_with(&(TYPES.identities)(&lease.attrs))?;
        Some(format!(
            "two nodes have one {}: this node, with lease {} (subnet {}), and {}; others send the traffic of both to one of \
             them. On the machine that is a copy {}, or remove the lease that no node holds (weft lease rm)",
            shared.name(),
            plan.own().id,
            plan.own().subnets,
            named(lease),
            shared.remedy()
        ))
    };
    plan.skipped_leases().filter_map(text).collect()
}

fn clashes(plan: &Plan) -> Vec<String> {
    let text = |(mac, loser, winner): (_, &Lease, &Lease)| {
        let age = if (&winner.age, &winner.id) < (&loser.age, &loser.id) { "older" } else { "newer" };
        format!(
            "two nodes have VtepMAC {mac}: {} is not reached, since {} is {age}. On the machine that is a copy delete flannel's device \
             and restart the agent, or remove the lease that no node holds (weft lease rm)",
            named(loser),
            named(winner)
        )
    };
    let clashes = plan
        .skipped_leases()
        .flat_map(|loser| plan.clashes(loser).into_iter().map(move |(mac, winner)| (mac, loser, winner)));
    clashes.map(text).collect()
}

fn shared(plan: &Plan) -> Vec<String> {
    let text = |shared: weft_subnet::peers::Shared<'_>| {
        let names: Vec<String> = shared.leases.iter().map(|lease| named(lease)).collect();
        let more = if shared.count > names.len() { ", ..." } else { "" };
        format!(
            "{} leases publish {}: {}{more}; one of the nodes is reached at most. Give the others another address, or remove the \
             leases that no node holds (weft lease rm)",
            shared.count,
            shared.ip,
            names.join(", ")
        )
    };
    plan.peers().shared().into_iter().map(text).collect()
}
