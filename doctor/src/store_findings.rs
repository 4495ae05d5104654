// SPDX-License-Identifier: Apache-2.0
//! Decides what is wrong with the store, net-conf and certificates, without side effects.

use std::time::Duration;

use weft_subnet::cidr::Subnets;

use super::certificates::{CertificateFact, date};
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::store::StoreAnswer;

/// A store that takes longer for one answer is slow. A sound etcd answers within milliseconds.
const SLOW: Duration = Duration::from_secs(1);
/// A certificate is reported this long before its end.
const WARN_BEFORE: u64 = 14 * 24 * 3600;
/// A certificate with a short life is reported when this part of it is left.
const WARN_PART: u64 = 10;

/// The store fails or is slow.
pub(super) fn store(facts: &NodeFacts) -> Vec<NodeFinding> {
    let (store, mut findings) = (&facts.store, Vec::new());
    let place = &store.place;
    match &store.answer {
        StoreAnswer::NotAsked => {}
        StoreAnswer::Failed(why) => {
            let remedy = "check that the store runs, then its address in the flags, firewalls on the way, certificates and rights";
            findings.push(finding(format!("{place} does not answer: {why}"), remedy.to_owned()));
        }
        StoreAnswer::NoNetConf { place: wanted, remedy } => {
            let evidence =
                format!("{place} answers, and has no net-conf, without which no node starts: {wanted} does not exist");
            findings.push(finding(evidence, remedy.clone()));
        }
        StoreAnswer::Answered { slowest, .. } if *slowest >= SLOW => {
            let seconds = slowest.as_secs_f32();
            let remedy = "look at the load, the disk and the network of the store (etcd: `etcdctl endpoint status`, and its \
                          metric etcd_disk_wal_fsync_duration_seconds)";
            findings.push(finding(format!("{place} took {seconds:.1} s for one answer"), remedy.to_owned()));
        }
        StoreAnswer::Answered { .. } => {}
    }
    if let Some(Err(why)) = &store.net_conf {
        findings.push(finding(format!("net-conf in {place}: {why}"), "correct the key that is named".to_owned()));
    }
    findings.extend(other_cluster(facts));
    findings
}

/// net-conf has other networks than this node. It may be that of another cluster.
fn other_cluster(facts: &NodeFacts) -> Option<NodeFinding> {
    let (Some(Ok(net_conf)), env) = (&facts.store.net_conf, facts.subnet_file.env()?) else { return None };
    if net_conf.networks == env.networks {
        return None;
    }
    let text = |networks: Subnets| networks.iter().map(|net| net.trunc().to_string()).collect::<Vec<_>>().join(",");
    let evidence = format!(
        "net-conf in {} has the network {}, and {} of this node has {}: the store is that of another cluster, or net-conf was changed",
        facts.store.place,
        text(net_conf.networks),
        facts.path.display(),
        text(env.networks)
    );
    let remedy = "compare the endpoints (and --etcd-prefix) with those of another node; if net-conf was changed on purpose, restart the \
                  agents node by node";
    Some(finding(evidence, remedy.to_owned()))
}

/// The kernel lacks what the backend of net-conf needs.
pub(super) fn kernel(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(Ok(net_conf)) = &facts.store.net_conf else { return Vec::new() };
    let Some((module, Some(false))) = net_conf.module else { return Vec::new() };
    let evidence = format!(
        "net-conf has the backend {}, and this kernel has no module {module}: it is not loaded, not built in, and not in /lib/modules",
        net_conf.backend
    );
    vec![finding(
        evidence,
        format!("install the package with the module {module} for this kernel, or choose another backend"),
    )]
}

/// Certificates that cannot be read, have ended, or end soon.
pub(super) fn certificates(facts: &NodeFacts) -> Vec<NodeFinding> {
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

/// A certificate that begins in the future: the clock of this node, or that of the machine that made it, is wrong.
pub(super) fn clock(facts: &NodeFacts) -> Vec<NodeFinding> {
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

fn describe(certificate: &CertificateFact) -> String {
    format!("{} {} ({})", certificate.purpose, certificate.file.display(), certificate.subject)
}

#[cfg(test)]
mod tests {
    use super::super::store::ExaminedNetConf;
    use super::*;

    const DAY: u64 = 24 * 3600;

    fn facts(answer: StoreAnswer) -> NodeFacts {
        let mut facts = NodeFacts::default();
        (facts.store.place, facts.store.answer, facts.store.now) = ("etcd".to_owned(), answer, 1000 * DAY);
        facts
    }

    #[test]
    fn a_store_is_slow_from_one_second_on() {
        for (millis, found) in [(3, false), (999, false), (1000, true), (2100, true)] {
            let slowest = Duration::from_millis(millis);
            let facts = facts(StoreAnswer::Answered { slowest, net_conf: String::new() });
            assert_eq!(store(&facts).len(), usize::from(found), "{millis} ms");
        }
        assert_eq!(store(&facts(StoreAnswer::NotAsked)), []);
        let (place, remedy) = ("/config".to_owned(), "etcdctl put /config".to_owned());
        let missing = store(&facts(StoreAnswer::NoNetConf { place, remedy }));
        assert!(missing[0].evidence.ends_with("/config does not exist"), "{missing:?}");
        assert_eq!(missing[0].remedy, "etcdctl put /config");
        let failed = store(&facts(StoreAnswer::Failed("connection refused".to_owned())));
        assert_eq!(failed[0].evidence, "etcd does not answer: connection refused");
    }

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
            let mut facts = facts(StoreAnswer::NotAsked);
            let time = |days: i64| (1000 * DAY).saturating_add_signed(days * DAY.cast_signed());
            facts.store.certificates.push(CertificateFact {
                purpose: "client certificate",
                file: "/etc/client.pem".into(),
                subject: "CN=client".to_owned(),
                from: time(from),
                until: time(until),
            });
            assert_eq!(certificates(&facts).len(), usize::from(ends), "{from} {until}");
            assert_eq!(clock(&facts).len(), usize::from(begins), "{from} {until}");
        }
    }

    #[test]
    fn a_module_that_is_missing_is_found_only_if_this_is_known() {
        for (has, found) in [(Some(false), true), (Some(true), false), (None, false)] {
            let mut facts = facts(StoreAnswer::NotAsked);
            let (networks, backend) = (weft_subnet::cidr::Subnets::default(), "wireguard".to_owned());
            facts.store.net_conf = Some(Ok(ExaminedNetConf { networks, backend, module: Some(("wireguard", has)) }));
            assert_eq!(kernel(&facts).len(), usize::from(found), "{has:?}");
        }
    }
}
