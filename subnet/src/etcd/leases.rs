// SPDX-License-Identifier: Apache-2.0
//! Which of the leases in the store are ours, whether one of them can be used as it is, and which subnet is free.

use std::collections::{HashMap, HashSet};

use ipnet::IpNet;

use crate::allocate;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::Id;
use crate::source::{Error, LeaseRequest};

use super::keys::{LeaseList, Stored};

/// The leases in the store as one attempt to acquire a subnet sees them.
pub(super) struct Leases<'a> {
    request: &'a LeaseRequest,
    all: &'a LeaseList,
    /// Those that are ours, the one with the best evidence first.
    pub(super) ours: Vec<&'a Stored>,
    our_ids: HashSet<&'a Id>,
}

impl<'a> Leases<'a> {
    pub(super) fn new(request: &'a LeaseRequest, all: &'a LeaseList, evidence: &Evidence) -> Leases<'a> {
        let ours = all.ours(evidence);
        let our_ids = ours.iter().map(|own| &own.record.id).collect();
        Leases { request, all, ours, our_ids }
    }

    fn others(&self) -> impl Iterator<Item = &'a Stored> {
        self.all.stored.iter().filter(|stored| !self.our_ids.contains(&stored.record.id))
    }

    /// Returns true if net-conf allows a lease of these subnets.
    fn is_compatible(&self, stored: &Stored) -> bool {
        stored.subnets.is_some_and(|subnets| allocate::is_compatible(&self.request.net_conf, &subnets))
    }

    /// Returns the revision at which the oldest lease of another node was created, for each subnet that net-conf allows.
    fn oldest_of_others(&self) -> HashMap<IpNet, i64> {
        let mut oldest = HashMap::new();
        for other in self.others().filter(|other| self.is_compatible(other) && other.lease().is_some()) {
            for net in other.subnets.iter().flat_map(Subnets::iter) {
                let created = oldest.entry(net).or_insert(other.created);
                *created = other.created.min(*created);
            }
        }
        oldest
    }

    /// Returns a lease of ours that can be used as it is. If an older lease of another node has its subnet, ours came second in a race, and
    /// we ended before we could delete it.
    pub(super) fn usable(&self) -> Option<&'a Stored> {
        // Whoever may write leases may write many that look like ours. All subnets that net-conf allows have one length, so two of them
        // overlap only if they are equal.
        if self.ours.is_empty() {
            return None;
        }
        let oldest = self.oldest_of_others();
        let is_older = |net: &IpNet, own: &Stored| oldest.get(net).is_some_and(|created| *created < own.created);
        let lost_a_race = |own: &Stored| own.subnets.iter().flat_map(Subnets::iter).any(|net| is_older(&net, own));
        self.ours.iter().copied().find(|own| self.is_compatible(own) && !lost_a_race(own))
    }

    /// Chooses a free subnet.
    pub(super) fn choose(&self) -> Result<Subnets, Error> {
        let taken = self.others().filter_map(|stored| stored.subnets).collect();
        let nodes = self.others().filter_map(Stored::lease).map(|lease| &lease.attrs);
        let ours = self.ours.iter().filter_map(|own| own.subnets);
        self.request.choose(taken, nodes, ours)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::time::Instant;

    use super::super::keys::ListRead;
    use super::*;
    use crate::attrs::Attrs;
    use crate::backend_types::FOR_TESTS;
    use crate::connected::Connected;
    use crate::lease::{Age, Lease, Record};
    use crate::net_conf::NetConf;

    const SINGLE: &str = r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.4.0"}"#;
    const DUAL: &str = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48"}"#;

    /// Returns what the node with this number publishes. We are the node with the number 1.
    fn attrs(number: u8) -> Attrs {
        Attrs {
            public_ip: Some([192, 0, 2, number].into()),
            backend_type: "vxlan".into(),
            backend_data: Some(format!(r#"{{"VtepMAC":"02:00:00:00:00:{number:02x}"}}"#).into()),
            ..Attrs::default()
        }
    }

    /// Returns a lease of the node with this number, which was created at this revision.
    fn lease(key: &str, number: u8, created: i64) -> Stored {
        let subnets = Subnets::from_key(key).unwrap();
        let age = Age { stamp: created.unsigned_abs(), tie: Arc::default() };
        let lease = Lease { id: key.into(), subnets, attrs: attrs(number), age };
        let record = Record { id: key.into(), lease: Ok(lease) };
        Stored { record, subnets: Some(subnets), created, modified: created, etcd_lease: 9 }
    }

    /// Returns a record whose value cannot be read.
    fn unreadable(key: &str, created: i64) -> Stored {
        Stored { record: Record::new(key.into(), Err("it is no lease")), ..lease(key, 9, created) }
    }

    fn request(net_conf: &str, previous: Option<&str>) -> LeaseRequest {
        LeaseRequest {
            net_conf: NetConf::parse(net_conf).unwrap(),
            attrs: attrs(1),
            previous: previous.and_then(Subnets::from_key),
            was: Some(attrs(1)),
            connected: Connected::default(),
        }
    }

    /// Returns what one attempt does with these records: `uses KEY`, `chooses KEY`, or why there is no subnet.
    fn outcome(request: &LeaseRequest, stored: &[Stored]) -> String {
        let read = ListRead { at: Instant::now(), endpoint: 0 };
        let all = LeaseList { stored: stored.to_vec(), revision: 99, cluster: 1, term: 2, config: None, read };
        let leases = Leases::new(request, &all, &request.evidence(FOR_TESTS));
        match leases.usable() {
            Some(own) => format!("uses {}", own.record.id),
            None => match leases.choose() {
                Ok(subnets) => format!("chooses {}", subnets.to_key()),
                Err(error) => error.to_string(),
            },
        }
    }

    /// The pods of this node use one of them. Another one, which an earlier run left behind, would cut them off.
    #[test]
    fn of_several_leases_of_ours_the_one_of_our_pods_is_used_and_otherwise_the_oldest() {
        for previous in ["10.5.1.0-24", "10.5.2.0-24", "10.5.3.0-24"] {
            let all = [lease("10.5.1.0-24", 1, 5), lease("10.5.2.0-24", 1, 3), lease("10.5.3.0-24", 1, 4)];
            assert_eq!(outcome(&request(SINGLE, Some(previous)), &all), format!("uses {previous}"));
            assert_eq!(outcome(&request(SINGLE, None), &all), "uses 10.5.2.0-24");
        }
        // One that does not fit net-conf cannot be used, whatever speaks for it.
        let unfit = [lease("10.5.1.0-25", 1, 3), lease("10.5.2.0-24", 1, 5)];
        assert_eq!(outcome(&request(SINGLE, Some("10.5.1.0-25")), &unfit), "uses 10.5.2.0-24");
    }

    /// Two nodes that start together may both write a lease. The younger one gives way, also if it was interrupted before it could do so.
    #[test]
    fn our_lease_gives_way_to_an_older_lease_of_another_node_and_to_nothing_else() {
        let ours = "10.5.1.0-24&fd00:5:0:1::-64";
        let both = lease(ours, 1, 5);
        let request = request(DUAL, Some(ours));
        let is_used = |other: Stored| {
            let orders = [[both.clone(), other.clone()], [other, both.clone()]];
            let [one, two] = orders.map(|all| outcome(&request, &all) == format!("uses {ours}"));
            assert_eq!(one, two, "the order of the keys decides nothing");
            one
        };
        assert!(!is_used(lease("10.5.1.0-24&fd00:5:0:2::-64", 2, 4)), "it has our IPv4 subnet");
        assert!(!is_used(lease("10.5.2.0-24&fd00:5:0:1::-64", 2, 4)), "it has our IPv6 subnet");
        assert!(is_used(lease("10.5.1.0-24&fd00:5:0:2::-64", 2, 6)), "it is younger");
        assert!(is_used(lease("10.5.1.0-24&fd00:5:0:2::-64", 1, 4)), "it is one of ours");
        assert!(is_used(lease("10.5.2.0-24&fd00:5:0:2::-64", 2, 4)), "it shares no address with ours");
        assert!(is_used(lease("10.5.0.0-16", 2, 4)), "every node sets a lease of another length aside");
        assert!(is_used(unreadable("10.5.1.0-24&fd00:5:0:2::-64", 4)), "nobody believes what cannot be read");
    }

    #[test]
    fn of_several_leases_of_ours_one_is_used_that_no_older_lease_has() {
        let key = |v4: u8, v6: u8| format!("10.5.{v4}.0-24&fd00:5:0:{v6}::-64");
        let ours = [(1, 5), (2, 5), (3, 7), (4, 5)].map(|(subnet, created)| lease(&key(subnet, subnet), 1, created));
        // Two nodes have the IPv4 subnet of the second one, and the older of them counts.
        let others = [(1, 11, 4), (2, 12, 9), (2, 22, 3), (3, 13, 8), (14, 4, 4)];
        let others = others.map(|(v4, v6, created)| lease(&key(v4, v6), v6, created));
        let mut all = [&ours[..], &others[..]].concat();
        assert_eq!(outcome(&request(DUAL, None), &all), format!("uses {}", key(3, 3)));
        all.reverse();
        assert_eq!(outcome(&request(DUAL, None), &all), format!("uses {}", key(3, 3)));
    }

    #[test]
    fn a_lease_that_gives_way_keeps_the_half_that_nobody_else_has() {
        let ours = lease("10.5.1.0-24&fd00:5:0:1::-64", 1, 5);
        let request = request(DUAL, Some("10.5.1.0-24&fd00:5:0:1::-64"));
        let chosen = outcome(&request, &[lease("10.5.1.0-24&fd00:5:0:2::-64", 2, 4), ours.clone()]);
        assert!(chosen.ends_with("&fd00:5:0:1::-64") && !chosen.contains("10.5.1.0-24"), "{chosen}");
        let chosen = outcome(&request, &[lease("10.5.2.0-24&fd00:5:0:1::-64", 2, 4), ours]);
        assert!(chosen.starts_with("chooses 10.5.1.0-24&") && !chosen.contains("fd00:5:0:1::"), "{chosen}");
    }

    #[test]
    fn a_subnet_is_free_if_no_other_record_has_it_and_no_other_node_is_in_it() {
        let (bad, theirs) = (unreadable("10.5.1.0-24", 3), lease("10.5.2.0-24", 2, 4));
        let mut inside = lease("10.5.4.0-24", 3, 5);
        if let Ok(lease) = &mut inside.record.lease {
            lease.attrs.public_ip = Some([10, 5, 3, 9].into());
        }
        let all = [bad, theirs, inside];
        let previous = request(SINGLE, Some("10.5.3.0-24"));
        assert_eq!(outcome(&previous, &all[..2]), "chooses 10.5.3.0-24");
        let full = outcome(&previous, &all);
        assert!(full.starts_with("out of subnets"), "the address of a node is in the last one: {full}");
        // The records of ours that do not fit give their subnets back. The one that speaks most for us comes first.
        let was_dual = ["10.5.3.0-24&fd00:5:0:3::-64", "10.5.4.0-24&fd00:5:0:4::-64"];
        let ours = [lease(was_dual[0], 1, 7), lease(was_dual[1], 1, 6)];
        assert_eq!(outcome(&request(SINGLE, None), &ours), "chooses 10.5.4.0-24");
        assert_eq!(outcome(&request(SINGLE, Some(was_dual[0])), &ours), "chooses 10.5.3.0-24");
    }
}
