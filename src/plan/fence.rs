// SPDX-License-Identifier: Apache-2.0
//! The fence: this host does not forward packets into Network that only the default route would take, nor packets to unused addresses
//! of its own subnet. The fence never applies to packets of the host itself (see `src/kernel/fence.rs`).
//!
//! A node whose address is inside Network must stay reachable, so its address is an exception. An exception opens only that address.
//! So a lease with a false address cannot open the rest of the fence.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;

use weft_backends::backend::Backend;
use weft_backends::index::Changed;
use weft_backends::state::{self, Key, State, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::lease::{Age, Id};

use super::Plan;
use crate::options::Fences;

/// Maximum number of leases with exceptions. Each of them costs at most two routes in the kernel.
const MAX_EXCEPTIONS: usize = 4096;

/// Contributor of the fence itself. No lease has an id that begins with a slash.
const FENCE: &str = "/fence";

/// The order of leases that need exceptions: the oldest lease comes first.
type Rank = (Age, Id);

/// The fences, and the exceptions from them.
#[derive(Debug, Default)]
pub(super) struct Fence {
    /// What the flags ask for.
    asked: Fences,
    /// What the backend allows of it.
    wanted: Fences,
    /// The name of the backend, if it makes no routes and `--fail-closed` is therefore left out.
    without_routes: Option<&'static str>,
    /// Leases with addresses inside Network that are exceptions. Usually there are none.
    excepted: BTreeMap<Rank, Vec<IpAddr>>,
    /// Leases with addresses inside Network that are no exceptions, because there are too many.
    waiting: BTreeMap<Rank, Vec<IpAddr>>,
    /// The age of each lease in both maps.
    ages: HashMap<Id, Age>,
}

impl Fence {
    pub(super) fn new(asked: Fences, backend: &dyn Backend) -> Fence {
        let without_routes = (asked.fail_closed && !backend.makes_routes()).then(|| backend.kind());
        let wanted = Fences { fail_closed: asked.fail_closed && without_routes.is_none(), ..asked };
        Fence { asked, wanted, without_routes, ..Fence::default() }
    }

    /// Forgets all leases. The backend may be another one than before.
    pub(super) fn clear(&mut self, backend: &dyn Backend) {
        *self = Fence::new(self.asked, backend);
    }

    /// Sets which addresses of this lease are inside Network. Without addresses the lease needs no exceptions. Returns the leases whose
    /// exceptions changed, each with its age and with the addresses that are exceptions now.
    fn set(&mut self, id: &Id, age: &Age, addresses: Vec<IpAddr>) -> BTreeMap<Id, (Age, Vec<IpAddr>)> {
        let mut changed = BTreeMap::new();
        if !self.wanted.fail_closed || (addresses.is_empty() && self.ages.is_empty()) {
            return changed;
        }
        if let Some(before) = self.ages.remove(id) {
            let rank = (before.clone(), id.clone());
            self.waiting.remove(&rank);
            if self.excepted.remove(&rank).is_some() {
                changed.insert(id.clone(), (before, Vec::new()));
            }
        }
        if !addresses.is_empty() {
            self.ages.insert(id.clone(), age.clone());
            self.waiting.insert((age.clone(), id.clone()), addresses);
        }
        while self.is_exception_due()
            && let Some((rank, addresses)) = self.waiting.pop_first()
        {
            let (age, id) = rank.clone();
            changed.insert(id, (age, addresses.clone()));
            self.excepted.insert(rank, addresses);
            if self.excepted.len() > MAX_EXCEPTIONS
                && let Some((rank, addresses)) = self.excepted.pop_last()
            {
                let (age, id) = rank.clone();
                changed.insert(id, (age, Vec::new()));
                self.waiting.insert(rank, addresses);
            }
        }
        changed
    }

    /// Returns true if the oldest of the leases that wait must get its exceptions: there is room for it, or a younger lease has some.
    fn is_exception_due(&self) -> bool {
        let Some((first, _)) = self.waiting.first_key_value() else { return false };
        self.excepted.len() < MAX_EXCEPTIONS || self.excepted.last_key_value().is_some_and(|(last, _)| first < last)
    }

    fn state(&self, networks: &Subnets, own: &Subnets) -> State {
        let mut state = State::new();
        for family in Family::BOTH {
            // A fence around a prefix of length 0 would have no effect, because every route leads into that prefix.
            let fenced = |wanted: bool, net: Option<ipnet::IpNet>| net.filter(|net| wanted && net.prefix_len() > 0);
            let unreachable = fenced(self.wanted.fail_closed, networks.of(family));
            let blackhole = fenced(self.wanted.blackhole, own.of(family));
            if unreachable.is_some() || blackhole.is_some() {
                let fence = state::Fence { unreachable, blackhole, whole: true };
                state.insert(Key::Fence(family), Value::fence(fence));
            }
        }
        state
    }

    /// Says why `--fail-closed` is left out, if it is.
    pub(super) fn left_out(&self) -> Option<String> {
        let kind = self.without_routes?;
        Some(format!(
            "--fail-closed is left out: the backend {kind} makes no routes, so packets to other nodes' pods may need the default route, \
              which --fail-closed does not let them take; --fail-closed=false says the same without this message"
        ))
    }

    /// Describes which exceptions are missing.
    pub(super) fn problem(&self) -> Option<String> {
        let ip = self.waiting.values().flatten().next()?;
        Some(format!(
            "--fail-closed: {} nodes have addresses inside Network; pods reach only the {MAX_EXCEPTIONS} with the oldest leases, \
             and not {ip}, unless a route leads there; give pods a Network of their own",
            self.ages.len()
        ))
    }
}

impl Plan {
    /// Adds these fences. This must be called after [`Plan::with_earlier`] and before the first [`Plan::put`].
    pub fn with_fences(mut self, fences: Fences) -> Plan {
        self.fence = Fence::new(fences, self.extra_backends.without_routes_or(&*self.backend));
        if let Some(left_out) = self.fence.left_out() {
            tracing::warn!("{left_out}");
        }
        self.plan_fence();
        self
    }

    /// Plans the exceptions of a lease that came or changed. `None` says that the lease is gone.
    pub(super) fn plan_fence_exceptions(&mut self, id: &Id, age: &Age, attrs: Option<&Attrs>) -> Vec<Changed> {
        let networks = &self.net_conf.networks;
        let within = |ip: &IpAddr| networks.iter().any(|network| network.contains(ip));
        let inside = attrs.into_iter().flat_map(Attrs::published).filter(within).collect();
        let mut changed = Vec::new();
        for (id, (age, addresses)) in self.fence.set(id, age, inside) {
            let state = addresses.into_iter().map(|ip| (Key::Open(ip), Value::Open)).collect();
            changed.extend(self.index.set(&contributor(&id), &age, state));
        }
        changed
    }

    /// Plans the fence itself, after Network or our own subnet changed.
    pub(super) fn plan_fence(&mut self) {
        let state = self.fence.state(&self.net_conf.networks, &self.own.subnets);
        self.index.set(&Id::from(FENCE), &Age::default(), state);
    }

    /// Returns the keys of the fence and of its exceptions.
    pub fn fence_keys(&self) -> Vec<Key> {
        let leases = self.fence.excepted.keys().map(|(_, id)| contributor(id));
        std::iter::once(Id::from(FENCE)).chain(leases).flat_map(|id| self.index.keys(&id)).collect()
    }

    /// Describes the fence. Returns `None` if the flags ask for none.
    pub fn fence_text(&self) -> Option<FenceText> {
        let state = self.fence.state(&self.net_conf.networks, &self.own.subnets);
        let fences: Vec<String> = state.iter().map(|(_, value)| value.to_string()).collect();
        (!fences.is_empty()).then_some(FenceText { fences, nodes: self.fence.excepted.len() })
    }
}

/// Returns the contributor of the exceptions of a lease.
fn contributor(id: &Id) -> Id {
    format!("/open/{id}").into()
}

/// Describes the fence in words.
#[derive(Debug)]
pub struct FenceText {
    fences: Vec<String>,
    nodes: usize,
}

impl fmt::Display for FenceText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "forwarded packets without a route of their own: {}", self.fences.join(", "))?;
        match self.nodes {
            0 => Ok(()),
            nodes => write!(f, "; {nodes} nodes inside Network are exceptions"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend() -> Box<dyn Backend> {
        let conf = r#"{"Network":"10.0.0.0/8","Backend":{"Type":"vxlan"}}"#;
        weft_backends::register::make(&weft_subnet::net_conf::NetConf::parse(conf).unwrap()).unwrap()
    }

    fn closed() -> Fence {
        Fence::new(Fences { fail_closed: true, blackhole: false }, &*backend())
    }

    fn age(stamp: u64) -> Age {
        Age { stamp, tie: "".into() }
    }

    fn ip(number: u32) -> IpAddr {
        IpAddr::V4((0x0a00_0000 + number).into())
    }

    /// The exceptions that the index would contain.
    #[derive(Default)]
    struct Model(BTreeMap<Id, Vec<IpAddr>>);

    impl Model {
        fn set(&mut self, fence: &mut Fence, id: u32, stamp: u64, there: bool) {
            let addresses = if there { vec![ip(id)] } else { Vec::new() };
            for (id, (_, addresses)) in fence.set(&id.to_string().into(), &age(stamp), addresses) {
                if addresses.is_empty() {
                    assert!(self.0.remove(&id).is_some(), "lease {id} had no exceptions");
                } else {
                    self.0.insert(id, addresses);
                }
            }
        }

        /// Returns the addresses that are exceptions, sorted.
        fn addresses(&self) -> Vec<IpAddr> {
            let mut all: Vec<IpAddr> = self.0.values().flatten().copied().collect();
            all.sort();
            all
        }
    }

    #[test]
    fn the_fence_covers_both_families_and_both_flags() {
        let networks = Subnets { v4: "10.0.0.0/8".parse().ok(), v6: "fd00::/48".parse().ok() };
        let own = Subnets { v4: "10.1.2.0/24".parse().ok(), v6: "fd00:0:0:1::/64".parse().ok() };
        let text = |fail_closed, blackhole| {
            let state = Fence::new(Fences { fail_closed, blackhole }, &*backend()).state(&networks, &own);
            state.iter().map(|(_, value)| value.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(text(false, false), [""; 0]);
        // Each route leads into such a prefix, so the fence would do nothing.
        let all = Subnets { v4: "0.0.0.0/0".parse().ok(), v6: None };
        assert_eq!(closed().state(&all, &own), State::new());
        assert_eq!(text(true, false), ["unreachable 10.0.0.0/8", "unreachable fd00::/48"]);
        assert_eq!(text(false, true), ["blackhole 10.1.2.0/24", "blackhole fd00:0:0:1::/64"]);
        assert_eq!(
            text(true, true),
            ["unreachable 10.0.0.0/8, blackhole 10.1.2.0/24", "unreachable fd00::/48, blackhole fd00:0:0:1::/64"]
        );
    }

    #[test]
    fn the_oldest_leases_have_the_exceptions_in_every_order_of_arrival() {
        let many = MAX_EXCEPTIONS as u32 + 100;
        // The orders are ascending, descending and mixed.
        for order in [|n: u32, _| n, |n, many| many - 1 - n, |n: u32, many| n * 4099 % many] {
            let (mut fence, mut model) = (closed(), Model::default());
            (0..many).map(|n| order(n, many)).for_each(|n| model.set(&mut fence, n, n.into(), true));
            assert_eq!(model.addresses(), (0..MAX_EXCEPTIONS as u32).map(ip).collect::<Vec<_>>());
            assert!(fence.problem().unwrap().starts_with("--fail-closed: 4196 nodes have addresses inside Network"));
            // If a lease goes, the next one gets its exceptions. A lease that changes keeps its own.
            model.set(&mut fence, 7, 7, false);
            let next = MAX_EXCEPTIONS as u32;
            let wanted: Vec<IpAddr> = (0..=next).filter(|n| *n != 7).map(ip).collect();
            assert_eq!(model.addresses(), wanted);
            model.set(&mut fence, 8, 8, true);
            assert_eq!(model.addresses(), wanted);
            (0..many).for_each(|n| model.set(&mut fence, n, n.into(), false));
            assert_eq!((model.addresses(), fence.problem(), fence.ages.len()), (Vec::new(), None, 0));
        }
    }

    /// After a restore of the store, a lease may be older or younger than before.
    #[test]
    fn the_oldest_leases_have_the_exceptions_after_an_age_changed_too() {
        let (mut fence, mut model) = (closed(), Model::default());
        let most = MAX_EXCEPTIONS as u32;
        for stamp in [5, 3, 7] {
            model.set(&mut fence, 0, stamp, true);
            assert_eq!(model.addresses(), [ip(0)], "age {stamp}");
        }
        (0..most + 2).for_each(|n| model.set(&mut fence, n, n.into(), true));
        assert_eq!(model.addresses(), (0..most).map(ip).collect::<Vec<_>>());
        model.set(&mut fence, 0, u64::from(most) + 2, true);
        assert_eq!(model.addresses(), (1..=most).map(ip).collect::<Vec<_>>(), "it is the youngest now");
        model.set(&mut fence, 0, 0, true);
        assert_eq!(model.addresses(), (0..most).map(ip).collect::<Vec<_>>());
    }

    #[test]
    fn without_fail_closed_there_are_no_exceptions() {
        let mut fence = Fence::new(Fences { fail_closed: false, blackhole: true }, &*backend());
        assert_eq!(fence.set(&"a".into(), &age(1), vec![ip(1)]), BTreeMap::new());
    }
}
