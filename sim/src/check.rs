// SPDX-License-Identifier: Apache-2.0
//! The invariants. To add one that holds at every moment: a line in [`Watcher::step`]. To add one that holds at rest: a line in [`at_rest`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use weft_subnet::cidr::Subnets;

use crate::cluster::Cluster;
use crate::machine::PREFIX;
use crate::server::Disorder;
use crate::walk::Fabric;

/// Two ready nodes may have one subnet for so many seconds: the time in which a node learns that its lease is gone.
const MOST_SHARED: u64 = 90;
/// How often subnets are compared, in seconds.
const COMPARE_EVERY: u64 = 5;

/// Checks what must hold at every moment.
#[derive(Debug, Default)]
pub struct Watcher {
    /// Since when two ready machines share a subnet.
    shared_since: BTreeMap<(usize, usize), u64>,
    /// The start of its agent at which each machine was ready last.
    ready_start: BTreeMap<usize, u64>,
    /// Machines whose wall clock was wrong at some time. They cannot know when a lease ends.
    wrong_clocks: BTreeSet<usize>,
}

impl Watcher {
    /// Returns what is wrong at this second.
    pub fn step(&mut self, now: u64, cluster: &Cluster) -> Vec<String> {
        let mut wrong: Vec<String> = cluster.machines.iter().filter_map(|machine| machine.touched()).collect();
        wrong.extend(cluster.machines.iter().filter_map(|machine| machine.diverted()));
        let ended = cluster.machines.iter().filter(|machine| machine.has_ended());
        wrong.extend(ended.map(|machine| format!("n{}: the agent ended by itself", machine.number)));
        wrong.extend(self.ended_leases(cluster));
        if now.is_multiple_of(COMPARE_EVERY) {
            wrong.extend(self.shared_subnets(now, cluster));
        }
        wrong
    }

    /// Returns the machines whose agent was started without the store and is ready with a lease that has ended. An agent that runs when its lease ends
    /// goes on, because its pods need their network.
    fn ended_leases(&mut self, cluster: &Cluster) -> Vec<String> {
        let mut wrong = Vec::new();
        for machine in &cluster.machines {
            let number = machine.number;
            if machine.clock.get() != 0 {
                self.wrong_clocks.insert(number);
            }
            if !machine.is_ready() || self.ready_start.insert(number, machine.starts()) == Some(machine.starts()) {
                continue;
            }
            let is_alone = machine.wire.disorder() != Disorder::None && !self.wrong_clocks.contains(&number);
            let Some(subnets) = machine.pods().filter(|_| is_alone) else { continue };
            let key = format!("{PREFIX}/subnets/{}", subnets.to_key());
            if cluster.server.read(|etcd| etcd.has_ended(&key)) {
                wrong.push(format!(
                    "n{number} was started without the store and uses {subnets}, a lease that has ended"
                ));
            }
        }
        wrong
    }

    fn shared_subnets(&mut self, now: u64, cluster: &Cluster) -> Option<String> {
        let mut holders: BTreeMap<Subnets, Vec<usize>> = BTreeMap::new();
        for machine in &cluster.machines {
            let reaches_store = machine.wire.disorder() == Disorder::None;
            if machine.is_awake() && machine.is_ready() && reaches_store {
                holders.entry(machine.pods()?).or_default().push(machine.number);
            }
        }
        let pairs = holders.iter().filter(|(_, all)| all.len() > 1).map(|(subnets, all)| ((all[0], all[1]), *subnets));
        let now_shared: BTreeMap<(usize, usize), Subnets> = pairs.collect();
        self.shared_since.retain(|pair, _| now_shared.contains_key(pair));
        for (pair, subnets) in now_shared {
            let since = *self.shared_since.entry(pair).or_insert(now);
            if now - since > MOST_SHARED {
                let (one, two) = pair;
                return Some(format!("n{one} and n{two} are ready and share {subnets} for more than {MOST_SHARED} s"));
            }
        }
        None
    }
}

/// Returns what is wrong with a cluster in which nothing has happened for a long time.
pub fn at_rest(cluster: &Cluster) -> Vec<String> {
    let mut wrong = Vec::new();
    let leases: BTreeMap<String, String> =
        cluster.server.read(|etcd| etcd.all(&format!("{PREFIX}/subnets/"))).into_iter().collect();
    let fabric = Fabric::new(&cluster.machines);
    let machines = &cluster.machines;
    let pods: Vec<Option<Subnets>> = machines.iter().map(|machine| machine.pods()).collect();
    for machine in machines {
        let number = machine.number;
        if !machine.is_ready() {
            wrong.push(format!("n{number} is not ready: {}", machine.reasons().join("; ")));
        }
        let Some(subnets) = pods[number] else {
            wrong.push(format!("n{number} has no subnet.env"));
            continue;
        };
        match leases.get(&format!("{PREFIX}/subnets/{}", subnets.to_key())) {
            None => wrong.push(format!("n{number}: the store has no lease of {subnets}, which its pods use")),
            Some(value) if !machine.kernel.addresses().iter().any(|ip| value.contains(&format!("\"{ip}\""))) => {
                wrong.push(format!(
                    "n{number} has {} and its pods use {subnets}, but that lease is {value}",
                    machine.ip
                ));
            }
            Some(_) => {}
        }
        for (other, theirs) in pods.iter().enumerate().filter(|(other, _)| *other != number) {
            let Some(to) = theirs.and_then(|subnets| subnets.v4).map(|v4| v4.network().to_bits() + 5) else { continue };
            let to = IpAddr::V4(to.into());
            match fabric.send(number, to) {
                Ok(arrived) if arrived == other => {}
                Ok(arrived) => wrong.push(format!("a packet from n{number} to {to} of n{other} arrives at n{arrived}")),
                Err(lost) => wrong.push(format!("a packet from n{number} to {to} of n{other} is lost: {lost}")),
            }
        }
    }
    wrong
}
