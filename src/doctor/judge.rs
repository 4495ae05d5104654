// SPDX-License-Identifier: Apache-2.0
//! What leaks, what is in doubt, what lives: a pure function over the facts.
//!
//! A leak is sure when all of these hold: everything could be seen; nothing that is alive has the address, or is at the other
//! end of the pair; no process bears the container's id, and the runtime's cache names no namespace of it that is there
//! (sandboxes that take the address away from the kernel, gVisor's for one, are known by that alone); the file is not young.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use super::Leak;
use super::look::{Facts, Pair, Reserved, Written};
use super::spaces::Space;

/// How sure it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `--fix` clears it.
    Leak,
    /// It looks like a leak, but might live.
    Doubt,
}

/// One thing that is not plainly alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is, for people.
    pub what: String,
    /// How sure.
    pub verdict: Verdict,
    /// For people.
    pub why: String,
    /// What there is to clear.
    pub leak: Leak,
}

/// Judges everything; records first, because clearing them clears most of the rest.
pub fn judge(facts: &Facts, young: Duration) -> Vec<Finding> {
    let judge = Judge { facts, young };
    let records = facts.written.iter().filter_map(|written| judge.record(written));
    let pairs = facts.pairs.iter().filter_map(|pair| judge.pair(pair));
    let addresses = facts.reserved.iter().filter_map(|reserved| judge.address(reserved));
    records.chain(pairs).chain(addresses).collect()
}

struct Judge<'a> {
    facts: &'a Facts,
    young: Duration,
}

impl Judge<'_> {
    fn address(&self, reserved: &Reserved) -> Option<Finding> {
        let (addr, container) = (reserved.reservation.addr, &reserved.reservation.container);
        if self.lives_at(addr) || self.runs(container) {
            return None;
        }
        let (verdict, why) = self.of(container, reserved.age, "no running pod uses it");
        let of = if container.is_empty() { "nobody".to_owned() } else { format!("container {container}") };
        let leak = Leak::Address { path: reserved.reservation.path.clone(), container: container.clone() };
        Some(Finding { what: format!("address {addr} of {}, {of}", reserved.network), verdict, why, leak })
    }

    fn record(&self, written: &Written) -> Option<Finding> {
        let record = &written.record;
        let container = &record.container;
        let ours = |reserved: &&Reserved| reserved.reservation.container == *container;
        let held: Vec<&Reserved> = self.facts.reserved.iter().filter(ours).collect();
        let wired = |pair: &&Pair| pair.container.as_ref() == Some(container) && self.space(pair).is_some_and(alive);
        if self.runs(container)
            || held.iter().any(|held| self.lives_at(held.reservation.addr))
            || self.facts.pairs.iter().any(|pair| wired(&pair))
        {
            return None;
        }
        let (mut verdict, mut why) = self.of(container, written.age, "no running pod uses anything of it");
        let path = record.path.clone();
        if record.conf.is_none() || record.network().is_empty() {
            (verdict, why) = (Verdict::Doubt, format!("it cannot be read; {why}"));
        }
        // The file of flannel's plugin does not say the interface; host-local does.
        let named = record.caller.as_ref().map(|caller| caller.ifname.clone());
        let ifname = named.or_else(|| held.iter().find_map(|held| held.reservation.ifname.clone()));
        let leak = Leak::Record {
            path: path.clone(),
            network: record.network().to_owned(),
            container: container.clone(),
            ifname: ifname.unwrap_or_else(|| "eth0".to_owned()),
        };
        Some(Finding { what: format!("record {}", path.display()), verdict, why, leak })
    }

    fn pair(&self, pair: &Pair) -> Option<Finding> {
        let space = self.space(pair);
        if space.is_some_and(alive) {
            return None;
        }
        let addrs: BTreeSet<IpAddr> = space.map(|space| space.addrs.clone()).unwrap_or_default();
        let of_pod = |reserved: &&Reserved| {
            addrs.contains(&reserved.reservation.addr)
                || pair.container.as_ref() == Some(&reserved.reservation.container)
        };
        let held: Vec<&Reserved> = self.facts.reserved.iter().filter(of_pod).collect();
        let container = pair.container.clone().or_else(|| Some(held.first()?.reservation.container.clone()));
        let age = held.iter().filter_map(|held| held.age).min().filter(|_| held.iter().all(|held| held.age.is_some()));
        let name = space
            .and_then(|space| space.name.as_ref())
            .map(|path| format!(" ({})", path.display()))
            .unwrap_or_default();
        let text = format!("nothing runs at its other end{name}");
        let (verdict, why) = match (&container, space) {
            (Some(container), Some(_)) => self.of(container, age, &text),
            _ => (Verdict::Doubt, format!("{text}, and its owner is unknown")),
        };
        let of = container.map(|container| format!(" of container {container}")).unwrap_or_default();
        let leak = Leak::Pair { name: pair.name.clone(), index: pair.index };
        Some(Finding { what: format!("veth pair {}{of}", pair.name), verdict, why, leak })
    }

    /// Is there a reason to believe that the container lives, or that we cannot know?
    fn of(&self, container: &str, age: Option<Duration>, text: &str) -> (Verdict, String) {
        let doubt = |why: &str| (Verdict::Doubt, format!("{text}, but {why}"));
        if !self.facts.blind.is_empty() {
            return doubt("not everything can be seen");
        }
        if self.facts.cached.iter().any(|cached| cached.container == container) {
            return doubt("the runtime's cache has the container, and its network namespace is there");
        }
        if !container.is_empty() && self.facts.words.iter().any(|words| words.contains(container)) {
            return doubt("a process with the container's id is running");
        }
        match age {
            None => doubt("its age is unknown"),
            Some(age) if age < self.young => doubt(&format!("it is only {} s old", age.as_secs())),
            Some(age) => (Verdict::Leak, format!("{text}; {} min old", age.as_secs() / 60)),
        }
    }

    /// The runtime speaks of the container, and something runs in its namespace.
    fn runs(&self, container: &str) -> bool {
        self.facts.cached.iter().any(|cached| cached.runs && cached.container == container)
    }

    fn lives_at(&self, addr: IpAddr) -> bool {
        self.facts.spaces.iter().any(|space| alive(space) && space.addrs.contains(&addr))
    }

    fn space(&self, pair: &Pair) -> Option<&Space> {
        self.facts.spaces.iter().find(|space| pair.number.is_some() && space.number == pair.number)
    }
}

/// The runtime makes a namespace before its first process, and speaks of it until it has called DEL.
fn alive(space: &Space) -> bool {
    space.runs || space.cached
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use weft_cni::hostlocal::Reservation;
    use weft_cni::record::{Caller, Record};

    use super::super::look::Cached;
    use super::*;

    const OLD: Option<Duration> = Some(Duration::from_secs(3600));
    const YOUNG: Duration = Duration::from_secs(600);

    fn reserved(addr: &str, container: &str) -> Reserved {
        let reservation = Reservation {
            path: PathBuf::from("/n/cbr0").join(addr),
            addr: addr.parse().unwrap(),
            container: container.to_owned(),
            ifname: Some("eth0".to_owned()),
        };
        Reserved { network: "cbr0".to_owned(), reservation, age: OLD }
    }

    fn written(container: &str) -> Written {
        let conf = serde_json::json!({"name": "cbr0", "type": "bridge"});
        let caller = Some(Caller { ifname: "eth0".to_owned(), ..Caller::default() });
        let path = PathBuf::from("/r").join(container);
        let conf = conf.as_object().cloned();
        Written { record: Record { path, container: container.to_owned(), caller, conf }, age: OLD }
    }

    /// One pod that is gone, with everything that it could leave: record, pair, address, and a namespace without processes.
    fn gone() -> Facts {
        let space = Space {
            name: Some(PathBuf::from("/run/netns/x")),
            addrs: BTreeSet::from(["10.5.1.2".parse().unwrap()]),
            number: Some(4),
            ..Space::default()
        };
        Facts {
            reserved: vec![reserved("10.5.1.2", "c1")],
            written: vec![written("c1")],
            pairs: vec![Pair { name: "vethx".to_owned(), index: 9, container: Some("c1".to_owned()), number: Some(4) }],
            spaces: vec![space],
            ..Facts::default()
        }
    }

    fn verdicts(facts: &Facts) -> Vec<Verdict> {
        judge(facts, YOUNG).into_iter().map(|finding| finding.verdict).collect()
    }

    #[test]
    fn everything_of_a_pod_that_is_gone_leaks() {
        let findings = judge(&gone(), YOUNG);
        let what: Vec<_> = findings.iter().map(|finding| finding.what.as_str()).collect();
        assert_eq!(what, ["record /r/c1", "veth pair vethx of container c1", "address 10.5.1.2 of cbr0, container c1"]);
        assert!(findings.iter().all(|finding| finding.verdict == Verdict::Leak), "{findings:#?}");
        assert_eq!(findings[1].why, "nothing runs at its other end (/run/netns/x); 60 min old");
    }

    #[test]
    fn what_lives_is_not_mentioned() {
        for change in [|space: &mut Space| space.runs = true, |space: &mut Space| space.cached = true] {
            let mut facts = gone();
            change(&mut facts.spaces[0]);
            assert_eq!(verdicts(&facts), []);
        }
        let mut facts = gone();
        (facts.spaces, facts.pairs) = (Vec::new(), Vec::new());
        facts.cached = vec![Cached { container: "c1".to_owned(), runs: true }];
        assert_eq!(verdicts(&facts), [], "a sandbox that keeps the address to itself");
    }

    #[test]
    fn what_might_live_is_only_listed() {
        type Change = fn(&mut Facts);
        let rows: [(&str, Change); 5] = [
            ("cached", |facts| facts.cached = vec![Cached { container: "c1".to_owned(), runs: false }]),
            ("a process", |facts| facts.words = vec!["0::/kubepods/pod1/cri-containerd-c1.scope\n/pause".to_owned()]),
            ("blind", |facts| facts.blind = vec!["processes".to_owned()]),
            ("young", |facts| {
                facts.reserved[0].age = Some(Duration::from_secs(599));
                facts.written[0].age = Some(Duration::from_secs(599));
            }),
            ("no age", |facts| {
                facts.reserved[0].age = None;
                facts.written[0].age = None;
            }),
        ];
        for (name, change) in rows {
            let mut facts = gone();
            change(&mut facts);
            assert_eq!(verdicts(&facts), [Verdict::Doubt; 3], "{name}");
        }
        let mut facts = gone();
        facts.written[0].record.conf = None;
        assert_eq!(verdicts(&facts), [Verdict::Doubt, Verdict::Leak, Verdict::Leak], "an unreadable record");
        let mut facts = gone();
        (facts.reserved, facts.pairs[0].container) = (Vec::new(), None);
        assert_eq!(verdicts(&facts), [Verdict::Leak, Verdict::Doubt], "a pair of nobody");
        facts.spaces[0].runs = true;
        assert_eq!(verdicts(&facts), [Verdict::Leak], "a pair that lives");
    }
}
