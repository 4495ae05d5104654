// SPDX-License-Identifier: Apache-2.0
//! Injects faults on the first node, as administrators and other daemons cause them, and measures how long the repair
//! takes.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ipnet::IpNet;
use nix::sys::signal::Signal;

use super::cluster::{Lab, add_default_routes};
use super::netns::Netns;
use super::network::Network;
use super::network::tables::FdbEntry;
use super::ping::{Loss, Stream};
use super::process::PATIENCE;

/// Time limit for a repair: an audit (10 s) on a machine that is busy with much else.
const LIMIT: Duration = PATIENCE;

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A peer's route is deleted, as by `ip route del`. The value is its subnet.
    Route(IpNet),
    /// A peer's FDB entry is deleted, as by `bridge fdb del`.
    Fdb(FdbEntry),
    /// A tunnel device is deleted, as by `ip link del`. The value is its name.
    Device(String),
    /// The uplink is set down and up again.
    Uplink,
    /// The agent is killed (SIGKILL) and started again.
    Agent,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Route(subnet) => write!(f, "route {subnet} deleted"),
            Fault::Fdb(entry) => write!(f, "FDB entry {} on {} deleted", entry.destination, entry.device),
            Fault::Device(dev) => write!(f, "device {dev} deleted"),
            Fault::Uplink => write!(f, "uplink down and up"),
            Fault::Agent => write!(f, "agent killed and restarted"),
        }
    }
}

/// The result of a fault.
#[derive(Debug, Clone)]
pub struct Repair {
    /// The fault.
    pub fault: Fault,
    /// The time until all entries were restored, and until an agent that was killed was ready again; `None` if that did
    /// not happen in time.
    pub took: Option<Duration>,
    /// Lost packets of a ping with 100 packets a second; `None` if the pings were not answered again.
    pub loss: Option<Loss>,
}

impl Repair {
    /// Returns true if the entries were restored and the pings are answered.
    pub fn healed(&self) -> bool {
        self.took.is_some() && self.loss.is_some()
    }
}

/// Returns the faults that are possible in this lab. They are derived from the first node's entries for the last node.
///
/// # Errors
/// The kernel's tables cannot be read, or contain no route to the last node.
pub async fn possible(lab: &Lab) -> Result<Vec<Fault>> {
    let (node, target) = ends(lab)?;
    let network = node.network()?;
    let mut faults = Vec::new();
    for address in &target {
        faults.push(Fault::Route(network.route_to(*address).await?));
    }
    let mut fdb = network.fdb().await?;
    for link in network.links().await?.into_iter().filter(|link| link.name.starts_with("flannel")) {
        if let Some(last) = fdb.iter().rposition(|entry| link.vxlan && entry.device == link.name) {
            faults.push(Fault::Fdb(fdb.remove(last)));
        }
        faults.push(Fault::Device(link.name));
    }
    faults.push(Fault::Uplink);
    faults.push(Fault::Agent);
    Ok(faults)
}

/// Injects a fault, waits for the repair, and counts lost packets.
///
/// # Errors
/// The fault cannot be injected. A fault that is not repaired is not an error; the result says so.
pub async fn inject(lab: &mut Lab, fault: &Fault) -> Result<Repair> {
    let (node, target) = ends(lab)?;
    let node = node.clone();
    // A route or an FDB entry belongs to one family, so its fault is visible only with an address of that family. Other
    // faults are visible with the first address.
    let wants_v6 = match fault {
        Fault::Route(subnet) => subnet.addr().is_ipv6(),
        Fault::Fdb(FdbEntry { device, .. }) | Fault::Device(device) => device.contains("-v6"),
        Fault::Uplink | Fault::Agent => false,
    };
    let addr =
        *target.iter().find(|addr| addr.is_ipv6() == wants_v6).or(target.first()).context("a pod without address")?;
    let before = entries(&node).await?;
    let pod = lab.nodes.first().and_then(|n| n.pods.first()).context("a node without pods")?;
    let mut stream = Stream::start(pod, addr).await?;
    let begin = cause(lab, &node, fault).await?;
    // The entries stay while no agent runs, so they say nothing before the new one is ready.
    let is_ready = match (fault, lab.nodes.first_mut()) {
        (Fault::Agent, Some(first)) => first.ready().await.is_ok(),
        _ => true,
    };
    let took = if is_ready { wait_for_entries(&node, &before, begin).await? } else { None };
    let loss = match stream.answers(20, LIMIT).await {
        Ok(()) => Some(stream.stop().await?),
        Err(_) => None,
    };
    Ok(Repair { fault: fault.clone(), took, loss })
}

/// Causes the fault. Returns the time from which its repair is measured.
async fn cause(lab: &mut Lab, node: &Netns, fault: &Fault) -> Result<Instant> {
    let first = lab.nodes.first_mut().context("a lab without nodes")?;
    let network = node.network()?;
    // The agent hears of a fault before the kernel has answered the request that causes it.
    let begin = Instant::now();
    match fault {
        Fault::Route(subnet) => network.delete_route(*subnet).await?,
        Fault::Fdb(entry) => network.delete_fdb_entry(entry).await?,
        Fault::Device(name) => network.delete_link(name).await?,
        Fault::Uplink => {
            network.set_down("eth0").await?;
            let begin = Instant::now();
            network.set_up("eth0").await?;
            add_default_routes(node, *first.uplink.first().context("a node without uplink address")?).await?;
            return Ok(begin);
        }
        Fault::Agent => {
            first.stop(Signal::SIGKILL).await?;
            let begin = Instant::now();
            first.start()?;
            return Ok(begin);
        }
    }
    Ok(begin)
}

/// Returns the time from `begin` until all entries are restored, or `None` if the limit is exceeded.
async fn wait_for_entries(node: &Netns, before: &BTreeSet<String>, begin: Instant) -> Result<Option<Duration>> {
    let network = node.network()?;
    loop {
        let restored = read_entries(&network).await?.is_superset(before);
        // The time includes the reading, so it is never shorter than the repair.
        let now = begin.elapsed();
        if restored {
            return Ok(Some(now));
        }
        if now >= LIMIT {
            return Ok(None);
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Returns all entries that an agent has written for its peers, as one text each. The parts that may change with a
/// repair (IDs, counters, state flags) are left out, and so are the kernel's own entries and the default routes.
///
/// # Errors
/// The tables cannot be read.
pub async fn entries(node: &Netns) -> Result<BTreeSet<String>> {
    read_entries(&node.network()?).await
}

async fn read_entries(network: &Network) -> Result<BTreeSet<String>> {
    let mut entries = BTreeSet::new();
    for route in network.routes().await?.iter().filter(|route| route.added && route.destination.prefix_len() > 0) {
        entries.insert(format!("route {route}"));
    }
    entries.extend(network.fdb().await?.iter().map(|entry| format!("fdb {entry}")));
    entries.extend(network.permanent_neighbours().await?.iter().map(|neighbour| format!("neigh {neighbour}")));
    Ok(entries)
}

/// Returns the first node, and the addresses of a pod on the last node.
fn ends(lab: &Lab) -> Result<(&Netns, Vec<IpAddr>)> {
    let first = lab.nodes.first().context("a lab without nodes")?;
    let pod = lab.nodes.last().and_then(|node| node.pods.first()).context("a node without pods")?;
    Ok((&first.ns, pod.addrs.clone()))
}
