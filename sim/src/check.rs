// SPDX-License-Identifier: Apache-2.0
//! The invariants. To add one that holds at every moment: a line in [`Watcher::step`]. To add one that holds at rest: a line in [`at_rest`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;
use weft_subnet::cidr::Subnets;

use crate::cluster::Cluster;
use crate::walk::{Fabric, Lost};
use crate::wire::Disorder;

/// Two ready nodes may have one subnet for so many seconds: the time in which a node learns that its lease is gone.
const MOST_SHARED: u64 = 90;
/// How often subnets are compared, in seconds.
const COMPARE_EVERY: u64 = 5;
/// The prefix that contains all subnets, and no address of a LAN.
const PODS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 10);

/// Checks what must hold at every moment.
#[derive(Debug, Default)]
pub struct Watcher {
    /// Since when two ready machines share a subnet.
    shared_since: BTreeMap<(usize, usize), u64>,
    /// The start of its agent at which each machine was ready last.
    ready_start: BTreeMap<usize, u64>,
    /// Machines whose wall clock was wrong at some time. They cannot know when a lease ends.
    wrong_clocks: BTreeSet<usize>,
    /// The subnet of each machine that was ready with it and whose lease was in the store one second before.
    held: BTreeMap<usize, Subnets>,
    /// Since when packets of the first machine for the second one go to a node that copied its identity.
    taken_since: BTreeMap<(usize, usize), u64>,
    /// [`Cluster::interventions`] one second before.
    interventions: u64,
}

impl Watcher {
    /// Returns what is wrong at this second.
    pub fn step(&mut self, now: u64, cluster: &Cluster) -> Vec<String> {
        let mut wrong: Vec<String> = cluster.machines.iter().filter_map(|machine| machine.touched()).collect();
        wrong.extend(cluster.machines.iter().filter_map(|machine| machine.diverted()));
        let ended = cluster.machines.iter().filter(|machine| machine.has_ended());
        wrong.extend(ended.map(|machine| format!("n{}: the agent ended by itself", machine.number)));
        wrong.extend(self.ended_leases(cluster));
        wrong.extend(self.subnets_given_up(cluster));
        if now.is_multiple_of(COMPARE_EVERY) {
            wrong.extend(self.shared_subnets(now, cluster));
            wrong.extend(published_pod_addresses(cluster));
            wrong.extend(self.taken_packets(now, cluster));
        }
        wrong
    }

    /// Returns the machines that use another subnet than before although their lease was in the store, so that their pods lost the network for
    /// no reason. While an agent is not ready, the subnet that it had before counts.
    fn subnets_given_up(&mut self, cluster: &Cluster) -> Vec<String> {
        let leases = cluster.store.leases();
        let is_outside = std::mem::replace(&mut self.interventions, cluster.interventions) != cluster.interventions;
        let before = std::mem::take(&mut self.held);
        for machine in &cluster.machines {
            let known = before.get(&machine.number).copied().filter(|_| !is_outside);
            let held = if machine.is_ready() { machine.pods() } else { known };
            let named = held.filter(|held| leases.get(&held.to_key()).is_some_and(|lease| machine.is_named_by(lease)));
            self.held.extend(named.map(|held| (machine.number, held)));
        }
        let given_up = before.into_iter().filter(|_| !is_outside).filter_map(|(number, subnets)| {
            let now = cluster.machines[number].pods().filter(|now| *now != subnets)?;
            (!cluster.store.has_ended(&subnets))
                .then(|| format!("n{number} uses {now} instead of {subnets}, of which it had the lease"))
        });
        given_up.collect()
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
            if cluster.store.has_ended(&subnets) {
                wrong.push(format!(
                    "n{number} was started without the store and uses {subnets}, a lease that has ended"
                ));
            }
        }
        wrong
    }

    /// Returns the machines that send packets to a node that copied the identity of another one, for longer than it takes to notice.
    fn taken_packets(&mut self, now: u64, cluster: &Cluster) -> Vec<String> {
        let mut taken = BTreeMap::new();
        if !cluster.copied.is_empty() {
            let fabric = Fabric::new(&cluster.machines);
            for (owner, copier) in &cluster.copied {
                let Some(to) = cluster.machines[*owner].pods().and_then(|pods| first_pod(&pods)) else { continue };
                let senders = cluster.machines.iter().filter(|machine| machine.number != *owner && machine.follows());
                for sender in senders.map(|machine| machine.number) {
                    if matches!(fabric.send(sender, to), Err(Lost::NobodyHas(_, ip)) if ip == *copier) {
                        let since = *self.taken_since.get(&(sender, *owner)).unwrap_or(&now);
                        taken.insert((sender, *owner), since);
                    }
                }
            }
        }
        self.taken_since = taken;
        let long = self.taken_since.iter().filter(|(_, since)| now - **since > MOST_SHARED);
        let text = |(sender, owner)| {
            format!(
                "n{sender} sends packets for n{owner} to the node that copied its identity, for more than {MOST_SHARED} s"
            )
        };
        long.map(|(pair, _)| text(*pair)).collect()
    }

    fn shared_subnets(&mut self, now: u64, cluster: &Cluster) -> Option<String> {
        let mut holders: BTreeMap<Subnets, Vec<usize>> = BTreeMap::new();
        for machine in &cluster.machines {
            if machine.follows() {
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

/// Returns an address that a pod of these subnets may have.
fn first_pod(subnets: &Subnets) -> Option<IpAddr> {
    subnets.v4.map(|v4| IpAddr::V4((v4.network().to_bits() + 5).into()))
}

/// Returns the leases that publish an address which can only be that of a pod or of a tunnel.
fn published_pod_addresses(cluster: &Cluster) -> Vec<String> {
    let leases = cluster.store.leases().into_iter();
    let of_pods = leases.filter(|(_, value)| {
        let public = value.split("\"PublicIP\":\"").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok());
        public.is_some_and(|public: Ipv4Addr| PODS.contains(&public))
    });
    of_pods.map(|(key, value)| format!("the lease {key} publishes an address of pods: {value}")).collect()
}

/// Returns what is wrong with a cluster in which nothing has happened for a long time.
pub fn at_rest(cluster: &Cluster) -> Vec<String> {
    let mut wrong = Vec::new();
    let leases = cluster.store.leases();
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
        match leases.get(&subnets.to_key()) {
            None => wrong.push(format!("n{number}: the store has no lease of {subnets}, which its pods use")),
            Some(value) if !machine.is_named_by(value) => {
                wrong.push(format!(
                    "n{number} has {} and its pods use {subnets}, but that lease is {value}",
                    machine.ip
                ));
            }
            Some(_) => {}
        }
        for (other, theirs) in pods.iter().enumerate().filter(|(other, _)| *other != number) {
            let Some(to) = theirs.as_ref().and_then(first_pod) else { continue };
            match fabric.send(number, to) {
                Ok(arrived) if arrived == other => {}
                Ok(arrived) => wrong.push(format!("a packet from n{number} to {to} of n{other} arrives at n{arrived}")),
                Err(lost) => wrong.push(format!("a packet from n{number} to {to} of n{other} is lost: {lost}")),
            }
        }
    }
    wrong
}
