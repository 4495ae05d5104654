// SPDX-License-Identifier: Apache-2.0
//! The cluster: its machines and its store, what each event does to them, and how they recover from it.

mod claims;
mod publishers;
mod store;
mod uplink;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Context;
use ipnet::{IpNet, Ipv4Net};
use weft::options::OnLostLease;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, ObservedValue};

use crate::disk;
use crate::event::{Event, Trouble};
use crate::kernel::STATIC;
use crate::machine::{Machine, Site, audit_interval, uplink};
use crate::net_conf::WantedConf;
use crate::scenario::{Scenario, StoreKind};
use crate::store::{FalseLease, Store};
use crate::timeline;
use crate::wire::Disorder;
use claims::Writer;

/// RTPROT_BOOT, which `ip route add` writes.
const BOOT: u8 = 3;

/// What ends an event that lasts.
#[derive(Debug, Clone)]
enum Recovery {
    Start(usize),
    Thaw(usize),
    Up(usize),
    Plug(usize),
    Uplink(usize),
    Address(usize, Ipv4Addr),
    Hear(usize),
    Wire(usize),
    Lag(usize),
    Throttle(usize),
    CacheLag,
    FalseLease(FalseLease),
    Copy(usize, FalseLease),
    Register(usize),
    Assign(usize),
    NetConf,
    NetConfFile(usize),
    Attack(String),
    Disk(usize),
}

/// The machines and the store.
#[derive(Debug)]
pub struct Cluster {
    /// The machines, by number.
    pub machines: Vec<Machine>,
    /// The store.
    pub store: Store,
    lan: Ipv4Net,
    vip: Option<usize>,
    /// How often somebody changed the store or the disk of a machine.
    pub interventions: u64,
    /// The machines of which a newer lease has the identity, and the address in that lease.
    pub copied: BTreeMap<usize, Ipv4Addr>,
    /// What the operator wants net-conf to be, also for a backup.
    pub net_conf: WantedConf,
    saved_net_conf: Option<WantedConf>,
    /// Who attacks the cluster.
    writers: Vec<Writer>,
    /// The subnets and addresses of nodes that only publish a lease, as far as they have published it.
    pub publishers: Vec<(Ipv4Net, Ipv4Addr)>,
    /// How many nodes only publish a lease.
    wanted_publishers: usize,
    /// Files that were written and that a power loss took back.
    pub lost_files: Vec<String>,
    /// What recovers at which second.
    recoveries: BTreeMap<(u64, u64), Recovery>,
    count: u64,
}

impl From<Trouble> for Disorder {
    fn from(trouble: Trouble) -> Disorder {
        match trouble {
            Trouble::Silence => Disorder::Silence,
            Trouble::Refused => Disorder::Refused,
            Trouble::AnswersLost => Disorder::AnswersLost,
        }
    }
}

impl Cluster {
    /// Returns a cluster in which no agent runs yet.
    pub fn new(scenario: &Scenario) -> anyhow::Result<Cluster> {
        let lan: Ipv4Net = if scenario.lan_inside { "10.128.0.0/16" } else { "192.168.0.0/16" }.parse()?;
        let net_conf = scenario.net_conf();
        let store = match scenario.store {
            StoreKind::Kube => Store::kube(&net_conf, scenario.machines)?,
            StoreKind::Etcd => Store::etcd(&net_conf),
        };
        let lease_ttl = Duration::from_secs(scenario.lease_ttl);
        let (on_lost_lease, by_address) = (OnLostLease::Reacquire, scenario.by_address);
        let resync = audit_interval(scenario.machines + scenario.publishers);
        let site = Site { lan, lease_ttl, on_lost_lease, by_address, resync };
        let machines = (0..scenario.machines).map(|number| Machine::new(number, site));
        let machines = machines.collect::<Result<_, _>>().context("make the directories of the machines")?;
        let (recoveries, copied) = (BTreeMap::new(), BTreeMap::new());
        let mut cluster = Cluster {
            machines,
            store,
            lan,
            vip: None,
            interventions: 0,
            copied,
            net_conf,
            saved_net_conf: None,
            writers: Vec::new(),
            publishers: Vec::new(),
            wanted_publishers: scenario.publishers,
            lost_files: Vec::new(),
            recoveries,
            count: 0,
        };
        cluster.register_all(0);
        Ok(cluster)
    }

    /// Lets the kubelets of all machines create their Nodes, and the controller assign pod CIDRs, in the next seconds. An etcd has no Nodes.
    fn register_all(&mut self, now: u64) {
        if !self.store.has_nodes() {
            return;
        }
        for number in 0..self.machines.len() {
            let at = now + number as u64 % 4;
            self.later(at, Recovery::Register(number));
            self.later(at + 2, Recovery::Assign(number));
        }
    }

    fn later(&mut self, at: u64, recovery: Recovery) {
        self.count += 1;
        self.recoveries.insert((at, self.count), recovery);
    }

    /// Lets everything recover whose time has come.
    pub fn recover(&mut self, now: u64) -> anyhow::Result<()> {
        while let Some(entry) = self.recoveries.first_entry().filter(|entry| entry.key().0 <= now) {
            let recovery = entry.remove();
            timeline::note(&format!("recovery: {recovery:?}"));
            self.carry_out(recovery)?;
        }
        Ok(())
    }

    /// Lets everything recover.
    pub fn recover_all(&mut self) -> anyhow::Result<()> {
        self.recover(u64::MAX)?;
        for number in 0..self.machines.len() {
            self.carry_out(Recovery::Start(number))?;
        }
        Ok(())
    }

    fn carry_out(&mut self, recovery: Recovery) -> anyhow::Result<()> {
        match recovery {
            Recovery::Start(number) => self.machines[number].start(&self.store)?,
            Recovery::Thaw(number) => self.machines[number].freeze(false),
            Recovery::Hear(number) => self.machines[number].kernel.lose_notifications(false),
            Recovery::Wire(number) => self.machines[number].wire.set(Disorder::None),
            Recovery::Lag(number) => self.machines[number].wire.set_lag(Duration::ZERO),
            Recovery::Throttle(number) => self.machines[number].wire.throttle(false),
            Recovery::CacheLag => self.store.set_cache_lag(Duration::ZERO),
            Recovery::FalseLease(lease) => self.store.remove_lease(&lease),
            Recovery::Copy(number, lease) => {
                self.copied.remove(&number);
                self.store.remove_lease(&lease);
            }
            Recovery::Register(number) => self.store.register(number),
            Recovery::Assign(number) => self.store.assign(number),
            Recovery::NetConf => self.correct_net_conf(),
            Recovery::NetConfFile(number) => self.store.write_net_conf_file(number, &self.net_conf),
            Recovery::Attack(name) => self.end_attack(&name),
            Recovery::Disk(number) => {
                disk::set_slow(number, Duration::ZERO);
                disk::set_full(number, false);
            }
            Recovery::Up(number) => {
                let machine = &mut self.machines[number];
                machine.kernel.set_up(uplink(), true);
                let ip = machine.ip;
                machine.set_address(ip);
            }
            Recovery::Plug(number) => {
                self.machines[number].kernel.set_carrier(uplink(), true);
                self.machines[number].remember_foreign();
            }
            Recovery::Uplink(number) => {
                let machine = &mut self.machines[number];
                if !machine.kernel.has_link(uplink()) {
                    machine.add_uplink();
                }
            }
            Recovery::Address(number, ip) => self.machines[number].set_address(ip),
        }
        Ok(())
    }

    /// Carries out an event at this second.
    pub fn event(&mut self, now: u64, event: &Event) -> anyhow::Result<()> {
        timeline::note(&format!("event: {event:?}"));
        match *event {
            Event::Kill(number, seconds) => {
                self.machines[number].kill();
                self.later(now + seconds, Recovery::Start(number));
            }
            Event::Terminate(number, seconds) => {
                self.machines[number].terminate();
                self.later(now + seconds.max(3), Recovery::Start(number));
            }
            Event::Freeze(number, seconds) => {
                self.machines[number].freeze(true);
                self.later(now + seconds, Recovery::Thaw(number));
            }
            Event::SlowDisk(number, ms, seconds) => {
                disk::set_slow(number, Duration::from_millis(ms));
                self.later(now + seconds, Recovery::Disk(number));
            }
            Event::FullDisk(number, seconds) => {
                disk::set_full(number, true);
                self.later(now + seconds, Recovery::Disk(number));
            }
            Event::Reboot(..) | Event::PowerLoss(..) | Event::NewDisk(..) | Event::CloneDisk(..) => {
                self.boot_event(now, event)?
            }
            Event::Deaf(number, seconds) => {
                self.machines[number].kernel.lose_notifications(true);
                self.later(now + seconds, Recovery::Hear(number));
            }
            Event::Clock(number, by) => self.machines[number].clock.set(by),
            Event::Wire(..) | Event::Outage(..) | Event::Lag(..) | Event::Throttle(..) | Event::CacheLag(..) => {
                self.wire_event(now, event)
            }
            Event::NetConf(_) | Event::BadNetConf(..) => self.conf_event(now, event),
            Event::Hostile(attack, victim, seconds) => self.attack_event(now, attack, victim, seconds),
            Event::DeleteDevices(number)
            | Event::FlushRoutes(number)
            | Event::DeleteEntry(number, _)
            | Event::Hijack(number, _)
            | Event::ForeignRoute(number, _)
            | Event::ForeignDevice(number, _) => self.entry_event(number, event),
            Event::Renumber(..)
            | Event::Exchange(..)
            | Event::AddressAway(..)
            | Event::Vip(_)
            | Event::LinkDown(..)
            | Event::Unplug(..)
            | Event::NewUplink(..) => self.uplink_event(now, event),
            _ => self.store_event(now, event),
        }
        Ok(())
    }

    /// Events of the network to the store.
    fn wire_event(&mut self, now: u64, event: &Event) {
        match *event {
            Event::Wire(number, trouble, seconds) => {
                self.machines[number].wire.set(trouble.into());
                self.later(now + seconds, Recovery::Wire(number));
            }
            Event::Outage(trouble, seconds) => {
                for number in 0..self.machines.len() {
                    self.machines[number].wire.set(trouble.into());
                    self.later(now + seconds, Recovery::Wire(number));
                }
            }
            Event::Lag(number, ms, seconds) => {
                self.machines[number].wire.set_lag(Duration::from_millis(ms));
                self.later(now + seconds, Recovery::Lag(number));
            }
            Event::Throttle(number, seconds) => {
                self.machines[number].wire.throttle(true);
                self.later(now + seconds, Recovery::Throttle(number));
            }
            Event::CacheLag(ms, seconds) => {
                self.store.set_cache_lag(Duration::from_millis(ms));
                self.later(now + seconds, Recovery::CacheLag);
            }
            _ => {}
        }
    }

    /// Events after which a machine boots.
    fn boot_event(&mut self, now: u64, event: &Event) -> anyhow::Result<()> {
        let (number, seconds) = match *event {
            Event::Reboot(number, seconds) | Event::PowerLoss(number, seconds) => (number, seconds),
            Event::NewDisk(number) | Event::CloneDisk(number, _) => (number, 5),
            _ => return Ok(()),
        };
        self.interventions += 1;
        self.machines[number].kill();
        match *event {
            Event::NewDisk(_) => self.machines[number].clear_disk()?,
            Event::CloneDisk(_, from) => {
                let (machine, from) = (&self.machines[number], &self.machines[from]);
                machine.copy_disk_of(from)?;
            }
            Event::PowerLoss(..) => {
                self.machines[number].clear_run_dir()?;
                self.lost_files.extend(self.machines[number].lose_power()?);
            }
            _ => self.machines[number].clear_run_dir()?,
        }
        if self.vip == Some(number) {
            self.vip = None;
        }
        self.machines[number].boot();
        self.later(now + seconds, Recovery::Start(number));
        Ok(())
    }

    /// Events in which somebody changes entries of the kernel.
    fn entry_event(&mut self, number: usize, event: &Event) {
        let gateway = self.machines[number].gateway();
        let machine = &mut self.machines[number];
        let entries = machine.kernel.entries();
        let ours = |key: &Key, seen: &ObservedValue| match key {
            Key::Route(..) => seen.protocol == PROTOCOL,
            _ => true,
        };
        let all: Vec<Key> = entries.iter().filter(|(key, seen)| ours(key, seen)).map(|(key, _)| *key).collect();
        match *event {
            Event::DeleteDevices(_) => {
                let devices = all.into_iter().filter(|key| matches!(key, Key::Link(_)));
                devices.for_each(|key| machine.kernel.disturb(key, None));
            }
            Event::FlushRoutes(_) => {
                let routes = all.into_iter().filter(|key| matches!(key, Key::Route(..)));
                routes.for_each(|key| machine.kernel.disturb(key, None));
            }
            Event::DeleteEntry(_, which) if !all.is_empty() => machine.kernel.disturb(all[which % all.len()], None),
            Event::Hijack(_, which) => {
                let routes: Vec<IpNet> =
                    all.iter().filter_map(|key| if let Key::Route(net, 0) = key { Some(*net) } else { None }).collect();
                if let Some(net) = routes.get(which % routes.len().max(1))
                    && machine.kernel.add_route(*net, gateway.into(), uplink(), STATIC)
                {
                    machine.give_up(Key::Route(*net, 0));
                }
            }
            Event::ForeignRoute(_, which) => {
                let net = Ipv4Net::new_assert(Ipv4Addr::new(10, 100, which, 0), 24);
                machine.kernel.add_route(net.into(), gateway.into(), uplink(), BOOT);
            }
            Event::ForeignDevice(_, vni) => machine.add_foreign_device(vni),
            _ => {}
        }
        machine.remember_foreign();
    }
}
