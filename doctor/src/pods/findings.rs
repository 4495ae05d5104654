// SPDX-License-Identifier: Apache-2.0
//! Decides from the facts what was left behind. It has no side effects.
//!
//! A finding is certain only if all of the following is true. Otherwise it is in doubt.
//!
//! - Everything could be read.
//! - No namespace in use has the address, or is at the other end of the veth pair.
//! - No command line and no control group of a process contains the container's ID, and the runtime's cache mentions no
//!   existing namespace of the container. This protects sandboxes that hide their address from the kernel, such as
//!   gVisor's.
//! - The file is old enough.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::facts::{AddressFile, Facts, RecordFile, VethPair};
use crate::namespaces::Namespace;

/// How certain a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Certainty {
    /// It is certain. `--fix` removes it.
    Leak,
    /// It may belong to a running pod. It is only listed.
    Doubt,
}

/// Something that was left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leak {
    /// A record of the CNI plugin. The plugin's DEL removes everything that the record describes.
    Record {
        /// The file.
        path: PathBuf,
        /// Name of the network.
        network: String,
        /// ID of the container.
        container: String,
        /// Name of the pod's interface.
        ifname: String,
    },
    /// A veth pair.
    VethPair {
        /// Name of the host's end.
        name: String,
        /// Interface index of the host's end.
        index: u32,
    },
    /// An address that host-local reserves.
    Address {
        /// The file.
        path: PathBuf,
        /// ID of the container that the address is reserved for.
        container: String,
    },
}

/// Something that does not certainly belong to a running pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is, for people.
    pub what: String,
    /// How certain it is.
    pub certainty: Certainty,
    /// Why it is a leak or in doubt, for people.
    pub why: String,
    /// What would have to be removed.
    pub leak: Leak,
}

/// Returns the findings. Those about records come first, because the removal of what a record describes also removes
/// most of the veth pairs and addresses. Files that are younger than `min_age` are in doubt.
pub fn findings(facts: &Facts, min_age: Duration) -> Vec<Finding> {
    let examiner = Examiner { facts, min_age };
    let records = facts.records.iter().filter_map(|file| examiner.record(file));
    let pairs = facts.veth_pairs.iter().filter_map(|pair| examiner.veth_pair(pair));
    let addresses = facts.addresses.iter().filter_map(|file| examiner.address(file));
    records.chain(pairs).chain(addresses).collect()
}

struct Examiner<'a> {
    facts: &'a Facts,
    min_age: Duration,
}

impl Examiner<'_> {
    fn address(&self, file: &AddressFile) -> Option<Finding> {
        let (addr, container) = (file.reservation.addr, &file.reservation.container);
        if self.is_used(addr) || self.is_running(container) {
            return None;
        }
        let (certainty, why) = self.certainty(container, file.age, "no running pod has this address");
        let of = if container.is_empty() { "no container".to_owned() } else { format!("container {container}") };
        let leak = Leak::Address { path: file.reservation.path.clone(), container: container.clone() };
        Some(Finding { what: format!("address {addr} of {}, {of}", file.network), certainty, why, leak })
    }

    fn record(&self, file: &RecordFile) -> Option<Finding> {
        let record = &file.record;
        let container = &record.container;
        let of_container = |file: &&AddressFile| file.reservation.container == *container;
        let addresses: Vec<&AddressFile> = self.facts.addresses.iter().filter(of_container).collect();
        let connected = |pair: &VethPair| {
            pair.container.as_ref() == Some(container) && self.namespace(pair).is_some_and(Namespace::in_use)
        };
        if self.is_running(container)
            || addresses.iter().any(|file| self.is_used(file.reservation.addr))
            || self.facts.veth_pairs.iter().any(connected)
        {
            return None;
        }
        let (mut certainty, mut why) = self.certainty(container, file.age, "no running pod uses what it describes");
        let path = record.path.clone();
        if record.conf.is_none() || record.network().is_empty() {
            (certainty, why) = (Certainty::Doubt, format!("it cannot be read; {why}"));
        }
        // A record of flannel's own plugin does not contain the name of the interface. The file of host-local does.
        let ifname = record.caller.as_ref().map(|caller| caller.ifname.clone());
        let ifname = ifname.or_else(|| addresses.iter().find_map(|file| file.reservation.ifname.clone()));
        let leak = Leak::Record {
            path: path.clone(),
            network: record.network().to_owned(),
            container: container.clone(),
            ifname: ifname.unwrap_or_else(|| "eth0".to_owned()),
        };
        Some(Finding { what: format!("record {}", path.display()), certainty, why, leak })
    }

    fn veth_pair(&self, pair: &VethPair) -> Option<Finding> {
        let namespace = self.namespace(pair);
        if namespace.is_some_and(Namespace::in_use) {
            return None;
        }
        let of_pod = |file: &&AddressFile| {
            namespace.is_some_and(|namespace| namespace.addrs.contains(&file.reservation.addr))
                || pair.container.as_ref() == Some(&file.reservation.container)
        };
        let files: Vec<&AddressFile> = self.facts.addresses.iter().filter(of_pod).collect();
        let container = pair.container.clone().or_else(|| Some(files.first()?.reservation.container.clone()));
        let age =
            files.iter().filter_map(|file| file.age).min().filter(|_| files.iter().all(|file| file.age.is_some()));
        let name = namespace
            .and_then(|namespace| namespace.name.as_ref())
            .map(|path| format!(" ({})", path.display()))
            .unwrap_or_default();
        let text = format!("no process runs at its other end{name}");
        let (certainty, why) = match (&container, namespace) {
            (Some(container), Some(_)) => self.certainty(container, age, &text),
            (None, _) => (Certainty::Doubt, format!("{text}, but its container is unknown")),
            (Some(_), None) => (Certainty::Doubt, format!("{text}, but the namespace of its other end is unknown")),
        };
        let of = container.map(|container| format!(" of container {container}")).unwrap_or_default();
        let leak = Leak::VethPair { name: pair.name.clone(), index: pair.index };
        Some(Finding { what: format!("veth pair {}{of}", pair.name), certainty, why, leak })
    }

    /// Returns how certain it is that something of a container was left behind, with the reason. `text` says why it looks like a leak.
    fn certainty(&self, container: &str, age: Option<Duration>, text: &str) -> (Certainty, String) {
        let doubt = |why: &str| (Certainty::Doubt, format!("{text}, but {why}"));
        if !self.facts.unreadable.is_empty() {
            return doubt("not everything can be read");
        }
        if self.facts.cached.iter().any(|cached| cached.container == container) {
            return doubt("the runtime's cache lists the container, and its network namespace exists");
        }
        if !container.is_empty() && self.facts.process_texts.iter().any(|text| text.contains(container)) {
            return doubt("the command line or control group of a process contains the container's ID");
        }
        match age {
            None => doubt("its age is unknown"),
            Some(age) if age < self.min_age => doubt(&format!("it is only {} s old", age.as_secs())),
            Some(age) => (Certainty::Leak, format!("{text}; {} min old", age.as_secs() / 60)),
        }
    }

    /// Returns true if the runtime's cache lists the container and a process is in its namespace.
    fn is_running(&self, container: &str) -> bool {
        self.facts.cached.iter().any(|cached| cached.has_processes && cached.container == container)
    }

    /// Returns true if a namespace in use has the address.
    fn is_used(&self, addr: IpAddr) -> bool {
        self.facts.namespaces.iter().any(|namespace| namespace.in_use() && namespace.addrs.contains(&addr))
    }

    /// Returns the namespace of the pair's other end.
    fn namespace(&self, pair: &VethPair) -> Option<&Namespace> {
        self.facts.namespaces.iter().find(|namespace| pair.nsid.is_some() && namespace.nsid == pair.nsid)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use weft_cni::hostlocal::Reservation;
    use weft_cni::record::{Caller, Record};

    use super::super::facts::CachedContainer;
    use super::*;

    const OLD: Option<Duration> = Some(Duration::from_secs(3600));
    const MIN_AGE: Duration = Duration::from_secs(600);

    fn address_file(addr: &str, container: &str) -> AddressFile {
        let reservation = Reservation {
            path: PathBuf::from("/n/cbr0").join(addr),
            addr: addr.parse().unwrap(),
            container: container.to_owned(),
            ifname: Some("eth0".to_owned()),
        };
        AddressFile { network: "cbr0".to_owned(), reservation, age: OLD }
    }

    fn record_file(container: &str) -> RecordFile {
        let conf = serde_json::json!({"name": "cbr0", "type": "bridge"});
        let caller = Some(Caller { ifname: "eth0".to_owned(), ..Caller::default() });
        let path = PathBuf::from("/r").join(container);
        let conf = conf.as_object().cloned();
        RecordFile { record: Record { path, container: container.to_owned(), caller, conf }, age: OLD }
    }

    /// The facts about one deleted pod with everything that it can leave behind: a record, a veth pair, an address, and a namespace
    /// without processes.
    fn deleted_pod() -> Facts {
        let namespace = Namespace {
            name: Some(PathBuf::from("/run/netns/x")),
            addrs: BTreeSet::from(["10.5.1.2".parse().unwrap()]),
            nsid: Some(4),
            ..Namespace::default()
        };
        Facts {
            addresses: vec![address_file("10.5.1.2", "c1")],
            records: vec![record_file("c1")],
            veth_pairs: vec![VethPair {
                name: "vethx".to_owned(),
                index: 9,
                container: Some("c1".to_owned()),
                nsid: Some(4),
            }],
            namespaces: vec![namespace],
            ..Facts::default()
        }
    }

    fn certainties(facts: &Facts) -> Vec<Certainty> {
        findings(facts, MIN_AGE).into_iter().map(|finding| finding.certainty).collect()
    }

    #[test]
    fn everything_of_a_deleted_pod_leaks() {
        let findings = findings(&deleted_pod(), MIN_AGE);
        let what: Vec<_> = findings.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(what, ["record /r/c1", "veth pair vethx of container c1", "address 10.5.1.2 of cbr0, container c1"]);
        assert!(findings.iter().all(|finding| finding.certainty == Certainty::Leak), "{findings:#?}");
        assert_eq!(findings[1].why, "no process runs at its other end (/run/netns/x); 60 min old");
    }

    #[test]
    fn nothing_of_a_running_pod_is_listed() {
        for change in [
            |namespace: &mut Namespace| namespace.has_processes = true,
            |namespace: &mut Namespace| namespace.cached = true,
        ] {
            let mut facts = deleted_pod();
            change(&mut facts.namespaces[0]);
            assert_eq!(certainties(&facts), []);
        }
        let mut facts = deleted_pod();
        (facts.namespaces, facts.veth_pairs) = (Vec::new(), Vec::new());
        facts.cached = vec![CachedContainer { container: "c1".to_owned(), has_processes: true }];
        assert_eq!(certainties(&facts), [], "a sandbox that hides its address from the kernel");
    }

    /// A pod may have given up its address.
    #[test]
    fn the_record_of_a_pod_is_not_listed_while_its_veth_pair_leads_to_a_namespace_in_use() {
        let mut facts = deleted_pod();
        facts.namespaces[0].addrs.clear();
        facts.namespaces[0].has_processes = true;
        let what: Vec<String> = findings(&facts, MIN_AGE).into_iter().map(|finding| finding.what).collect();
        assert_eq!(what, ["address 10.5.1.2 of cbr0, container c1"]);
    }

    #[test]
    fn the_interface_of_a_record_is_that_of_its_caller_or_else_that_of_its_address() {
        let ifname = |facts: &Facts| match findings(facts, MIN_AGE).remove(0).leak {
            Leak::Record { ifname, .. } => ifname,
            other => panic!("{other:?} comes before the record"),
        };
        let mut facts = deleted_pod();
        facts.addresses[0].reservation.ifname = Some("net1".to_owned());
        assert_eq!(ifname(&facts), "eth0", "the caller has named it");
        facts.records[0].record.caller = None;
        assert_eq!(ifname(&facts), "net1");
        facts.addresses[0].reservation.ifname = None;
        assert_eq!(ifname(&facts), "eth0", "the usual name");
    }

    #[test]
    fn what_may_belong_to_a_running_pod_is_in_doubt() {
        type Change = fn(&mut Facts);
        let rows: [(&str, Change); 5] = [
            ("cached", |facts| {
                facts.cached = vec![CachedContainer { container: "c1".to_owned(), has_processes: false }]
            }),
            ("a process", |facts| {
                facts.process_texts = vec!["0::/kubepods/pod1/cri-containerd-c1.scope\n/pause".to_owned()]
            }),
            ("unreadable", |facts| facts.unreadable = vec!["processes".to_owned()]),
            ("young", |facts| {
                facts.addresses[0].age = Some(Duration::from_secs(599));
                facts.records[0].age = Some(Duration::from_secs(599));
            }),
            ("no age", |facts| {
                facts.addresses[0].age = None;
                facts.records[0].age = None;
            }),
        ];
        for (name, change) in rows {
            let mut facts = deleted_pod();
            change(&mut facts);
            assert_eq!(certainties(&facts), [Certainty::Doubt; 3], "{name}");
        }
        let mut facts = deleted_pod();
        facts.records[0].record.conf = None;
        assert_eq!(certainties(&facts), [Certainty::Doubt, Certainty::Leak, Certainty::Leak], "an unreadable record");
        let mut facts = deleted_pod();
        (facts.addresses, facts.veth_pairs[0].container) = (Vec::new(), None);
        assert_eq!(certainties(&facts), [Certainty::Leak, Certainty::Doubt], "a pair whose container is unknown");
        facts.namespaces[0].has_processes = true;
        assert_eq!(certainties(&facts), [Certainty::Leak], "a pair in use");
        let mut facts = deleted_pod();
        facts.addresses.push(AddressFile { age: None, ..address_file("10.5.1.3", "c1") });
        let wanted = [Certainty::Leak, Certainty::Doubt, Certainty::Leak, Certainty::Doubt];
        assert_eq!(
            certainties(&facts),
            wanted,
            "the age of one of two addresses is unknown, and so is that of the pair"
        );
        // Neither end of this pair is in another namespace. A namespace that is connected to nothing has no id, either.
        let mut facts = deleted_pod();
        facts.veth_pairs[0].nsid = None;
        facts.namespaces.push(Namespace { has_processes: true, ..Namespace::default() });
        assert_eq!(
            certainties(&facts),
            [Certainty::Leak, Certainty::Doubt, Certainty::Leak],
            "a pair without a namespace"
        );
        assert!(findings(&facts, MIN_AGE)[1].why.ends_with("but the namespace of its other end is unknown"));
    }
}
