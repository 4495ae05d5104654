// SPDX-License-Identifier: Apache-2.0
//! The store fails or is slow, or net-conf is not valid.

use std::time::Duration;

use weft_subnet::cidr::Subnets;

use crate::facts::NodeFacts;
use crate::finding::{NodeFinding, finding};
use crate::sources::{StoreAlarm, StoreAnswer};

/// A store that takes longer for one answer is slow. A sound etcd answers within milliseconds.
const SLOW: Duration = Duration::from_secs(1);

/// The store fails or is slow.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let (store, mut findings) = (&facts.store, Vec::new());
    let place = &store.place;
    match &store.answer {
        StoreAnswer::NotAsked => {}
        StoreAnswer::Failed(why) => {
            findings.push(finding(format!("{place} does not answer: {why}"), after_failure(why).to_owned()));
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
    if let Some(StoreAlarm { what, remedy }) = &store.alarm {
        findings.push(finding(format!("{place} answers, but {what}"), remedy.clone()));
    }
    if let Some(Err(why)) = &store.net_conf {
        findings.push(finding(format!("net-conf in {place}: {why}"), "correct the key that is named".to_owned()));
    }
    findings.extend(other_cluster(facts));
    findings
}

/// Returns what to do about a store that did not answer. The library for TLS says so if the time of a certificate is the reason.
fn after_failure(why: &str) -> &'static str {
    if why.contains("certificate not valid yet") {
        "the certificate of the store begins in the future: set the clock of this node (NTP); `date` shows it; if it is right, that of \
         the machine that makes certificates"
    } else if why.contains("certificate expired") {
        "give the store a new certificate; if its certificate has not ended, the clock of this node is wrong: `date` shows it"
    } else {
        "check that the store runs, then its address in the flags, firewalls on the way, certificates and rights"
    }
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

#[cfg(test)]
mod tests {
    use weft_subnet::net_conf::{BadNetConf, NetConf};

    use super::*;
    use crate::facts::store::{ExaminedNetConf, StoreFacts};

    #[test]
    fn a_store_that_refuses_writes_is_found_with_its_own_remedy() {
        let mut facts = NodeFacts::with_store(StoreAnswer::NotAsked);
        facts.store.alarm =
            Some(StoreAlarm { what: "its space is used up".to_owned(), remedy: "defragment".to_owned() });
        let found = check(&facts);
        let texts: Vec<_> = found.iter().map(|one| (one.evidence.as_str(), one.remedy.as_str())).collect();
        assert_eq!(texts, [("etcd answers, but its space is used up", "defragment")]);
    }

    #[test]
    fn net_conf_is_found_if_it_is_not_valid_or_that_of_another_cluster() {
        let found = |net_conf| {
            let store = StoreFacts { net_conf: Some(net_conf), ..StoreFacts::default() };
            check(&NodeFacts { store, ..NodeFacts::of_a_node() })
        };
        let invalid = found(Err(BadNetConf::NoFamily));
        assert!(invalid.len() == 1 && invalid[0].evidence.contains("none defined stack"), "{invalid:?}");
        for (network, is_other) in [("10.5.0.0/16", false), ("10.6.0.0/16", true)] {
            let networks = NetConf::parse(&format!(r#"{{"Network":"{network}"}}"#)).unwrap().networks;
            let findings = found(Ok(ExaminedNetConf { networks }));
            assert_eq!(findings.len(), usize::from(is_other), "{findings:?}");
            assert!(findings.iter().all(|one| one.evidence.contains("has the network 10.6.0.0/16")), "{findings:?}");
        }
    }

    #[test]
    fn a_store_is_slow_from_one_second_on() {
        for (millis, found) in [(3, false), (999, false), (1000, true), (2100, true)] {
            let slowest = Duration::from_millis(millis);
            let facts = NodeFacts::with_store(StoreAnswer::Answered { slowest, net_conf: String::new() });
            assert_eq!(check(&facts).len(), usize::from(found), "{millis} ms");
        }
        assert_eq!(check(&NodeFacts::with_store(StoreAnswer::NotAsked)), []);
        let (place, remedy) = ("/config".to_owned(), "etcdctl put /config".to_owned());
        let missing = check(&NodeFacts::with_store(StoreAnswer::NoNetConf { place, remedy }));
        assert!(missing[0].evidence.ends_with("/config does not exist"), "{missing:?}");
        assert_eq!(missing[0].remedy, "etcdctl put /config");
        let failed = check(&NodeFacts::with_store(StoreAnswer::Failed("connection refused".to_owned())));
        assert_eq!(failed[0].evidence, "etcd does not answer: connection refused");
        for (why, words) in [
            (
                "invalid peer certificate: certificate not valid yet: verification time 200 (UNIX)",
                "set the clock of this node",
            ),
            (
                "invalid peer certificate: certificate expired: verification time 200 (UNIX)",
                "give the store a new certificate",
            ),
        ] {
            let failed = check(&NodeFacts::with_store(StoreAnswer::Failed(why.to_owned())));
            assert!(failed[0].remedy.contains(words), "{failed:?}");
        }
    }
}
