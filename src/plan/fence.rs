// SPDX-License-Identifier: Apache-2.0
//! What this host does not forward: packets into Network that only the default route would take, and packets to unused addresses of our
//! own subnet. The host's own packets are never concerned (`src/kernel/fence.rs` says how).
//!
//! A node whose address lies inside Network stays reachable: its address is an exception. An exception opens that one address and
//! nothing else, so a lease that lies about its address cannot take the fence down.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::IpAddr;

use weft_backends::index::Changed;
use weft_backends::state::{self, Key, State, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::lease::{Age, Id};

use super::Plan;
use crate::options::Fences;
use crate::pass::Pendings;

/// Leases that may bring exceptions. Every one costs two routes in the kernel at most.
const MOST_OPEN: usize = 4096;

/// Contributes the fence itself. The slash keeps it apart from every id of a store.
const FENCE: &str = "/fence";

/// Whose place it is among those who want an exception: the oldest lease comes first.
type Place = (Age, Id);

/// The fences, and the exceptions from them.
#[derive(Debug, Default)]
pub(super) struct Fence {
    wanted: Fences,
    /// Leases with addresses inside Network whose addresses are exceptions; usually none.
    open: BTreeMap<Place, Vec<IpAddr>>,
    /// Those for whom there is no room.
    waiting: BTreeMap<Place, Vec<IpAddr>>,
    /// The age of each of them.
    ages: HashMap<Id, Age>,
}

/// The exceptions that a lease now brings, to be given to the index.
type Exceptions = (Place, Vec<IpAddr>);

impl Fence {
    pub(super) fn new(wanted: Fences) -> Fence {
        Fence { wanted, ..Fence::default() }
    }

    pub(super) fn forget_all(&mut self) {
        *self = Fence::new(self.wanted);
    }

    /// Takes down where a node is (nowhere: it is gone). Returns the leases whose exceptions are others now.
    fn see(&mut self, id: &Id, age: &Age, addresses: Vec<IpAddr>) -> Vec<Exceptions> {
        if !self.wanted.fail_closed || (addresses.is_empty() && self.ages.is_empty()) {
            return Vec::new();
        }
        let mut changed = Vec::new();
        if let Some(before) = self.ages.remove(id) {
            let place = (before, id.clone());
            let was_open = self.open.remove(&place).is_some();
            self.waiting.remove(&place);
            if was_open {
                changed.push((place, Vec::new()));
            }
        }
        if !addresses.is_empty() {
            self.ages.insert(id.clone(), age.clone());
            let place = (age.clone(), id.clone());
            changed.retain(|(before, _)| *before != place);
            changed.push((place.clone(), addresses.clone()));
            self.open.insert(place, addresses);
        }
        if self.open.len() > MOST_OPEN
            && let Some((place, addresses)) = self.open.pop_last()
        {
            self.waiting.insert(place.clone(), addresses);
            changed.retain(|(before, _)| *before != place);
            changed.push((place, Vec::new()));
        }
        // Nobody who waits is older than the youngest that is let in.
        while self.open.len() < MOST_OPEN
            && let Some((place, addresses)) = self.waiting.pop_first()
        {
            self.open.insert(place.clone(), addresses.clone());
            changed.push((place, addresses));
        }
        changed
    }

    fn state(&self, networks: &Subnets, own: &Subnets) -> State {
        let mut state = State::new();
        for family in [Family::V4, Family::V6] {
            // A prefix of no length at all is no fence: every route would be a route into it.
            let some = |wanted: bool, net: Option<ipnet::IpNet>| net.filter(|net| wanted && net.prefix_len() > 0);
            let unreachable = some(self.wanted.fail_closed, networks.of(family));
            let blackhole = some(self.wanted.blackhole, own.of(family));
            if unreachable.is_some() || blackhole.is_some() {
                let fence = state::Fence { unreachable, blackhole, whole: true };
                state.insert(Key::Fence(family), Value::fence(fence));
            }
        }
        state
    }

    /// What is left out, for people.
    pub(super) fn problem(&self) -> Option<String> {
        let ip = self.waiting.values().flatten().next()?;
        Some(format!(
            "--fail-closed: {} nodes have addresses inside Network; pods reach only the {MOST_OPEN} with the oldest leases, \
             and not {ip}, unless a route leads there; give pods a Network of their own",
            self.ages.len()
        ))
    }
}

/// What the kernel has not of the fence, for people.
pub fn trouble(pending: &Pendings) -> Option<String> {
    let of_fence = |key: &Key| matches!(key, Key::Fence(_) | Key::Open(_));
    let (key, entry) = pending.iter().find(|(key, _)| of_fence(key))?;
    Some(format!("--fail-closed, --ip-blackhole-route: {key}: {}", entry.reason))
}

impl Plan {
    /// A peer came, moved or went (`None`): where it is inside Network, forwarded packets reach it all the same.
    pub(super) fn mind_fence(&mut self, id: &Id, age: &Age, attrs: Option<&Attrs>) -> Vec<Changed> {
        let addresses = attrs.map(|attrs| [attrs.public_ip.map(IpAddr::V4), attrs.public_ipv6.map(IpAddr::V6)]);
        let networks = &self.network.networks;
        let within = |ip: &IpAddr| networks.iter().any(|network| network.contains(ip));
        let inside = addresses.into_iter().flatten().flatten().filter(within).collect();
        let mut changed = Vec::new();
        for ((age, id), addresses) in self.fence.see(id, age, inside) {
            let state = addresses.into_iter().map(|ip| (Key::Open(ip), Value::Open)).collect();
            changed.extend(self.index.set(&contributor(&id), &age, state));
        }
        changed
    }

    /// The fence itself, after Network or our own subnet changed.
    pub(super) fn plan_fence(&mut self) {
        let state = self.fence.state(&self.network.networks, &self.own.subnets);
        self.index.set(&Id::from(FENCE), &Age::default(), state);
    }

    /// What is wanted of the fence.
    pub fn fence_keys(&self) -> Vec<Key> {
        let leases = self.fence.open.keys().map(|(_, id)| contributor(id));
        std::iter::once(Id::from(FENCE)).chain(leases).flat_map(|id| self.index.keys(&id)).collect()
    }

    /// The fence, for people; `None` = not asked for.
    pub fn fence_text(&self) -> Option<FenceText> {
        let state = self.fence.state(&self.network.networks, &self.own.subnets);
        let fences: Vec<String> = state.iter().map(|(_, value)| value.to_string()).collect();
        (!fences.is_empty()).then_some(FenceText { fences, nodes: self.fence.open.len() })
    }
}

/// Contributes the exceptions of a lease.
fn contributor(id: &Id) -> Id {
    format!("/open/{id}").into()
}

/// The fence in words.
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

    fn closed() -> Fence {
        Fence::new(Fences { fail_closed: true, blackhole: false })
    }

    fn age(stamp: u64) -> Age {
        Age { stamp, tie: "".into() }
    }

    fn ip(number: u32) -> IpAddr {
        IpAddr::V4((0x0a00_0000 + number).into())
    }

    /// A model that does as it is told: what the index would hold.
    #[derive(Default)]
    struct Model(BTreeMap<Id, Vec<IpAddr>>);

    impl Model {
        fn see(&mut self, fence: &mut Fence, id: u32, stamp: u64, there: bool) {
            let addresses = if there { vec![ip(id)] } else { Vec::new() };
            for ((_, id), addresses) in fence.see(&id.to_string().into(), &age(stamp), addresses) {
                if addresses.is_empty() {
                    assert!(self.0.remove(&id).is_some() || there, "{id} had none");
                } else {
                    self.0.insert(id, addresses);
                }
            }
        }
    }

    #[test]
    fn both_families_and_both_kinds_are_fenced() {
        let networks = Subnets { v4: "10.0.0.0/8".parse().ok(), v6: "fd00::/48".parse().ok() };
        let own = Subnets { v4: "10.1.2.0/24".parse().ok(), v6: "fd00:0:0:1::/64".parse().ok() };
        let text = |fail_closed, blackhole| {
            let state = Fence::new(Fences { fail_closed, blackhole }).state(&networks, &own);
            state.iter().map(|(_, value)| value.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(text(false, false), [""; 0]);
        assert_eq!(text(true, false), ["unreachable 10.0.0.0/8", "unreachable fd00::/48"]);
        assert_eq!(text(false, true), ["blackhole 10.1.2.0/24", "blackhole fd00:0:0:1::/64"]);
        assert_eq!(
            text(true, true),
            ["unreachable 10.0.0.0/8, blackhole 10.1.2.0/24", "unreachable fd00::/48, blackhole fd00:0:0:1::/64"]
        );
    }

    #[test]
    fn the_oldest_leases_have_the_exceptions_in_whatever_order_they_come() {
        let many = MOST_OPEN as u32 + 100;
        // Every order: upwards, downwards, and one that jumps about.
        for order in [|n: u32, _| n, |n, many| many - 1 - n, |n: u32, many| n * 4099 % many] {
            let (mut fence, mut model) = (closed(), Model::default());
            (0..many).map(|n| order(n, many)).for_each(|n| model.see(&mut fence, n, n.into(), true));
            let held = |model: &Model| {
                let mut all: Vec<IpAddr> = model.0.values().flatten().copied().collect();
                all.sort();
                all
            };
            assert_eq!(held(&model), (0..MOST_OPEN as u32).map(ip).collect::<Vec<_>>());
            assert!(fence.problem().unwrap().starts_with("--fail-closed: 4196 nodes have addresses inside Network"));
            // One that goes makes room for the next; one that moves keeps its place.
            model.see(&mut fence, 7, 7, false);
            let next = MOST_OPEN as u32;
            let wanted: Vec<IpAddr> = (0..=next).filter(|n| *n != 7).map(ip).collect();
            assert_eq!(held(&model), wanted);
            model.see(&mut fence, 8, 8, true);
            assert_eq!(held(&model), wanted);
            (0..many).for_each(|n| model.see(&mut fence, n, n.into(), false));
            assert_eq!((held(&model), fence.problem(), fence.ages.len()), (Vec::new(), None, 0));
        }
    }

    #[test]
    fn without_fail_closed_there_are_no_exceptions() {
        let mut fence = Fence::new(Fences { fail_closed: false, blackhole: true });
        assert_eq!(fence.see(&"a".into(), &age(1), vec![ip(1)]), []);
    }
}
