// SPDX-License-Identifier: Apache-2.0
//! A complete cluster: the fabric (a bridge, and optionally a router and etcd), nodes that are connected to it, their
//! agents and pods.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::net::{Netns, own_names};
use super::node::{Node, PATIENCE};
use super::options::LabOptions;
use super::ping::{self, Ping};
use super::store::Store;

/// The third byte of each half's IPv4 network, and the last digits of its IPv6 prefix: 192.168.77.0/24 and fd77::/64.
const HALVES: [u8; 2] = [77, 78];

/// A running cluster. Dropping it kills the agents and etcd. The namespaces disappear with the mount namespace of the
/// thread.
///
/// There can be one lab per thread, because the names of its namespaces belong to the thread.
#[derive(Debug)]
pub struct Lab {
    /// The nodes. Those of the second half, behind the router, come last.
    pub nodes: Vec<Node>,
    /// The store of the leases.
    pub store: Store,
    /// The namespace of the bridge, the router and etcd.
    pub fabric: Netns,
    dir: TempDir,
    /// The lock is held until the process ends. `make clean-lab` removes directories whose lock is free.
    _lock: fs::File,
    pods: usize,
}

impl Lab {
    /// Creates the fabric, the store and the nodes. It does not start the agents.
    ///
    /// # Errors
    /// An option is invalid or a namespace, link or process cannot be created. The usual reason is that root is
    /// required.
    pub async fn build(options: &LabOptions) -> Result<Lab> {
        options.check()?;
        own_names()?;
        let dir = TempDir::with_prefix("weft-lab-").context("create a temporary directory")?;
        let lock = fs::File::create(dir.path().join("lock")).context("create the lab's lock")?;
        lock.lock().context("take the lab's lock")?;
        fs::create_dir(dir.path().join("logs")).context("create the directory of logs")?;
        let fabric = build_fabric(options.router).await?;
        let store = Store::start(options.store, &fabric, dir.path(), &options.net_conf()).await?;
        let mut nodes = Vec::new();
        for number in 0..options.nodes {
            let far = options.router && number >= options.nodes.div_ceil(2);
            let (ns, uplink) = build_node(&fabric, number, far).await?;
            let mut node = Node::new(ns, uplink, dir.path(), options)?;
            let mut flags = store.flags();
            if options.no_nexthop_objects {
                flags.push("--no-nexthop-objects".to_owned());
            }
            flags.extend(options.agent_flags.iter().cloned());
            node.set_flags(flags);
            nodes.push(node);
        }
        Ok(Lab { nodes, store, fabric, dir, _lock: lock, pods: options.pods.count.into() })
    }

    /// Builds a lab, starts all agents at once, waits until they are ready, and adds the pods.
    ///
    /// # Errors
    /// As [`Lab::build`], or an agent does not become ready.
    pub async fn start(options: &LabOptions) -> Result<Lab> {
        let mut lab = Lab::build(options).await?;
        for node in &mut lab.nodes {
            node.start()?;
        }
        lab.settle().await?;
        Ok(lab)
    }

    /// Waits until all agents are ready, and adds the pods.
    ///
    /// # Errors
    /// An agent does not become ready, or a pod cannot be added.
    pub async fn settle(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            node.ready().await?;
            node.add_pods(self.pods).await?;
        }
        Ok(())
    }

    /// Pings every pod from every other pod until all pings are answered. Returns the last matrix.
    ///
    /// # Errors
    /// Not all pings are answered within 30 s. The message names those without an answer.
    pub async fn reach_all(&self) -> Result<Vec<Ping>> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let matrix = ping::matrix(&self.nodes).await?;
            let unanswered: Vec<_> =
                matrix.iter().filter(|p| !p.ok).map(|p| format!("{} -> {}", p.from, p.addr)).collect();
            if unanswered.is_empty() {
                return Ok(matrix);
            }
            if tokio::time::Instant::now() >= deadline {
                bail!("no answer: {}\n{}", unanswered.join(", "), self.logs(10));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns the directory of the store, the logs and the subnet files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Keeps the directory after the end, so that the logs can be read.
    pub fn keep_dir(&mut self) {
        self.dir.disable_cleanup(true);
    }

    /// Returns the last lines of every agent's log.
    pub fn logs(&self, lines: usize) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            let _ = writeln!(text, "--- {} ({})\n{}", node.name(), node.log().display(), node.log_tail(lines));
        }
        text
    }
}

/// Creates the fabric: a bridge for each half. With two halves, the namespace is the router between them.
async fn build_fabric(router: bool) -> Result<Netns> {
    let fabric = Netns::add("fabric").await?;
    fabric.sysctl(&["ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1"]).await?;
    let mut lines = String::new();
    for (half, byte) in HALVES.iter().enumerate().take(if router { 2 } else { 1 }) {
        let _ = write!(
            lines,
            "link add br{half} type bridge\nlink set br{half} up\n\
             addr add 192.168.{byte}.1/24 dev br{half}\naddr add fd{byte}::1/64 dev br{half} nodad\n"
        );
    }
    fabric.batch(&lines).await?;
    Ok(fabric)
}

/// Creates a node's namespace and its uplink. Returns the namespace and the uplink's addresses.
async fn build_node(fabric: &Netns, number: u8, far: bool) -> Result<(Netns, Vec<IpAddr>)> {
    let name = format!("n{}", number + 1);
    let half = usize::from(far);
    let byte = HALVES[half];
    let host = 11 + number;
    let v4 = Ipv4Addr::new(192, 168, byte, host);
    // The decimal digits of the byte are used as hexadecimal digits, so that the addresses of both families look alike.
    let v6: Ipv6Addr = format!("fd{byte}::{host}").parse().context("build an address")?;
    let ns = Netns::add(&name).await?;
    fabric
        .batch(&format!("link add {name} type veth peer name eth0 netns {name}\nlink set {name} master br{half} up\n"))
        .await?;
    ns.sysctl(&["ipv4/ip_forward=1", "ipv6/conf/all/forwarding=1", "ipv6/conf/eth0/keep_addr_on_down=1"]).await?;
    let addrs = format!("addr add {v4}/24 dev eth0\naddr add {v6}/64 dev eth0 nodad\nlink set eth0 up\n");
    ns.batch(&addrs).await?;
    add_default_routes(&ns, v4).await?;
    Ok((ns, vec![v4.into(), v6.into()]))
}

/// Adds the default routes through the fabric. networkd would add them again after the uplink was down.
///
/// # Errors
/// The kernel refuses a route.
pub async fn add_default_routes(ns: &Netns, uplink: Ipv4Addr) -> Result<()> {
    let byte = uplink.octets()[2];
    ns.batch(&format!(
        "route replace default via 192.168.{byte}.1 dev eth0\nroute replace default via fd{byte}::1 dev eth0\n"
    ))
    .await
}
