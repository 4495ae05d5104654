// SPDX-License-Identifier: Apache-2.0
//! What happens in a simulation: the cluster, and the list of events. It is made from a seed, and is written as JSON so that a shorter list
//! can be run as well.

use serde::{Deserialize, Serialize};
use weft_subnet::old_defects::Defect;

use crate::chance::Chance;
use crate::event::{self, Event};

/// An event and its time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timed {
    /// Seconds after the begin.
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
    /// A defect of the past that is switched on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub defect: Option<Defect>,
    /// The events, ordered by time.
    pub events: Vec<Timed>,
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
            defect: None,
            events: Vec::new(),
        };
        scenario.add_events(count, &mut chance);
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

    /// Returns net-conf. Subnets are leased from the first half of Network only, so that the simulation has prefixes of its own.
    pub fn net_conf(&self) -> String {
        let backend = &self.backend;
        // In a tight network, 10.1.0.0 to 10.1.N.0 for N machines.
        let last = if self.tight { format!("10.1.{}.0", self.machines.min(250)) } else { "10.63.255.0".to_owned() };
        format!(
            r#"{{"Network":"10.0.0.0/8","SubnetLen":24,"SubnetMin":"10.1.0.0","SubnetMax":"{last}","Backend":{{"Type":"{backend}"}}}}"#
        )
    }
}
