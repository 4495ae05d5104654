// SPDX-License-Identifier: Apache-2.0
//! Sentences for the operator about two nodes that claim the same address, the same VTEP MAC or the same public key. Whichever of them the
//! agent decides for, some nodes do not reach the other one, and only a person can tell which of the two is right.

use std::net::IpAddr;

use weft_backends::register::TYPES;
use weft_subnet::lease::Lease;
use weft_subnet::text::Shown;

use crate::plan::{LeaseIdentity, Plan};

/// Number of problems of one kind that are described one by one.
const MAX_DESCRIBED: usize = 5;

/// Describes everything that is claimed twice, one sentence each. This visits all leases.
pub fn problems(plan: &Plan) -> Vec<String> {
    let mut all = shortened(plan.peers().naming_us().map(|(ip, lease)| with_our_address(plan, ip, lease)).collect());
    all.extend(shortened(with_our_identity(plan)));
    all.extend(shortened(with_the_identity_of_another_peer(plan)));
    all.extend(shortened(with_the_address_of_another_peer(plan)));
    all
}

/// Describes why a peer may be unreachable although it has all its entries: another lease claims its address.
pub fn remark(plan: &Plan, lease: &Lease) -> Option<String> {
    let other = plan.peers().sharing(lease)?;
    Some(format!("its published address is that of {}, too: one of the two nodes is not reached", describe(other)))
}

fn shortened(mut all: Vec<String>) -> Vec<String> {
    let more = all.len().saturating_sub(MAX_DESCRIBED);
    if more > 0 {
        all.truncate(MAX_DESCRIBED);
        all.push(format!("and {more} more of this kind: see the peers"));
    }
    all
}

fn describe(lease: &Lease) -> String {
    format!("lease {} (subnet {}, {})", Shown(&lease.id), lease.subnets, lease.attrs.owner())
}

fn with_our_address(plan: &Plan, ip: IpAddr, lease: &Lease) -> String {
    let own = plan.own();
    format!(
        "two nodes publish {ip}: this node, with lease {} (subnet {}), and {}; they do not reach each other. Give one of them \
         another address (--public-ip, --iface), or with wireguard another port (--wireguard-port), or remove the lease that no node \
         holds (weft lease rm)",
        own.id,
        own.subnets,
        describe(lease)
    )
}

fn with_our_identity(plan: &Plan) -> Vec<String> {
    let text = |lease: &Lease| {
        let shared = plan.host().identities.shared_with(&(TYPES.identities)(&lease.attrs))?;
        Some(format!(
            "two nodes have one {}: this node, with lease {} (subnet {}), and {}; others send the traffic of both to one of \
             them. On the machine that is a copy {}, or remove the lease that no node holds (weft lease rm)",
            shared.name(),
            plan.own().id,
            plan.own().subnets,
            describe(lease),
            shared.remedy()
        ))
    };
    plan.unplanned_leases().filter_map(text).collect()
}

fn with_the_identity_of_another_peer(plan: &Plan) -> Vec<String> {
    let text = |(identity, loser, winner): (LeaseIdentity, &Lease, &Lease)| {
        let age = if (&winner.age, &winner.id) < (&loser.age, &loser.id) { "older" } else { "newer" };
        format!(
            "two nodes have {}: {} is not reached, since {} is {age}. On the machine that is a copy {}, or remove the lease that no node \
             holds (weft lease rm)",
            identity.name,
            describe(loser),
            describe(winner),
            identity.remedy
        )
    };
    let clashes = plan
        .unplanned_leases()
        .flat_map(|loser| plan.clashes(loser).into_iter().map(move |(identity, winner)| (identity, loser, winner)));
    clashes.map(text).collect()
}

fn with_the_address_of_another_peer(plan: &Plan) -> Vec<String> {
    let text = |shared: weft_subnet::peers::Shared<'_>| {
        let leases: Vec<String> = shared.leases.iter().map(|lease| describe(lease)).collect();
        let more = if shared.count > leases.len() { ", ..." } else { "" };
        format!(
            "{} leases publish {}: {}{more}; one of the nodes is reached at most. Give the others another address, or remove the \
             leases that no node holds (weft lease rm)",
            shared.count,
            shared.ip,
            leases.join(", ")
        )
    };
    plan.peers().shared().into_iter().map(text).collect()
}
