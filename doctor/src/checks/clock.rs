// SPDX-License-Identifier: Apache-2.0
//! The clock is before the start of a certificate.

use super::certificates::describe;
use crate::facts::NodeFacts;
use crate::facts::certificates::{CertificateFact, date};
use crate::finding::{NodeFinding, finding};

/// A certificate that begins in the future: the clock of this node, or that of the machine that made it, is wrong.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let now = facts.store.now;
    let early = facts.store.certificates.iter().filter(|certificate| certificate.from > now);
    let one = |certificate: &CertificateFact| {
        let evidence = format!(
            "the {} is valid from {} on, and the clock of this node says {}",
            describe(certificate),
            date(certificate.from),
            date(now)
        );
        finding(
            evidence,
            "set the clock (NTP) of this node; if it is right, that of the machine that makes certificates".to_owned(),
        )
    };
    early.map(one).collect()
}
