// SPDX-License-Identifier: Apache-2.0
//! A policy of IPsec takes packets between pods.

use crate::facts::NodeFacts;
use crate::facts::ipsec::{Direction, Taken};
use crate::finding::{NodeFinding, finding};

/// A policy of IPsec takes packets between pods.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |Taken { policy, from, to }: &Taken| {
        let direction = match policy.direction {
            Direction::Out => "out",
            Direction::Forward => "fwd",
        };
        let evidence = format!(
            "a policy of IPsec takes or drops packets from {from} to {to}: src {} dst {} dir {direction} priority {}",
            policy.from, policy.to, policy.order.priority
        );
        let remedy = "`ip xfrm policy` shows it; exclude Network in the program that made it (a passthrough connection of strongSwan or \
                      Libreswan with the Network on both sides)";
        finding(evidence, remedy.to_owned())
    };
    facts.ipsec.iter().map(one).collect()
}
