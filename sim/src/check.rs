// SPDX-License-Identifier: Apache-2.0
//! The invariants. To add one that holds at every moment: a line in [`Watcher::step`]. To add one that holds at rest: a line in [`at_rest`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::Ipv4Net;
use weft_subnet::cidr::Subnets;

use crate::cluster::Cluster;
use crate::machine::Machine;
use crate::walk::{Fabric, Lost};
use crate::wire::Disorder;

/// Two ready nodes may have one subnet for so many seconds: the time in which a node learns that its lease is gone.
const MOST_SHARED: u64 = 90;
/// How often subnets are compared, in seconds.
const COMPARE_EVERY: u64 = 5;
/// The most devices of one agent (docs/security.md).
const MOST_DEVICES: usize = 18;
/// The prefix that contains all subnets, and no address of a LAN.
const PODS: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 0, 0, 0), 10);

/// Since when something is wrong between two machines.
#[derive(Debug, Default)]
struct Lasting(BTreeMap<(usize, usize), u64>);

impl Lasting {
    /// Takes notice of the pairs between which something is wrong now, and returns those where it has lasted too long.
    fn update(&mut self, now: u64, pairs: impl Iterator<Item = (usize, usize)>) -> Vec<(usize, usize)> {
        let before = std::mem::take(&mut self.0);
        self.0 = pairs.map(|pair| (pair, before.get(&pair).copied().unwrap_or(now))).collect();
        self.0.iter().filter(|(_, since)| now - **since > MOST_SHARED).map(|(pair, _)| *pair).collect()
    }
}

/// What the checks read at one moment.
struct Moment<'a> {
    cluster: &'a Cluster,
    /// The leases in the store, by subnet.
    leases: BTreeMap<String, String>,
    /// The subnets of each machine's pods, by its number.
    pods: Vec<Option<Subnets>>,
}

impl Moment<'_> {
    fn of(cluster: &Cluster) -> Moment<'_> {
        let pods = cluster.machines.iter().map(|machine| machine.pods()).collect();
        Moment { cluster, leases: cluster.store.leases(), pods }
    }
}

/// Checks what must hold at every moment.
#[derive(Debug, Default)]
pub struct Watcher {
    /// Since when two ready machines share a subnet.
    shared: Lasting,
    /// The start of its agent at which each machine was ready last.
    ready_start: BTreeMap<usize, u64>,
    /// Machines whose wall clock was wrong at some time. They cannot know when a lease ends.
    wrong_clocks: BTreeSet<usize>,
    /// The subnet of each machine that was ready with it and whose lease was in the store one second before.
    held: BTreeMap<usize, Subnets>,
    /// Since when packets of the first machine for the second one go to a node that copied its identity.
    taken: Lasting,
    /// [`Cluster::interventions`] one second before.
    interventions: u64,
    /// The state of each machine in which nothing was wrong with its kernel: the version of the kernel, and the address.
    sound: BTreeMap<usize, (u64, Ipv4Addr)>,
}

impl Watcher {
    /// Returns what is wrong at this second.
    pub fn step(&mut self, now: u64, cluster: &Cluster) -> Vec<String> {
        let mut wrong: Vec<String> = Vec::new();
        for machine in &cluster.machines {
            let state = (machine.kernel.version(), machine.ip);
            if self.sound.get(&machine.number) == Some(&state) {
                continue;
            }
            let before = wrong.len();
            wrong.extend([machine.touched(), machine.diverted(), too_many_devices(machine)].into_iter().flatten());
            if wrong.len() == before {
                self.sound.insert(machine.number, state);
            }
        }
        let ended = cluster.machines.iter().filter(|machine| machine.has_ended());
        wrong.extend(ended.map(|machine| format!("n{}: the agent ended by itself", machine.number)));
        wrong.extend(
            cluster.lost_files.iter().map(|file| format!("{file} was written, and is lost after a power loss")),
        );
        let moment = Moment::of(cluster);
        wrong.extend(self.ended_leases(&moment));
        wrong.extend(self.subnets_given_up(&moment));
        if now.is_multiple_of(COMPARE_EVERY) {
            wrong.extend(self.shared_subnets(now, &moment));
            wrong.extend(published_pod_addresses(&moment));
            wrong.extend(self.taken_packets(now, &moment));
        }
        wrong
    }

    /// Returns the machines that use another subnet than before although their lease was in the store, so that their pods lost the network for
    /// no reason. While an agent is not ready, the subnet that it had before counts.
    fn subnets_given_up(&mut self, Moment { cluster, leases, pods }: &Moment<'_>) -> Vec<String> {
        let is_outside = std::mem::replace(&mut self.interventions, cluster.interventions) != cluster.interventions;
        let mut before = std::mem::take(&mut self.held);
        if is_outside {
            before.clear();
        }
        for machine in &cluster.machines {
            let number = machine.number;
            let held = if machine.is_ready() { pods[number] } else { before.get(&number).copied() };
            let held = held.filter(|_| !cluster.is_claimed(number));
            let named = held.filter(|held| leases.get(&held.to_key()).is_some_and(|lease| machine.is_named_by(lease)));
            self.held.extend(named.map(|held| (number, held)));
        }
        let given_up = before.into_iter().filter_map(|(number, subnets)| {
            let now = pods[number].filter(|now| *now != subnets)?;
            (!cluster.store.has_ended(&subnets))
                .then(|| format!("n{number} uses {now} instead of {subnets}, of which it had the lease"))
        });
        given_up.collect()
    }

    /// Returns the machines whose agent was started without the store and is ready with a lease that has ended. An agent that runs when its
    /// lease ends goes on, because its pods need their network.
    fn ended_leases(&mut self, Moment { cluster, pods, .. }: &Moment<'_>) -> Vec<String> {
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
            let Some(subnets) = pods[number].filter(|_| is_alone) else { continue };
            if cluster.store.has_ended(&subnets) {
                wrong.push(format!(
                    "n{number} was started without the store and uses {subnets}, a lease that has ended"
                ));
            }
        }
        wrong
    }

    /// Returns the machines that send packets to a node that copied the identity of another one, for longer than it takes to notice.
    fn taken_packets(&mut self, now: u64, Moment { cluster, pods, .. }: &Moment<'_>) -> Vec<String> {
        let mut taken = Vec::new();
        if !cluster.copied.is_empty() {
            let fabric = Fabric::new(&cluster.machines);
            for (owner, copier) in &cluster.copied {
                let Some(to) = pods[*owner].as_ref().and_then(first_pod) else { continue };
                let senders = cluster.machines.iter().filter(|machine| machine.number != *owner && machine.follows());
                let is_taken =
                    |sender: &usize| matches!(fabric.send(*sender, to), Err(Lost::NobodyHas(_, ip)) if ip == *copier);
                taken.extend(senders.map(|machine| machine.number).filter(is_taken).map(|sender| (sender, *owner)));
            }
        }
        let text = |(sender, owner)| {
            format!(
                "n{sender} sends packets for n{owner} to the node that copied its identity, for more than {MOST_SHARED} s"
            )
        };
        self.taken.update(now, taken.into_iter()).into_iter().map(text).collect()
    }

    fn shared_subnets(&mut self, now: u64, Moment { cluster, pods, .. }: &Moment<'_>) -> Vec<String> {
        let mut holders: BTreeMap<Subnets, Vec<usize>> = BTreeMap::new();
        for machine in cluster.machines.iter().filter(|machine| machine.follows()) {
            if let Some(subnets) = pods[machine.number] {
                holders.entry(subnets).or_default().push(machine.number);
            }
        }
        let pairs = holders.values().filter(|all| all.len() > 1).map(|all| (all[0], all[1]));
        let text = |(one, two): (usize, usize)| {
            let subnets = pods[one].unwrap_or_default();
            format!("n{one} and n{two} are ready and share {subnets} for more than {MOST_SHARED} s")
        };
        self.shared.update(now, pairs).into_iter().map(text).collect()
    }
}

/// Returns an address that a pod of these subnets may have.
pub fn first_pod(subnets: &Subnets) -> Option<IpAddr> {
    subnets.v4.map(|v4| IpAddr::V4((v4.network().to_bits() + 5).into()))
}

/// Returns what is wrong if a machine has more devices of weft than one agent may make.
fn too_many_devices(machine: &Machine) -> Option<String> {
    let count = machine.devices().len();
    (count > MOST_DEVICES).then(|| format!("n{} has {count} devices of weft", machine.number))
}

/// Returns the leases of machines that publish an address which can only be that of a pod or of a tunnel. Attackers publish what they like.
fn published_pod_addresses(moment: &Moment<'_>) -> Vec<String> {
    let keys: BTreeSet<String> = moment.pods.iter().flatten().map(Subnets::to_key).collect();
    let of_pods = moment.leases.iter().filter(|(key, _)| keys.contains(*key)).filter(|(_, value)| {
        let public = value.split("\"PublicIP\":\"").nth(1).and_then(|rest| rest.split('"').next()?.parse().ok());
        public.is_some_and(|public: Ipv4Addr| PODS.contains(&public))
    });
    of_pods.map(|(key, value)| format!("the lease {key} publishes an address of pods: {value}")).collect()
}

/// Returns what is wrong with a cluster in which nothing has happened for a long time.
pub fn at_rest(cluster: &Cluster) -> Vec<String> {
    let mut wrong = Vec::new();
    let Moment { leases, pods, .. } = Moment::of(cluster);
    let fabric = Fabric::new(&cluster.machines);
    for machine in &cluster.machines {
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
        let (saved, uses) = (machine.saved_subnet(), subnets.v4.map(|v4| v4.to_string()));
        if saved != uses {
            wrong.push(format!("n{number} uses {subnets}, and saved {saved:?} for a start without the store"));
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
    if cluster.unpublished() > 0 {
        wrong.push(format!("{} nodes have not published a lease yet", cluster.unpublished()));
    }
    for (subnet, public) in &cluster.publishers {
        let to = IpAddr::V4((subnet.network().to_bits() + 5).into());
        for machine in &cluster.machines {
            match fabric.send(machine.number, to) {
                Err(Lost::NobodyHas(_, ip)) if ip == *public => {}
                other => wrong.push(format!("a packet from n{} to {subnet} of {public}: {other:?}", machine.number)),
            }
        }
    }
    wrong.extend(net_conf_at_rest(cluster, &leases));
    wrong
}

/// Returns true if each machine is ready and has as many routes as a cluster at rest needs. This costs little.
pub fn may_be_at_rest(cluster: &Cluster) -> bool {
    let others = cluster.machines.len() + cluster.publishers.len() - 1;
    cluster.unpublished() == 0
        && cluster.machines.iter().all(|machine| machine.is_ready() && machine.kernel.count() >= others)
}

/// Returns which machines do not use the net-conf in the store.
fn net_conf_at_rest(cluster: &Cluster, leases: &BTreeMap<String, String>) -> Vec<String> {
    let conf = &cluster.net_conf;
    let parsed = |text: &String| serde_json::from_str::<serde_json::Value>(text).unwrap_or_default();
    let follows = |lease: &serde_json::Value| {
        lease["BackendType"] == conf.backend && (conf.backend != "vxlan" || lease["BackendData"]["VNI"] == conf.vni)
    };
    // A lease that its node has left behind keeps the earlier backend in use.
    let all_follow = leases.values().all(|lease| follows(&parsed(lease)));
    let devices = match conf.backend.as_str() {
        "vxlan" => vec![format!("flannel.{}", conf.vni)],
        "ipip" => vec!["flannel.ipip".to_owned()],
        "wireguard" => vec!["flannel-wg".to_owned()],
        _ => Vec::new(),
    };
    let mut wrong = Vec::new();
    for machine in &cluster.machines {
        let number = machine.number;
        let Some(env) = machine.subnet_env() else { continue };
        if env.networks.v4.is_none_or(|network| network.to_string() != conf.network()) {
            wrong.push(format!(
                "n{number}: subnet.env has Network {}, and net-conf has {}",
                env.networks,
                conf.network()
            ));
        }
        let Some(text) = leases.get(&env.subnets.to_key()) else { continue };
        let lease = parsed(text);
        if !follows(&lease) {
            wrong.push(format!("n{number}: its lease does not follow net-conf, which is {}: {text}", conf.text()));
        } else if all_follow && !lease["OtherWays"].is_null() {
            wrong.push(format!("n{number}: its lease names other ways, which no node needs: {text}"));
        } else if all_follow && machine.devices() != devices {
            wrong.push(format!("n{number} has the devices {:?}, and needs {devices:?}", machine.devices()));
        }
    }
    wrong
}
