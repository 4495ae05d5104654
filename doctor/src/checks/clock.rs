// SPDX-License-Identifier: Apache-2.0
//! The clock is wrong, or before the start of a certificate.

use super::certificates::describe;
use crate::facts::NodeFacts;
use crate::facts::certificates::{CertificateFact, date};
use crate::finding::{NodeFinding, finding};

/// The clock says a time that cannot be, or a certificate begins in the future: the clock of this node, or that of the machine that made
/// it, is wrong.
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
    facts.early_clock.map(impossible).into_iter().chain(early.map(one)).collect()
}

fn impossible(now: u64) -> NodeFinding {
    let evidence = format!(
        "the clock of this node says {}, which is before the first version of weft: certificates, also those of the Kubernetes API, count \
         as not valid yet",
        date(now)
    );
    let remedy = "run the one whose service is active: `chronyc makestep` or `systemctl restart systemd-timesyncd`; a machine whose clock \
                  stops while it is off needs NTP at its boot";
    finding(evidence, remedy.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_of_1970_is_found_without_any_certificate() {
        assert_eq!(check(&NodeFacts::default()), []);
        let found = check(&NodeFacts { early_clock: Some(200), ..NodeFacts::default() });
        assert!(found.len() == 1 && found[0].evidence.contains("says 1970-01-01T00:03:20Z"), "{found:?}");
    }
}
