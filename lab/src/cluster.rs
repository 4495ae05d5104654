// SPDX-License-Identifier: Apache-2.0
//! A complete cluster: the fabric (a bridge, and optionally a router and etcd), nodes that are connected to it, their
//! agents and pods.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use tempfile::TempDir;

use super::netns::{Netns, has_ipv6, make_names_private, require};
use super::network::VethEnd;
use super::node::Node;
use super::options::LabOptions;
use super::ping::{self, Ping};
use super::process::PATIENCE;
use super::store::Store;

/// The third byte of each half's IPv4 network, and the last digits of its IPv6 prefix: 192.168.77.0/24 and fd77::/64.
const HALVES: [u8; 2] = [77, 78];

/// The agents' `--change-grace` in a lab that changes its backend. The default is a minute, which is long for somebody who watches.
const CHANGE_GRACE: &str = "--change-grace=6s";

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
        require("ping", "iputils-ping")?;
        make_names_private()?;
        let dir = TempDir::with_prefix("weft-lab-").context("create a temporary directory")?;
        let lock = fs::File::create(dir.path().join("lock")).context("create the lab's lock")?;
        lock.lock().context("take the lab's lock")?;
        fs::create_dir(dir.path().join("logs")).context("create the directory of logs")?;
        let fabric = build_fabric(options).await?;
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
            if options.change_backend.is_some() {
                flags.push(CHANGE_GRACE.to_owned());
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
    /// Not all pings are answered in time. The message names those without an answer.
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

    /// Connects a host that is not part of the cluster to the first bridge: 192.168.77.HOST and fd77::HOST.
    ///
    /// # Errors
    /// The name or the address is in use.
    pub async fn add_host(&self, name: &str, host: u8) -> Result<Netns> {
        let ns = self.fabric.add_other(name).await?;
        connect(&self.fabric, &ns, 0).await?;
        configure(&ns, 0, host).await?;
        Ok(ns)
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
async fn build_fabric(options: &LabOptions) -> Result<Netns> {
    let fabric = Netns::add("fabric", &options.launcher()?).await?;
    forward(&fabric)?;
    let network = fabric.network()?;
    for (half, byte) in HALVES.into_iter().enumerate().take(if options.router { 2 } else { 1 }) {
        let bridge = bridge_name(half);
        network.add_bridge(&bridge, None).await?;
        for gateway in gateways(byte) {
            network.add_address(&bridge, gateway).await?;
        }
    }
    Ok(fabric)
}

/// Creates a node's namespace and its uplink. Returns the namespace and the uplink's addresses.
async fn build_node(fabric: &Netns, number: u8, far: bool) -> Result<(Netns, Vec<IpAddr>)> {
    let ns = fabric.add_other(&format!("n{}", number + 1)).await?;
    let half = usize::from(far);
    connect(fabric, &ns, half).await?;
    forward(&ns)?;
    if has_ipv6() {
        ns.sysctl(&["ipv6/conf/eth0/keep_addr_on_down=1"])?;
    }
    let uplink = configure(&ns, half, 11 + number).await?;
    Ok((ns, uplink))
}

/// Lets a namespace forward packets of all families of this machine.
fn forward(ns: &Netns) -> Result<()> {
    ns.sysctl(&["ipv4/ip_forward=1"])?;
    if has_ipv6() {
        ns.sysctl(&["ipv6/conf/all/forwarding=1"])?;
    }
    Ok(())
}

/// Connects a namespace to a bridge of the fabric by the link eth0, which stays down.
async fn connect(fabric: &Netns, ns: &Netns, half: usize) -> Result<()> {
    let far = VethEnd { ns: &ns.path(), name: "eth0" };
    fabric.network()?.add_port(ns.name(), &bridge_name(half), far, None).await
}

/// Makes a connected namespace host number `host` of the bridge's networks. Returns its addresses, IPv4 first.
async fn configure(ns: &Netns, half: usize, host: u8) -> Result<Vec<IpAddr>> {
    let network = ns.network()?;
    let addresses = usable(addresses(HALVES[half], host), has_ipv6());
    for address in &addresses {
        network.add_address("eth0", *address).await?;
    }
    network.set_up("eth0").await?;
    add_default_routes(ns, addresses[0].addr()).await?;
    Ok(addresses.iter().map(IpNet::addr).collect())
}

fn bridge_name(half: usize) -> String {
    format!("br{half}")
}

/// Returns the addresses of a host in the half's networks, with their prefix lengths.
fn addresses(byte: u8, host: u8) -> [IpNet; 2] {
    let v4 = Ipv4Addr::new(192, 168, byte, host);
    let v6 = Ipv6Addr::new(0xfd00 | decimal_digits(byte), 0, 0, 0, 0, 0, 0, decimal_digits(host));
    [IpNet::new_assert(v4.into(), 24), IpNet::new_assert(v6.into(), 64)]
}

/// Leaves IPv6 out on a machine without it.
fn usable(addresses: [IpNet; 2], ipv6: bool) -> Vec<IpNet> {
    addresses.into_iter().filter(|address| ipv6 || address.addr().is_ipv4()).collect()
}

fn gateways(byte: u8) -> Vec<IpNet> {
    usable(addresses(byte, 1), has_ipv6())
}

/// Reads the decimal digits of a number as hexadecimal digits, so that the addresses of both families look alike: 11
/// becomes 0x11.
fn decimal_digits(number: u8) -> u16 {
    let number = u16::from(number);
    number / 100 * 0x100 + number / 10 % 10 * 0x10 + number % 10
}

/// Adds the default routes through the fabric to the host with this IPv4 address. networkd would add them again after
/// the uplink was down.
///
/// # Errors
/// The kernel refuses a route.
pub async fn add_default_routes(ns: &Netns, uplink: IpAddr) -> Result<()> {
    let IpAddr::V4(v4) = uplink else { bail!("{uplink} is not an IPv4 address of the fabric") };
    let network = ns.network()?;
    for gateway in gateways(v4.octets()[2]) {
        network.replace_default_route("eth0", gateway.addr()).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{addresses, usable};

    #[test]
    fn the_addresses_of_both_families_look_alike() {
        let text = |byte, host| addresses(byte, host).map(|address| address.to_string());
        assert_eq!(text(77, 1), ["192.168.77.1/24", "fd77::1/64"]);
        assert_eq!(text(78, 210), ["192.168.78.210/24", "fd78::210/64"]);
    }

    #[test]
    fn a_machine_without_ipv6_gets_the_ipv4_address_alone() {
        assert_eq!(usable(addresses(77, 1), true), addresses(77, 1));
        assert_eq!(usable(addresses(77, 1), false), addresses(77, 1)[..1]);
    }
}
