// SPDX-License-Identifier: Apache-2.0
//! A certificate of the store cannot be read, ended, or ends soon.

use crate::facts::NodeFacts;
use crate::facts::certificates::{CertificateFact, date};
use crate::finding::{NodeFinding, finding};

/// A certificate is reported this long before its end.
const WARN_BEFORE: u64 = 14 * 24 * 3600;
/// A certificate with a short life is reported when this part of it is left.
const WARN_PART: u64 = 10;

/// Certificates that cannot be read, have ended, or end soon.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let now = facts.store.now;
    let unreadable = facts
        .store
        .unreadable
        .iter()
        .map(|why| finding(why.clone(), "correct the file, or the flag that names it".to_owned()));
    let ended = |certificate: &CertificateFact| {
        let life = certificate.until.saturating_sub(certificate.from);
        let warn = WARN_BEFORE.min(life / WARN_PART);
        let left = certificate.until.saturating_sub(now);
        let verb = if certificate.until < now { "ended" } else { "ends" };
        (left <= warn).then(|| {
            let evidence = format!("the {} {verb} on {}", describe(certificate), date(certificate.until));
            let remedy =
                "replace the file by a new certificate; the agent reads it with the next connection, without a restart";
            finding(evidence, remedy.to_owned())
        })
    };
    unreadable.chain(facts.store.certificates.iter().filter_map(ended)).collect()
}

/// Returns a certificate for people: what it is for, its file and its subject.
pub(super) fn describe(certificate: &CertificateFact) -> String {
    format!("{} {} ({})", certificate.purpose, certificate.file.display(), certificate.subject)
}

#[cfg(test)]
mod tests {
    use super::super::clock;
    use super::*;
    use crate::sources::StoreAnswer;

    const DAY: u64 = 24 * 3600;

    #[test]
    fn certificates_are_found_before_they_end_and_the_clock_if_they_begin_in_the_future() {
        // From and until, in days from now.
        for (from, until, ends, begins) in [
            (-300, 15, false, false),
            (-300, 14, true, false),
            (-300, -1, true, false),
            (-1, 2, false, false),
            (-19, 2, true, false),
            (1, 300, false, true),
        ] {
            let mut facts = NodeFacts::with_store(StoreAnswer::NotAsked);
            let time = |days: i64| (1000 * DAY).saturating_add_signed(days * DAY.cast_signed());
            facts.store.certificates.push(CertificateFact {
                purpose: "client certificate",
                file: "/etc/client.pem".into(),
                subject: "CN=client".to_owned(),
                from: time(from),
                until: time(until),
            });
            assert_eq!(check(&facts).len(), usize::from(ends), "{from} {until}");
            assert_eq!(clock::check(&facts).len(), usize::from(begins), "{from} {until}");
        }
    }
}
