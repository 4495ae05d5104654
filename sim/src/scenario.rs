// SPDX-License-Identifier: Apache-2.0
//! What happens in a simulation: the cluster, and the list of events. It is made from a seed, and is written as JSON so that a shorter list
//! can be run as well.

use serde::{Deserialize, Serialize};
use weft_subnet::old_defects::Defect;

use crate::chance::Chance;
use crate::event::{self, Event};
use crate::hostile;
use crate::net_conf::{self, WantedConf};

/// An agent that knows nothing of the others for longer than this may lose packets while net-conf changes (docs/operations.md). It is shorter than
/// `--change-grace`.
const MOST_AWAY: u64 = 50;

/// An event and its time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Seconds after the simulation began.
    pub at: u64,
    /// What happens.
    pub event: Event,
}

/// Where the leases of a cluster are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreKind {
    /// In an etcd.
    #[default]
    Etcd,
    /// In the Nodes of an API server.
    Kube,
}

/// A whole simulation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "each of them is a choice of its own")]
pub struct Scenario {
    /// The seed of everything that is random and not in this list.
    pub seed: u64,
    /// Number of machines.
    pub machines: usize,
    /// The type of the backend.
    pub backend: String,
    /// The LAN of the machines is inside Network.
    pub lan_inside: bool,
    /// The time to live of leases, in seconds.
    pub lease_ttl: u64,
    /// For how many seconds events happen.
    pub seconds: u64,
    /// There are hardly more subnets than machines.
    #[serde(default)]
    pub tight: bool,
    /// The machines choose their uplink by its address (`--iface-regex`), and not by the default route.
    #[serde(default)]
    pub by_address: bool,
    /// Where the leases are.
    #[serde(default)]
    pub store: StoreKind,
    /// How many nodes besides the machines only publish a lease.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub publishers: usize,
    /// The simulation ends as soon as the cluster is at rest, and fails if it is not at its end.
    #[serde(default)]
    pub until_rest: bool,
    /// The events are such that every packet between the machines must arrive at every moment.
    #[serde(default)]
    pub lossless: bool,
    /// A defect of the past that is switched on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defect: Option<Defect>,
    /// The events, ordered by time.
    pub events: Vec<Timed>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl Scenario {
    /// Returns the simulation of this seed.
    pub fn of_seed(seed: u64) -> Scenario {
        let mut chance = Chance::new(seed, 3);
        let machines = 3 + chance.below(4);
        let backend = ["vxlan", "vxlan", "vxlan", "host-gw", "ipip"][chance.below(5)].to_owned();
        let lan_inside = chance.percent(30);
        let tight = chance.percent(30);
        // In a tight network, leases must end before the cluster is at rest. Otherwise there may be no free subnet.
        let lease_ttl = if tight { 120 } else { [120, 600, 86_400][chance.below(3)] };
        let seconds = chance.between(600, 1800);
        let count = chance.between(4, 40);
        let mut scenario = Scenario {
            seed,
            machines,
            backend,
            lan_inside,
            lease_ttl,
            seconds,
            tight,
            by_address: Chance::new(seed, 5).percent(30),
            store: if Chance::new(seed, 6).percent(40) { StoreKind::Kube } else { StoreKind::Etcd },
            publishers: 0,
            until_rest: false,
            lossless: false,
            defect: None,
            events: Vec::new(),
        };
        scenario.add_events(count, &mut chance);
        scenario.add_claims(&mut Chance::new(seed, 7));
        scenario
    }

    /// Returns a simulation of this size, with so many random events per minute.
    pub fn of_size(seed: u64, machines: usize, seconds: u64, per_minute: u64) -> Scenario {
        let (backend, lan_inside, lease_ttl) = ("vxlan".to_owned(), false, 86_400);
        let mut scenario = Scenario {
            seed,
            machines,
            backend,
            lan_inside,
            lease_ttl,
            seconds,
            tight: false,
            by_address: false,
            store: StoreKind::Etcd,
            publishers: 0,
            until_rest: false,
            lossless: false,
            defect: None,
            events: Vec::new(),
        };
        scenario.add_events(seconds / 60 * per_minute, &mut Chance::new(seed, 3));
        scenario
    }

    fn add_events(&mut self, count: u64, chance: &mut Chance) {
        for _ in 0..count {
            // The cluster has some time to begin.
            let at = chance.between(20, self.seconds.max(21));
            self.events.push(Timed { at, event: event::random(chance, self.machines, self.lan_inside) });
        }
        self.events.sort_by_key(|timed| timed.at);
    }

    /// Adds changes of net-conf, attacks and bad disks. One scenario of four has nothing but events that cost no packet.
    fn add_claims(&mut self, chance: &mut Chance) {
        self.lossless = chance.percent(25);
        let more = if self.lossless { 2 } else { 0 };
        let [edits, mistakes, attacks, disks] = [5, 2, 4, 4].map(|most| chance.below(most + more));
        let events = (0..edits + mistakes + attacks + disks).map(|number| {
            let at = chance.between(30, self.seconds);
            let event = if number < edits {
                Event::NetConf(net_conf::random_edit(chance))
            } else if number < edits + mistakes {
                Event::BadNetConf(net_conf::random_bad(chance), chance.between(5, 200))
            } else if number < edits + mistakes + disks {
                event::random_disk(chance, self.machines)
            } else {
                Event::Hostile(hostile::random(chance), chance.below(self.machines), chance.between(5, 400))
            };
            Timed { at, event }
        });
        let events: Vec<Timed> = events.collect();
        self.events.extend(events);
        if self.lossless {
            // No lease may end while its agent is away.
            (self.lease_ttl, self.tight) = (86_400, false);
            let oldest_wins = self.store == StoreKind::Kube;
            self.events.retain(|timed| timed.event.is_lossless(oldest_wins));
            self.events.iter_mut().for_each(|timed| timed.event.shorten(MOST_AWAY));
        }
        self.events.sort_by_key(|timed| timed.at);
    }

    /// Returns net-conf at the beginning.
    pub fn net_conf(&self) -> WantedConf {
        // In a tight network, 10.1.0.0 to 10.1.N.0 for N machines.
        let third = u8::try_from(self.machines).unwrap_or(250).min(250);
        let last = if self.tight { [10, 1, third, 0] } else { [10, 63, 255, 0] };
        WantedConf { backend: self.backend.clone(), vni: 1, wide: false, last: last.into(), bad: None }
    }
}
