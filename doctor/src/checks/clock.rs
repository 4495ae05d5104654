// SPDX-License-Identifier: Apache-2.0
//! The clock is wrong, was set back, or is before the start of a certificate.

use std::time::Duration;

use weft_backends::register::device_kind;
use weft_backends::wireguard;

use super::certificates::describe;
use crate::facts::NodeFacts;
use crate::facts::certificates::{CertificateFact, date};
use crate::finding::{NodeFinding, finding};

/// A clock that was set back by less is behind for a moment only, or the clocks of two reads differ.
const MIN_STEP: Duration = Duration::from_secs(60);
/// The clock says a time that cannot be, it was set back, or a certificate begins in the future: the clock of this node, or that of the machine that
/// made it, is wrong.
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
    let impossible = facts.early_clock.map(|now| impossible(now, &facts.backend));
    impossible.or_else(|| set_back(facts)).into_iter().chain(early.map(one)).collect()
}

/// A handshake of WireGuard names the time of its sender, and a peer refuses one that is not later than those before (whitepaper of WireGuard, 5.4.2).
/// Of a handshake that the peer began, it remembers no time of this node. Which of the two began the last one is not known.
fn set_back(facts: &NodeFacts) -> Option<NodeFinding> {
    let ahead = Some(facts.handshake_ahead).filter(|ahead| *ahead >= MIN_STEP)?.as_secs();
    let evidence = format!(
        "the clock of this node was set back: the last handshake of WireGuard with a peer that packets do not reach is {ahead} s in the future, \
         and until then peers may refuse every handshake that this node begins"
    );
    let remedy = "set the clock (NTP) of this node, if it is behind now; if it is right now, look first whether that peer runs; if it does, and is not \
                  reached: weft rotate-key, because peers remember no handshake of the new key";
    Some(finding(evidence, remedy.to_owned()))
}

fn impossible(now: u64, backend: &str) -> NodeFinding {
    let evidence = format!(
        "the clock of this node says {}, which is before the first version of weft: certificates, also those of the Kubernetes API, count \
         as not valid yet",
        date(now)
    );
    let mut remedy = "run the one whose service is active: `chronyc makestep` or `systemctl restart systemd-timesyncd`; a machine whose clock \
                      stops while it is off needs NTP at its boot"
        .to_owned();
    if device_kind(backend) == Some(wireguard::DEVICE_KIND) {
        remedy.push_str("; until then, peers of WireGuard that know this node refuse every handshake that it begins");
    }
    finding(evidence, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_of_1970_is_found_without_any_certificate() {
        assert_eq!(check(&NodeFacts::default()), []);
        let found = check(&NodeFacts { early_clock: Some(200), ..NodeFacts::default() });
        assert!(found.len() == 1 && found[0].evidence.contains("says 1970-01-01T00:03:20Z"), "{found:?}");
        assert!(!found[0].remedy.contains("WireGuard"), "{found:?}");
        let backend = "wireguard".to_owned();
        let found = check(&NodeFacts { early_clock: Some(200), backend, ..NodeFacts::default() });
        assert!(found.len() == 1 && found[0].remedy.contains("refuse every handshake"), "{found:?}");
    }

    #[test]
    fn a_clock_that_was_set_back_is_known_by_a_handshake_in_the_future() {
        for (seconds, found) in [(59, false), (60, true)] {
            let handshake_ahead = Duration::from_secs(seconds);
            let findings = check(&NodeFacts { handshake_ahead, ..NodeFacts::default() });
            assert_eq!(findings.len(), usize::from(found), "{findings:?}");
            assert!(findings.iter().all(|one| one.evidence.contains("peers may refuse")), "{findings:?}");
            let is_last =
                |one: &NodeFinding| one.remedy.rsplit("; ").next().is_some_and(|last| last.contains("weft rotate-key"));
            assert!(findings.iter().all(is_last), "a new key is the last step: {findings:?}");
        }
        let both =
            NodeFacts { handshake_ahead: Duration::from_secs(900), early_clock: Some(200), ..NodeFacts::default() };
        assert_eq!(check(&both).len(), 1, "one clock is one finding");
    }
}
