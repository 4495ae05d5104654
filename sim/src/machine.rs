// SPDX-License-Identifier: Apache-2.0
//! One machine: its kernel, its files, its clock, its wire to the store, and its agent.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use weft::observe::status::Status;
use weft::options::{OnLostLease, Options, UplinkChoice};
use weft_backends::link::Link;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, Mac, Name, ObservedValue, Value};
use weft_backends::vxlan::VxlanLink;
use weft_subnet::cidr::Subnets;
use weft_subnet::env::SubnetEnv;

use crate::agent::Agent;
use crate::disk;
use crate::kernel::{DHCP, SimKernel, everywhere, name};
use crate::store::Store;
use crate::wire::{Disorder, Wire};

/// What all machines have in common.
#[derive(Debug, Clone, Copy)]
pub struct Site {
    /// The network between the machines.
    pub lan: Ipv4Net,
    /// The time to live of leases.
    pub lease_ttl: Duration,
    /// `--on-lost-lease`.
    pub on_lost_lease: OnLostLease,
    /// The uplink is chosen by its address.
    pub by_address: bool,
    /// The time between two audits.
    pub resync: Duration,
}

/// Returns the time between the audits of an agent with so many peers. The agent itself measures what an audit costs, and nothing costs time here.
/// In docs/adr/002-audits.md it is 5 us for each peer, of which a real agent spends one part in 5,000.
pub fn audit_interval(peers: usize) -> Duration {
    let stretched = Duration::from_millis(25 * peers as u64);
    stretched.clamp(Duration::from_secs(10), Duration::from_secs(300))
}

/// A machine of the cluster.
#[derive(Debug)]
pub struct Machine {
    /// Its number. It is `n` with this number in the timeline.
    pub number: usize,
    /// Its kernel.
    pub kernel: SimKernel,
    /// Its network to the store.
    pub wire: Wire,
    /// The address that its uplink has now.
    pub ip: Ipv4Addr,
    /// By how many seconds its wall clock is wrong.
    pub clock: Rc<Cell<i64>>,
    /// Everything in the kernel that is not weft's. weft must not change it.
    foreign: BTreeMap<Key, ObservedValue>,
    /// Entries of other programs in the place of weft's own, which weft may replace.
    given_up: BTreeSet<Key>,
    site: Site,
    agent: Option<Agent>,
    /// How often the agent was started.
    starts: u64,
}

/// The uplink of every machine.
pub fn uplink() -> Name {
    name("eth0")
}

fn is_foreign(key: &Key, seen: &ObservedValue) -> bool {
    match key {
        Key::Route(..) => seen.protocol != PROTOCOL,
        Key::Link(_) => !seen.mark,
        _ => false,
    }
}

impl Machine {
    /// Returns a machine that is up and whose agent does not run yet.
    pub fn new(number: usize, site: Site) -> io::Result<Machine> {
        let wire = Wire::default();
        let mut machine = Machine {
            number,
            kernel: SimKernel::default(),
            wire,
            ip: address(site.lan, number),
            clock: Rc::default(),
            foreign: BTreeMap::new(),
            given_up: BTreeSet::new(),
            site,
            agent: None,
            starts: 0,
        };
        fs::create_dir_all(machine.run_dir())?;
        fs::create_dir_all(machine.state_dir())?;
        machine.boot();
        Ok(machine)
    }

    fn dir(&self) -> PathBuf {
        PathBuf::from(format!("n{}", self.number))
    }

    /// The directory of files that a boot removes.
    fn run_dir(&self) -> PathBuf {
        self.dir().join("run")
    }

    /// The directory of files that outlive a boot.
    fn state_dir(&self) -> PathBuf {
        self.dir().join("state")
    }

    /// Returns the path of subnet.env.
    pub fn subnet_file(&self) -> PathBuf {
        self.run_dir().join("subnet.env")
    }

    /// Returns the subnet that subnet.env gives to pods.
    pub fn pods(&self) -> Option<Subnets> {
        self.subnet_env().map(|env| env.subnets)
    }

    /// Returns what subnet.env says.
    pub fn subnet_env(&self) -> Option<SubnetEnv> {
        SubnetEnv::parse(&fs::read_to_string(self.subnet_file()).ok()?)
    }

    /// Returns the names of the devices of weft.
    pub fn devices(&self) -> Vec<String> {
        self.kernel.with_entries(|entries| {
            let ours = entries.iter().filter_map(|(key, seen)| match key {
                Key::Link(name) if seen.mark => Some(name.to_string()),
                _ => None,
            });
            let mut names: Vec<String> = ours.collect();
            names.sort_unstable();
            names
        })
    }

    /// Returns true if this value of a lease names an address that the machine has now.
    pub fn is_named_by(&self, lease: &str) -> bool {
        self.kernel.addresses().iter().any(|ip| lease.contains(&format!("\"{ip}\"")))
    }

    /// Brings the kernel into the state after a boot, with a network configuration by DHCP.
    pub fn boot(&mut self) {
        self.kernel.boot();
        self.add_uplink();
    }

    /// Creates the uplink with its address and the default route.
    pub fn add_uplink(&mut self) {
        let [.., b, c] = self.ip.octets();
        self.kernel.add_link(uplink(), Mac([2, 0, 0, 0xee, b, c]));
        self.set_address(self.ip);
    }

    /// Gives the uplink this address, and the default route. Without an uplink it gets them when it is created.
    pub fn set_address(&mut self, ip: Ipv4Addr) {
        self.ip = ip;
        if !self.kernel.has_link(uplink()) {
            return;
        }
        self.kernel.add_address(uplink(), self.net(ip), 0);
        self.kernel.add_route(everywhere(), self.gateway().into(), uplink(), DHCP);
        self.remember_foreign();
    }

    /// Creates a vxlan device as another program does, unless a device has its name.
    pub fn add_foreign_device(&self, vni: u32) {
        let key = Key::Link(name(&format!("flannel.{vni}")));
        if !self.kernel.has_link(uplink()) || self.kernel.with_entries(|entries| entries.contains_key(&key)) {
            return;
        }
        let (local, gbp, learning) = (self.ip.into(), false, true);
        let kind = Arc::new(VxlanLink { vni, port: 4789, parent: uplink(), local, gbp, learning, ttl: 0 });
        let value = Value::link(Link { kind, mtu: 1450, mac: Some(Mac([2, 0, 0, 0xff, 0, 7])), up: true });
        self.kernel.disturb(key, Some(ObservedValue { value, protocol: 0, mark: false }));
    }

    /// Returns an address with the prefix length of the LAN.
    pub fn net(&self, ip: Ipv4Addr) -> IpNet {
        IpNet::V4(Ipv4Net::new_assert(ip, self.site.lan.prefix_len()))
    }

    /// Returns the address of the router.
    pub fn gateway(&self) -> Ipv4Addr {
        self.site.lan.broadcast().to_bits().wrapping_sub(1).into()
    }

    /// Takes notice of what other programs have in the kernel now. It is called after each change by another program.
    pub fn remember_foreign(&mut self) {
        let given_up = &self.given_up;
        self.foreign = self.kernel.with_entries(|entries| {
            let foreign = entries.iter().filter(|(key, seen)| is_foreign(key, seen) && !given_up.contains(key));
            foreign.map(|(key, seen)| (*key, seen.clone())).collect()
        });
    }

    /// No longer expects this entry of another program: weft may replace it.
    pub fn give_up(&mut self, key: Key) {
        self.given_up.insert(key);
    }

    /// Returns what weft has changed among the entries of other programs.
    pub fn touched(&self) -> Option<String> {
        self.kernel.with_entries(|entries| {
            let changed = self.foreign.iter().find(|(key, seen)| entries.get(key) != Some(seen));
            changed.map(|(key, seen)| {
                let now = entries.get(key).map_or("gone".to_owned(), |now| format!("now {}", now.value));
                format!("n{}: {key} {} of another program is {now}", self.number, seen.value)
            })
        })
    }

    /// Returns a route of weft that takes packets to the LAN of this machine.
    pub fn diverted(&self) -> Option<String> {
        let lan = self.net(self.ip).trunc();
        self.kernel.with_entries(|entries| {
            let mut routes = entries.iter().filter_map(|(key, seen)| match (key, &seen.value) {
                (Key::Route(net, _), Value::Route(route)) if seen.protocol == PROTOCOL && lan.contains(net) => {
                    Some((net, route))
                }
                _ => None,
            });
            routes.next().map(|(net, route)| format!("n{}: {net} {route} takes packets to the LAN", self.number))
        })
    }

    fn options(&self) -> Options {
        let state_dir = self.state_dir();
        // Both the LAN and the pods may have addresses that match.
        let regexes = if self.site.by_address { vec!["^(10|192)\\.".to_owned()] } else { Vec::new() };
        Options {
            uplink: UplinkChoice { regexes, ..UplinkChoice::default() },
            subnet_file: self.subnet_file(),
            resync: self.site.resync,
            change_grace: Duration::from_secs(60),
            on_lost_lease: self.site.on_lost_lease,
            manage_sysctls: true,
            wireguard_key: state_dir.join("wgkey"),
            state_dir: Some(state_dir),
            // There are no probes: they need sockets, and the simulated hosts have none.
            ..Options::minimal(&self.run_dir())
        }
    }

    /// Starts the agent, unless it runs.
    pub fn start(&mut self, store: &Store) -> anyhow::Result<()> {
        if self.agent.is_none() {
            let store = store.connect(&self.wire, self.number, self.site.lease_ttl)?;
            let options = self.options();
            self.agent = Some(Agent::start((self.number, self.clock.clone()), options, store, self.kernel.clone()));
            self.starts += 1;
        }
        Ok(())
    }

    /// Ends the agent as SIGKILL does.
    pub fn kill(&mut self) {
        self.agent.take().into_iter().for_each(|agent| agent.kill());
    }

    /// Ends the agent as SIGTERM does. It ends a moment later.
    pub fn terminate(&mut self) {
        self.agent.take().into_iter().for_each(Agent::terminate);
    }

    /// Stops the agent as SIGSTOP does, or lets it go on.
    pub fn freeze(&self, frozen: bool) {
        self.agent.iter().for_each(|agent| agent.freeze(frozen));
    }

    /// Returns true if the agent was started and not ended by [`Machine::kill`] or [`Machine::terminate`].
    pub fn runs(&self) -> bool {
        self.agent.is_some()
    }

    /// Returns true if the agent runs and is not stopped.
    pub fn is_awake(&self) -> bool {
        self.agent.as_ref().is_some_and(|agent| !agent.is_frozen())
    }

    /// Returns true if the agent runs and says that it is ready.
    pub fn is_ready(&self) -> bool {
        self.agent.as_ref().is_some_and(|agent| agent.readiness().is_ready())
    }

    /// Returns true if the agent is ready and can know what is in the store.
    pub fn follows(&self) -> bool {
        self.is_awake() && self.is_ready() && self.wire.disorder() == Disorder::None
    }

    /// Returns how often the agent was started.
    pub fn starts(&self) -> u64 {
        self.starts
    }

    /// Returns why the agent is not ready.
    pub fn reasons(&self) -> Vec<String> {
        self.agent.as_ref().map_or(vec!["the agent does not run".to_owned()], |agent| agent.readiness().reasons())
    }

    /// Returns true if the agent has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.agent.as_ref().is_some_and(Agent::has_ended)
    }

    /// Asks the agent for its status.
    pub async fn status(&self) -> Option<Status> {
        self.agent.as_ref()?.status().await
    }

    /// Removes the files that a boot removes.
    pub fn clear_run_dir(&self) -> io::Result<()> {
        fs::remove_dir_all(self.run_dir())?;
        fs::create_dir_all(self.run_dir())
    }

    /// Replaces the whole disk by an empty one.
    pub fn clear_disk(&self) -> io::Result<()> {
        fs::remove_dir_all(self.dir())?;
        fs::create_dir_all(self.run_dir())?;
        fs::create_dir_all(self.state_dir())?;
        disk::sync_all(self.number, &self.state_dir())
    }

    /// Loses what was not synced. Returns the files of saved peers that had been written.
    pub fn lose_power(&self) -> io::Result<Vec<String>> {
        disk::lose_power(self.number, &self.state_dir(), "peers-")
    }

    /// Returns the subnet that is saved for a start without the store.
    pub fn saved_subnet(&self) -> Option<String> {
        let text = fs::read_to_string(weft::saved::file(&self.state_dir(), &self.subnet_file())).ok()?;
        let (_, values) = text.split_once('\n')?;
        let head = serde_json::Deserializer::from_str(values).into_iter::<serde_json::Value>().next()?.ok()?;
        head["own"]["v4"].as_str().map(str::to_owned)
    }

    /// Replaces the whole disk by a copy of the disk of another machine.
    pub fn copy_disk_of(&self, other: &Machine) -> io::Result<()> {
        self.clear_disk()?;
        copy(&other.run_dir(), &self.run_dir())?;
        // The name of the file contains a hash of the path of the subnet file, which is the same on all real machines.
        let (theirs, ours) = (
            weft::saved::file(&other.state_dir(), &other.subnet_file()),
            weft::saved::file(&self.state_dir(), &self.subnet_file()),
        );
        match fs::copy(theirs, ours) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => disk::sync_all(self.number, &self.state_dir()),
        }
    }
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Returns the first address of a machine.
pub fn address(lan: Ipv4Net, number: usize) -> Ipv4Addr {
    let number = u32::try_from(number).unwrap_or(u32::MAX);
    // The second half of each 256 addresses is for other addresses of the machines.
    (lan.network().to_bits() + (number / 100) * 256 + number % 100 + 1).into()
}
