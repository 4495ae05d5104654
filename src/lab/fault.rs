// SPDX-License-Identifier: Apache-2.0
//! Injects faults on the first node, as administrators and other daemons cause them, and measures how long the repair
//! takes.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::cluster::{Lab, add_default_routes};
use super::net::Netns;
use super::ping::{Loss, Stream};

/// Time limit for a repair: an audit (10 s) on a slow machine.
const LIMIT: Duration = Duration::from_secs(30);

/// A fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A peer's route is deleted (`ip route del`). The value is its subnet.
    Route(String),
    /// A peer's FDB entry is deleted (`bridge fdb del`). The values are the device, the MAC and the destination.
    Fdb(String, String, String),
    /// The tunnel device is deleted (`ip link del`).
    Device(String),
    /// The uplink is set down and up again.
    Uplink,
    /// The agent is killed (SIGKILL) and started again.
    Agent,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Fault::Route(subnet) => write!(f, "route {subnet} deleted"),
            Fault::Fdb(dev, _, dst) => write!(f, "FDB entry {dst} on {dev} deleted"),
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
    /// The time until all entries were restored, or until the agent was ready again; `None` if that did not happen in
    /// time.
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
    let mut faults = Vec::new();
    for addr in &target {
        let found = json(&node.ip(&format!("-j route get {addr} fibmatch")).await?)?;
        let subnet = found[0]["dst"].as_str().with_context(|| format!("no route to {addr}"))?;
        faults.push(Fault::Route(subnet.to_owned()));
    }
    for dev in devices(node).await? {
        if let Some((mac, dst)) = fdb_entry(node, &dev).await? {
            faults.push(Fault::Fdb(dev.clone(), mac, dst));
        }
        faults.push(Fault::Device(dev));
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
        Fault::Route(subnet) => subnet.contains(':'),
        Fault::Fdb(dev, ..) | Fault::Device(dev) => dev.contains("-v6"),
        Fault::Uplink | Fault::Agent => false,
    };
    let addr =
        *target.iter().find(|addr| addr.is_ipv6() == wants_v6).or(target.first()).context("a pod without address")?;
    let before = entries(&node).await?;
    let pod = lab.nodes.first().and_then(|n| n.pods.first()).context("a node without pods")?;
    let mut stream = Stream::start(pod, addr).await?;
    let begin = cause(lab, &node, fault).await?;
    let mut took = wait_for_entries(&node, &before, begin).await?;
    if *fault == Fault::Agent
        && let Some(first) = lab.nodes.first_mut()
    {
        took = first.ready().await.is_ok().then(|| begin.elapsed());
    }
    let loss = match stream.answers(20, LIMIT).await {
        Ok(()) => Some(stream.stop().await?),
        Err(_) => None,
    };
    Ok(Repair { fault: fault.clone(), took, loss })
}

/// Causes the fault. Returns the time from which its repair is measured.
async fn cause(lab: &mut Lab, node: &Netns, fault: &Fault) -> Result<Instant> {
    let first = lab.nodes.first_mut().context("a lab without nodes")?;
    match fault {
        Fault::Route(subnet) => drop(node.ip(&format!("route del {subnet}")).await?),
        Fault::Fdb(dev, mac, dst) => drop(node.bridge(&format!("fdb del {mac} dev {dev} dst {dst}")).await?),
        Fault::Device(dev) => drop(node.ip(&format!("link del {dev}")).await?),
        Fault::Uplink => {
            node.ip("link set eth0 down").await?;
            node.ip("link set eth0 up").await?;
            let begin = Instant::now();
            if let Some(IpAddr::V4(uplink)) = first.uplink.first() {
                add_default_routes(node, *uplink).await?;
            }
            return Ok(begin);
        }
        Fault::Agent => {
            first.stop(Signal::SIGKILL).await?;
            let begin = Instant::now();
            first.start()?;
            return Ok(begin);
        }
    }
    Ok(Instant::now())
}

/// Returns the time from `begin` until all entries are restored, or `None` if the limit is exceeded.
async fn wait_for_entries(node: &Netns, before: &BTreeSet<String>, begin: Instant) -> Result<Option<Duration>> {
    loop {
        // The time is read before the tables, because reading them takes milliseconds that are not the agent's.
        let now = begin.elapsed();
        if entries(node).await?.is_superset(before) {
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
    let (v4, v6) = tokio::try_join!(node.ip("-4 route show table main"), node.ip("-6 route show table main"))?;
    let (fdb, neigh) = tokio::try_join!(node.bridge("fdb show"), node.ip("neigh show nud permanent"))?;
    let of_agent =
        |line: &&str| !line.contains("proto kernel") && !line.starts_with("default") && !line.contains("proto ra");
    let routes =
        v4.lines().chain(v6.lines()).filter(of_agent).map(|line| format!("route {}", without_nexthop_id(line)));
    let tunnels =
        fdb.lines().filter(|line| line.contains(" dst ")).map(|line| format!("fdb {}", without_nexthop_id(line)));
    let neighbours = neigh.lines().map(|line| format!("neigh {}", without_nexthop_id(line)));
    Ok(routes.chain(tunnels).chain(neighbours).collect())
}

/// Removes the nexthop ID from a line of `ip`.
fn without_nexthop_id(line: &str) -> String {
    let mut words = line.split_whitespace();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        if word == "nhid" {
            words.next();
        } else {
            kept.push(word);
        }
    }
    kept.join(" ")
}

/// Returns the first node, and the addresses of a pod on the last node.
fn ends(lab: &Lab) -> Result<(&Netns, Vec<IpAddr>)> {
    let first = lab.nodes.first().context("a lab without nodes")?;
    let pod = lab.nodes.last().and_then(|node| node.pods.first()).context("a node without pods")?;
    Ok((&first.ns, pod.addrs.clone()))
}

async fn devices(node: &Netns) -> Result<Vec<String>> {
    let links = json(&node.ip("-j link show").await?)?;
    let names = links.as_array().into_iter().flatten().filter_map(|link| link["ifname"].as_str());
    Ok(names.filter(|name| name.starts_with("flannel")).map(str::to_owned).collect())
}

async fn fdb_entry(node: &Netns, dev: &str) -> Result<Option<(String, String)>> {
    let kind = json(&node.ip(&format!("-j -d link show {dev}")).await?)?;
    if kind[0]["linkinfo"]["info_kind"] != "vxlan" {
        return Ok(None);
    }
    let table = json(&node.bridge(&format!("-j fdb show dev {dev}")).await?)?;
    let last = table.as_array().and_then(|all| all.iter().rfind(|entry| entry["dst"].is_string()));
    let pair = |entry: &Value| Some((entry["mac"].as_str()?.to_owned(), entry["dst"].as_str()?.to_owned()));
    Ok(last.and_then(pair))
}

fn json(text: &str) -> Result<Value> {
    if text.trim().is_empty() {
        bail!("ip printed nothing");
    }
    serde_json::from_str(text).context("read the output of ip")
}

#[cfg(test)]
mod tests {
    use super::without_nexthop_id;

    #[test]
    fn the_nexthop_id_is_removed() {
        assert_eq!(
            without_nexthop_id("10.1.2.0/24 nhid 77 via 10.1.2.0 dev flannel.1 "),
            "10.1.2.0/24 via 10.1.2.0 dev flannel.1"
        );
    }
}
