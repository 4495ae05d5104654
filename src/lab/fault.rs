// SPDX-License-Identifier: Apache-2.0
//! Faults: break something on the first node the way people and daemons do, and measure how long its entries take to come back.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::cluster::{Lab, add_default_routes};
use super::net::Netns;
use super::ping::{Loss, Stream};

/// Longest time a repair may take: an audit (10 s) and a slow machine.
const LIMIT: Duration = Duration::from_secs(30);

/// What is broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// `ip route del` of a peer's subnet.
    Route(String),
    /// `bridge fdb del` of a peer's VTEP: device, MAC, destination.
    Fdb(String, String, String),
    /// `ip link del` of the tunnel device.
    Device(String),
    /// The uplink goes down and comes up again.
    Uplink,
    /// SIGKILL of the agent, which is then started again.
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

/// How it ended.
#[derive(Debug, Clone)]
pub struct Repair {
    /// What was broken.
    pub fault: Fault,
    /// Time until every entry was back (agent: until it was ready again); `None` when that did not happen.
    pub took: Option<Duration>,
    /// Pings of 100 a second while it lasted; `None` when they did not come back.
    pub loss: Option<Loss>,
}

impl Repair {
    /// True when entries and traffic came back.
    pub fn healed(&self) -> bool {
        self.took.is_some() && self.loss.is_some()
    }
}

/// The faults that this lab can have: found by looking at what the first node has for the last one.
///
/// # Errors
/// When the kernel's tables cannot be read, or hold no route to the last node.
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

/// Breaks it, waits for the repair, counts lost packets.
///
/// # Errors
/// When the fault cannot be made; not when nobody repairs it, that is in the result.
pub async fn inject(lab: &mut Lab, fault: &Fault) -> Result<Repair> {
    let (node, target) = ends(lab)?;
    let node = node.clone();
    // FDB and routes of one family belong to one address; any other fault shows on the first.
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
    let begin = break_it(lab, &node, fault).await?;
    let mut took = back(&node, &before, begin).await?;
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

/// Makes the fault; the moment from which its repair counts.
async fn break_it(lab: &mut Lab, node: &Netns, fault: &Fault) -> Result<Instant> {
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

/// Time from `begin` until all entries are there again; `None` after the limit.
async fn back(node: &Netns, before: &BTreeSet<String>, begin: Instant) -> Result<Option<Duration>> {
    loop {
        // Taken before the look: reading the tables takes milliseconds that are not the agent's.
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

/// Everything an agent writes about its peers, one text each, without what may differ after a repair (ids, counters, flags
/// of state). The kernel's own entries and the default routes are left out: they are not the agent's.
///
/// # Errors
/// When the tables cannot be read.
pub async fn entries(node: &Netns) -> Result<BTreeSet<String>> {
    let (v4, v6) = tokio::try_join!(node.ip("-4 route show table main"), node.ip("-6 route show table main"))?;
    let (fdb, neigh) = tokio::try_join!(node.bridge("fdb show"), node.ip("neigh show nud permanent"))?;
    let mine =
        |line: &&str| !line.contains("proto kernel") && !line.starts_with("default") && !line.contains("proto ra");
    let routes = v4.lines().chain(v6.lines()).filter(mine).map(|line| format!("route {}", plain(line)));
    let tunnels = fdb.lines().filter(|line| line.contains(" dst ")).map(|line| format!("fdb {}", plain(line)));
    let neighbours = neigh.lines().map(|line| format!("neigh {}", plain(line)));
    Ok(routes.chain(tunnels).chain(neighbours).collect())
}

/// A line of `ip` without its nexthop id.
fn plain(line: &str) -> String {
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

/// The node that is broken, and the addresses of a pod on the node farthest from it.
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
        bail!("ip answered with nothing");
    }
    serde_json::from_str(text).context("read what ip wrote")
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn nexthop_ids_do_not_matter() {
        assert_eq!(plain("10.1.2.0/24 nhid 77 via 10.1.2.0 dev flannel.1 "), "10.1.2.0/24 via 10.1.2.0 dev flannel.1");
    }
}
